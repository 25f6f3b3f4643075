"""The soak on real servers: prompts of mixed lengths whose right answers are known, clients that leave, restarts."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench_serving.soak_record import Goal, Kind, Record, Restart, Sample
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.topology import Role
from tests.faults.servers_ask import Ask, Asker, End, Pair
from tests.faults.servers_state import State, differences
from tests.serving.fleets import Served, Setup

PROMPTS = 24
LENGTHS = (1, 2, 7, 43, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 400, 511, 512, 513, 600, 700, 800, 900)
"""Tokens of the prompts, a prompt each: borders of pages and of chunks, and what is between."""
CHUNK, PAGE = 256, 64
OUTPUT = 24
"""Tokens of the longest answer; each request wants some of them."""
STALL_SECONDS = 20.0
"""How long a transfer may stand still; long for one, so that a busy machine is not taken for a fault."""
WAITING_SECONDS = 60.0
"""SGLang's own limits, and how long a request may wait for staging."""
HANG_SECONDS = STALL_SECONDS + WAITING_SECONDS + 30.0
"""A request without an answer after so long has hung. The last part is for a busy machine."""
SETTLE_SECONDS = 60.0
"""Within it a server holds what it held at the start, once nothing is under way."""
LEAVE_SECONDS = 3.0
"""A client that goes away does so in that time, whatever has become of its request: within a usual answer's."""
SAMPLE_SECONDS = 10.0
PAUSE_SECONDS = 0.1
"""Between two looks at whether something has happened."""
ENVIRONMENT = (
    ("SGLANG_HETERO_STALL_TIMEOUT", str(STALL_SECONDS)),
    ("SGLANG_HETERO_WINDOW_TIMEOUT", str(WAITING_SECONDS / 2)),
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", str(int(WAITING_SECONDS))),
    ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(int(WAITING_SECONDS))),
)
NAMELESS = {"", "internal server error", "none", "null", "unknown error", "aborted", "abort"}
"""Errors that say nothing of the cause."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is asked of which servers. abort_share: of the requests, those whose client goes away. restarts: spread over
    the run, each server in turn."""

    topology: str = "p2p4_d1"
    model: str = "tiny"
    mtp: int = 3
    concurrency: int = 8
    abort_share: float = 0.1
    restarts: int = 0
    seed: int = 0
    log_dir: Path | None = None

    @property
    def options(self) -> Options:
        return Options(
            model=self.model,
            mtp=self.mtp,
            page_size=PAGE,
            chunk=CHUNK,
            max_requests=max(2, self.concurrency),
            log_dir=self.log_dir,
            prefill_env=ENVIRONMENT,
            decode_env=ENVIRONMENT,
        )


def names_a_cause(error: str) -> bool:
    """Whether an error says more than that something is wrong."""
    said = error.removeprefix("HTTP 500:").removeprefix("HTTP 503:").strip().strip(".\"'{}").lower()
    return said not in NAMELESS


def wrong_end(ends: dict[str, End], expected: list[int], killed: Role | None) -> str | None:
    """What is wrong about the two answers to a request whose client has stayed; `killed`: its server that was killed
    while it was under way."""
    decode = ends["decode"]
    if decode.arrived:
        if list(decode.tokens) != expected:
            return f"tokens {list(decode.tokens)}, transformers says {expected}"
        return None
    if killed is None:
        return "a request that nobody gave up has failed: " + "; ".join(
            f"{side} says {end.error}" for side, end in ends.items() if end.error
        )
    for side, end in ends.items():
        if side != killed and end.error and not names_a_cause(end.error):
            return f"{side} has failed without a cause after {killed} was killed: {end.error!r}"
    return None


@dataclass
class Flying:
    """A request under way: from when, through which servers."""

    prefill: str
    ask: Ask
    killed: Role | None = None


class ServersSoak:
    """Asks until the goal is reached, or too much is wrong, or `stopping()`."""

    def __init__(
        self,
        plan: Plan,
        record: Record,
        goal: Goal,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        *,
        stopping: Callable[[], bool],
        say: Say,
    ) -> None:
        self.plan, self.record, self.goal = plan, record, goal
        self._stopping, self._say, self._fleet, self._session = stopping, say, fleet, session
        described = fleet.describe()
        self._served = Served(Setup(plan.topology, mtp=0, model=plan.model), described, None)  # type: ignore[arg-type]
        self._prompts: list[list[int]] = []
        self._asker: dict[str, Asker] = {}
        for server in described["servers"]:  # type: ignore[attr-defined]
            if server["role"] == Role.PREFILL:
                pair = replace(Pair.of(described), prefill=server["url"], bootstrap_port=server["bootstrap_port"])
                self._asker[server["name"]] = Asker(session, pair, HANG_SECONDS)
        self._flying: list[Flying] = []
        self._rng = random.Random(plan.seed)
        self._start: dict[str, State] = {}
        self._lives: dict[str, int] = {}
        self._turn = itertools.cycle(server.instance.name for server in fleet.servers)
        self._sent = 0
        self._gate = asyncio.Event()
        """Closed while a server is away: a router would send nothing to it either."""

    async def run(self) -> None:
        """Start values, requests with restarts, end values."""
        self._say(f"computing the right answers to {PROMPTS} prompts with transformers")
        for number, length in enumerate(LENGTHS[:PROMPTS]):
            self._prompts.append(await asyncio.to_thread(self._served.prompt, length, number))
        self._gate.set()
        self.record.begin()
        await self._warm_up()
        watch = asyncio.create_task(self._watch())
        workers = [asyncio.create_task(self._work()) for _ in range(self.plan.concurrency)]
        try:
            await self._restarts(workers)
            await asyncio.gather(*workers)
        finally:
            for task in (watch, *workers):
                task.cancel()
        await self._settle()
        await self._sample()
        self.record.judge_memory()

    @property
    def _over(self) -> bool:
        return self.goal.reached(self.record) or self.record.hopeless or self._stopping()

    async def _warm_up(self) -> None:
        """Every prompt once through every prefill server; then what the servers hold is noted."""
        for name in self._asker:
            for start in range(0, len(self._prompts), self.plan.concurrency):
                batch = range(start, min(start + self.plan.concurrency, len(self._prompts)))
                await asyncio.gather(*(self._one(name, number, leaves=False) for number in batch))
        await asyncio.sleep(SAMPLE_SECONDS / 2)
        self._start = await self._states()
        for server, state in self._start.items():
            for fault in state.faults:
                self.record.fault(Kind.WRONG, f"{server} at the start: {fault}")
        await self._sample()
        self._say("warm; the start values are noted")

    async def _work(self) -> None:
        """One client after the other."""
        while not self._over:
            await self._gate.wait()
            if self.goal.handoffs is not None and self._sent >= self.goal.handoffs:
                return
            leaves = self._rng.random() < self.plan.abort_share
            await self._one(self._rng.choice(list(self._asker)), self._rng.randrange(len(self._prompts)), leaves=leaves)

    async def _one(self, prefill: str, number: int, *, leaves: bool) -> None:
        """A request, its answer, and what that comes to."""
        self._sent += 1
        tokens = self._rng.randint(1, OUTPUT)
        flying = Flying(prefill, self._asker[prefill].ask(self._prompts[number], tokens))
        self._flying.append(flying)
        try:
            if leaves:
                await self._leave(flying.ask)
                self.record.handoffs += 1
                self.record.aborted += 1
                return
            ends = await flying.ask.ends()
        finally:
            self._flying.remove(flying)
        self.record.handoffs += 1
        expected = await asyncio.to_thread(self._served.reference, self._prompts[number], OUTPUT)
        self._judge(flying, ends, expected.tokens[:tokens], f"prompt of {len(self._prompts[number])} by {prefill}")

    async def _leave(self, ask: Ask) -> None:
        """The client goes away: at any time, or right after decode's first token."""
        if self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.uniform(0, LEAVE_SECONDS))
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask.decoded.wait(), LEAVE_SECONDS)
        await ask.leave()

    def _judge(self, flying: Flying, ends: dict[str, End], expected: list[int], what: str) -> None:
        hung = [side for side, end in ends.items() if end.hung]
        if hung:
            self.record.fault(Kind.HANG, f"{what}: no answer of {' and '.join(hung)} within {HANG_SECONDS:.0f} s")
            return
        wrong = wrong_end(ends, expected, flying.killed)
        if wrong is not None:
            self.record.fault(Kind.WRONG, f"{what}: {wrong}")
        elif ends["decode"].arrived:
            self.record.arrived += 1
        else:
            self.record.lost += 1

    async def _restarts(self, workers: list["asyncio.Task[None]"]) -> None:
        """kill -9 of each server in turn, at equal distances of the goal; then the start, and requests again."""
        for number in range(1, self.plan.restarts + 1):
            while not self._over and self._progress() < number / (self.plan.restarts + 1):
                if all(worker.done() for worker in workers):
                    return
                await asyncio.sleep(PAUSE_SECONDS)
            if self._over:
                return
            await self._restart(next(self._turn))

    def _progress(self) -> float:
        """How much of the goal is done, 0 to 1."""
        if self.goal.handoffs is not None:
            return self.record.handoffs / self.goal.handoffs
        assert self.goal.seconds is not None
        return self.record.seconds / self.goal.seconds

    async def _restart(self, name: str) -> None:
        instance = next(server.instance for server in self._fleet.servers if server.instance.name == name)
        lost = self.record.lost
        hit = [each for each in self._flying if instance.role is Role.DECODE or each.prefill == name]
        for each in hit:
            each.killed = instance.role
        self._gate.clear()
        self._fleet.kill(name)
        self._say(f"{name}: kill -9 with {len(hit)} requests under way on it")
        process = self._fleet.process(name)
        while process.poll() is None or self._flying:
            await asyncio.sleep(PAUSE_SECONDS)
        began = time.monotonic()
        await asyncio.to_thread(self._fleet.restart, name)
        self._lives[name] = self._lives.get(name, 0) + 1
        probes = list(self._asker) if instance.role is Role.DECODE else [name]
        await asyncio.gather(*(self._one(each, 0, leaves=False) for each in probes))
        recovered = round(time.monotonic() - began, 1)
        for each in probes:
            await asyncio.gather(*(self._one(each, number, leaves=False) for number in range(self.plan.concurrency)))
        await asyncio.sleep(SAMPLE_SECONDS / 2)
        self._start[name] = self._start[name].started_again((await self._states()).get(name, State()))
        self.record.restarts.append(Restart(round(self.record.seconds, 1), name, self.record.lost - lost, recovered))
        self._say(f"{name}: serves again after {recovered} s; {self.record.lost - lost} requests were lost")
        self._gate.set()

    async def _settle(self) -> None:
        """Nothing is under way: every server holds what it held at the start, after SETTLE_SECONDS at most."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while left := list(differences(self._start, await self._states())):
            if time.monotonic() > deadline:
                for line in left:
                    self.record.fault(Kind.LEAK, line)
                return
            await asyncio.sleep(1)

    async def _watch(self) -> None:
        """Samples and progress lines."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            await self._sample()
            self._say(self.record.progress(self.goal))

    async def _sample(self) -> None:
        moment = round(self.record.seconds, 2)
        for server, state in (await self._states()).items():
            for rank, told in _ranks(state).items():
                if "rss_bytes" in told:
                    self.record.samples.append(self._of(moment, server, rank, told))

    def _of(self, moment: float, server: str, rank: str, told: dict[str, Any]) -> Sample:
        return Sample(
            moment,
            self.record.handoffs,
            f"{server} {rank}",
            self._lives.get(server, 0),
            told["rss_bytes"],
            told.get("threads", 0),
            told.get("sockets", 0),
            told.get("units_free"),
            told.get("units_quarantined"),
        )

    async def _states(self) -> dict[str, State]:
        """What the servers that answer say of themselves."""
        found = {}
        for server in self._fleet.servers:
            try:
                async with (
                    asyncio.timeout(SAMPLE_SECONDS),
                    self._session.get(f"{server.endpoint.url}/hetero/state") as response,
                ):
                    found[server.instance.name] = State.read(await response.read(), response.status)
            except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
                if self._gate.is_set():
                    found[server.instance.name] = State(faults=(f"no /hetero/state: {type(error).__name__} {error}",))
        return found


def _ranks(state: State) -> dict[str, dict[str, Any]]:
    """Figures by rank: `TP0/2: units` becomes `units` of `TP0/2`."""
    found: dict[str, dict[str, Any]] = {}
    for figure, value in state.figures.items():
        rank, _, name = figure.partition(": ")
        found.setdefault(rank, {})[name] = value
    return found


def run(plan: Plan, record: Record, goal: Goal, stopping: Callable[[], bool], say: Say) -> None:
    """Start the fleet, ask, stop it. What goes wrong is in the record. Raises HeteroError if it does not start."""
    asyncio.run(_run(plan, record, goal, stopping, say))


async def _run(plan: Plan, record: Record, goal: Goal, stopping: Callable[[], bool], say: Say) -> None:
    fleet = Fleet(topology.parse(plan.topology), plan.options, say)
    async with AsyncExitStack() as stack:
        stack.callback(fleet.stop)
        fleet.start()
        await asyncio.to_thread(fleet.wait_until_healthy)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await ServersSoak(plan, record, goal, fleet, session, stopping=stopping, say=say).run()
