"""Which servers there are, as whoever sends them requests sees it."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from sglang_hetero.errors import DiscoveryError, RecordError
from sglang_hetero.layout.checks import shorten
from sglang_hetero.layout.manifest import Side
from sglang_hetero.transfer.worker import Worker

from .etcd import MAX_INSTANCES, Change, Etcd, Held, Listing
from .record import Instance, clean_url, decode
from .settings import EtcdOptions

logger = logging.getLogger(__name__)

QUIET_SECONDS = 15.0
"""A watch that says nothing for so long is made anew, after all records are read: so an etcd that has gone without a
word, or a machine between, is noticed by then."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 5.0
"""Between two attempts while etcd is away; doubled each time."""
JOIN_SECONDS = 5.0
MAX_LOGGED = 1024
"""Records that cannot be read of which it is remembered that the log has them."""
MAX_KEY = 1024
"""Characters that are kept of a key; a server's, of the longest prefix and URL, is below it."""
NOT_READ = "etcd has not been read yet"


class Members(Protocol):
    """The servers that there are. Thread-safe."""

    @property
    def trouble(self) -> str:
        """Why `snapshot` may be old, in a line for people; empty while it is up to date."""
        ...

    @property
    def settled(self) -> bool:
        """Whether who is not in `snapshot` is really gone: every server has had time to come (back)."""
        ...

    def snapshot(self) -> tuple[Instance, ...]:
        """All of them, sorted by role and URL, each once."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have it called after each change, from any thread; it takes a snapshot then. It must return soon. What it
        raises is logged."""
        ...

    def close(self) -> None:
        """No callback is called any more once this has returned."""
        ...


class StaticMembers:
    """Servers that are given by URL and stay. What else is to be known of them they say on `GET /hetero/instance`."""

    trouble = ""
    settled = True

    def __init__(self, prefills: Iterable[tuple[str, int | None]], decodes: Iterable[str]) -> None:
        """prefills: URL and bootstrap port, None if it is not given. Raises RecordError for what is no URL or port."""
        found = [Instance(role=Side.PREFILL, url=clean_url(url), bootstrap_port=port or 0) for url, port in prefills]
        found += [Instance(role=Side.DECODE, url=clean_url(url)) for url in decodes]
        self._all = in_order(found)

    def snapshot(self) -> tuple[Instance, ...]:
        """All of them."""
        return self._all

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Nothing ever changes."""

    def close(self) -> None:
        """There is nothing to be ended."""


def in_order(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Sorted by role and URL; of several with the same role and URL the last one that is given."""
    by_url = {(one.role, one.url): one for one in instances}
    return tuple(by_url[key] for key in sorted(by_url))


class EtcdMembers:
    """The servers that have registered in etcd.

    A thread reads all records, follows what changes, and begins anew whenever the watch ends. While etcd is away the
    set stays as it was. Only what the watch tells has certainly happened: a server that is missing when all is read
    stays for a lease longer, after every outage anew. etcd may have lost its data, or another one may answer at its
    address, with or without an outage that could be noticed, and servers need a moment to register again. A record that
    cannot be read, or that has no lease and so would stay for ever, is left out.
    """

    def __init__(
        self,
        options: EtcdOptions,
        *,
        connect: Callable[[EtcdOptions], Etcd] = Etcd,
        clock: Callable[[], float] = time.monotonic,
        quiet: float = QUIET_SECONDS,
        retry: float = RETRY_SECONDS,
    ) -> None:
        """Starts the thread and waits for nothing: see `wait`. connect, clock, quiet, retry: for tests."""
        self._options, self._clock, self._quiet, self._retry = options, clock, quiet, retry
        self._etcd = connect(options)
        self._lock = threading.Lock()
        self._records: dict[str, Instance] = {}
        self._skipped: dict[str, str] = {}
        """Why a record is left out, by key."""
        self._leaving: dict[str, float] = {}
        """When a record that was missing when all was read counts as gone, `clock`."""
        self._settled_at: float | None = None
        """From when on, `clock`, servers have had a lease to come, since the first reading or the last outage."""
        self._logged: set[tuple[str, str]] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._trouble = NOT_READ
        self._was_away = self._failed = False
        self._more = ""
        self._next_revision = 0
        self._ready, self._closing = threading.Event(), threading.Event()
        self.worker = Worker("hetero-members", self._run)

    @property
    def trouble(self) -> str:
        """Why the set may be old, or lacks some; empty while all is well."""
        with self._lock:
            return self._trouble or self._more or self.worker.fault

    @property
    def settled(self) -> bool:
        """Whether a lease has passed since etcd was read first, or since it was back."""
        with self._lock:
            return self._settled_at is not None and self._settled_at <= self._clock()

    @property
    def skipped(self) -> dict[str, str]:
        """Records that are left out because they cannot be read: the reason by key."""
        with self._lock:
            return dict(self._skipped)

    def wait(self, seconds: float) -> bool:
        """Whether etcd has been read once, after so many seconds at most."""
        return self._ready.wait(seconds)

    def snapshot(self) -> tuple[Instance, ...]:
        """All servers, as far as is known."""
        with self._lock:
            return in_order(self._records.values())

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have it called after each change, from this thread of ours."""
        with self._lock:
            self._callbacks.append(callback)

    def close(self) -> None:
        """End the thread."""
        self.worker.stop()
        self._closing.set()
        self._etcd.close()
        if threading.current_thread() is not self.worker.thread:
            self.worker.thread.join(JOIN_SECONDS)
        with self._lock:
            self._callbacks.clear()

    # The thread.

    def _run(self) -> None:
        wait = self._retry
        while not self._closing.is_set():
            try:
                self._read(self._etcd.read(f"{self._options.prefix}/"))
                watch = self._etcd.watch(f"{self._options.prefix}/", self._next_revision, self._patience())
                with contextlib.closing(watch):
                    for changes in watch:
                        wait = self._retry
                        self._change(changes)
                        if any(at <= self._clock() for at in self._leaving.values()):
                            break  # however much is written meanwhile
                continue
            except DiscoveryError as error:
                self._away(str(error))
            except Exception as error:
                if not self._failed:
                    logger.exception("what etcd says cannot be followed, and is begun anew; said once")
                self._failed = True
                self._away(f"{type(error).__name__}: {error}")
            self._closing.wait(wait * random.uniform(0.5, 1.0))  # not all routers at the same moment
            wait = min(2 * wait, MAX_RETRY_SECONDS)

    def _patience(self) -> float:
        """How long to wait for a change: until a record that is missing is to be left out, at most."""
        soonest = min(self._leaving.values(), default=None)
        return self._quiet if soonest is None else max(0.05, min(self._quiet, soonest - self._clock()))

    def _away(self, why: str) -> None:
        if self._closing.is_set():
            return
        with self._lock:
            first, self._was_away = not self._was_away, True
            self._trouble = f"{why}; the {len(self._records)} servers that were known stay"
        if first:
            logger.warning("etcd is away: %s", self._trouble)

    def _read(self, listing: Listing) -> None:
        """Everything, at one moment."""
        self._next_revision = listing.revision + 1
        now = self._clock()
        with self._lock:
            before = dict(self._records)
            listed = {bounded(key): held for key, held in listing.records.items()}
            back, self._was_away, self._trouble = self._was_away, False, ""
            if back or not self._ready.is_set():
                self._settled_at = now + self._options.lease
            missing = [key for key in self._records if key not in listed and not listing.unseen(key)]
            until = {key: now + self._grace(self._records[key]) for key in missing}
            self._leaving = (
                until if back else until | {key: self._leaving[key] for key in self._leaving.keys() & missing}
            )
            for key in [key for key, at in self._leaving.items() if at <= now]:
                del self._leaving[key], self._records[key]
            self._skipped = {}
            full = listing.truncated
            # Those that are known come first, so that nobody's records put them out.
            for key, held in sorted(listed.items(), key=lambda one: one[0] not in self._records):
                if key in self._records or self._room():
                    self._enter(key, held)
                else:
                    full = True
            while len(self._records) > MAX_INSTANCES:  # so there are some that are missing
                del self._records[self._leaving.popitem()[0]]
            self._full(full)
            changed = [(before.get(key), self._records.get(key)) for key in sorted(before.keys() | self._records)]
            count = len(self._records)
        if back:
            logger.warning("etcd is back: %d servers", count)
        self._ready.set()
        self._tell(changed)

    def _change(self, changes: Iterable[Change]) -> None:
        with self._lock:
            before: dict[str, Instance | None] = {}
            for one in changes:
                key = bounded(one.key)
                before.setdefault(key, self._records.get(key))
                self._leaving.pop(key, None)
                self._skipped.pop(key, None)
                if one.record is None:
                    self._records.pop(key, None)
                elif key in self._records or self._room():
                    self._enter(key, one.record)
                else:
                    self._full(True)
            changed = [(old, self._records.get(key)) for key, old in sorted(before.items())]
        self._tell(changed)

    def _grace(self, instance: Instance) -> float:
        """Seconds in which a server that is missing may register again: it renews as often as its own lease says."""
        return max(self._options.lease, instance.lease)

    def _room(self) -> bool:
        """For one more record. Those that are missing make room."""
        return len(self._records) - len(self._leaving) + len(self._skipped) < MAX_INSTANCES

    def _full(self, full: bool) -> None:
        more = f"etcd has more than {MAX_INSTANCES} records there" if full else ""
        if more and not self._more:
            logger.warning("not all servers are known: %s", more)
        self._more = more

    def _enter(self, key: str, held: Held) -> None:
        """Take a record up, in the place of the one that was there. One that cannot be read leaves that one out, too:
        whoever wrote it is not what it was."""
        try:
            self._records[key] = entered(self._options.prefix, key, held)
        except RecordError as error:
            self._records.pop(key, None)
            self._skipped[key] = str(error)
            if (key, str(error)) not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add((key, str(error)))
                logger.warning("the record %s in etcd is left out: %s", shorten(key, 200), error)

    def _tell(self, changed: Iterable[tuple[Instance | None, Instance | None]]) -> None:
        """Log what is not as it was before, and call back."""
        changed = [(old, new) for old, new in changed if old != new]
        if not changed or self._closing.is_set():
            return
        for old, new in changed:
            if new is not None:
                logger.info("%s has registered%s (%s)", new.label, " anew" if old else "", new.incarnation)
            elif old is not None:
                logger.info("%s is gone (%s)", old.label, old.incarnation)
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback on a change of servers has failed")


def key_of(prefix: str, instance: Instance) -> str:
    """Where a server's record lies: one place for each address, so that a restarted server takes its former one."""
    return f"{prefix}/{instance.role}/{instance.url.partition('://')[2]}"


def entered(prefix: str, key: str, held: Held) -> Instance:
    """The server whose record this is. Raises RecordError, also where it lies under a key that is not its own, or has
    no lease: nobody would take it away when the server is gone."""
    found = decode(held.value)
    if key_of(prefix, found) != key:
        raise RecordError(f"it is that of {found.label}, which belongs under {key_of(prefix, found)}")
    if not held.lease:
        raise RecordError(f"it is that of {found.label} and has no lease, which a server's own has: remove it")
    return found


def bounded(key: str) -> str:
    """A key of which no more is kept than a server's has; one that is cut is nobody's."""
    return key if len(key) <= MAX_KEY else shorten(key, MAX_KEY)
