"""The way of requests through both sides: what SGLang's two schedulers and their all-reduces decide, in turns.

A turn polls every request that is under way and takes each one step. The harness stands in for the all-reduce of the
polls: a side has a state when all its ranks have it, and has failed when one has.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from . import oracle
from .errors import HarnessError, HarnessTimeout
from .expectation import Placement
from .processes import RankProcess, call_all
from .sides import Request

POLL_SECONDS = 0.002
PHASE_SECONDS = 60.0
"""Limit of each phase: building the ranks, and all handoffs of a call."""
FAILED, WAITING_FOR_INPUT, SUCCESS = 0, 2, 4
"""SGLang's KVPoll (disaggregation/base/conn.py), kept here so that a test process imports no SGLang."""


class On(Enum):
    """The two sides of a handoff."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Abort:
    """The client goes away: SGLang tells all ranks of one side to abort the request.

    It happens as soon as `chunks` chunks have been sent, and `turns` turns of the schedulers later. If the side has
    ended by then nothing happens.
    """

    on: On
    chunks: int = 0
    turns: int = 0


@dataclass(frozen=True)
class Handoff:
    """One prompt to hand over: `tokens` tokens in `chunks` chunks, contents made from `seed`.

    `prefill` and `decode` are numbers: which of the pair's prefill sides, which attention-DP rank of decode.
    """

    tokens: int
    chunks: int = 1
    seed: int = 0
    prefill: int = 0
    decode: int = 0
    abort: Abort | None = None


@dataclass(frozen=True)
class Outcome:
    """How one handoff ended; the reasons are those of the side's ranks that reported a failure."""

    prefill: bool
    decode: bool
    prefill_reasons: tuple[str, ...] = ()
    decode_reasons: tuple[str, ...] = ()

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
    prefill_reasons: tuple[str, ...] = ()
    decode_reasons: tuple[str, ...] = ()
    placed: dict[On, Placement] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.request.room

    @property
    def ended(self) -> bool:
        return {self.prefill, self.decode} <= ENDED

    def outcome(self) -> Outcome:
        return Outcome(
            self.prefill is Step.SUCCEEDED, self.decode is Step.SUCCEEDED, self.prefill_reasons, self.decode_reasons
        )


class Flow:
    """Takes requests through both sides, each one as far as it can go."""

    def __init__(self, journeys: Sequence[Journey]) -> None:
        self.journeys = journeys
        self.under_way = list(journeys)

    def run(self) -> None:
        """Until every request has ended on both sides. Raises HarnessTimeout, CommandFailed or RankDied."""
        deadline = time.monotonic() + PHASE_SECONDS
        for on in On:
            for ranks, journeys in _by_ranks(self.journeys, on):
                call_all(ranks, "open", [journey.request for journey in journeys])
        while self.under_way:
            self._abort()
            progress = [self._prefill(), self._decode(), self._drain(), self._send()]
            self.under_way = [journey for journey in self.under_way if not journey.ended]
            if time.monotonic() > deadline:
                raise HarnessTimeout(self._stuck())
            if not any(progress):
                time.sleep(POLL_SECONDS)

    def _abort(self) -> None:
        for journey in self.under_way:
            abort = journey.handoff.abort
            if abort is None or journey.abort_in is None or journey.sent < abort.chunks:
                continue
            journey.abort_in -= 1
            if journey.abort_in >= 0:
                continue
            journey.abort_in = None
            if abort.on is On.DECODE:
                if journey.decode in POLLED:
                    call_all(journey.decode_ranks, "abort", journey.room)
            elif journey.prefill in POLLED:
                call_all(journey.prefill_ranks, "abort", journey.room)
            elif journey.prefill is Step.CHUNKS:
                journey.prefill_reasons = _told(call_all(journey.prefill_ranks, "retire", journey.room))
                journey.prefill = Step.FAILED

    def _prefill(self) -> bool:
        moved = False
        for ranks, journeys in _by_ranks(self.under_way, On.PREFILL):
            ready = []
            for journey, poll in _polls(ranks, [each for each in journeys if each.prefill in POLLED]):
                if poll == FAILED or (poll == SUCCESS and journey.prefill is Step.TRANSFER):
                    journey.prefill_reasons = _told(call_all(ranks, "conclude", journey.room, poll == FAILED))
                    journey.prefill = Step.FAILED if poll == FAILED else Step.SUCCEEDED
                    moved = True
                elif poll == WAITING_FOR_INPUT and journey.prefill is Step.HANDSHAKE:
                    ready.append(journey)
            for journey in _admit(ranks, ready):
                journey.prefill = Step.CHUNKS
                journey.placed[On.PREFILL] = _placement(ranks, journey.room)
                moved = True
        return moved

    def _decode(self) -> bool:
        moved = False
        for ranks, journeys in _by_ranks(self.under_way, On.DECODE):
            ready = []
            for journey, poll in _polls(ranks, [each for each in journeys if each.decode in POLLED]):
                if poll == FAILED:
                    reasons, held = zip(*call_all(ranks, "fail", journey.room), strict=True)
                    journey.decode_reasons = _told(reasons)
                    journey.decode = Step.DRAINING
                    if not any(held):
                        self._release(journey, deferred=False)
                    moved = True
                elif poll == SUCCESS and journey.decode is Step.TRANSFER:
                    journey.placed[On.DECODE] = _placement(ranks, journey.room)
                    call_all(ranks, "commit", journey.room)
                    journey.decode = Step.SUCCEEDED
                    moved = True
                elif poll == WAITING_FOR_INPUT and journey.decode is Step.HANDSHAKE:
                    ready.append(journey)
            for journey in _admit(ranks, ready):
                journey.decode = Step.TRANSFER
                moved = True
        return moved

    def _drain(self) -> bool:
        moved = False
        for ranks, journeys in _by_ranks(self.under_way, On.DECODE):
            held = [journey for journey in journeys if journey.decode is Step.DRAINING]
            if not held:
                continue
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
        running = [journey for journey in self.under_way if journey.prefill is Step.CHUNKS]
        for journey in running:
            call_all(journey.prefill_ranks, "send_chunk", journey.room, journey.chunks.popleft())
            journey.sent += 1
            if not journey.chunks:
                journey.prefill = Step.TRANSFER
        return bool(running)

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


def _by_ranks(journeys: Sequence[Journey], on: On) -> list[tuple[Sequence[RankProcess], list[Journey]]]:
    """The requests of each group of ranks, in order."""
    groups: dict[int, tuple[Sequence[RankProcess], list[Journey]]] = {}
    for each in journeys:
        ranks = each.prefill_ranks if on is On.PREFILL else each.decode_ranks
        groups.setdefault(id(ranks), (ranks, []))[1].append(each)
    return list(groups.values())


def _polls(ranks: Sequence[RankProcess], journeys: Sequence[Journey]) -> list[tuple[Journey, int]]:
    if not journeys:
        return []
    polls = zip(*call_all(ranks, "poll", [each.room for each in journeys]), strict=True)
    return [(each, min(poll)) for each, poll in zip(journeys, polls, strict=True)]


def _admit(ranks: Sequence[RankProcess], ready: Sequence[Journey]) -> list[Journey]:
    """Those that got their memory; the others stay where they are until some is free."""
    if not ready:
        return []
    first, *others = call_all(ranks, "admit", [each.room for each in ready])
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
