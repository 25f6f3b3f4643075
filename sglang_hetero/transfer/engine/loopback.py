"""Engine within one process, for tests: checks every address, and misbehaves on demand (`Script`).

Memory is moved with ctypes.memmove, so a test uses real buffers (numpy, torch on CPU) on both sides. Each peer is a
`LoopbackEngine` on one `Fabric`; what it sends obeys its `script`:

    engine.script.next(Fault(gate=gate))                  # the next call waits at the gate, others overtake it
    engine.script.next(Fault(error="reset", late=True))   # fails now, lands when script.land_late() is called
"""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .asked import Unfinished
from .base import Batch, EngineError, Region, check_batch, check_regions, describe, split

GATE_SECONDS = 20.0
"""A forgotten gate fails its test instead of hanging it."""


class Operation(StrEnum):
    WRITE = "write"
    READ = "read"


class Gate:
    """Where a call waits until the test lets it go. Opens once, for good."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def wait_reached(self, seconds: float = GATE_SECONDS) -> bool:
        """Whether a call stands (or stood) at the gate."""
        return self._reached.wait(seconds)

    def pass_through(self) -> None:
        self._reached.set()
        if not self._open.wait(GATE_SECONDS):
            raise EngineError(f"loopback: a gate stayed closed for {GATE_SECONDS:.0f} s", settled=True)


@dataclass(frozen=True)
class Fault:
    """What befalls one call (one slice, where the engine slices), in the order of these fields."""

    gate: Gate | None = None
    """Wait here before any byte moves."""
    delay: float = 0.0
    """Seconds to wait before any byte moves."""
    shuffle: int | None = None
    """Move the descriptors in a random order with this seed."""
    lands: int | None = None
    """How many descriptors, in the order moved, land now; None: all, or none where `error` is given."""
    late: bool = False
    """All descriptors land at `Script.land_late`, with the bytes of now: in doubt after an error, else a duplicate."""
    gate_after: Gate | None = None
    """Wait here when bytes have moved: the call returns late."""
    error: str = ""
    """Raise EngineError with this text."""
    unfinished: Unfinished | None = None
    """Of the error; the test says how it ended."""
    settled: bool | None = None
    """Of the error; None: what is true, not `late`."""


@dataclass(frozen=True)
class Call:
    """One call as the engine saw it."""

    operation: Operation
    session: str
    descriptors: int
    total_bytes: int


Late = tuple[str, str, list[tuple[int, bytes]]]
"""Session of the sender, of the destination, and the bytes by address."""


class Script:
    """Faults of one engine's calls, and the record of the calls. Thread-safe."""

    def __init__(self, fabric: "Fabric") -> None:
        self._fabric = fabric
        self._lock = threading.Lock()
        self._planned: deque[tuple[Fault, str | None, Operation | None]] = deque()
        self._always: Fault | None = None
        self._late: list[Late] = []
        self.calls: list[Call] = []

    def next(
        self, *faults: Fault, session: str | None = None, operation: Operation | None = None, times: int = 1
    ) -> None:
        """Plan faults for the next calls, one each, only those of this peer and operation if given."""
        with self._lock:
            self._planned.extend((fault, session, operation) for _ in range(times) for fault in faults)

    def always(self, fault: Fault | None) -> None:
        """For every call that has no planned fault; None ends it."""
        with self._lock:
            self._always = fault

    @property
    def unused(self) -> int:
        """Planned faults that no call has met: a test asserts 0 at its end."""
        with self._lock:
            return len(self._planned)

    @property
    def late(self) -> int:
        """Calls whose bytes are still under way."""
        with self._lock:
            return len(self._late)

    def land_late(self, index: int | None = None) -> None:
        """Let the bytes of one call, or of all, that are under way land now. A peer that is gone gets nothing."""
        with self._lock:
            landing = self._late if index is None else [self._late[index]]
            self._late = [] if index is None else self._late[:index] + self._late[index + 1 :]
        for sender, session, pieces in landing:
            self._fabric.land(sender, session, pieces)

    def meet(self, call: Call) -> Fault:
        """The fault of this call, which is recorded. For the engine."""
        with self._lock:
            self.calls.append(call)
            for at, (fault, session, operation) in enumerate(self._planned):
                if session in (None, call.session) and operation in (None, call.operation):
                    del self._planned[at]
                    return fault
            return self._always or Fault()

    def postpone(self, late: Late) -> None:
        with self._lock:
            self._late.append(late)


class Fabric:
    """The sessions of one test. `violations` keeps every access outside registered memory, also swallowed ones."""

    def __init__(self) -> None:
        # Held while bytes move: after close() nothing touches the memory of that session any more.
        self._lock = threading.Lock()
        self._regions: dict[str, list[Region]] = {}
        self.violations: list[str] = []

    def join(self, session: str) -> None:
        with self._lock:
            if session in self._regions:
                raise EngineError(f"loopback: there is a session {session} already", settled=True)
            self._regions[session] = []

    def leave(self, session: str) -> None:
        """The session ends, as when its process dies: from now on it is gone for its peers."""
        with self._lock:
            self._regions.pop(session, None)

    def has(self, session: str) -> bool:
        """Whether the session has joined and not left."""
        with self._lock:
            return session in self._regions

    def register(self, session: str, regions: Sequence[Region]) -> None:
        with self._lock:
            known = self._known(session, session)
            check_regions([*known, *regions])
            known.extend(regions)

    def move(self, sender: str, session: str, operation: Operation, batch: Batch, order: Sequence[int]) -> None:
        """Copy the descriptors in `order`, after all of the batch have been checked."""
        with self._lock:
            self._check(sender, session, batch)
            for index in order:
                near, far, size = int(batch.local[index]), int(batch.remote[index]), int(batch.sizes[index])
                ctypes.memmove(*((far, near) if operation is Operation.WRITE else (near, far)), size)

    def copy_out(self, sender: str, session: str, batch: Batch) -> Late:
        """What a write would land, taken now."""
        with self._lock:
            self._check(sender, session, batch)
            rows = zip(batch.local.tolist(), batch.remote.tolist(), batch.sizes.tolist(), strict=True)
            return sender, session, [(far, ctypes.string_at(near, size)) for near, far, size in rows]

    def land(self, sender: str, session: str, pieces: Sequence[tuple[int, bytes]]) -> None:
        with self._lock:
            if session not in self._regions:
                return
            for address, data in pieces:
                self._within(session, address, len(data), sender)
            for address, data in pieces:
                ctypes.memmove(address, data, len(data))

    def _known(self, session: str, asker: str) -> list[Region]:
        try:
            return self._regions[session]
        except KeyError:
            raise EngineError(f"loopback: {asker} reaches no session {session}", settled=True) from None

    def _check(self, sender: str, session: str, batch: Batch) -> None:
        rows = zip(batch.local.tolist(), batch.remote.tolist(), batch.sizes.tolist(), strict=True)
        for near, far, size in rows:
            self._within(sender, near, size, sender)
            self._within(session, far, size, sender)

    def _within(self, owner: str, address: int, size: int, sender: str) -> None:
        regions = self._known(owner, sender)
        if not any(start <= address and address + size <= start + length for start, length in regions):
            text = f"loopback: {sender} reaches for {size} bytes at {address:#x}, which {owner} has not registered"
            self.violations.append(text)
            raise EngineError(text, settled=True)


class LoopbackEngine:
    """One peer of a fabric; `slice_descriptors` makes it slice its batches as the real engines do."""

    def __init__(self, session: str, fabric: Fabric, *, slice_descriptors: int | None = None) -> None:
        self._session = session
        self._fabric = fabric
        self._slice = slice_descriptors
        self.script = Script(fabric)
        fabric.join(session)

    @property
    def session(self) -> str:
        return self._session

    def register(self, regions: Sequence[Region]) -> None:
        self._fabric.register(self._session, regions)

    def write(self, session: str, sources: npt.ArrayLike, destinations: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        self._transfer(Operation.WRITE, session, check_batch(sources, destinations, sizes))

    def read(self, session: str, local: npt.ArrayLike, remote: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        self._transfer(Operation.READ, session, check_batch(local, remote, sizes))

    @property
    def busy_waits(self) -> bool:
        return False

    @property
    def sees_ends(self) -> bool:
        return True

    def peer_gone(self, session: str) -> bool:
        return not self._fabric.has(session)

    def close(self) -> None:
        self._fabric.leave(self._session)

    def _transfer(self, operation: Operation, session: str, batch: Batch) -> None:
        for part in split(batch, descriptors=self._slice or max(len(batch), 1)):
            self._call(operation, session, part)

    def _call(self, operation: Operation, session: str, batch: Batch) -> None:
        fault = self.script.meet(Call(operation, session, len(batch), batch.total_bytes))
        if fault.gate:
            fault.gate.pass_through()
        if fault.delay:
            threading.Event().wait(fault.delay)
        order = list(range(len(batch)))
        if fault.shuffle is not None:
            random.Random(fault.shuffle).shuffle(order)
        if fault.late and operation is Operation.WRITE:
            self.script.postpone(self._fabric.copy_out(self._session, session, batch))
        lands = fault.lands if fault.lands is not None else 0 if fault.error else len(batch)
        self._fabric.move(self._session, session, operation, batch, order[:lands])
        if fault.gate_after:
            fault.gate_after.pass_through()
        if fault.error:
            settled = not fault.late if fault.settled is None else fault.settled
            raise EngineError(
                f"loopback: {operation} failed ({fault.error}): {describe(batch, session)}",
                settled=settled,
                unfinished=fault.unfinished,
            )


def region_of(array: npt.NDArray[np.generic]) -> Region:
    """Where the bytes of a contiguous array lie."""
    return array.ctypes.data, array.nbytes
