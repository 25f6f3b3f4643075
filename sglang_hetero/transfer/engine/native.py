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
        self._peers: dict[str, _Peer] = {}
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
            self._registered += addresses

    def write(self, session: str, sources: npt.ArrayLike, destinations: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        batch = check_batch(sources, destinations, sizes)
        self._transfer("write", self._native.batch_transfer_sync_write, session, batch)

    def read(self, session: str, local: npt.ArrayLike, remote: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        batch = check_batch(local, remote, sizes)
        self._transfer("read", self._native.batch_transfer_sync_read, session, batch)

    def close(self) -> None:
        with self._lock:
            addresses, self._registered, self._closed = self._registered, [], True
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
        """Whether it is certain that the peer's process has ended. May take CONNECT_SECONDS."""

    @abstractmethod
    def _transfer_remedy(self) -> str:
        """What a failed transfer may be due to, and where the engine tells more."""

    def _transfer(self, what: str, native: NativeTransfer, session: str, batch: Batch) -> None:
        self._refuse_closed()
        with self._in_use(session) as peer:
            self._transfer_to(peer, what, native, session, batch)

    @contextmanager
    def _in_use(self, session: str) -> Iterator["_Peer"]:
        """The books of a peer, which stay as long as this lasts."""
        with self._lock:
            peer = self._peers.pop(session, None) or _Peer(self._limits.outstanding)
            self._peers[session] = peer
            peer.users += 1
            if len(self._peers) > MAX_PEERS:
                self._peers.pop(next((name for name, each in self._peers.items() if not each.users), ""), None)
        try:
            yield peer
        finally:
            with self._lock:
                peer.users -= 1

    def _transfer_to(self, peer: "_Peer", what: str, native: NativeTransfer, session: str, batch: Batch) -> None:
        for part in split(batch, descriptors=self._limits.descriptors, first=1 if peer.in_doubt else None):
            with peer.room(len(part)):
                code = call(native, session, part.local.tolist(), part.remote.tolist(), part.sizes.tolist())
            # A failed call leaves descriptors in the engine's queue that nobody can count. Until one gets through, the
            # peer is tried with a single descriptor, so that what is left cannot pile up to an overflow.
            peer.in_doubt = code != 0
            if code != 0:
                raise self._failure(what, f"failed (code {code})", session, part)

    def _write_asking(self, calls: Calls, session: str, batch: Batch) -> None:
        """A write whose descriptors are begun one by one, so that the end of each is known, sooner or later."""
        self._refuse_closed()
        with self._in_use(session) as peer:
            for part in split(batch, descriptors=self._limits.descriptors, first=1 if peer.in_doubt else None):
                self._write_part(peer, calls, session, part)

    def _write_part(self, peer: "_Peer", calls: Calls, session: str, part: Batch) -> None:
        if not peer.take(len(part), calls.patience):
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
        ended = inquiry.wait(calls.patience, lambda: self._closed)
        peer.in_doubt = not ended
        if not ended:
            with self._lock:
                peer.users += 1  # its books have to stay: what is left of this part counts
            unfinished = self._watch.take(inquiry, lambda: self._left(peer, len(part)))
            outcome = f"has ended nowhere for {calls.patience:.0f} s, {len(inquiry)} descriptors are left"
            raise self._failure("write", outcome, session, part, unfinished=unfinished)
        peer.give(len(part))
        if refused is not None or inquiry.failed:
            # What was refused was never begun.
            outcome = f"failed (code {refused if inquiry.failed == 0 else inquiry.unknown or -1})"
            raise self._failure("write", outcome, session, part, settled=not inquiry.failed)

    def _left(self, peer: "_Peer", descriptors: int) -> None:
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
        gone = self.peer_gone(session)
        cause = "nobody listens there any more" if gone else self._transfer_remedy()
        message = f"{self.name} {what} {outcome}: {describe(part, session)}; {cause}"
        # A port that refuses says nothing about connections that are there: what is under way may land all the same.
        settled = settled or (gone and unfinished is None)
        return EngineError(message, peer_gone=gone, settled=settled, unfinished=unfinished)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(f"this {self.name} engine is closed", settled=True)


class _Peer:
    """How many descriptors of calls to one peer are under way, in all threads."""

    def __init__(self, outstanding: int) -> None:
        self._free = outstanding
        self._freed = threading.Condition()
        # Whoever waits for room holds this, so that small calls do not starve a large one.
        self._queue = threading.Lock()
        self.in_doubt = False
        self.users = 0
        """Transfers that are under way or wait for room; the engine's lock guards it."""

    @contextmanager
    def room(self, descriptors: int) -> Iterator[None]:
        self.take(descriptors, None)
        try:
            yield
        finally:
            self.give(descriptors)

    def take(self, descriptors: int, patience: float | None) -> bool:
        """Wait for room; False if there was none within `patience` seconds since it was this call's turn."""
        with self._queue, self._freed:
            found = self._freed.wait_for(lambda: self._free >= descriptors, patience)
            self._free -= descriptors if found else 0
        return found

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
