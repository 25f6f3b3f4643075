"""The soak on the harness: batches of handoffs through real managers and pools, every byte compared."""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench_serving import soak_process
from bench_serving.soak_record import Books, Goal, Kind, Record, Restart, Sample
from sglang_hetero.transfer.pieces import StateMode
from sglang_hetero.transfer.reception import MAX_READERS
from tests.harness import (
    Abort,
    Forward,
    Geometry,
    Handoff,
    Harness,
    HarnessError,
    HarnessTimeout,
    Leftovers,
    On,
    Outcome,
    Pair,
    RankDied,
    Result,
)
from tests.harness.flow import Strike, condition
from tests.harness.processes import Condition, RankProcess, call_all

PAGE = 16
PAGES = 6
"""Of the longest prompt. Small pools, so that comparing them costs little beside the handoffs."""
CHUNKS = 4
BATCH = 32
WINDOW = 2
"""Units per request: fewer than it has pieces, so that each is used several times."""
UNIT_MIB = 2
"""What a unit of these models takes (docs/transfer.md)."""
STAGED = 4
"""A decode server has units for a STAGED-th part of a batch; with several of them, and aborts, some requests wait."""
STALL_SECONDS = 20.0
"""Of both sides, so that a request whose peer was killed does not wait longer. A batch takes seconds, and several times
as many on a busy machine: what waits for its turn in prefill meanwhile must not be taken for a stalled transfer."""
HANG_SECONDS = 35.0
"""For a batch. SGLang's own limits are 40 s in the harness: what ends by them has hung."""
CRASH_SECONDS = 50.0
"""For a batch in which a server is killed: prefill does not know which decode server a request will come from, so that
one that was not bound yet ends by SGLang's limit of 40 s."""
QUIET_SECONDS = 10.0
CRASH_QUIET_SECONDS = 2 * HANG_SECONDS
"""The same after a side was killed: whoever may still write to a unit has to be proven gone first."""
SAMPLE_SECONDS = 5.0
SOCKETS = 8
"""Connections that Mooncake opens when more writes than before are under way at the same time, and keeps."""
LANES = 4
"""Connections of Mooncake's TCP transport to each rank that a process writes to or reads from. It keeps those to a rank
that has ended (docs/soak.md), and opens new ones to the next."""
WARM_BATCHES = 3

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is handed over. states: SGLANG_HETERO_STATE of as many decode servers. passes: every other batch is computed
    by forward passes whose layers leave early (docs/harness.md). restart_every: handoffs between two restarts, 0: none.
    rooms: room numbers are used again after so many, 0: never.
    """

    prefill_tp: tuple[int, ...] = (2, 4)
    decode_tp: int = 1
    states: tuple[str, ...] = tuple(StateMode)
    batch: int = BATCH
    abort_share: float = 0.1
    restart_every: int = 0
    rooms: int = 0
    verify: bool = False
    passes: bool = True
    seed: int = 0

    @property
    def geometry(self) -> Geometry:
        """One layer of each kind and the draft's; heads that all sizes divide, and pools that hold one batch."""
        heads = math.lcm(2, self.decode_tp, *self.prefill_tp)
        return Geometry(
            layers=2,
            full_attention_layers=(1,),
            kv_heads=heads,
            linear_key_heads=heads,
            linear_value_heads=2 * heads,
            page_size=PAGE,
            pages=PAGES * self.batch,
            slots=self.batch,
        )

    @property
    def prefill_env(self) -> dict[str, str]:
        return {"SGLANG_HETERO_STALL_TIMEOUT": str(STALL_SECONDS), "SGLANG_HETERO": "always"}

    def decode_env(self, state: str) -> dict[str, str]:
        return self.prefill_env | {
            "SGLANG_HETERO_STATE": state,
            "SGLANG_HETERO_WINDOW": str(WINDOW),
            "SGLANG_HETERO_STAGING_MB": str(UNIT_MIB * WINDOW * max(1, self.batch // STAGED)),
            "SGLANG_HETERO_VERIFY": str(int(self.verify)),
        }

    def requests(self, number: int, count: int) -> list[Handoff]:
        """Batch `number`: the same in every run with this seed. No two requests of it have the same contents."""
        rng = random.Random(f"{self.seed} {number}")
        contents = rng.sample(range(1 << 20), count)
        return [self._request(rng, seed) for seed in contents]

    def _request(self, rng: random.Random, seed: int) -> Handoff:
        tokens = rng.randint(1, PAGES * PAGE)
        if rng.random() < 0.5:  # the border of a page, or next to it
            tokens = min(PAGES * PAGE, max(1, round(tokens / PAGE) * PAGE + rng.choice((-1, 0, 1))))
        chunks = rng.randint(1, min(CHUNKS, tokens))
        abort = None
        if rng.random() < self.abort_share:
            abort = Abort(rng.choice(list(On)), rng.randint(0, chunks), rng.randint(0, 3))
        prefill, decode = rng.randrange(len(self.prefill_tp)), rng.randrange(len(self.states))
        return Handoff(tokens, chunks, seed, prefill=prefill, decode=decode, abort=abort)

    def forward(self, number: int) -> Forward | tuple[()]:
        return Forward() if self.passes and number % 2 else ()


@dataclass(frozen=True)
class Place:
    """One server of the pair."""

    on: On
    number: int

    @property
    def name(self) -> str:
        return f"{self.on.value} {self.number + 1}"

    def has(self, handoff: Handoff) -> bool:
        return (handoff.prefill if self.on is On.PREFILL else handoff.decode) == self.number

    def kill(self, pair: Pair) -> None:
        (pair.kill_prefill if self.on is On.PREFILL else pair.kill_decode)(self.number)

    def restart(self, pair: Pair) -> None:
        """Killed, if it was not yet, and started again on the same ports; the others live on."""
        (pair.restart_prefill if self.on is On.PREFILL else pair.restart_decode)(self.number)


def wrong_end(handoff: Handoff, outcome: Outcome, killed: Place | None) -> str | None:
    """What is wrong about the end of a request; `killed`: the place it was on that was killed meanwhile."""
    abort = handoff.abort
    dead = killed.on if killed else None
    if not outcome.succeeded and abort is None and dead is None:
        return f"a request that nobody gave up has failed: {outcome.reasons}"
    if outcome.prefill != outcome.decode and dead is None:
        # A side may have done its part when the client of the other one goes away.
        failed = On.DECODE if outcome.prefill else On.PREFILL
        if abort is None or abort.on is not failed:
            return f"it has failed on {failed.value} only: {outcome.reasons}"
    sides = (
        (On.PREFILL, outcome.prefill, outcome.prefill_reasons),
        (On.DECODE, outcome.decode, outcome.decode_reasons),
    )
    for side, arrived, reasons in sides:
        if not arrived and side is not dead and not any(reason.strip() for reason in reasons):
            return f"it has failed without a cause on {side.value}"
    return None


class HarnessSoak:
    """Hands over until the goal is reached, or too much is wrong, or `stopping()`."""

    def __init__(self, harness: Harness, plan: Plan, record: Record, say: Say) -> None:
        self.plan, self.record = plan, record
        self._harness, self._say = harness, say
        self._pair: Pair | None = None
        self._books = Books((), {"threads": MAX_READERS, "sockets": SOCKETS})
        self._lives: dict[str, tuple[int, int]] = {}
        """By name: the process id, and how many it has had before."""
        self._numbers = itertools.count()
        self._places = itertools.cycle(
            Place(on, number)
            for on, count in ((On.PREFILL, len(plan.prefill_tp)), (On.DECODE, len(plan.states)))
            for number in range(count)
        )
        self._restarted_at = 0
        self._sampled = -SAMPLE_SECONDS

    def run(self, goal: Goal, stopping: Callable[[], bool] = lambda: False) -> None:
        """Until the goal is reached. What goes wrong is in the record."""
        self.record.begin()
        while not (goal.reached(self.record) or self.record.hopeless or stopping()):
            try:
                if self._pair is None:
                    self._pair = self._open()
                    self._warm_up(self._pair)
                self._round(self._pair, goal)
            except HarnessError as error:
                if not stopping():  # a signal may have ended the ranks, too
                    self.record.fault(_kind(error), str(error))
                self._close()
        try:
            if self._pair is not None:
                self._look(self._pair)
                self._settled(self._pair)
        except HarnessError as error:
            if not stopping():
                self.record.fault(_kind(error), str(error))
        self.record.judge_memory()
        self._close()

    def _open(self) -> Pair:
        return self._harness.pair(
            self.plan.geometry,
            prefill_tp=self.plan.prefill_tp,
            decode_tp=self.plan.decode_tp,
            prefill_env=self.plan.prefill_env,
            decode_env=[self.plan.decode_env(state) for state in self.plan.states],
            seed=self.plan.seed,
        )

    def _warm_up(self, pair: Pair) -> None:
        """Connections and threads that are made when they are first needed; then what each process has is noted."""
        # First the handshakes: a request that decode gives up before it knows the prefill server at all ends there only
        # by SGLang's own limit.
        pairings = itertools.product(range(len(self.plan.prefill_tp)), range(len(self.plan.states)))
        self._judge(pair, [self._probe(Place(On.PREFILL, one), other) for one, other in pairings], None, ())
        for _ in range(WARM_BATCHES):
            self._hand_over(pair, self.plan.batch, None)
        for rank, held in self._held(pair):
            self._books.note(rank, held)
        self._say(f"{len(pair.ranks)} ranks and {len(pair.bootstraps)} bootstrap servers are up and warm")

    def _close(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def _round(self, pair: Pair, goal: Goal) -> None:
        """One batch, a restart within it if it is due, and a look at what is held."""
        count = self.plan.batch
        if goal.handoffs is not None:
            count = max(1, min(count, goal.handoffs - self.record.handoffs))
        every = self.plan.restart_every
        due = bool(every) and self.record.handoffs - self._restarted_at >= every
        place = next(self._places) if due else None
        if place is None:
            self._hand_over(pair, count, None)
        else:
            self._with_restart(pair, count, place)
        for leak in pair.leaks():
            self.record.fault(Kind.LEAK, leak)
        if self.record.seconds - self._sampled >= SAMPLE_SECONDS:
            self._look(pair)
            self._settled(pair)
            self._say(self.record.progress(goal))

    def _with_restart(self, pair: Pair, count: int, place: Place) -> None:
        """Kill a server while a batch is under way, start it again, and have one request through each of its peers."""
        self._restarted_at = self.record.handoffs
        lost = self.record.lost
        began = self._hand_over(pair, count, place)
        if place.on is On.DECODE:
            began = time.monotonic()
            place.restart(pair)
        self._keep_lanes(pair, place)
        peers = len(self.plan.states if place.on is On.PREFILL else self.plan.prefill_tp)
        probes = [self._probe(place, peer) for peer in range(peers)]
        self._judge(pair, probes, None, ())
        recovered = round(time.monotonic() - began, 1)
        self.record.restarts.append(
            Restart(round(self.record.seconds, 1), place.name, self.record.lost - lost, recovered)
        )
        self._say(f"{place.name} restarted: {self.record.lost - lost} requests lost, {recovered} s until served again")

    def _keep_lanes(self, pair: Pair, place: Place) -> None:
        """The other side's processes still have their connections to the ranks that were killed."""
        ended = (pair.prefills if place.on is On.PREFILL else pair.decodes)[place.number].ranks
        for rank in pair.decode if place.on is On.PREFILL else pair.prefill:
            self._books.allow(rank.name, "sockets", LANES * len(ended))
        for rank in ended:
            self._books.restarted(rank.name)
        self.record.note(
            "Mooncake's TCP transport keeps its connections to ranks that have ended: up to "
            f"{LANES} for each of them are not counted as leaks"
        )

    @staticmethod
    def _probe(place: Place, peer: int) -> Handoff:
        prefill, decode = (place.number, peer) if place.on is On.PREFILL else (peer, place.number)
        return Handoff(PAGE + 1, chunks=2, seed=peer, prefill=prefill, decode=decode)

    def _hand_over(self, pair: Pair, count: int, place: Place | None) -> float:
        """A batch, during which `place` is killed; returns when, if it is a prefill server, its new start began."""
        number = next(self._numbers)
        kill = None
        if place is not None:
            kill = _Kill(pair, place, random.Random(f"{self.plan.seed} {number} kill").randint(0, count // 2))
        self._judge(pair, self.plan.requests(number, count), kill, self.plan.forward(number))
        return kill.began if kill is not None else 0.0

    def _judge(
        self, pair: Pair, handoffs: Sequence[Handoff], kill: "_Kill | None", forward: Forward | tuple[()]
    ) -> None:
        if self.plan.rooms and pair.next_room > self.plan.rooms:
            pair.next_room = 1
        first = pair.next_room

        def settle(pair: Pair, result: Result) -> None:
            """Nobody may write any more when the comparison begins, and decode has made its first steps."""
            if kill is not None:
                kill.at_last()
                if kill.place.on is On.PREFILL:
                    kill.began = time.monotonic()
                    kill.place.restart(pair)
            for server, group in enumerate(pair.decodes):
                if condition(group.ranks) is Condition.RUNNING:
                    rooms = [each.room for each in result.decode if handoffs[each.room - first].decode == server]
                    call_all(group.ranks, "step", rooms)
            try:
                pair.quiet(QUIET_SECONDS if kill is None else CRASH_QUIET_SECONDS)
            except HarnessTimeout as error:
                raise _Held(str(error)) from error

        strikes = [kill.strike] if kill is not None else []
        result = pair.handoff_many(
            handoffs, Leftovers.UNTOUCHED, before_compare=settle, forward=forward, strikes=strikes
        )
        self._enter(handoffs, result, kill.place if kill is not None else None)

    def _enter(self, handoffs: Sequence[Handoff], result: Result, place: Place | None) -> None:
        record = self.record
        record.handoffs += len(handoffs)
        for difference in result.differences:
            record.fault(Kind.WRONG, str(difference))
        for handoff, outcome in zip(handoffs, result.outcomes, strict=True):
            killed = place if place is not None and place.has(handoff) else None
            wrong = wrong_end(handoff, outcome, killed)
            if wrong is not None:
                record.fault(Kind.WRONG, f"{handoff}: {wrong}")
            elif outcome.decode:
                record.arrived += 1
            elif handoff.abort is not None:
                record.aborted += 1
            else:
                record.lost += 1
        if result.seconds > (HANG_SECONDS if place is None else CRASH_SECONDS):
            last = max(zip(handoffs, result.outcomes, strict=True), key=lambda each: _ended(each[1]))
            record.fault(
                Kind.HANG,
                f"a batch took {result.seconds:.0f} s; killed: {place}; the last one to end: {last[0]}: "
                f"{last[1].reasons}",
            )

    def _look(self, pair: Pair) -> None:
        """A sample of every process."""
        moment = round(self.record.seconds, 2)
        self._sampled = moment
        states = dict(zip([rank.name for rank in pair.running], pair.hetero(), strict=True))
        for name, process in self._processes(pair):
            seen = soak_process.look(process.pid)
            if seen is None:
                continue
            pid, life = self._lives.setdefault(name, (process.pid, 0))
            if pid != process.pid:
                life += 1
                self._lives[name] = (process.pid, life)
            units = states.get(name, {})
            self.record.samples.append(
                Sample(
                    moment,
                    self.record.handoffs,
                    name,
                    life,
                    seen.rss,
                    seen.threads,
                    seen.sockets,
                    units.get("units_free"),
                    units.get("units_quarantined"),
                )
            )

    def _settled(self, pair: Pair) -> None:
        """Threads and connections are back, after some time at most."""
        deadline = time.monotonic() + QUIET_SECONDS
        while missing := [line for name, held in self._held(pair) for line in self._books.missing(name, held)]:
            if time.monotonic() > deadline:
                for line in missing:
                    self.record.fault(Kind.LEAK, line)
                for name, held in self._held(pair):  # told once; what is more than that is told again
                    self._books.note(name, held)
                return
            time.sleep(0.1)

    def _held(self, pair: Pair) -> list[tuple[str, dict[str, int]]]:
        seen = [(name, soak_process.look(process.pid)) for name, process in self._processes(pair)]
        return [(name, {"threads": each.threads, "sockets": each.sockets}) for name, each in seen if each is not None]

    @staticmethod
    def _processes(pair: Pair) -> list[tuple[str, RankProcess]]:
        servers = [(f"bootstrap of prefill {number}", process) for number, process in enumerate(pair.bootstraps, 1)]
        return [(rank.name, rank) for rank in pair.ranks] + servers


def _ended(outcome: Outcome) -> float:
    return max(outcome.ended.values(), default=0.0)


class _Held(HarnessError):
    """Something is still held, or written, although every request has ended."""


def _kind(error: HarnessError) -> Kind:
    if isinstance(error, _Held):
        return Kind.LEAK
    return Kind.HANG if isinstance(error, HarnessTimeout) and not isinstance(error, RankDied) else Kind.WRONG


class _Kill:
    """kill -9 of a server as soon as so many requests of the batch have ended, or before it is compared."""

    def __init__(self, pair: Pair, place: Place, ended: int) -> None:
        self.place, self.at, self.began = place, 0.0, 0.0
        self._pair, self._ended = pair, ended

    @property
    def strike(self) -> Strike:
        return Strike(
            when=lambda flow: len(flow.journeys) - len(flow.under_way) >= self._ended, do=lambda _: self.at_last()
        )

    def at_last(self) -> None:
        """Now, if it has not been yet."""
        if not self.at:
            self.at = time.monotonic()
            self.place.kill(self._pair)
