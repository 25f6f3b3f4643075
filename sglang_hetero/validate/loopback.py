"""Stages: an engine moves bytes between two processes, on two devices where there are; and what it lets be registered.

The bytes are compared with what they must be by digest of the peer's whole memory, poisoned before, with memory behind
the registered part that nobody may touch.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from sglang_hetero.device import memory_info
from sglang_hetero.doctor.lines import Line, fail, ok, warn
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher.ports import Ports
from sglang_hetero.transfer.engine.base import EngineError, Words
from sglang_hetero.transfer.engine.native import NativeEngine

from . import engines, peer
from .child import Say
from .hearer import Hearer
from .stage import Settings

MIB = 1 << 20
SIZE = {True: 16 * MIB, False: 256 * MIB}
DESCRIPTORS = 64
"""Of one transfer: a layer's pages of a few requests, each a piece of its own."""
TURNS = 5
PEER_SECONDS = 240.0
"""For an answer of the other process: its first one comes behind the import of torch and the making of an engine."""
PROMISES = ("write", "read", "refusal")
LIMIT_PROMISES = ("largest region", "many regions")
WRONG_BYTES = "wrong bytes: do not serve with this engine, and report it"
NO_PULL = "SGLANG_HETERO_STATE=pull cannot be used here"
LARGEST = {True: 256 * MIB, False: 1024 * MIB}
"""Bytes at which a host's memory is not tried any further; a device's is, up to SHARE_OF_FREE."""
SHARE_OF_FREE = 0.8
NEEDED_BYTES = 64 * MIB
"""A region that every server registers: one layer's cache, or the staging arena."""
MANY = (64, 512, 4096)
NEEDED_REGIONS = 512
"""A server with 64 layers registers K, V, conv and SSM of each, and a draft's."""
CHIP_TRANSPORT = {"910b": engines.DEVICE_RDMA, "a3": engines.SDMA}
"""MemFabric's way on each chip (launch/lib/ascend.sh)."""


class _Peer:
    """The other process."""

    def __init__(self, kind: str, device: int, transport: str, store: str, nbytes: int) -> None:
        arguments = [kind, str(device), transport, store, str(nbytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang_hetero.validate.peer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._hearer = Hearer(self._process)
        try:
            said = self.answer()
            if "error" in said:
                raise engines.NoEngine(f"the other process: {said['error']}")
        except BaseException:
            self.close()
            raise
        self.session, self.address = str(said["session"]), int(said["address"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def ask(self, word: str) -> dict[str, Any]:
        """Its answer to one word."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next thing that it says; native code may print lines of its own before. Raises NoEngine if it ends."""
        deadline = time.monotonic() + PEER_SECONDS
        while (line := self._hearer.line(deadline)) is not None:
            if not line:
                raise engines.NoEngine(f"the other process has ended with status {self._process.wait()}")
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise engines.NoEngine(f"the other process has said nothing for {PEER_SECONDS:.0f} s")


def run(settings: Settings, argument: str, say: Say) -> None:
    """The loop-back over one transport."""
    transport, area = argument, area_of(argument)
    store = f"tcp://{engines.HOST}:{Ports(engines.HOST).free()}"
    nbytes = SIZE[settings.quick]
    other = 1 if settings.device != "cpu" and settings.count > 1 else 0
    wrong = _Wrong(area, transport, settings.chip)
    try:
        if transport != engines.MOONCAKE:
            engines.make_store(store)
        here = peer.memory(settings.device, 0, nbytes)
        engine = engines.wrap(engines.make(transport, role=engines.PREFILL, device=0, store=store), transport)
        engine.register([(here.data_ptr(), nbytes)])
        with _Peer(settings.device, other, transport, store, nbytes) as there:
            way = _Way(wrong, engine, here, there, nbytes)
            say(way.write())
            say(way.read())
            say(way.refusal())
    except HeteroError as error:
        remedy = "see the environment's lines and this stage's log; on an NPU LAUNCH_CHIP says which transport is its"
        for name in PROMISES:
            say(wrong.line(name, str(error), remedy))


def area_of(transport: str) -> str:
    """Name of the stage of a transport."""
    return f"loopback-{transport}"


@dataclass(frozen=True)
class _Wrong:
    """How a fault of a transport counts."""

    area: str
    transport: str
    chip: str

    def line(self, name: str, what: str, remedy: str) -> Line:
        """A failure, unless it is the way of another chip than this host's."""
        own = CHIP_TRANSPORT.get(self.chip, self.transport)
        if own != self.transport:
            return warn(self.area, name, what, f"not this chip's way, {own} is: nothing to do")
        return fail(self.area, name, what, remedy)


@dataclass(frozen=True)
class _Way:
    """An engine here, memory that it has registered, and the process at the other end."""

    wrong: _Wrong
    engine: NativeEngine
    here: torch.Tensor
    there: _Peer
    nbytes: int

    @property
    def columns(self) -> tuple[Words, Words, Words]:
        """Descriptors that bring every block to another place: the last one first."""
        size = self.nbytes // DESCRIPTORS
        places = np.arange(DESCRIPTORS, dtype=np.uint64) * np.uint64(size)
        here, there = np.uint64(self.here.data_ptr()), np.uint64(self.there.address)
        return here + places, there + places[::-1], np.full(DESCRIPTORS, size, np.uint64)

    def write(self) -> Line:
        """Write it all, several times."""
        sent = peer.pattern(self.nbytes, peer.SEED + 1)
        self.here[: self.nbytes].copy_(sent)
        seconds = [_seconds(lambda: self.engine.write(self.there.session, *self.columns)) for _ in range(TURNS)]
        if self.there.ask("digest")["digest"] != peer.digest(_guarded(_turned(sent))):
            return self.wrong.line("write", "the peer's memory is not what was written", WRONG_BYTES)
        return self._fast("write", seconds)

    def read(self) -> Line:
        """Read it all, several times. Only SGLANG_HETERO_STATE=pull needs it."""
        self.there.ask("fill")
        peer.poison(self.here)
        try:
            seconds = [_seconds(lambda: self.engine.read(self.there.session, *self.columns)) for _ in range(TURNS)]
        except EngineError as error:
            return warn(self.wrong.area, "read", str(error), f"{NO_PULL}; prepush and push need no reads")
        if peer.digest(self.here) != peer.digest(_guarded(_turned(peer.pattern(self.nbytes, peer.SEED)))):
            return self.wrong.line("read", "what was read is not what the peer has", NO_PULL)
        return self._fast("read", seconds)

    def refusal(self) -> Line:
        """A write behind what the peer has registered must fail, and change nothing: it is the last of all."""
        area, name = self.wrong.area, "refusal"
        try:
            behind = self.there.address + self.nbytes
            self.engine.write(self.there.session, [self.here.data_ptr()], [behind], [peer.GUARD // 2])
            refused = False
        except EngineError:
            refused = True
        if self.there.ask("digest")["digest"] != peer.digest(_guarded(peer.pattern(self.nbytes, peer.SEED))):
            return self.wrong.line(name, "a write behind the registered memory has changed it", WRONG_BYTES)
        if not refused:
            remedy = "nothing was changed, but a wrong address would not be told: see this stage's log"
            return warn(area, name, "a write behind the registered memory was not refused", remedy)
        return ok(area, name, "a write behind the registered memory is refused, and nothing there has changed")

    def _fast(self, name: str, seconds: list[float]) -> Line:
        gb = self.nbytes / statistics.median(seconds) / 1e9
        figures = {"GB/s": round(gb, 3), "MiB": self.nbytes / MIB}
        what = f"{self.nbytes // MIB} MiB in {DESCRIPTORS} descriptors, equal byte by byte, {gb:.2f} GB/s"
        return ok(self.wrong.area, name, what, **figures)


def _seconds(what: Callable[[], None]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def _turned(values: torch.Tensor) -> torch.Tensor:
    """What `_Way.columns` makes of bytes."""
    return values.reshape(DESCRIPTORS, -1).flip(0).flatten()


def _guarded(values: torch.Tensor) -> torch.Tensor:
    """Bytes as they are in a memory of `peer.memory`, with the poison behind them."""
    return torch.cat([values, torch.full((peer.GUARD,), peer.POISON, dtype=torch.uint8)])


def limits(settings: Settings, argument: str, say: Say) -> None:
    """How large a region may be, and how many there may be in one batch."""
    transport = argument
    wrong = _Wrong(limits_area(transport), transport, settings.chip)
    store = f"tcp://{engines.HOST}:{Ports(engines.HOST).free()}"
    try:
        if transport != engines.MOONCAKE:
            engines.make_store(store)
        upstream = engines.make(transport, role=engines.DECODE, device=0, store=store)
    except HeteroError as error:
        for name in LIMIT_PROMISES:
            say(wrong.line(name, str(error), "see the loop-back's lines"))
        return
    say(_largest(wrong, settings, upstream))
    say(_many(wrong, settings, upstream))


def limits_area(transport: str) -> str:
    """Name of the stage of a transport's limits."""
    return f"registration-{transport}"


def _registers(upstream: engines.Upstream, transport: str, regions: list[tuple[int, int]]) -> str:
    """Register and let go; why that cannot be, or an empty text."""
    engine = engines.wrap(upstream, transport)
    try:
        engine.register(regions)
    except EngineError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def _largest(wrong: _Wrong, settings: Settings, upstream: engines.Upstream) -> Line:
    place = torch.device(settings.device, 0) if settings.device != "cpu" else torch.device("cpu")
    free, _ = memory_info(place)
    most = int(free * SHARE_OF_FREE)
    if settings.device == "cpu":
        most = min(most, LARGEST[settings.quick])
    size, found, problem = NEEDED_BYTES, 0, ""
    while size <= most and not problem:
        region = peer.memory(settings.device, 0, size)
        problem = _registers(upstream, wrong.transport, [(region.data_ptr(), size)])
        found = found if problem else size
        del region
        size *= 2
    if found < NEEDED_BYTES:
        return wrong.line("largest region", problem or f"{free // MIB} MiB are free", "as the engine says")
    what = f"{found // MIB} MiB in one region" + (
        f"; twice as much is refused: {problem}" if problem else ", all tried"
    )
    return ok(wrong.area, "largest region", what, MiB=found / MIB)


def _many(wrong: _Wrong, settings: Settings, upstream: engines.Upstream) -> Line:
    piece = peer.ALIGN if settings.device != "cpu" else 4096
    count, problem = 0, ""
    for wanted in MANY:
        whole = peer.memory(settings.device, 0, 2 * wanted * piece)
        # Every second one: neighbours would be registered as one.
        regions = [(whole.data_ptr() + 2 * number * piece, piece) for number in range(wanted)]
        if problem := _registers(upstream, wrong.transport, regions):
            break
        count = wanted
    if count < NEEDED_REGIONS:
        return wrong.line("many regions", f"{count} in one batch, then: {problem}", "as the engine says")
    what = f"{count} regions in one batch" + (f"; more are refused: {problem}" if problem else ", all tried")
    return ok(wrong.area, "many regions", what, regions=count)
