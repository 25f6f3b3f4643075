"""The way of requests through both sides: what SGLang's two schedulers and their all-reduces decide, in turns.

A turn polls every request that is under way and takes each one step. The harness stands in for the all-reduce of the
polls: a side has a state when all its ranks have it, and has failed when one has.

Chunks are filled in at once, or prefill runs forward passes (replay.py): then its ranks are busy with one batch at a
time, while decode goes on.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from . import oracle
from .errors import HarnessError, HarnessTimeout
from .expectation import Placement
from .processes import Condition, RankProcess, call_all
from .sides import Forward, Request, Turn

POLL_SECONDS = 0.002
PHASE_SECONDS = 60.0
"""Limit of each phase: building the ranks, and all handoffs of a call."""
FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, SUCCESS = 0, 1, 2, 4
"""SGLang's KVPoll (disaggregation/base/conn.py), kept here so that a test process imports no SGLang."""


class On(Enum):
    """The two sides of a handoff."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Abort:
    """The client goes away: SGLang tells all ranks of one side to abort the request.

    It happens as soon as `chunks` chunks have been sent, and `turns` turns of the schedulers later. If the side has
    ended by then nothing happens. With forward passes `running` waits until the pass of the next chunk runs; prefill's
    scheduler looks at it when the pass has ended.
    """

    on: On
    chunks: int = 0
    turns: int = 0
    running: bool = False


@dataclass(frozen=True)
class Handoff:
    """One prompt to hand over: `tokens` tokens in `chunks` chunks, contents made from `seed`.

    `prefill` and `decode` are numbers: which of the pair's prefill sides, which attention-DP rank of decode.
    `paused_after`: prefill runs no more than so many of its chunks before the first `Strike` of the Flow has been.
    `bound_after`: decode hears of the prompt when so many of its chunks have been run; prefill runs them without, as
    with SGLang's optimistic prefill. `told_after`: of a handshake that is done prefill's scheduler learns after so many
    of them, as where one of its ranks has not heard of it. With forward passes only.
    """

    tokens: int
    chunks: int = 1
    seed: int = 0
    prefill: int = 0
    decode: int = 0
    abort: Abort | None = None
    paused_after: int | None = None
    bound_after: int = 0
    told_after: int = 0


@dataclass(frozen=True)
class Outcome:
    """How one handoff ended; the reasons are those of the side's ranks that reported a failure."""

    prefill: bool
    decode: bool
    prefill_reasons: tuple[str, ...] = ()
    decode_reasons: tuple[str, ...] = ()
    ended: Mapping["On", float] = field(default_factory=dict)
    """When the scheduler of each side knew that it had arrived or failed, by time.monotonic."""

    @property
    def succeeded(self) -> bool:
        return self.prefill and self.decode

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.prefill_reasons + self.decode_reasons


class Step(Enum):
    """Where one side of a request is."""

    HANDSHAKE = "handshake"
    CHUNKS = "chunks"
    """Prefill only: it has its memory and runs."""
    TRANSFER = "transfer"
    DRAINING = "draining"
    """Decode only: it has failed, and SGLang keeps its memory until prefill has drained."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"


ENDED = {Step.SUCCEEDED, Step.FAILED}
POLLED = {Step.HANDSHAKE, Step.TRANSFER}


@dataclass
class Journey:
    """One request under way."""

    request: Request
    handoff: Handoff
    prefill_ranks: Sequence[RankProcess]
    decode_ranks: Sequence[RankProcess]
    chunks: deque[int]
    """End positions of the chunks that are left."""
    abort_in: int | None
    """Turns until the abort, once its chunks have been sent."""
    prefill: Step = Step.HANDSHAKE
    decode: Step = Step.HANDSHAKE
    sent: int = 0
    """Chunks that have been sent or, with forward passes, run."""
    running: bool = False
    """A forward pass of its next chunk is under way."""
    opened: bool = False
    """Decode has heard of it."""
    unbound: bool = False
    """Prefill has run a part of it, or all, before its handshake was done."""
    prefill_reasons: tuple[str, ...] = ()
    decode_reasons: tuple[str, ...] = ()
    placed: dict[On, Placement] = field(default_factory=dict)
    ran: float = 0.0
    """When the layers of its last chunk had run, by time.monotonic."""
    ends: dict[On, float] = field(default_factory=dict)
    """When each side's scheduler knew how it had ended, by time.monotonic."""

    @property
    def room(self) -> int:
        return self.request.room

    @property
    def ended(self) -> bool:
        return {self.prefill, self.decode} <= ENDED

    def outcome(self) -> Outcome:
        return Outcome(
            self.prefill is Step.SUCCEEDED,
            self.decode is Step.SUCCEEDED,
            self.prefill_reasons,
            self.decode_reasons,
            self.ends,
        )

    def ranks(self, on: On) -> Sequence[RankProcess]:
        return self.prefill_ranks if on is On.PREFILL else self.decode_ranks


@dataclass
class Strike:
    """A fault that the test brings about while requests are under way: `do` is called once `when` is true.

    Strikes come one after the other; `seconds`: not before so much time has passed since the one before.
    """

    when: Callable[["Flow"], bool]
    do: Callable[["Flow"], None]
    seconds: float = 0.0
    struck: float = 0.0
    """When it was done, by time.monotonic; 0 until then."""


@dataclass
class Loop:
    """Where the scheduler loop of a prefill side is."""

    ranks: Sequence[RankProcess]
    busy: bool = False
    batch: list[Journey] = field(default_factory=list)
    """Of the round that runs, or of the last one."""


class Flow:
    """Takes requests through both sides, each one as far as it can go.

    A side one of whose ranks the test has killed is at an end, as SGLang's is: its requests have failed there, and
    what is left of it is told nothing any more. One of whose ranks is paused waits, all of it, as in an all-reduce.
    """

    def __init__(
        self, journeys: Sequence[Journey], forwards: Sequence[Forward] = (), strikes: Sequence[Strike] = ()
    ) -> None:
        """forwards: how prefill runs its forward passes, in turn; none: chunks are filled in at once."""
        self.journeys = journeys
        self.strikes = strikes
        self.under_way = list(journeys)
        self.overlap = any(forward.overlap for forward in forwards)
        self._forwards = itertools.cycle(forwards) if forwards else None
        self.turns: list[list[Turn]] = []
        """What the ranks of a side say of each round with forward passes."""
        self._loops = {id(ranks): Loop(ranks) for ranks, _ in _by_ranks(journeys, On.PREFILL)}

    def run(self) -> None:
        """Until every request has ended on both sides. Raises HarnessTimeout, CommandFailed or RankDied."""
        deadline = time.monotonic() + PHASE_SECONDS
        for ranks, journeys in self._awake(On.PREFILL):
            call_all(ranks, "open", [journey.request for journey in journeys])
        while self.under_way or self._busy() or self._owes_strikes():
            self._strike()
            self.lose()
            self._open()
            self._abort()
            progress = [self._prefill(), self._decode(), self._drain(), self._send()]
            self.under_way = [journey for journey in self.under_way if not journey.ended]
            if time.monotonic() > deadline:
                raise HarnessTimeout(self._stuck())
            if not any(progress):
                time.sleep(POLL_SECONDS)

    def _open(self) -> None:
        for ranks, journeys in self._awake(On.DECODE, lambda each: not each.opened):
            opened = [journey for journey in journeys if journey.sent >= journey.handoff.bound_after]
            if opened:
                call_all(ranks, "open", [journey.request for journey in opened])
            for journey in opened:
                journey.opened = True

    def _abort(self) -> None:
        for journey in self.under_way:
            abort = journey.handoff.abort
            if abort is None or journey.abort_in is None or journey.sent < abort.chunks:
                continue
            if abort.running and journey.sent == abort.chunks and not journey.running:
                continue
            if abort.on is On.PREFILL and self._loops[id(journey.prefill_ranks)].busy:
                continue
            if condition(journey.ranks(abort.on)) is not Condition.RUNNING:
                continue
            journey.abort_in -= 1
            if journey.abort_in >= 0:
                continue
            journey.abort_in = None
            self.abort(journey, abort.on)

    def abort(self, journey: Journey, on: On) -> None:
        """SGLang's AbortReq on all ranks of a side; nothing happens where the request has ended."""
        if on is On.DECODE:
            if journey.opened and journey.decode in POLLED:
                call_all(journey.decode_ranks, "abort", journey.room)
        elif journey.prefill in POLLED:
            call_all(journey.prefill_ranks, "abort", journey.room)
        elif journey.prefill is Step.CHUNKS:
            journey.prefill_reasons = _told(call_all(journey.prefill_ranks, "retire", journey.room))
            self._ended(journey, On.PREFILL, Step.FAILED)

    def _ended(self, journey: Journey, on: On, step: Step) -> None:
        journey.ends[on] = time.monotonic()
        if on is On.PREFILL:
            journey.prefill = step
        else:
            journey.decode = step

    def _strike(self) -> None:
        """The next fault, if its time has come."""
        before = 0.0
        for strike in self.strikes:
            if not strike.struck:
                if time.monotonic() - before >= strike.seconds and strike.when(self):
                    strike.do(self)
                    strike.struck = time.monotonic()
                return
            before = strike.struck

    def _owes_strikes(self) -> bool:
        """Whether a later fault belongs to the first one, as SIGCONT does to SIGSTOP."""
        return any(strike.struck for strike in self.strikes) and not all(strike.struck for strike in self.strikes)

    def lose(self) -> None:
        """Requests of a side that has lost a rank have failed there."""
        for journey in self.under_way:
            for on, step in ((On.PREFILL, journey.prefill), (On.DECODE, journey.decode)):
                if step not in ENDED and condition(journey.ranks(on)) is Condition.DEAD:
                    self._ended(journey, on, Step.FAILED)
        for loop in self._loops.values():
            if condition(loop.ranks) is Condition.DEAD:
                loop.busy, loop.batch = False, []

    def _awake(
        self, on: On, which: Callable[[Journey], bool] = lambda journey: True
    ) -> list[tuple[Sequence[RankProcess], list[Journey]]]:
        """The requests under way by groups of ranks, of the groups that take commands."""
        groups = _by_ranks([journey for journey in self.under_way if which(journey)], on)
        return [group for group in groups if condition(group[0]) is Condition.RUNNING]

    def _prefill(self) -> bool:
        moved = False
        for ranks, journeys in self._awake(On.PREFILL):
            if self._loops[id(ranks)].busy:
                continue
            ready = []
            for journey, poll in _polls(ranks, [each for each in journeys if each.prefill in POLLED]):
                if poll == FAILED or (poll == SUCCESS and journey.prefill is Step.TRANSFER):
                    journey.prefill_reasons = _told(call_all(ranks, "conclude", journey.room, poll == FAILED))
                    self._ended(journey, On.PREFILL, Step.FAILED if poll == FAILED else Step.SUCCEEDED)
                    moved = True
                elif journey.prefill is Step.HANDSHAKE:
                    handoff = journey.handoff
                    journey.unbound = handoff.told_after > 0 or (poll == BOOTSTRAPPING and handoff.bound_after > 0)
                    if poll == WAITING_FOR_INPUT or journey.unbound:
                        ready.append(journey)
                elif journey.unbound and poll == WAITING_FOR_INPUT and journey.sent >= journey.handoff.told_after:
                    call_all(ranks, "bind", journey.room)
                    journey.unbound = False
                    moved = True
            for journey in _admit(ranks, ready, [each.room for each in ready if each.unbound]):
                journey.prefill = Step.CHUNKS
                journey.placed[On.PREFILL] = _placement(ranks, journey.room)
                moved = True
        return moved

    def _decode(self) -> bool:
        moved = False
        for ranks, journeys in self._awake(On.DECODE):
            ready = []
            for journey, poll in _polls(ranks, [each for each in journeys if each.opened and each.decode in POLLED]):
                if poll == FAILED:
                    reasons, held = zip(*call_all(ranks, "fail", journey.room), strict=True)
                    journey.decode_reasons = _told(reasons)
                    self._ended(journey, On.DECODE, Step.DRAINING)
                    if not any(held):
                        self._release(journey, deferred=False)
                    moved = True
                elif poll == SUCCESS and journey.decode is Step.TRANSFER:
                    journey.placed[On.DECODE] = _placement(ranks, journey.room)
                    call_all(ranks, "commit", journey.room)
                    self._ended(journey, On.DECODE, Step.SUCCEEDED)
                    moved = True
                elif poll == WAITING_FOR_INPUT and journey.decode is Step.HANDSHAKE:
                    ready.append(journey)
            for journey in _admit(ranks, ready):
                journey.decode = Step.TRANSFER
                moved = True
        return moved

    def _drain(self) -> bool:
        moved = False
        for ranks, held in self._awake(On.DECODE, lambda each: each.decode is Step.DRAINING):
            answers = zip(*call_all(ranks, "drained", [journey.room for journey in held]), strict=True)
            for journey, drained in zip(held, answers, strict=True):
                if all(drained):
                    self._release(journey, deferred=True)
                    moved = True
        return moved

    def _release(self, journey: Journey, *, deferred: bool) -> None:
        call_all(journey.decode_ranks, "release", journey.room, deferred)
        journey.decode = Step.FAILED

    def _send(self) -> bool:
        """The next chunk of every request that prefill runs. A request that has failed meanwhile gets its chunks, too:
        prefill looks at it after the last one."""
        if self._forwards is not None:
            moved = [self._round(loop, self._forwards) for loop in self._loops.values()]
            return any(moved)
        running = [journey for journey in self.under_way if self._runs(journey)]
        for journey in running:
            call_all(journey.prefill_ranks, "send_chunk", journey.room, journey.chunks.popleft())
            journey.sent += 1
            if not journey.chunks:
                journey.prefill = Step.TRANSFER
        return bool(running)

    def _runs(self, journey: Journey) -> bool:
        """Whether prefill may run its next chunk."""
        if journey.prefill is not Step.CHUNKS or condition(journey.prefill_ranks) is not Condition.RUNNING:
            return False
        paused = journey.handoff.paused_after
        return paused is None or journey.sent < paused or any(strike.struck for strike in self.strikes)

    def _round(self, loop: Loop, forwards: Iterator[Forward]) -> bool:
        """The next round of a prefill side's loop, when the last one has ended."""
        if condition(loop.ranks) is not Condition.RUNNING:
            return False
        if loop.busy:
            if not all(rank.answered() for rank in loop.ranks):
                return False
            self._end_round(loop)
            return True  # clients' aborts are looked at between two rounds
        running = [each for each in self.under_way if each.prefill_ranks is loop.ranks and each.chunks]
        batch = made_batch([journey for journey in running if self._runs(journey)])
        # With overlap the last batch is handed over in the round after it, also if that has no batch.
        if not batch and not (self.overlap and loop.batch):
            return False
        bound = self._bound(loop, [journey for journey in running if journey.unbound and journey.sent])
        forward = next(forwards)
        for rank in loop.ranks:
            rank.start("turn", [(each.room, each.chunks[0]) for each in batch], forward, bound)
        loop.busy, loop.batch = True, batch
        for journey in batch:
            journey.chunks.popleft()
            journey.running = True
        return True

    def _bound(self, loop: Loop, unbound: Sequence[Journey]) -> list[int]:
        """Rooms of which prefill's scheduler learns now that decode has bound them."""
        late = [journey for journey in unbound if journey.sent >= journey.handoff.told_after]
        return [journey.room for journey, poll in _polls(loop.ranks, late) if poll == WAITING_FOR_INPUT]

    def _end_round(self, loop: Loop) -> None:
        deadline = time.monotonic() + PHASE_SECONDS
        turns: list[Turn] = [rank.result("turn", deadline) for rank in loop.ranks]
        loop.busy = False
        self.turns.append(turns)
        if any(turn.handed_over != turns[0].handed_over for turn in turns):
            raise HarnessError(f"the ranks of one side hand over other requests: {turns}")
        for journey in loop.batch:
            journey.sent += 1
            journey.running = False
            if not journey.chunks:
                journey.ran = max(turn.ended for turn in turns)
        for journey in self.under_way:
            if journey.prefill is Step.CHUNKS and journey.room in turns[0].handed_over:
                journey.prefill = Step.TRANSFER

    def _busy(self) -> bool:
        """Whether a round runs, or one is owed to a batch whose requests have all ended."""
        return any(loop.busy or (self.overlap and loop.batch) for loop in self._loops.values())

    def _stuck(self) -> str:
        states = {journey.room: (journey.prefill.value, journey.decode.value) for journey in self.under_way}
        ranks = {id(rank): rank for each in self.under_way for rank in (*each.prefill_ranks, *each.decode_ranks)}
        tails = "\n".join(rank.log_tail() for rank in ranks.values())
        return f"requests are still in {states} after {PHASE_SECONDS} s\n{tails}"


def journey(
    request: Request, handoff: Handoff, prefill_ranks: Sequence[RankProcess], decode_ranks: Sequence[RankProcess]
) -> Journey:
    """A request at its start."""
    chunks = deque(oracle.split(handoff.tokens, handoff.chunks))
    return Journey(
        request, handoff, prefill_ranks, decode_ranks, chunks, handoff.abort.turns if handoff.abort else None
    )


def until(done: Callable[[], Any], what: Callable[[], str], seconds: float = PHASE_SECONDS) -> None:
    """Ask again and again. Raises HarnessTimeout with `what()`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise HarnessTimeout(what())
        time.sleep(POLL_SECONDS)


def condition(ranks: Sequence[RankProcess]) -> Condition:
    """Of a side: that of its worst rank."""
    conditions = {rank.condition for rank in ranks}
    for worst in (Condition.DEAD, Condition.PAUSED):
        if worst in conditions:
            return worst
    return Condition.RUNNING


def _by_ranks(journeys: Sequence[Journey], on: On) -> list[tuple[Sequence[RankProcess], list[Journey]]]:
    """The requests of each group of ranks, in order."""
    groups: dict[int, tuple[Sequence[RankProcess], list[Journey]]] = {}
    for each in journeys:
        ranks = each.prefill_ranks if on is On.PREFILL else each.decode_ranks
        groups.setdefault(id(ranks), (ranks, []))[1].append(each)
    return list(groups.values())


def made_batch(running: Sequence[Journey]) -> list[Journey]:
    """As SGLang makes one: the prompt that has been begun first, and one at most that does not end with its chunk."""
    batch, goes_on = [], False
    for journey in sorted(running, key=lambda each: not each.sent):
        last = len(journey.chunks) == 1
        if last or not goes_on:
            batch.append(journey)
            goes_on = goes_on or not last
    return batch


def _polls(ranks: Sequence[RankProcess], journeys: Sequence[Journey]) -> list[tuple[Journey, int]]:
    if not journeys:
        return []
    polls = zip(*call_all(ranks, "poll", [each.room for each in journeys]), strict=True)
    return [(each, min(poll)) for each, poll in zip(journeys, polls, strict=True)]


def _admit(ranks: Sequence[RankProcess], ready: Sequence[Journey], *unbound: Sequence[int]) -> list[Journey]:
    """Those that got their memory; the others stay where they are until some is free. `unbound`: prefill's only."""
    if not ready:
        return []
    first, *others = call_all(ranks, "admit", [each.room for each in ready], *unbound)
    if any(other != first for other in others):
        raise HarnessError(f"the ranks of one side admit other requests: {[first, *others]}")
    return [each for each in ready if each.room in first]


def _placement(ranks: Sequence[RankProcess], room: int) -> Placement:
    """Where a side keeps a request; raises HarnessError when its ranks disagree, which SGLang rules out."""
    (first,), *others = call_all(ranks, "place", [room])
    if any(other != [first] for other in others):
        raise HarnessError(f"the ranks of one side keep a request in different places: {[[first], *others]}")
    placement: Placement = first
    return placement


def _told(reasons: Sequence[str]) -> tuple[str, ...]:
    return tuple(filter(None, reasons))
