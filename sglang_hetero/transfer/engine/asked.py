"""Native transfers that are begun one by one and asked about until each has ended, however long that takes.

What a call that waits cannot give: after it has run out of patience, the certainty that nothing of it arrives later.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

logger = logging.getLogger(__name__)

Begin = Callable[[str, int, int, int], int]
"""Begins one transfer to a session: from, to, bytes. Its number, or one of `Calls.refusals` if it was not begun."""
Ask = Callable[[int], int]
"""By the number of a transfer: 1 it has landed (never to be asked about again), negative it has failed (the same), 0 it
is under way."""
TIMED_OUT = -2
"""The engine's own opinion about one that is still under way."""
LEAST_NAP, MOST_NAP = 5e-5, 2e-2
"""Seconds between two looks; a nap is a sixteenth of the time waited so far, which is the most it costs a long wait."""
NAP_SHARE = 16
WATCH_SECONDS = 0.1
"""Between two looks at what nobody waits for any more."""


@dataclass(frozen=True)
class Calls:
    """The native ones. patience: seconds without the end of a transfer after which nobody waits any more.

    refusals: in the place of a number, what says that a transfer was not begun.
    """

    begin: Begin
    ask: Ask
    patience: float
    refusals: tuple[int, ...] = (0,)


class Inquiry:
    """The transfers of one call. Not thread-safe: one thread looks at a time."""

    def __init__(self, ask: Callable[[int], int | str]) -> None:
        """ask: as `Calls.ask`, or a text if asking itself has failed."""
        self._ask = ask
        self._open: deque[int] = deque()
        self.failed = 0
        self.unknown = ""
        """Why the end of a transfer will never be known, or an empty text."""

    def add(self, number: int) -> None:
        self._open.append(number)

    def lose(self, why: str) -> None:
        """One more, which may have been begun, and cannot be asked about."""
        self.unknown = why
        self.failed += 1

    def __len__(self) -> int:
        """Transfers that had not ended at the last look."""
        return len(self._open)

    def look(self) -> bool:
        """Whether all have ended. Each is asked in turn: they end about in the order they were begun."""
        while self._open:
            said = self._ask(self._open[0])
            if said in (0, TIMED_OUT):
                return False
            self._open.popleft()
            if isinstance(said, str):
                self.unknown = said
            self.failed += said != 1
        return True

    def wait(self, patience: float, given_up: Callable[[], bool]) -> bool:
        """Until all have ended, or none has for `patience` seconds, or `given_up`. Whether all have."""
        start = last = time.monotonic()
        open_before = len(self)
        while not self.look():
            now = time.monotonic()
            if len(self) < open_before:
                open_before, last = len(self), now
            if now - last > patience or given_up():
                return False
            time.sleep(min(MOST_NAP, max(LEAST_NAP, (now - start) / NAP_SHARE)))
        return True


class Unfinished:
    """A failed call of which transfers are still under way. `when_ended` may be called from any thread, once.

    It is told once, however the call ends, also after the engine was closed; but not while the system gives no thread
    for it, which is asked for again when the next call is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tell: Callable[[bool], None] | None = None
        self._settled: bool | None = None

    def when_ended(self, tell: Callable[[bool], None]) -> None:
        """Be told, on some thread, when the engine has said of every transfer how it ended.

        True: all have landed, so nothing arrives any more. False: not all have; nobody will know more.
        """
        with self._lock:
            self._tell, settled = tell, self._settled
        if settled is not None:
            tell(settled)

    def end(self, settled: bool) -> None:
        """For the engine."""
        with self._lock:
            self._settled, tell = settled, self._tell
        if tell is not None:
            tell(settled)


class Watch:
    """Looks after calls that nobody waits for any more, on a thread that lives while there are any.

    Nothing that is raised ends the thread before that: what it could not find out about one call is said to be unknown.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: list[tuple[Inquiry, Callable[[], None], Unfinished]] = []
        self._running = False

    def take(self, inquiry: Inquiry, ended: Callable[[], None]) -> Unfinished:
        """ended: called before the taker is told."""
        unfinished = Unfinished()
        with self._lock:
            self._calls.append((inquiry, ended, unfinished))
            start, self._running = not self._running, True
        if start:
            try:
                threading.Thread(target=self._run, name=f"hetero-{self._name}-watch", daemon=True).start()
            except RuntimeError:  # the system gives no thread
                logger.exception("what is left of a transfer is looked after when the next one is left")
                with self._lock:
                    self._running = False
        return unfinished

    def _run(self) -> None:
        while True:
            try:
                if not self._look():
                    return
            except BaseException:
                logger.critical("a look at transfers that nobody waits for; there will be another", exc_info=True)
            time.sleep(WATCH_SECONDS)

    def _look(self) -> bool:
        """Whether there was anything to look at."""
        with self._lock:
            calls = list(self._calls)
            self._running = bool(calls)
        for call in calls:
            inquiry, ended, unfinished = call
            if not _has_ended(inquiry):
                continue
            with self._lock:
                self._calls.remove(call)
            for step in (ended, partial(unfinished.end, not inquiry.failed)):
                try:
                    step()
                except BaseException:
                    logger.exception("the end of a transfer could not be told")
        return bool(calls)


def _has_ended(inquiry: Inquiry) -> bool:
    try:
        return inquiry.look()
    except BaseException as error:
        logger.exception("transfers that nobody waits for cannot be asked about")
        inquiry.lose(f"{type(error).__name__}: {error}")
        return True
