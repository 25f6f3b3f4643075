"""Decode side of a transfer: what has arrived of a request, when it is complete, and when its units are free again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

from sglang_hetero.errors import ProtocolError

P = TypeVar("P")
"""What a piece is; only compared here."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of prefill: the numbers of its sources, and the units that it may use at a time."""

    sources: tuple[int, ...]
    window: int


@dataclass(frozen=True)
class Merge(Generic[P]):
    """Merge this piece from its unit; report with `merged` when the unit is no longer read, however that ended."""

    stage: int
    seq: int
    piece: P


@dataclass(frozen=True)
class Ack:
    """Tell all sources of the stage that all pieces below `upto` are merged."""

    stage: int
    upto: int


@dataclass(frozen=True)
class Pull:
    """Read the components that are not pushed; report with `pulled` when the read has ended, however that was.

    All pieces are merged by now, so the whole window may be used as staging for the read.
    """


@dataclass(frozen=True)
class Settle:
    """The request has ended here, well (no reason) or not: the one action in which every way to end results, once.

    Well: tell every source that this destination is finished; the request may go on here. Not: tell every source, also
    those that know nothing of the room yet, to stop and to answer when it has drained; its pages may be freed as soon
    as nobody merges any more. Merges that were issued and not begun are reported like the others, and do nothing.
    """

    reason: str | None


@dataclass(frozen=True)
class ReturnUnits:
    """Nobody reads or writes the units any more: give them back, or give up the wait for them."""


Action: TypeAlias = Merge[P] | Ack | Pull | Settle | ReturnUnits


class ReceivingStatus(StrEnum):
    QUEUED = "queued"
    """No source has been told of a window."""
    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass
class _Arrival(Generic[P]):
    """A piece that at least one source has announced."""

    piece: P
    sharers: frozenset[int]
    sources: set[int]
    merged: bool = False


@dataclass
class _Progress(Generic[P]):
    """How far one stage is."""

    acked: int = 0
    total: int | None = None
    closed: set[int] = field(default_factory=set)
    """Sources that have said the total."""
    arrivals: dict[int, _Arrival[P]] = field(default_factory=dict)
    """By seq; those merged stay, so that a repetition can be told from a contradiction."""


class Receiving(Generic[P]):
    """One room at one decode rank: it is given events and answers with the actions to carry out, in that order."""

    def __init__(
        self, stages: tuple[Stage, ...], pulls: bool = False, lacking: Callable[[], str] | None = None
    ) -> None:
        """pulls: the state mode reads something after the last piece (`Pull`). lacking: asked when all that was told
        has arrived: what is missing all the same, or an empty text. Raises ProtocolError for stages without a source or
        a unit, or a source in two of them."""
        self._stages = stages
        self._stage_of = {source: index for index, stage in enumerate(stages) for source in stage.sources}
        if sum(len(stage.sources) for stage in stages) != len(self._stage_of):
            raise ProtocolError(f"a source belongs to one stage: {stages}")
        if not stages or any(stage.window < 1 or not stage.sources for stage in stages):
            raise ProtocolError(f"a transfer has stages, each with a source and a unit: {stages}")
        self._pulls, self._lacking = pulls, lacking
        self._status = ReceivingStatus.QUEUED
        self._reason: str | None = None
        self._bound = False
        self._progress: list[_Progress[P]] = [_Progress() for _ in stages]
        self._generated = False
        self._merging: set[tuple[int, int]] = set()
        self._pulling = False
        self._pulled = False
        self._stopped: set[int] = set()  # sources that have drained or are gone
        self._units_home = False
        self._news = 0

    @property
    def status(self) -> ReceivingStatus:
        return self._status

    @property
    def reason(self) -> str | None:
        """Why it failed; None if it has not."""
        return self._reason

    @property
    def merging(self) -> frozenset[tuple[int, int]]:
        """(stage, seq) of the merges that were issued and not reported: begun or not, the units wait for them."""
        return frozenset(self._merging)

    @property
    def pulling(self) -> bool:
        """Whether the read of a `Pull` was issued and not reported; its staging is in use like a merge's."""
        return self._pulling

    @property
    def may_write(self) -> frozenset[int]:
        """Sources that may still write into the units."""
        if not self._bound or self._status is ReceivingStatus.COMPLETE:
            return frozenset()
        return frozenset(self._stage_of) - self._stopped

    @property
    def acknowledged(self) -> tuple[int, ...]:
        """Per stage, below which number all pieces are merged: what the last `Ack` said. Empty after the end."""
        return tuple(progress.acked for progress in self._progress)

    @property
    def news(self) -> int:
        """Grows whenever an event says something that was not known; repetitions are none."""
        return self._news

    @property
    def units_home(self) -> bool:
        """Whether `ReturnUnits` was issued."""
        return self._units_home

    def bound(self) -> tuple[Action[P], ...]:
        """The units are granted and the sources are about to be told: call it before the first Bind is sent.

        Raises ProtocolError if the room has ended: no source may be told any more.
        """
        if self._ended:
            raise ProtocolError(f"the room is {self._status}, its sources must not be told of a window")
        self._bound = True
        self._status = ReceivingStatus.OPEN
        return ()

    def ready(self, source: int, seq: int, piece: P, sharers: frozenset[int]) -> tuple[Action[P], ...]:
        """A source says that its part of piece `seq` lies in its area; sharers: all sources that have a part of it.

        Raises ProtocolError if the source is no sharer, another source of the stage means another piece by `seq`, or
        `seq` is outside the window or beyond the total.
        """
        if self._ended:
            return ()
        index, progress = self._of(source)
        stage = self._stages[index]
        if source not in sharers or not sharers.issubset(stage.sources):
            raise ProtocolError(f"source {source} announces piece {seq} of stage {index}, shared by {sorted(sharers)}")
        arrival = progress.arrivals.get(seq)
        if arrival is None:
            if not progress.acked <= seq < progress.acked + stage.window:
                raise ProtocolError(
                    f"source {source} announces piece {seq} of stage {index}; {progress.acked} are acknowledged and "
                    f"the window is {stage.window}"
                )
            if progress.total is not None and seq >= progress.total:
                raise ProtocolError(f"source {source} announces piece {seq} of the {progress.total} of stage {index}")
            arrival = progress.arrivals[seq] = _Arrival(piece, sharers, set())
        elif arrival.piece != piece or arrival.sharers != sharers:
            raise ProtocolError(
                f"piece {seq} of stage {index} is {piece} of {sorted(sharers)} for source {source}, and "
                f"{arrival.piece} of {sorted(arrival.sharers)} for sources {sorted(arrival.sources)}"
            )
        if source in arrival.sources:
            return ()
        arrival.sources.add(source)
        self._news += 1
        if arrival.sources != sharers:
            return ()
        self._merging.add((index, seq))
        return (Merge(index, seq, piece),)

    def total(self, source: int, total: int) -> tuple[Action[P], ...]:
        """A source says how many pieces its stage has. Raises ProtocolError if that contradicts what is known."""
        if self._ended:
            return ()
        index, progress = self._of(source)
        self._agree(index, total, f"source {source}")
        self._news += source not in progress.closed
        progress.closed.add(source)
        return self._advance()

    def merged(self, stage: int, seq: int) -> tuple[Action[P], ...]:
        """A merge has ended. In a failed room it need not have done its work. Raises ProtocolError if none runs."""
        if (stage, seq) not in self._merging:
            raise ProtocolError(f"no merge of piece {seq} of stage {stage} is running")
        self._merging.remove((stage, seq))
        if self._status is ReceivingStatus.FAILED:
            return self._return_units()
        progress = self._progress[stage]
        progress.arrivals[seq].merged = True
        self._news += 1
        before = progress.acked
        while progress.acked in progress.arrivals and progress.arrivals[progress.acked].merged:
            progress.acked += 1
        acks = (Ack(stage, progress.acked),) if progress.acked > before else ()
        return (*acks, *self._advance())

    def first_generation(self, totals: Mapping[int, int] | None) -> tuple[Action[P], ...]:
        """FirstGeneration has come; totals: pieces by stage, for the stages that it counts, None if it counts nothing.

        Raises ProtocolError if that contradicts what is known.
        """
        if self._ended:
            return ()
        self._must_be_bound("FirstGeneration")
        for index, total in (totals or {}).items():
            self._agree(index, total, "FirstGeneration")
        self._news += not self._generated
        self._generated = True
        return self._advance()

    def pulled(self) -> tuple[Action[P], ...]:
        """The read of `Pull` has ended. In a failed room it need not have succeeded. ProtocolError if none runs."""
        if not self._pulling:
            raise ProtocolError("no read is running")
        self._pulling = False
        if self._status is ReceivingStatus.FAILED:
            return self._return_units()
        self._pulled = True
        self._news += 1
        return self._advance()

    def fail(self, reason: str) -> tuple[Action[P], ...]:
        """This rank gives the room up. No merge is issued from now on; those running stay in `merging`.

        The first reason is kept; no effect after the end.
        """
        return () if self._ended else self._settle(reason)

    def peer_failed(self, source: int, reason: str) -> tuple[Action[P], ...]:
        """A source gives the room up. It has to be told like the others, and to drain like them."""
        self._check_source(source)
        return self.fail(reason)

    def drained(self, source: int) -> tuple[Action[P], ...]:
        """A source will never again write for this room. Before it was asked to, that is a failure."""
        return self._stop(source, f"source {source} has stopped")

    def gone(self, source: int) -> tuple[Action[P], ...]:
        """A source's process or session has ended, in a way that nothing of it can reach this rank's memory."""
        return self._stop(source, f"source {source} is gone")

    @property
    def _ended(self) -> bool:
        return self._status in (ReceivingStatus.COMPLETE, ReceivingStatus.FAILED)

    def _stop(self, source: int, reason: str) -> tuple[Action[P], ...]:
        self._check_source(source)
        if self._status is ReceivingStatus.COMPLETE:
            return ()
        self._news += source not in self._stopped
        self._stopped.add(source)
        return self.fail(reason) or self._return_units()

    def _check_source(self, source: int) -> None:
        if source not in self._stage_of:
            raise ProtocolError(f"source {source} is none of {sorted(self._stage_of)}")

    def _must_be_bound(self, what: str) -> None:
        if not self._bound:
            raise ProtocolError(f"{what} speaks of a window that no source has been told of")

    def _of(self, source: int) -> tuple[int, _Progress[P]]:
        self._check_source(source)
        self._must_be_bound(f"source {source}")
        index = self._stage_of[source]
        return index, self._progress[index]

    def _agree(self, index: int, total: int, who: str) -> None:
        """Take over a stage's total, or raise ProtocolError."""
        if not 0 <= index < len(self._stages):
            raise ProtocolError(f"{who} counts pieces of stage {index}, there are {len(self._stages)}")
        progress = self._progress[index]
        if progress.total is not None and total != progress.total:
            raise ProtocolError(f"stage {index} has {total} pieces for {who}, it was {progress.total} before")
        least = max(progress.arrivals, default=-1) + 1
        if total < least:
            raise ProtocolError(f"stage {index} has {total} pieces for {who}, but {least} were announced")
        progress.total = total

    def _advance(self) -> tuple[Action[P], ...]:
        """What follows when everything has arrived; nothing before."""
        for stage, progress in zip(self._stages, self._progress, strict=True):
            if progress.acked != progress.total or len(progress.closed) != len(stage.sources):
                return ()
        if not self._generated:
            return ()
        if self._pulls and not self._pulled:
            if self._pulling:
                return ()
            self._pulling = True
            return (Pull(),)
        # All sources have announced everything, so none of them can have a write in flight or begin another one.
        return self._settle((self._lacking() if self._lacking else "") or None)

    def _settle(self, reason: str | None) -> tuple[Action[P], ...]:
        """Every way to end comes through here, once: everything is here, or the reason why it never will be."""
        self._status = ReceivingStatus.COMPLETE if reason is None else ReceivingStatus.FAILED
        self._reason = reason
        self._news += 1
        self._progress.clear()  # late announcements are not looked at
        self._lacking = None  # is asked no more, and usually refers to what owns this machine: a cycle
        return (Settle(reason), *self._return_units())

    def _return_units(self) -> tuple[Action[P], ...]:
        """Called once the room has ended, after everything that may be the last thing to wait for."""
        if self._units_home or self.may_write or self._merging or self._pulling:
            return ()
        self._units_home = True
        return (ReturnUnits(),)
