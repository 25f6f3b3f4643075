"""Source side of a transfer: which pieces of a request may be written to one decode rank, and how that ends."""

from collections import deque
from collections.abc import Collection
from enum import StrEnum

from sglang_hetero.errors import ProtocolError


class SendingStatus(StrEnum):
    SENDING = "sending"
    FINISHED = "finished"
    """The destination has everything; the source's pages are of no more use to it."""
    FAILED = "failed"


class Sending:
    """One room on its way from one source to one destination.

    Pieces are numbered from 0 in the order of the stage. Piece `seq` may be written once `seq - window` is
    acknowledged: it goes into the same unit. Pieces of which the source has no share have a number too; they are taken
    like the others, but there is nothing to write or announce.
    """

    def __init__(self, window: int) -> None:
        """window: units per stage that the destination lent. Raises ProtocolError if that is none."""
        if window < 1:
            raise ProtocolError(f"a window has at least one unit, not {window}")
        self._window = window
        self._produced = 0
        self._closed = False
        self._acked = 0
        self._next = 0  # the first piece that was not taken
        self._owed: deque[int] = deque()  # pieces of which the source has a share and that are not written yet
        self._batch: range | None = None
        self._in_doubt = False
        self._status = SendingStatus.SENDING
        self._reason: str | None = None
        self._news = 0

    @property
    def status(self) -> SendingStatus:
        return self._status

    @property
    def reason(self) -> str | None:
        """Why it failed; None if it has not."""
        return self._reason

    @property
    def total(self) -> int | None:
        """Number of the stage's pieces, once the scheduler has said that no more follow."""
        return self._produced if self._closed else None

    @property
    def acknowledged(self) -> int:
        """All pieces below this are merged at the destination."""
        return self._acked

    @property
    def taken(self) -> int:
        """All pieces below this have been taken for writing."""
        return self._next

    @property
    def announced(self) -> range:
        """Pieces that are written, or passed over, and not acknowledged: what a lost message may have told."""
        written = self._batch.start if self._batch is not None else self._next
        return range(self._acked, max(self._acked, written))

    @property
    def news(self) -> int:
        """Grows whenever an event brings the room forward; repetitions do not."""
        return self._news

    @property
    def in_doubt(self) -> bool:
        """Whether bytes of a failed write may still arrive: then the room never drains."""
        return self._in_doubt

    @property
    def in_flight(self) -> bool:
        """Whether a batch was taken of which neither `wrote` nor `write_failed` has told the end."""
        return self._batch is not None

    @property
    def drained(self) -> bool:
        """Whether nothing of this room will ever again be written to the destination."""
        return self._status is not SendingStatus.SENDING and self._batch is None and not self._in_doubt

    @property
    def runnable(self) -> bool:
        """Whether `take` would give something."""
        return self._status is SendingStatus.SENDING and self._batch is None and self._next < self._limit

    @property
    def _limit(self) -> int:
        return min(self._produced, self._acked + self._window)

    def produced(self, count: int, skipped: Collection[int]) -> None:
        """The source holds `count` more pieces; `skipped`: which of these (from 0) it has no share of.

        Nothing happens after the end. Raises ProtocolError after `close`, for indices outside, and if the destination
        has acknowledged one of them that it cannot have.
        """
        if self._status is not SendingStatus.SENDING:
            return
        left_out = frozenset(skipped)
        if count < 0 or any(not 0 <= index < count for index in left_out):
            raise ProtocolError(f"{sorted(left_out)} are not indices of {count} pieces")
        if self._closed:
            raise ProtocolError(f"{count} more pieces, after the stage was closed with {self._produced}")
        self._owed.extend(self._produced + index for index in range(count) if index not in left_out)
        self._produced += count
        self._news += count > 0
        self._check_acked(self._acked)

    def close(self) -> None:
        """No more pieces follow. Raises ProtocolError if the destination has acknowledged more than there are."""
        if self._status is not SendingStatus.SENDING:
            return
        self._news += not self._closed
        self._closed = True
        self._check_acked(self._acked)

    def acked(self, upto: int) -> None:
        """The destination has merged all pieces below `upto`. An older number than the last one changes nothing.

        The number may be ahead of what the source has: other sources write the pieces of which it has no share.
        Raises ProtocolError if it covers a piece that the source has not written.
        """
        if self._status is not SendingStatus.SENDING:
            return
        self._check_acked(upto)
        self._news += upto > self._acked
        self._acked = max(self._acked, upto)

    def take(self, limit: int) -> range:
        """The next pieces to write now, at most `limit`; empty if there are none or a batch is in flight.

        A batch that is not empty is in flight until `wrote` or `write_failed`, also if the room ends meanwhile.
        """
        if limit < 1 or not self.runnable:
            return range(0)
        self._next, start = min(self._limit, self._next + limit), self._next
        self._batch = range(start, self._next)
        return self._batch

    def wrote(self) -> None:
        """The batch in flight lies in the destination's memory. Announce it, unless the room has ended meanwhile.

        Raises ProtocolError if none is in flight.
        """
        batch = self._end_batch()
        self._news += 1
        while self._owed and self._owed[0] < batch.stop:
            self._owed.popleft()

    def take_back(self) -> None:
        """The batch in flight lies in the destination's memory, but what was read may have been somebody else's.

        Nothing of it is announced; it is taken again. Raises ProtocolError if none is in flight.
        """
        batch = self._end_batch()
        self._next = batch.start

    def write_failed(self, reason: str, in_doubt: bool = False) -> None:
        """The batch in flight was not written, or not all of it.

        in_doubt: bytes of it may still arrive; then the room never drains, and only the end of the session frees the
        destination's units. Raises ProtocolError if none is in flight.
        """
        batch = self._end_batch()
        # What was only passed over was never given to the engine.
        self._in_doubt = in_doubt and bool(self._owed) and self._owed[0] < batch.stop
        self.abort(reason)

    def finished(self) -> None:
        """The destination has everything. Raises ProtocolError if it cannot: something is not written yet."""
        if self._status is not SendingStatus.SENDING:
            return
        if not self._closed:
            raise ProtocolError(f"the destination is finished, but only {self._produced} pieces exist so far")
        if self._owed:
            raise ProtocolError(f"the destination is finished, but piece {self._owed[0]} was not written yet")
        self._settle(None)

    def abort(self, reason: str) -> None:
        """Stop, whoever wants it. What is in flight stays so; the first reason is kept; no effect after the end."""
        if self._status is SendingStatus.SENDING:
            self._settle(reason)

    def _settle(self, reason: str | None) -> None:
        """Every way to end comes through here, once: the destination has everything, or the reason why it will not."""
        self._status = SendingStatus.FINISHED if reason is None else SendingStatus.FAILED
        self._reason = reason
        self._news += 1

    def _end_batch(self) -> range:
        if self._batch is None:
            raise ProtocolError("a write has ended, but none was in flight")
        batch, self._batch = self._batch, None
        return batch

    def _check_acked(self, upto: int) -> None:
        if self._owed and upto > self._owed[0]:
            raise ProtocolError(f"pieces below {upto} are acknowledged, but piece {self._owed[0]} was not written yet")
        if self._closed and upto > self._produced:
            raise ProtocolError(f"pieces below {upto} are acknowledged, but there are only {self._produced}")
