"""What Mooncake and MemFabric have in common: SGLang made the native engine, and its calls have limits and codes."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

from .asked import Calls, Inquiry, Unfinished, Watch
from .base import Batch, EngineError, Region, check_batch, check_regions, describe, split

Code = int | str
"""What a native call returned (0: success), or the text of what it raised."""
NativeTransfer = Callable[[str, list[int], list[int], list[int]], int]
MAX_PEERS = 4096
"""Sessions whose books are kept, the latest used: a fleet has fewer at a time, but each start of a process makes a new
one."""


@dataclass(frozen=True)
class Limits:
    """descriptors: of one native call. outstanding: of all calls to one peer that are under way together.

    busy_waits: a call spins while this host's processors move its bytes.
    """

    descriptors: int
    outstanding: int
    busy_waits: bool = False
    asks: bool = False
    """Writes are begun one by one and asked about, so that it is known when nothing of a failed one can arrive."""


class NativeEngine(ABC):
    """An `Engine` on SGLang's object around a native one: anything with `.engine` and `.session_id`.

    It owns only what it registers; the native engine stays SGLang's, which makes, shares and ends it. A native call
    that fails raises and changes nothing else: no peer is shut out for it.
    """

    name: ClassVar[str]
    sees_ends: bool = True

    def __init__(self, upstream: Any, limits: Limits) -> None:
        self._native = upstream.engine
        self._session = str(upstream.session_id)
        self._limits = limits
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._registered: list[int] = []
        self._closed = False
        self._watch = Watch(self.name)

    @property
    def session(self) -> str:
        return self._session

    @property
    def busy_waits(self) -> bool:
        return self._limits.busy_waits

    def register(self, regions: Sequence[Region]) -> None:
        self._refuse_closed()
        addresses, sizes = check_regions(regions)
        code = call(self._native.batch_register_memory, addresses, sizes)
        if code != 0:
            raise EngineError(
                f"{self.name} refused to register {len(sizes)} regions, {sum(sizes)} bytes (code {code}); "
                f"{self._register_remedy(code)}",
                settled=True,
            )
        with self._lock:
            closed = self._closed
            self._registered += [] if closed else addresses
        if closed:  # meanwhile
            call(self._unregister, addresses)
            self._refuse_closed()

    def write(self, session: str, sources: npt.ArrayLike, destinations: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        batch = check_batch(sources, destinations, sizes)
        self._transfer("write", self._native.batch_transfer_sync_write, session, batch)

    def read(self, session: str, local: npt.ArrayLike, remote: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        batch = check_batch(local, remote, sizes)
        self._transfer("read", self._native.batch_transfer_sync_read, session, batch)

    def _probe(self, session: str) -> None:
        """See whether a peer answers that nothing has been moved to or from yet. Raises EngineError, settled.

        Here: an engine that needs no such thing."""
        return

    def close(self) -> None:
        """As `Engine.close`. A native call that waits by itself ends when it ends; nothing follows it."""
        with self._lock:
            addresses, self._registered, self._closed = self._registered, [], True
            for peer in self._peers.values():
                peer.close()
        if addresses:
            # Its code says nothing that could still be acted upon.
            call(self._unregister, addresses)

    @abstractmethod
    def _unregister(self, addresses: list[int]) -> int: ...

    @abstractmethod
    def _register_remedy(self, code: Code) -> str:
        """What to do about a refused registration."""

    @abstractmethod
    def peer_gone(self, session: str) -> bool:
        """As `Engine.peer_gone`. May take CONNECT_SECONDS."""

    @abstractmethod
    def _transfer_remedy(self) -> str:
        """What a failed transfer may be due to, and where the engine tells more."""

    def _transfer(self, what: str, native: NativeTransfer, session: str, batch: Batch) -> None:
        with self._in_use(session) as peer:
            if len(batch) and not peer.reached:
                self._probe(session)
            self._transfer_to(peer, what, native, session, batch)

    @contextmanager
    def _in_use(self, session: str) -> Iterator["Peer"]:
        """The books of a peer, which stay as long as this lasts."""
        with self._lock:
            self._refuse_closed()
            peer = self._peers.pop(session, None) or Peer(self._limits.outstanding)
            self._peers[session] = peer
            peer.users += 1
            if len(self._peers) > MAX_PEERS:
                self._peers.pop(next((name for name, each in self._peers.items() if not each.users), ""), None)
        try:
            yield peer
        finally:
            with self._lock:
                peer.users -= 1

    def _transfer_to(self, peer: "Peer", what: str, native: NativeTransfer, session: str, batch: Batch) -> None:
        for part in split(batch, descriptors=self._limits.descriptors, first=1 if peer.in_doubt else None):
            if not peer.take(len(part), None):
                self._refuse_closed()
            try:
                code = call(native, session, part.local.tolist(), part.remote.tolist(), part.sizes.tolist())
            finally:
                peer.give(len(part))
            # A failed call leaves descriptors in the engine's queue that nobody can count. Until one gets through, the
            # peer is tried with a single descriptor, so that what is left cannot pile up to an overflow.
            peer.in_doubt, peer.reached = code != 0, peer.reached or code == 0
            if code != 0:
                # The call has returned at the first of its descriptors that failed; others may be under way.
                raise self._failure(what, f"failed (code {code})", session, part)

    def _write_asking(self, calls: Calls, session: str, batch: Batch) -> None:
        """A write whose descriptors are begun one by one, so that the end of each is known, sooner or later."""
        with self._in_use(session) as peer:
            if len(batch) and not peer.reached:
                self._probe(session)
            for part in split(batch, descriptors=self._limits.descriptors, first=1 if peer.in_doubt else None):
                self._write_part(peer, calls, session, part)

    def _write_part(self, peer: "Peer", calls: Calls, session: str, part: Batch) -> None:
        if not peer.take(len(part), calls.patience):
            self._refuse_closed()
            # What was begun before has not ended, and there is a limit to what may be under way.
            message = (
                f"{self.name} write to {session} was not begun: nothing there has moved for {calls.patience:.0f} s"
            )
            raise EngineError(message, settled=True)
        inquiry, refused = Inquiry(lambda number: call(calls.ask, number)), None
        for local, remote, size in zip(part.local.tolist(), part.remote.tolist(), part.sizes.tolist(), strict=True):
            number = call(calls.begin, session, local, remote, size)
            if isinstance(number, str):
                inquiry.lose(number)  # it may have been begun
                break
            if number in calls.refusals:
                refused = number
                break
            inquiry.add(number)
            peer.reached = True
        ended = inquiry.wait(calls.patience, lambda: self._closed)
        peer.in_doubt = not ended
        if not ended:
            with self._lock:
                peer.users += 1  # its books have to stay: what is left of this part counts
            unfinished = self._watch.take(inquiry, lambda: self._left(peer, len(part)))
            if self._closed:
                message = f"this {self.name} engine was closed during a write: {describe(part, session)}"
                raise EngineError(message, unfinished=unfinished)
            outcome = f"has ended nowhere for {calls.patience:.0f} s, {len(inquiry)} descriptors are left"
            raise self._failure("write", outcome, session, part, unfinished=unfinished)
        peer.give(len(part))
        if refused is not None or inquiry.failed:
            # What was refused was never begun.
            outcome = f"failed (code {refused if inquiry.failed == 0 else inquiry.unknown or -1})"
            raise self._failure("write", outcome, session, part, settled=not inquiry.failed)

    def _left(self, peer: "Peer", descriptors: int) -> None:
        """What was left of a part has ended."""
        peer.give(descriptors)
        with self._lock:
            peer.users -= 1

    def _failure(
        self,
        what: str,
        outcome: str,
        session: str,
        part: Batch,
        *,
        settled: bool = False,
        unfinished: Unfinished | None = None,
    ) -> EngineError:
        # A port that refuses is a likely cause, and nothing more: it says nothing about connections that are there, so
        # what is under way may land all the same. Whether the process has ended is for others to find out.
        cause = "nobody listens there any more" if self.peer_gone(session) else self._transfer_remedy()
        message = f"{self.name} {what} {outcome}: {describe(part, session)}; {cause}"
        return EngineError(message, settled=settled, unfinished=unfinished)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(f"this {self.name} engine is closed", settled=True)


class Peer:
    """How many descriptors of calls to one peer are under way, in all threads; and whether there is a way to it."""

    def __init__(self, outstanding: int) -> None:
        self._free = outstanding
        self._freed = threading.Condition()
        # Whoever waits for room holds this, so that small calls do not starve a large one.
        self._queue = threading.Lock()
        self._closed = False
        self.in_doubt = False
        self.reached = False
        """Whether something has been moved: the engine knows it since then."""
        self.users = 0
        """Transfers that are under way or wait for room; the engine's lock guards it."""

    def take(self, descriptors: int, patience: float | None) -> bool:
        """Wait for room; False if there was none within `patience` seconds since it was this call's turn, or after
        `close`."""
        with self._queue, self._freed:
            self._freed.wait_for(lambda: self._closed or self._free >= descriptors, patience)
            found = self._free >= descriptors and not self._closed
            self._free -= descriptors if found else 0
        return found

    def close(self) -> None:
        """Whoever waits for room waits no more, and gets none."""
        with self._freed:
            self._closed = True
            self._freed.notify_all()

    def give(self, descriptors: int) -> None:
        with self._freed:
            self._free += descriptors
            self._freed.notify()


def call(native: Callable[..., int], *arguments: object) -> Code:
    """The code of a native call, or what it raised: neither may pass for success."""
    try:
        return native(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
