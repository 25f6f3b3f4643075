"""What a benchmark asks of the ranks beside a request's own steps: start at one moment, say when, write in bulk."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import pools
from .decode import DecodeRank
from .expectation import Buffer
from .oracle import Bits
from .prefill import PrefillRank
from .rank import Live
from .replay import WAITING_FOR_INPUT, Replay

POLL_SECONDS = 0.0005
"""Between two polls of a scheduler that has nothing else to do."""
ALIGN = 2 << 20
"""Bytes; engines register memory in pages of this size."""
SPIN_SECONDS = 0.002
"""Before an appointed moment: a sleep may end late by about as much."""
TERMINAL = {0, 4}
"""KVPoll.Failed and KVPoll.Success."""


class Bulk:
    """A rank's part in writing many bytes at once, the lower limit of a transfer; and in starting from equal terms."""

    def scatter(self: Any, seed: int) -> None:
        """Put the free pages and slots in an order of its own; all ranks of a side need the same seed."""
        pools.shuffle_free_lists(self.pools, self.scheduler.req_to_metadata_buffer_idx_allocator, seed)

    _buffer: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    _copy: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def bulk_buffer(self: Any, size: int) -> tuple[str, int]:
        """Memory for the engine, touched, and as much to copy it to; returns the engine's session and the address."""
        if self._buffer is None or len(self._buffer) < size:
            whole = np.full(size + ALIGN, 1, dtype=np.uint8)
            self._buffer = whole[-whole.ctypes.data % ALIGN :][:size]
            self._copy = np.full(size, 1, dtype=np.uint8)
            if self.manager.engine.batch_register([self._buffer.ctypes.data], [size]) != 0:
                raise RuntimeError(f"the engine refuses to register {size} bytes")
        return self.manager.engine.get_session_id(), self._buffer.ctypes.data

    def bulk_write(self: Any, session: str, address: int, size: int, piece: int, when: float) -> float:
        """One call to the engine at `when`, a descriptor per `piece` bytes; returns when it had ended.

        Times are those of time.monotonic, as everywhere here.
        """
        offsets = range(0, size, piece)
        sizes = [min(piece, size - offset) for offset in offsets]
        here = [self._buffer.ctypes.data + offset for offset in offsets]
        there = [address + offset for offset in offsets]
        _wait_until(when)
        if self.manager.engine.batch_transfer_sync(session, here, there, sizes) != 0:
            raise RuntimeError(f"the engine could not write {size} bytes at once")
        return time.monotonic()

    def bulk_copy(self: Any, size: int) -> float:
        """Seconds that one thread takes to copy what was written to memory that has been touched before."""
        started = time.monotonic()
        self._copy[:size] = self._buffer[:size]
        return time.monotonic() - started


class Meaningless(Replay):
    """Layers that store the same values whatever the request, which costs nothing but the storing, and leave the linear
    state as it is."""

    _values: torch.Tensor | None = None

    def kv(self, buffer: Buffer, live: Live, start: int, end: int) -> torch.Tensor:
        if self._values is None or len(self._values) < end - start:
            shape = end - start, *buffer.shape[2:]
            self._values = torch.ones(shape, dtype=getattr(torch, self.geometry.kv_dtype))
        return self._values[: end - start]

    def state(self, buffer: Buffer, view: Bits, live: Live, end: int) -> None:
        pass


class TimedPrefill(Bulk, PrefillRank):
    """A prefill rank that sends when it is told to, and counts what SGLang's engine is asked for."""

    def meaningless(self) -> None:
        """From now on forward passes store what costs least."""
        self.replay_class, self._replay = Meaningless, None

    _counted: dict[str, int] | None = None

    def send_all(self, chunks: Sequence[tuple[int, int]], when: float) -> None:
        """Hand over all chunks (room, end) of prompts whose forward has ended, from `when` on."""
        _wait_until(when)
        for room, end in chunks:
            self.send(room, end)

    def engine_counts(self) -> dict[str, int]:
        """Batches, descriptors and bytes that upstream's path gave to the engine since the last call."""
        if self._counted is None:
            self._counted = {}
            engine, count = self.manager.engine, self._count
            original = engine.batch_transfer_sync

            def counting(session: str, here: Sequence[int], there: Sequence[int], sizes: Sequence[int]) -> int:
                count(sizes)
                result: int = original(session, here, there, sizes)
                return result

            engine.batch_transfer_sync = counting
        counted, self._counted = self._counted, {}
        return counted

    def _count(self, sizes: Sequence[int]) -> None:
        assert self._counted is not None
        for name, value in (("writes", 1), ("descriptors", len(sizes)), ("bytes", sum(map(int, sizes)))):
            self._counted[name] = self._counted.get(name, 0) + value


class TimedDecode(Bulk, DecodeRank):
    """A decode rank that says when its requests were ready."""

    def await_ends(self, rooms: Sequence[int], seconds: float) -> list[tuple[int, float]]:
        """Poll as a scheduler without other work does, until every request has ended; (KVPoll, when) of each.

        A request that does not end within `seconds` has the state that it is in.
        """
        return self._ends(rooms, seconds, waiting=set())

    def drive(self, rooms: Sequence[int], seconds: float) -> list[tuple[int, float]]:
        """Take requests from their handshake to their end as a scheduler without other work does.

        (KVPoll, when) of each, as of `await_ends`. Without other ranks, whose polls would have a say.
        """
        return self._ends(rooms, seconds, waiting=set(rooms))

    def _ends(self, rooms: Sequence[int], seconds: float, *, waiting: set[int]) -> list[tuple[int, float]]:
        """waiting: those that still have to be admitted."""
        ends: dict[int, tuple[int, float]] = {}
        deadline = time.monotonic() + seconds
        while len(ends) < len(rooms):
            left = [room for room in rooms if room not in ends]
            late = time.monotonic() > deadline
            for room, poll in zip(left, self.poll(left), strict=True):
                if poll in TERMINAL or late:
                    ends[room] = poll, time.monotonic()
                elif poll == WAITING_FOR_INPUT and room in waiting:
                    waiting.difference_update(self.admit([room]))
            time.sleep(POLL_SECONDS)
        return [ends[room] for room in rooms]

    def staging_bytes(self) -> int:
        """Memory that peers may write to; 0 without our path."""
        memory = getattr(self.manager, "_hetero_memory", None)
        return 0 if memory is None else int(memory.numel())


def _wait_until(when: float) -> None:
    """Sleep, and spin at the end: a sleep ends late by up to the scheduler's slice."""
    time.sleep(max(0.0, when - time.monotonic() - SPIN_SECONDS))
    while time.monotonic() < when:
        pass
