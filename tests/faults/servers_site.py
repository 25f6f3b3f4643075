"""A running P2/D1 fleet of real servers: requests and what must become of them, signals, restarts, and what the servers
say of themselves."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options
from tests.serving.fleets import LOGPROB_TOLERANCE, Served, Setup

from .servers_ask import Ask, Asker, End, Pair
from .servers_state import State, differences

TOPOLOGY = "p2_d1"
STALL_SECONDS = 20
"""How long a transfer may stand still. Long for a transfer, so that a busy machine is not taken for a fault."""
WAITING_SECONDS = 60
"""SGLang's own limits, and how long a request may wait for staging."""
SLACK_SECONDS = 15
"""On top of a limit: SGLang's polls, the all-reduce, the HTTP server, on a busy machine."""
PAUSE_SECONDS = STALL_SECONDS + 2 * SLACK_SECONDS
"""How long a stopped server is stopped: its peers' limits are over by then."""
SETTLE_SECONDS = 90
"""Within it both servers hold nothing any more after a fault: prefill has run prompts that nobody wants to their end,
and units have come home because their writers have drained or are known to be gone."""
HANG_SECONDS = 240
"""A client that has no answer for so long hangs. Far beyond all limits: prefill runs a prompt to its end, though nobody
wants it any more, and on a busy machine that takes a while."""
SLOTS = 16
ENVIRONMENT = (
    ("SGLANG_HETERO_STALL_TIMEOUT", str(STALL_SECONDS)),
    ("SGLANG_HETERO_WINDOW_TIMEOUT", str(WAITING_SECONDS)),
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", str(WAITING_SECONDS)),
    ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(WAITING_SECONDS)),
)
OPTIONS = Options(
    mtp=3,
    page_size=64,
    chunk=256,
    max_requests=SLOTS,
    prefill_env=ENVIRONMENT,
    decode_env=ENVIRONMENT,
    server_arguments=("--decode-log-interval", "1"),
)
SHORT, OUTPUT = 70, 24
"""Tokens of a usual prompt and of its answer."""
LONG_PROMPT = 4000
"""A prompt whose prefill takes seconds, so that a fault finds it under way."""
LONG_OUTPUT = 300
"""An answer that takes seconds."""


@dataclass
class Findings:
    """What one fault has shown so far; FaultResult's fields."""

    struck: float = 0.0
    """When the fault happened, by time.monotonic."""
    seconds: float | None = None
    error: str = ""
    recovered: float | None = None
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    hung: str = ""


class Site:
    """The running fleet, and what the faults do to it."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, say: Callable[[str], None]) -> None:
        self.fleet = fleet
        self.session = session
        self.say = say
        self.asker = Asker(session, Pair.of(fleet.describe()), limit=HANG_SECONDS)
        # Without drafts transformers gives the same tokens, and faster.
        self._served = Served(Setup(TOPOLOGY, mtp=0, model=fleet.options.model), fleet.describe(), None)  # type: ignore[arg-type]
        self.start: dict[str, State] = {}
        self.found = Findings()

    # Requests.

    def prompt(self, length: int = SHORT, seed: int = 0) -> list[int]:
        """A prompt whose right tokens are known."""
        return self._served.prompt(length, seed)

    def noise(self, length: int) -> list[int]:
        """A prompt of which nobody wants the answer."""
        return random.choices(range(256, 500), k=length)

    def ask(self, prompt: list[int], tokens: int = OUTPUT) -> Ask:
        return self.asker.ask(prompt, tokens)

    async def right(self, asks: Sequence[Ask], what: str) -> None:
        """These arrive, with the tokens and log-probabilities of transformers."""
        for ask in asks:
            ends = await ask.ends()
            for side, end in ends.items():
                if end.hung:
                    self.found.hung = f"{what}: {side} has not answered"
                elif not end.arrived:
                    self.found.wrong.append(f"{what}: {side} says {end.error}")
            await self._compare(ask, ends.get("decode") or ends["router"], what)

    async def _compare(self, ask: Ask, end: End, what: str) -> None:
        if not end.arrived:
            return
        expected = await asyncio.to_thread(self._served.reference, ask.prompt, ask.tokens)
        if list(end.tokens) != expected.tokens:
            self.found.wrong.append(f"{what}: tokens {list(end.tokens)}, transformers says {expected.tokens}")
        elif end.logprobs:
            off = max(abs(a - b) for a, b in zip(end.logprobs, expected.logprobs, strict=True))
            if off > LOGPROB_TOLERANCE:
                self.found.wrong.append(f"{what}: a log-probability is off by {off}")

    async def failed(self, asks: Sequence[Ask], side: str, names: str, within: float, *, lost: bool = False) -> None:
        """These fail on `side` within so many seconds after the fault, with a reason that `names` (a regular
        expression) is found in; or, `lost`, because the connection to the dead process broke."""
        for ask in asks:
            end = await ask.end(side)
            if end.hung:
                self.found.hung = f"{side} has not answered its client"
                continue
            seconds = end.ended - self.found.struck
            if seconds < 0:
                self.found.wrong.append(f"{side} had answered before the fault: nothing has been tried")
                continue
            self.found.seconds = max(self.found.seconds or 0.0, seconds)
            if end.arrived:
                self.found.wrong.append(f"{side} has answered as if nothing had happened")
                continue
            if not (lost and end.lost):
                self.found.error = self.found.error or end.error
                if not re.search(names, end.error, re.IGNORECASE):
                    self.found.wrong.append(f"{side} does not name the cause ({names}): {end.error}")
            if seconds > within:
                self.found.wrong.append(f"{side} took {seconds:.1f} s, allowed are {within:.0f}: {end.error}")

    async def fresh(self, what: str, since: float | None = None) -> None:
        """New requests, short, long and together, are right; `since`: when they could be again."""
        first = self.ask(self.prompt())
        await self.right([first], f"{what}: the first request")
        if since is not None:
            self.found.recovered = time.monotonic() - since
        others = [self.ask(self.prompt(length, seed=2)) for length in (1, 63, 64, 257, 600)]
        await self.right(others, f"{what}: the next requests")

    # Where requests are.

    async def prefilling(self, asks: int = 2) -> list[Ask]:
        """Long prompts, of which prefill has run some chunks."""
        batches = self.batches()
        made = [self.ask(self.noise(LONG_PROMPT)) for _ in range(asks)]
        await self.until(lambda: self.batches() >= batches + 3, "no chunk of the long prompts has run")
        return made

    async def decoding(self, asks: int = 2) -> list[Ask]:
        """Requests with long answers, of which decode has told some tokens."""
        made = [self.ask(self.prompt(SHORT, seed=10 + each), LONG_OUTPUT) for each in range(asks)]
        await asyncio.gather(*(asyncio.wait_for(ask.decoded.wait(), WAITING_SECONDS) for ask in made))
        await self.until(lambda: all(ask.ended("prefill") for ask in made), "prefill has not ended")
        return made

    def batches(self) -> int:
        return Path(self.fleet.process("prefill0").log).read_text(errors="replace").count("Prefill batch")

    async def until(self, done: Callable[[], Any], what: str, seconds: float = WAITING_SECONDS) -> None:
        """Wait; raises TimeoutError with `what`."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {seconds:.0f} s")
            await asyncio.sleep(0.05)

    # Faults.

    def rank(self, server: str, number: int) -> int:
        """The process id of a server's scheduler of TP rank `number`."""
        children = psutil.Process(self.fleet.process(server).pid).children(recursive=True)
        titles = {child.pid: " ".join(child.cmdline()) for child in children}
        found = [pid for pid, title in sorted(titles.items()) if title.startswith("sglang::scheduler")]
        return next((pid for pid in found if f"TP{number}" in titles[pid]), found[0])

    def strike(self) -> None:
        """The fault happens now."""
        self.found.struck = time.monotonic()

    def kill_rank(self, server: str, number: int) -> None:
        self.strike()
        os.kill(self.rank(server, number), signal.SIGKILL)

    def kill_server(self, server: str) -> None:
        self.strike()
        self.fleet.kill(server)

    def everyone(self, server: str, number: signal.Signals) -> None:
        """A signal to all processes of a server, the one that others came from last."""
        root = psutil.Process(self.fleet.process(server).pid)
        for process in [*root.children(recursive=True), root]:
            process.send_signal(number)

    async def restart(self, server: str) -> float:
        """Start it again; returns when it was healthy, by time.monotonic."""
        process = self.fleet.process(server)
        await self.until(lambda: process.poll() is not None, f"what was left of {server} has not ended")
        seconds = await asyncio.to_thread(self.fleet.restart, server)
        self.say(f"    {server} is back after {seconds:.0f} s")
        return time.monotonic()

    async def repair(self) -> None:
        """Whatever has ended and was not started again by its fault: that is wrong, and the next fault needs it."""
        for process in self.fleet.processes:
            if process.poll() is not None:
                self.found.wrong.append(f"{process.name} has ended")
                await asyncio.to_thread(self.fleet.restart, process.name)

    # State.

    async def state(self) -> dict[str, State]:
        """What each server says of itself."""
        found = {}
        for server in self.fleet.servers:
            async with self.session.get(f"{server.endpoint.url}/hetero/state") as response:
                found[server.instance.name] = State.read(await response.read(), response.status)
        return found

    async def settled(self) -> None:
        """Both servers hold what they held at the start, after SETTLE_SECONDS at most."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while left := list(differences(self.start, await self.state())):
            if time.monotonic() > deadline:
                self.found.leaked += left
                return
            await asyncio.sleep(1)

    async def begin(self) -> None:
        """The start values: everything has run once, and nothing runs now."""
        await asyncio.gather(*(self.ask(self.noise(SHORT)).ends() for _ in range(SLOTS)))
        self.found = Findings()
        await self.fresh("before the faults")
        if self.found.wrong or self.found.hung:
            raise AssertionError(f"the fleet is not right before any fault: {self.found}")
        await asyncio.sleep(3)
        self.start = await self.state()

    async def restart_and_ask(self, server: str) -> None:
        """Start a server again: it is taken at once by the one that lives on."""
        since = await self.restart(server)
        await self.fresh("after the restart", since)
        self.start[server] = self.start[server].started_again((await self.state())[server])
