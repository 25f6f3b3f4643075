"""What an engine is, and what all engines share: checking and cutting a batch, and wording a failure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_hetero.errors import HeteroError

from .asked import Unfinished

Words = npt.NDArray[np.uint64]
"""Addresses or sizes, one per descriptor."""
Region = tuple[int, int]
"""Address and bytes of memory that remote ranks may write or read."""

UINT64_END = 1 << 64


class EngineError(HeteroError):
    """A transfer or a registration failed.

    settled: nothing of the failed call will land any more: all that was begun of it has landed, or nothing was begun.
    Where it is False the bytes may still be on their way: the remote memory must stay out of use, and the local memory
    unchanged, until the peer's process has ended, which no engine can prove (`Engine.peer_gone`). Earlier slices of the
    same call have landed, later ones were never started.

    unfinished: where it is not settled but will be known later: who will say so.
    """

    def __init__(self, message: str, *, settled: bool = False, unfinished: Unfinished | None = None) -> None:
        super().__init__(message)
        self.settled = settled
        self.unfinished = unfinished


class Engine(Protocol):
    """Moves bytes between registered memory of two processes. Every method may be called from any thread."""

    @property
    def session(self) -> str:
        """By which peers address this engine."""

    @property
    def busy_waits(self) -> bool:
        """Whether a call occupies a core until the bytes are there, which the host's own copying needs, too."""

    def register(self, regions: Sequence[Region]) -> None:
        """Let peers write and read these regions; all in ONE batch. EngineError with the cause and the remedy."""

    def write(self, session: str, sources: npt.ArrayLike, destinations: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        """Copy local bytes to the peer; returns when its memory has them all. In no order. EngineError."""

    def read(self, session: str, local: npt.ArrayLike, remote: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        """Copy bytes of the peer here; returns when local memory has them all. In no order. EngineError."""

    @property
    def sees_ends(self) -> bool:
        """Whether a peer's engine listens on the port of its session as long as its process lives; if not, `peer_gone`
        is always False."""

    def peer_gone(self, session: str) -> bool:
        """Whether the peer's host says that nobody listens at its session. May take seconds.

        It does when the process has ended; but a firewall's rule, or a process that has closed no more than the socket
        it listens on, look the same. So it proves nothing about what is under way (backend/doubts.py asks more).
        """

    def close(self) -> None:
        """Let go of what this object registered, and begin nothing more. Idempotent.

        Calls that wait for the end of what they have begun, or for room, raise EngineError soon. What is under way goes
        on, and memory that it reads has to stay until its `Unfinished` has been told, which it is after this, too.
        """


@dataclass(frozen=True)
class Batch:
    """Descriptors: `sizes[i]` bytes between `local[i]` here and `remote[i]` at the peer."""

    local: Words
    remote: Words
    sizes: Words

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        # Python's own sum: uint64 would wrap for sizes that are nonsense, and the message would hide it.
        return sum(self.sizes.tolist())


def check_batch(local: npt.ArrayLike, remote: npt.ArrayLike, sizes: npt.ArrayLike) -> Batch:
    """The three columns as uint64. EngineError (settled: nothing was started) if they are no batch.

    Descriptors of size 0 are dropped: engines disagree about them.
    """
    columns = [_words(name, values) for name, values in (("local", local), ("remote", remote), ("sizes", sizes))]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise EngineError(
            f"a batch needs as many local addresses as remote ones and sizes, these are {lengths}", settled=True
        )
    used = columns[2] != 0
    batch = Batch(*(column if used.all() else column[used] for column in columns))
    for name, start in (("local", batch.local), ("remote", batch.remote)):
        beyond = np.flatnonzero(start > np.uint64(UINT64_END - 1) - (batch.sizes - np.uint64(1)))
        if len(beyond):
            at = int(beyond[0])
            raise EngineError(
                f"descriptor {at}: {batch.sizes[at]} bytes from {name} address {start[at]:#x} pass the end of memory",
                settled=True,
            )
    return batch


def _words(name: str, values: npt.ArrayLike) -> Words:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "ui" and array.size):
        raise EngineError(
            f"{name} of a batch are a one-dimensional array of uint64, not {array.dtype} of shape {array.shape}",
            settled=True,
        )
    if array.dtype.kind == "i" and (array < 0).any():
        raise EngineError(f"{name} of a batch hold the negative number {array.min()}", settled=True)
    return array.astype(np.uint64, copy=False)


def split(batch: Batch, *, descriptors: int, max_bytes: int | None = None, first: int | None = None) -> Iterator[Batch]:
    """Slices of at most `descriptors` descriptors and, if given, `max_bytes` bytes, in order; `first` bounds the first.

    A single descriptor beyond max_bytes is cut in several.
    """
    if max_bytes is not None:
        batch = _cut_long(batch, max_bytes)
        ends = np.cumsum(batch.sizes, dtype=np.uint64)
    begin, bound = 0, first or descriptors
    while begin < len(batch):
        end = min(begin + bound, len(batch))
        if max_bytes is not None:
            moved = ends[begin - 1] if begin else np.uint64(0)
            end = min(end, int(np.searchsorted(ends, moved + np.uint64(max_bytes), side="right")))
        yield Batch(batch.local[begin:end], batch.remote[begin:end], batch.sizes[begin:end])
        begin, bound = end, descriptors


def _cut_long(batch: Batch, max_bytes: int) -> Batch:
    limit = np.uint64(max_bytes)
    if not (batch.sizes > limit).any():
        return batch
    parts = ((batch.sizes + limit - np.uint64(1)) // limit).astype(np.int64)
    firsts = np.cumsum(parts) - parts
    offsets = (np.arange(parts.sum()) - np.repeat(firsts, parts)).astype(np.uint64) * limit
    sizes = np.minimum(np.repeat(batch.sizes, parts) - offsets, limit)
    return Batch(np.repeat(batch.local, parts) + offsets, np.repeat(batch.remote, parts) + offsets, sizes)


def check_regions(regions: Sequence[Region]) -> tuple[list[int], list[int]]:
    """Addresses and sizes of regions that are there, not empty, and apart from each other. EngineError."""
    if not regions:
        raise EngineError("there is no memory to register: the list of regions is empty", settled=True)
    last_end = 0
    for address, size in sorted(regions):
        if size <= 0 or address <= 0 or address + size > UINT64_END:
            raise EngineError(f"{size} bytes at address {address:#x} cannot be registered", settled=True)
        if address < last_end:
            raise EngineError(
                f"the region of {size} bytes at {address:#x} overlaps the one before it, which ends at {last_end:#x}; "
                "engines refuse overlapping regions: pass the allocation that holds both once",
                settled=True,
            )
        last_end = address + size
    return [address for address, _ in regions], [size for _, size in regions]


def describe(batch: Batch, session: str) -> str:
    """A batch in words, for messages."""
    return f"{len(batch)} descriptors, {batch.total_bytes} bytes, peer {session}"
