"""Faults on a real P2/D1 fleet with a model: what the clients are told, that the others get the right tokens, and that
both servers are afterwards as they were.

One fleet serves all faults, since starting it costs a minute or more; a fault that ends a server starts it again on the
same ports while the other one lives on.
"""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.fleet import Fleet

from .result import FaultResult, Kind
from .servers_ask import Ask
from .servers_site import (
    LONG_OUTPUT,
    LONG_PROMPT,
    OPTIONS,
    OUTPUT,
    PAUSE_SECONDS,
    SHORT,
    SLACK_SECONDS,
    SLOTS,
    STALL_SECONDS,
    TOPOLOGY,
    WAITING_SECONDS,
    Findings,
    Site,
)

NAME = "P2D1 servers"
STORM, AT_ONCE, STAY = 1000, 64, 20
"""Requests of the abort storm, how many of them at a time, and that each so-and-so-manyth is left alone."""

Play = Callable[[Site], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Case:
    """One fault. play: makes it happen and looks; what it finds is in Site.found."""

    fault: str
    step: str
    expectation: str
    play: Play

    def result(self, found: Findings) -> FaultResult:
        return FaultResult(
            self.fault,
            self.step,
            NAME,
            Kind.SERVER,
            self.expectation,
            seconds=found.seconds,
            error=found.error,
            recovered=found.recovered,
            wrong=tuple(found.wrong),
            leaked=tuple(found.leaked),
            hung=found.hung,
        )


WITHIN = STALL_SECONDS + SLACK_SECONDS
PREFILL_GONE = r"prefill"
DECODE_GONE = r"decode"


async def _client_leaves(site: Site, asks: list[Ask]) -> None:
    others = [site.ask(site.prompt(seed=3)), site.ask(site.prompt(300, seed=3))]
    site.strike()
    for ask in asks:
        await ask.leave()
    await site.right(others, "a request beside it")
    await site.fresh("after it", site.found.struck)


async def leaves_while_prefilling(site: Site) -> None:
    await _client_leaves(site, await site.prefilling())


async def leaves_while_decoding(site: Site) -> None:
    await _client_leaves(site, await site.decoding())


async def abort_storm(site: Site) -> None:
    """Clients come and go, half of them by /abort_request, at any time of their requests."""
    gate = asyncio.Semaphore(AT_ONCE)
    chance = random.Random(6)
    kept: list[Ask] = []

    async def client(number: int) -> None:
        async with gate:
            if number % STAY == 0:
                ask = site.ask(site.prompt(SHORT, seed=number % 5))
                kept.append(ask)
                await ask.ends()
                return
            ask = site.ask(site.noise(chance.randint(1, 40)))
            await asyncio.sleep(chance.random() * 2)
            if number % 2:
                await ask.leave()
                return
            await site.asker.abort(ask)
            for side, end in (await ask.ends()).items():
                if end.hung:
                    site.found.hung = f"an aborted request has no answer from {side}"

    site.strike()
    await asyncio.gather(*(client(number) for number in range(STORM)))
    site.found.seconds = time.monotonic() - site.found.struck
    await site.right(kept, "a request that stays")
    await site.fresh("after it", time.monotonic())


async def more_than_slots(site: Site) -> None:
    site.strike()
    asks = [site.ask(site.prompt(length, seed=4)) for length in [*range(60, 60 + 2 * SLOTS), 1, 257, 300]]
    await site.right(asks, "one of many")
    site.found.seconds = time.monotonic() - site.found.struck


async def prefill_stops(site: Site) -> None:
    """Longer than the timeouts; then it goes on, the same processes."""
    decoding = await site.decoding()
    prefilling = await site.prefilling()
    site.strike()
    site.everyone("prefill0", signal.SIGSTOP)
    try:
        await site.failed(prefilling, "decode", PREFILL_GONE, WITHIN)
        await site.right(decoding, "a request that decode has")
        await asyncio.sleep(max(0.0, site.found.struck + PAUSE_SECONDS - time.monotonic()))
    finally:
        site.everyone("prefill0", signal.SIGCONT)
    continued = time.monotonic()
    for ask in prefilling:
        end = await ask.end("prefill")
        if end.arrived:
            site.found.wrong.append("prefill has answered a request that decode has given up")
        if end.hung:
            site.found.hung = "prefill has not answered its client"
    await site.fresh("when it goes on", continued)


async def decode_stops(site: Site) -> None:
    prefilling = await site.prefilling()
    site.strike()
    site.everyone("decode0", signal.SIGSTOP)
    try:
        await site.failed(prefilling, "prefill", DECODE_GONE, WITHIN + WAITING_SECONDS)
        await asyncio.sleep(max(0.0, site.found.struck + PAUSE_SECONDS - time.monotonic()))
    finally:
        site.everyone("decode0", signal.SIGCONT)
    continued = time.monotonic()
    for ask in prefilling:
        end = await ask.end("decode")
        if end.arrived:
            site.found.wrong.append("decode has answered a request that prefill has given up")
        if end.hung:
            site.found.hung = "decode has not answered its client"
    await site.fresh("when it goes on", continued)


async def _prefill_dies(site: Site, kill: Callable[[], None]) -> None:
    decoding = await site.decoding()
    prefilling = await site.prefilling()
    kill()
    await site.failed(prefilling, "decode", PREFILL_GONE, WITHIN)
    await site.failed(prefilling, "prefill", PREFILL_GONE, WITHIN, lost=True)
    await site.right(decoding, "a request that decode has")
    await site.restart_and_ask("prefill0")


async def prefill_rank_dies(site: Site) -> None:
    await _prefill_dies(site, lambda: site.kill_rank("prefill0", 1))


async def prefill_dies(site: Site) -> None:
    await _prefill_dies(site, lambda: site.kill_server("prefill0"))


async def prefill_dies_unasked(site: Site) -> None:
    """Nothing is under way, and the first request finds another process at the same address."""
    site.kill_server("prefill0")
    await site.restart_and_ask("prefill0")


async def _decode_dies(site: Site, kill: Callable[[], None]) -> None:
    decoding = await site.decoding()
    prefilling = await site.prefilling()
    kill()
    await site.failed([*decoding, *prefilling], "decode", DECODE_GONE, WITHIN, lost=True)
    await site.failed(prefilling, "prefill", DECODE_GONE, WITHIN)
    await site.restart_and_ask("decode0")


async def decode_rank_dies(site: Site) -> None:
    await _decode_dies(site, lambda: site.kill_rank("decode0", 0))


async def decode_dies(site: Site) -> None:
    await _decode_dies(site, lambda: site.kill_server("decode0"))


async def router_dies(site: Site) -> None:
    """Its clients are gone for both servers; direct ones are not."""
    prompt, batches = site.prompt(seed=5), site.batches()
    asks = [site.asker.ask_router(site.noise(LONG_PROMPT), LONG_OUTPUT) for _ in range(2)]
    await site.until(lambda: site.batches() >= batches + 3, "no chunk of the long prompts has run")
    direct = site.ask(prompt)
    site.kill_server("router")
    await site.failed(asks, "router", "router", WITHIN, lost=True)
    await site.right([direct], "a request that did not come through it")
    since = await site.restart("router")
    await site.right([site.asker.ask_router(site.prompt(seed=6), OUTPUT)], "through the new router")
    site.found.recovered = time.monotonic() - since


CASES = (
    Case("client leaves", "while prefill runs", "the others arrive; nothing stays", leaves_while_prefilling),
    Case("client leaves", "while decode runs", "the others arrive; nothing stays", leaves_while_decoding),
    Case("more requests than twice the slots", "at the start", "all arrive", more_than_slots),
    Case(f"{STORM} aborts", "anywhere", "those that stay arrive; nothing stays", abort_storm),
    Case("SIGSTOP of prefill, then SIGCONT", "mid-push", f"decode fails within {WITHIN} s, names it", prefill_stops),
    Case("SIGSTOP of decode, then SIGCONT", "mid-push", "prefill fails and names it", decode_stops),
    Case("kill -9 of a prefill rank", "mid-push", f"decode fails within {WITHIN} s, names it", prefill_rank_dies),
    Case("kill -9 of the whole prefill", "mid-push", f"decode fails within {WITHIN} s, names it", prefill_dies),
    Case("kill -9 of the whole prefill", "when nothing is under way", "taken at once", prefill_dies_unasked),
    Case("kill -9 of the decode rank", "mid-push", f"prefill fails within {WITHIN} s, names it", decode_rank_dies),
    Case("kill -9 of the whole decode", "mid-push", f"prefill fails within {WITHIN} s, names it", decode_dies),
    Case("kill -9 of the router", "mid-push", "both servers let go of its requests", router_dies),
)


async def _play(site: Site, case: Case) -> FaultResult:
    site.found = Findings()
    try:
        await case.play(site)
    except TimeoutError as error:
        site.found.hung = site.found.hung or str(error)
    except HeteroError as error:
        site.found.wrong.append(str(error).partition("\n")[0])
    await site.repair()
    await site.settled()
    return case.result(site.found)


async def _run(
    cases: Sequence[Case], log_dir: Path, add: Callable[[FaultResult], None], say: Callable[[str], None]
) -> None:
    fleet = Fleet(topology.parse(TOPOLOGY), replace(OPTIONS, log_dir=log_dir), say)
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(fleet.__enter__)
        stack.callback(fleet.stop)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        site = Site(fleet, session, say)
        await site.begin()
        for case in cases:
            started = time.monotonic()
            result = await _play(site, case)
            say(f"{case.fault}, {case.step}: {result.verdict} after {time.monotonic() - started:.0f} s")
            add(result)


def run(cases: Sequence[Case], log_dir: Path, add: Callable[[FaultResult], None], say: Callable[[str], None]) -> None:
    """Start a fleet, play the faults one after the other, stop it; `add` gets each result, `say` lines of progress."""
    asyncio.run(_run(cases, log_dir, add, say))
