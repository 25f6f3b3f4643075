"""What one request took at one rank: when things happened, how many bytes moved; one log line when it has ended.

A `Perf` belongs to one rank and is called from any of its threads. Every call is a few assignments under a lock of its
own, never blocks on anything else and never raises. Times are `time.monotonic()` in seconds, taken inside where they
are not given.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from sglang_hetero.layout.component import Role

from .spans import NO_TRACE, NoTrace, Track

logger = logging.getLogger(__name__)

PREFIX = "[PD-PERF]"
MAX_RECORDS = 4096
"""Requests that a rank follows at a time, each way; far more than it can have under way. The oldest make room."""
DIGITS = 3
"""Of milliseconds and shares in a line."""
MILLISECONDS = 1000.0
REPLACED = "another request has its room now"
FORGOTTEN = "its end was never told"
RESPONSE_SECONDS = 600.0
"""A request in decode's queue without a step for so long was given up there; SGLang tells nobody of that."""

Clock = Callable[[], float]


class Component(StrEnum):
    """What bytes belong to, as far as speed is concerned."""

    KV = "kv"
    """Attention caches of the target model, of any kind."""
    STATE = "state"
    """Conv window and SSM state of linear layers."""
    DRAFT = "draft"
    """Attention caches of the draft model."""


def component_of(role: Role | None) -> Component:
    """The component that a piece counts for. role: of the piece; None for linear state, whose pieces hold two roles."""
    if role is None or role in (Role.CONV, Role.SSM):
        return Component.STATE
    return Component.DRAFT if role.draft else Component.KV


@dataclass(frozen=True)
class Figures:
    """What the metrics page is told when a record ends; only what was reached.

    seconds: by name of metrics.HISTOGRAMS. early: share of bytes that landed before prefill ended, 0 to 1. nbytes and
    descriptors: what was written, by component.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    early: float | None = None
    nbytes: Mapping[Component, int] = field(default_factory=dict)
    descriptors: Mapping[Component, int] = field(default_factory=dict)


Observe = Callable[[Figures], None]


def _nobody(figures: Figures) -> None:
    pass


def _span(start: float | None, end: float | None) -> float | None:
    """Seconds from one moment to another, None if one of them never came."""
    return None if start is None or end is None else end - start


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * MILLISECONDS, DIGITS)


def _reached(**seconds: float | None) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if value is not None}


def _add(to: dict[Component, int], what: Mapping[Component, int]) -> None:
    for component, number in what.items():
        to[component] = to.get(component, 0) + number


def _by_name(counts: Mapping[Component, int]) -> dict[str, int]:
    return {component.value: counts[component] for component in Component if counts.get(component)}


class _Record:
    """What both kinds have."""

    side = ""

    def __init__(self, rank: str, room: int, clock: Clock, trace: NoTrace) -> None:
        self.rank, self.room = rank, room
        self._clock, self._trace = clock, trace
        self._lock = threading.Lock()
        self._made = clock()
        self._reason: str | None = None

    def end(self, reason: str | None) -> None:
        """The request has ended. reason: why it failed, None if it did not."""
        with self._lock:
            self._reason = reason

    def _head(self) -> dict[str, Any]:
        outcome = "ok" if self._reason is None else self._reason
        return {"side": self.side, "rank": self.rank, "room": self.room, "outcome": outcome}


class SentRecord(_Record):
    """One request at one prefill rank."""

    side = "prefill"

    def __init__(self, rank: str, room: int, clock: Clock = time.monotonic, trace: NoTrace = NO_TRACE) -> None:
        super().__init__(rank, room, clock, trace)
        self._bound: float | None = None
        self._running: deque[tuple[float, int, int]] = deque()
        """Forward passes that have begun and not ended, in order: when, tokens and number of the chunk."""
        self._first_forward: float | None = None
        self._forward_end: float | None = None
        """Of the last forward pass."""
        self._handed_last: float | None = None
        self._tokens = self._chunks = self._handed = self._handed_tokens = 0
        self._writes: list[tuple[float, float, int]] = []  # start, end, bytes
        self._bytes: dict[Component, int] = {}
        self._descriptors: dict[Component, int] = {}

    def bound(self) -> None:
        """Every decode rank has bound the request."""
        now = self._clock()
        with self._lock:
            if self._bound is not None:
                return
            self._bound = now
        self._trace.instant(Track.FORWARD, "bound", now, self.room)

    def forward_began(self, tokens: int) -> None:
        """A forward pass with a chunk of the request begins. tokens: of the chunk.

        SGLang's overlap schedule launches a pass before the one before it has ended, as every device may.
        """
        now = self._clock()
        with self._lock:
            if self._first_forward is None:
                self._first_forward = now
            self._tokens += tokens
            self._chunks += 1
            self._running.append((now, tokens, self._chunks))

    def forward_ended(self, last: bool) -> None:
        """The pass that began first of those that run has ended: passes end in the order in which they began.

        last: it was the one with the prompt's last chunk, the draft's forward included.
        """
        now = self._clock()
        with self._lock:
            ended = self._running.popleft() if self._running else None
            if last:
                self._forward_end = now
        if ended is not None:
            began, tokens, chunk = ended
            self._trace.span(Track.FORWARD, f"chunk {chunk}", began, now, self.room, tokens=tokens, chunk=chunk)
        if last:
            self._trace.instant(Track.FORWARD, "prefill ended", now, self.room)

    def handed_over(self, last: bool, tokens: int = 0) -> None:
        """SGLang's scheduler hands a chunk over. last: it is the prompt's last. tokens: of the chunk."""
        now = self._clock()
        with self._lock:
            self._handed += 1
            self._handed_tokens += tokens
            number = self._handed
            if last and self._handed_last is None:
                self._handed_last = now
        self._trace.instant(Track.FORWARD, f"handed over {number}", now, self.room, last=last)

    def wrote(
        self,
        peer: str,
        start: float,
        end: float,
        nbytes: Mapping[Component, int],
        descriptors: Mapping[Component, int],
    ) -> None:
        """One engine write has ended well.

        peer: label of the decode rank. start, end: time.monotonic(). nbytes, descriptors: bytes and contiguous runs
        of bytes in it, by component.
        """
        total = sum(nbytes.values())
        with self._lock:
            self._writes.append((start, end, total))
            _add(self._bytes, nbytes)
            _add(self._descriptors, descriptors)
        if self._trace.on:
            self._trace.span(
                Track.LINK,
                "+".join(_by_name(nbytes)) or "nothing",
                start,
                end,
                self.room,
                peer=peer,
                bytes=_by_name(nbytes),
                descriptors=_by_name(descriptors),
            )

    @property
    def prefill_ended(self) -> float | None:
        """End of the prompt's last forward pass; where nobody told it, SGLang's hand-over of the last chunk."""
        return self._handed_last if self._forward_end is None else self._forward_end

    def early(self) -> float | None:
        """Share of the written bytes whose write had ended when prefill ended; None without bytes or that end."""
        with self._lock:
            return self._early()

    def _early(self) -> float | None:
        ended = self.prefill_ended
        total = sum(nbytes for _, _, nbytes in self._writes)
        if ended is None or not total:
            return None
        return sum(nbytes for _, end, nbytes in self._writes if end <= ended) / total

    def _transfer(self) -> tuple[float | None, float | None]:
        """First byte and last byte."""
        if not self._writes:
            return None, None
        return min(start for start, _, _ in self._writes), max(end for _, end, _ in self._writes)

    def line(self) -> dict[str, Any]:
        """The figures as plain JSON values; null for what was not reached."""
        with self._lock:
            first, last = self._transfer()
            early = self._early()
            return self._head() | {
                "tokens": max(self._tokens, self._handed_tokens),
                "chunks": max(self._chunks, self._handed),
                "bound_to_forward_ms": _ms(_span(self._bound, self._first_forward)),
                "prefill_ms": _ms(_span(self._first_forward, self.prefill_ended)),
                "transfer_ms": _ms(_span(first, last)),
                "after_prefill_ms": _ms(_span(self.prefill_ended, last)),
                "early_share": None if early is None else round(early, DIGITS),
                "writes": len(self._writes),
                "bytes": _by_name(self._bytes),
                "descriptors": _by_name(self._descriptors),
            }

    def figures(self) -> Figures:
        """For the metrics page. A request that failed counts with its bytes only."""
        with self._lock:
            counts = dict(self._bytes), dict(self._descriptors)
            if self._reason is not None:
                return Figures({}, None, *counts)
            return Figures(_reached(transfer_seconds=_span(*self._transfer())), self._early(), *counts)


class ReceivedRecord(_Record):
    """One request at one decode rank."""

    side = "decode"

    def __init__(self, rank: str, room: int, clock: Clock = time.monotonic, trace: NoTrace = NO_TRACE) -> None:
        super().__init__(rank, room, clock, trace)
        self._opened: float | None = None
        self._granted: float | None = None
        self._first_ready: float | None = None
        self._last_ready: float | None = None
        self._first_generation: float | None = None
        self._complete: float | None = None
        self._enqueued: float | None = None
        self._first_response: float | None = None
        self._pages = self._batches = self._reads = 0
        self._read_seconds = 0.0
        self._bytes: dict[Component, int] = {}
        self._seconds: dict[Component, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether the request has its memory: another one with the same room is not this one."""
        return self._opened is not None

    @property
    def queued_since(self) -> float | None:
        """When the request went into decode's queue, on the record's clock."""
        return self._enqueued

    def created(self) -> None:
        """SGLang's receiver of the request has been initialised: it waits for memory from here on."""
        now = self._clock()
        with self._lock:
            if self._opened is None:
                self._made = now

    def opened(self, pages: int = 0) -> None:
        """Pages, slot and row are allocated. pages: how many."""
        now = self._clock()
        with self._lock:
            self._opened, self._pages = now, pages
            made = self._made
        self._trace.span(Track.WAIT, "allocation wait", made, now, self.room, pages=pages)

    def granted(self) -> None:
        """The request has its units of staging."""
        now = self._clock()
        with self._lock:
            self._granted = now
            opened = self._opened
        if opened is not None:
            self._trace.span(Track.WAIT, "window wait", opened, now, self.room)

    def ready(self) -> None:
        """A source has announced pieces."""
        now = self._clock()
        with self._lock:
            self._last_ready = now
            if self._first_ready is None:
                self._first_ready = now

    def merged(self, component: Component, nbytes: int, seconds: float, pieces: int = 1, *, ago: float = 0.0) -> None:
        """A batch has been merged, `ago` seconds before now. nbytes: from staging. seconds: of the merging thread."""
        now = self._clock() - ago
        with self._lock:
            self._batches += 1
            self._bytes[component] = self._bytes.get(component, 0) + nbytes
            self._seconds[component] = self._seconds.get(component, 0.0) + seconds
        track = Track.SCHEDULER if component is Component.STATE else Track.MERGE
        self._trace.span(track, f"merge {component}", now - seconds, now, self.room, bytes=nbytes, pieces=pieces)

    def read(self, seconds: float) -> None:
        """Mode pull: a round of reads from the sources has just ended."""
        now = self._clock()
        with self._lock:
            self._reads += 1
            self._read_seconds += seconds
        self._trace.span(Track.MERGE, "read", now - seconds, now, self.room)

    def first_generation(self) -> None:
        """Prefill's first token has arrived."""
        now = self._clock()
        with self._lock:
            if self._first_generation is not None:
                return
            self._first_generation = now
        self._trace.instant(Track.SCHEDULER, "FirstGeneration", now, self.room)

    def complete(self) -> None:
        """All has arrived and is merged at this rank; SGLang enqueues the request when all ranks say so."""
        now = self._clock()
        with self._lock:
            if self._complete is not None:
                return
            self._complete = now
        self._trace.instant(Track.SCHEDULER, "complete", now, self.room)

    def enqueued(self) -> None:
        """SGLang has put the request into decode's queue."""
        now = self._clock()
        with self._lock:
            if self._enqueued is not None:
                return
            self._enqueued = now
            first = self._first_generation
        if first is not None:
            self._trace.span(Track.WAIT, "FirstGeneration to enqueue", first, now, self.room)
        self._trace.instant(Track.SCHEDULER, "enqueue", now, self.room)

    def first_response(self) -> None:
        """The scheduler has processed the first step of decode's own for the request."""
        now = self._clock()
        with self._lock:
            if self._first_response is not None:
                return
            self._first_response = now
            enqueued = self._enqueued
        if enqueued is not None:
            self._trace.span(Track.WAIT, "enqueue to first response", enqueued, now, self.room)
        self._trace.instant(Track.SCHEDULER, "first response", now, self.room)

    def line(self) -> dict[str, Any]:
        """The figures as plain JSON values; null for what was not reached."""
        with self._lock:
            return self._head() | {
                "pages": self._pages,
                "allocation_wait_ms": _ms(_span(self._made, self._opened)),
                "window_wait_ms": _ms(_span(self._opened, self._granted)),
                "ready_ms": _ms(_span(self._first_ready, self._last_ready)),
                "merge_ms": _ms(sum(self._seconds.values())),
                "merges": self._batches,
                "merged_bytes": _by_name(self._bytes),
                "merged_ms": {each.value: _ms(self._seconds[each]) for each in Component if each in self._seconds},
                "reads": self._reads,
                "read_ms": _ms(self._read_seconds),
                "first_generation_to_enqueue_ms": _ms(_span(self._first_generation, self._enqueued)),
                "complete_to_enqueue_ms": _ms(_span(self._complete, self._enqueued)),
                "enqueue_to_first_response_ms": _ms(_span(self._enqueued, self._first_response)),
            }

    def figures(self) -> Figures:
        """For the metrics page. A request that failed does not count."""
        with self._lock:
            if self._reason is not None:
                return Figures()
            return Figures(
                _reached(
                    allocation_wait_seconds=_span(self._made, self._opened),
                    window_wait_seconds=_span(self._opened, self._granted),
                    merge_seconds=sum(self._seconds.values()) if self._seconds else None,
                    first_generation_to_enqueue_seconds=_span(self._first_generation, self._enqueued),
                    enqueue_to_first_response_seconds=_span(self._enqueued, self._first_response),
                )
            )


Kind = TypeVar("Kind", SentRecord, ReceivedRecord)


class Perf:
    """The records of one rank."""

    def __init__(
        self,
        side: str,
        rank: str,
        *,
        observe: Observe = _nobody,
        trace: NoTrace = NO_TRACE,
        clock: Clock = time.monotonic,
        log: bool = True,
    ) -> None:
        """side: `prefill` or `decode`. rank: its label. observe: told of every record that ends. log: write lines."""
        self.side, self.rank, self.trace = side, rank, trace
        self._observe, self._clock, self._log = observe, clock, log
        self._lock = threading.Lock()
        self._sent: dict[int, SentRecord] = {}
        self._received: dict[int, ReceivedRecord] = {}
        self._queued: dict[int, ReceivedRecord] = {}
        """Those in decode's queue, or in its first step; who has been there longest comes first."""

    def sent(self, room: int) -> SentRecord:
        """The record of a request that this rank sends; made if there is none."""
        return self._get(self._sent, SentRecord, room)

    def received(self, room: int) -> ReceivedRecord:
        """The record of a request that this rank receives; made if there is none."""
        return self._get(self._received, ReceivedRecord, room)

    def sent_end(self, room: int, reason: str | None = None) -> None:
        """A request that this rank sent has ended; no effect if it is not known. reason: why it failed, or None."""
        with self._lock:
            record = self._sent.pop(room, None)
        self._end(record, reason)

    def received_end(self, room: int, reason: str | None = None) -> None:
        """A request that this rank received has ended; no effect if it is not known. reason: why it failed, or None."""
        with self._lock:
            record = self._received.pop(room, None)
            self._queued.pop(room, None)
        self._end(record, reason)

    def created(self, room: int) -> bool:
        """SGLang has a receiver for a request. False: the room's record is that of another one, which is under way."""
        record = self.received(room)
        if record.queued_since is not None:
            self.received_end(room, REPLACED)
            record = self.received(room)
        if record.is_open:
            return False
        record.created()
        return True

    def opened(self, room: int, pages: int) -> ReceivedRecord:
        """A request that this rank receives has its memory. A record that has had it is of an earlier one, and ends."""
        record = self.received(room)
        if record.is_open:
            self.received_end(room, REPLACED)
            record = self.received(room)
        record.opened(pages)
        return record

    def enqueued(self, room: int) -> None:
        """SGLang has put a request into decode's queue; no effect if it is not known."""
        with self._lock:
            record = self._received.get(room)
            if record is None:
                return
            record.enqueued()
            self._queued[room] = record
        self._sweep()

    @property
    def awaits_step(self) -> bool:
        """Whether any request is in decode's queue and has not had its first step: cheap, for every step to ask."""
        return bool(self._queued)

    def stepped(self, rooms: Iterable[int | None]) -> None:
        """The scheduler has processed a step of these requests; the first one ends a request's record.

        So does a step of others when a request has been in the queue for RESPONSE_SECONDS: as long as there is one,
        every step's requests are gone through.
        """
        for room in rooms:
            record = self._queued.get(room) if room is not None else None
            if record is not None:
                record.first_response()
                self.received_end(record.room)
        self._sweep()

    def _sweep(self) -> None:
        """End the records of requests that decode has given up in its queue."""
        limit = self._clock() - RESPONSE_SECONDS
        while True:
            with self._lock:
                oldest = next(iter(self._queued.values()), None)
                since = None if oldest is None else oldest.queued_since
                if oldest is None or since is None or since >= limit:
                    return
                self._queued.pop(oldest.room)
                self._received.pop(oldest.room, None)
            self._end(oldest, FORGOTTEN)

    @property
    def counts(self) -> tuple[int, int]:
        """Records of sent and of received requests that have not ended."""
        with self._lock:
            return len(self._sent), len(self._received)

    def _get(self, records: dict[int, Kind], kind: Callable[..., Kind], room: int) -> Kind:
        oldest = None
        with self._lock:
            found = records.get(room)
            if found is None:
                if len(records) >= MAX_RECORDS:
                    oldest = records.pop(next(iter(records)))
                    if records is self._received:
                        self._queued.pop(oldest.room, None)
                found = records[room] = kind(self.rank, room, self._clock, self.trace)
        self._end(oldest, FORGOTTEN)
        return found

    def _end(self, record: SentRecord | ReceivedRecord | None, reason: str | None) -> None:
        if record is None:
            return
        record.end(reason)
        try:
            if self._log and logger.isEnabledFor(logging.INFO):
                logger.info("%s %s", PREFIX, json.dumps(record.line(), ensure_ascii=False))
            self._observe(record.figures())
        except Exception:
            # Who ends a request serves others, too.
            logger.exception("room %d: the figures of %s", record.room, record.rank)


def silent(side: str, rank: str) -> Perf:
    """A Perf that neither logs nor counts nor traces, for callers that were given none."""
    return Perf(side, rank, log=False)


def unlooked() -> SentRecord:
    """The figures of a request that nobody looks at."""
    return SentRecord("", 0)
