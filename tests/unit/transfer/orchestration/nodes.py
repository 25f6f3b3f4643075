"""One prefill or decode rank of a test: oracle caches at real addresses, an engine, and the side under test."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from sglang_hetero.device import ForwardLane, Lane
from sglang_hetero.layout import Coordinates, Role, Side
from sglang_hetero.layout.wire import encode as encode_manifest
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.decode import DecodeSide
from sglang_hetero.transfer.engine.loopback import Fabric, LoopbackEngine
from sglang_hetero.transfer.link import Endpoint
from sglang_hetero.transfer.prefill import PrefillSide
from sglang_hetero.transfer.reception import Identity, Settings
from sglang_hetero.transfer.writer import PackBuffers
from tests.harness.oracle import DESTINATION_POISON, repeated_byte
from tests.reshard_oracle.handover import STAGING_POISON, Place
from tests.reshard_oracle.model import Model
from tests.reshard_oracle.rank import Bytes, Rank, Shape, first_difference

from .network import Network

_incarnations = itertools.count(1)
POOL_BYTES = 4 << 20


class RealRank(Rank):
    """An oracle rank whose buffers lie at real addresses."""

    def __init__(self, model: Model, side: Side, coordinates: Coordinates, shape: Shape, name: str) -> None:
        self._pool = np.zeros(POOL_BYTES, dtype=np.uint8)
        self._pool_at = 0
        super().__init__(model, side, coordinates, shape)
        incarnation = f"{name}-{next(_incarnations)}"
        self.manifest = replace(self.manifest, incarnation=incarnation, host=name)
        self.memory = {key: torch.from_numpy(self.bytes_from(buffer.address)) for key, buffer in self.buffers.items()}

    def _allocate(self, nbytes: int) -> tuple[int, Bytes]:
        # Aligned, and with a gap behind, so that a copy past an end meets nothing that is registered.
        start = -(-(self._pool.ctypes.data + self._pool_at) // 4096) * 4096 - self._pool.ctypes.data
        self._pool_at = start + nbytes + 4096
        assert self._pool_at <= POOL_BYTES, "the caches of a test are too large for its pool"
        memory = self._pool[start : start + nbytes]
        memory[:] = self.poison
        self.allocations.append((memory.ctypes.data, memory))
        return memory.ctypes.data, memory

    def twin(self) -> Rank:
        """A poisoned rank of the same kind, for expectations."""
        return Rank(self.model, self.side, self.coordinates, self.shape)

    def scrub(self, place: Place) -> None:
        """The place is another owner's: poison it, so that a late merge is seen."""
        for buffer in self.buffers.values():
            items = (place.slot,) if buffer.tensor.item == "slot" else place.pages
            for item in items:
                buffer.items[item] = repeated_byte(DESTINATION_POISON, buffer.tensor.itemsize)


def aligned_bytes(nbytes: int, fill: int) -> torch.Tensor:
    """uint8, at a multiple of 4096."""
    whole = torch.full((nbytes + 4096,), fill, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    return whole[start : start + nbytes]


class Events:
    """What a prefill rank's scheduler would learn."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.reasons: dict[int, str] = {}

    def bound(self, room: int) -> None:
        self.log.append(("bound", room))

    def succeeded(self, room: int) -> None:
        self.log.append(("succeeded", room))

    def forgotten(self, room: int) -> None:
        self.log.append(("forgotten", room))

    def failed(self, room: int, reason: str) -> None:
        self.log.append(("failed", room))
        self.reasons[room] = reason

    def count(self, what: str, room: int) -> int:
        return self.log.count((what, room))


class PrefillNode:
    """A prefill rank."""

    def __init__(
        self,
        name: str,
        rank: RealRank,
        fabric: Fabric,
        network: Network,
        *,
        control: Callable[[messages.Message], None],
        clock: Callable[[], float],
        pack_bytes: int,
        packs: int = 2,
        stall_seconds: float = 30.0,
        port: int = 0,
    ) -> None:
        self.name, self.rank, self.events = name, rank, Events()
        self.engine = LoopbackEngine(rank.manifest.incarnation, fabric)
        memory = aligned_bytes(packs * pack_bytes, STAGING_POISON)
        regions = [(address, len(data)) for address, data in rank.allocations]
        self.engine.register([*regions, (memory.data_ptr(), memory.numel())])
        self.endpoint = Endpoint(name, port or 1)
        self.twin = rank.twin()
        self.packs = PackBuffers(memory, pack_bytes)
        self.side = PrefillSide(
            manifest=rank.manifest,
            engine=self.engine,
            memory=rank.memory,
            packs=self.packs,
            lane=Lane(torch.device("cpu")),
            post=network.post(name),
            control=control,
            events=self.events,
            stall_seconds=stall_seconds,
            clock=clock,
        )
        network.attach(name, self.endpoint, self.side.handle)

    @property
    def entry(self) -> messages.RankEntry:
        """As the topology lists it."""
        return messages.RankEntry(
            encode_manifest(self.rank.manifest), self.endpoint.host, self.endpoint.port, self.engine.session
        )

    def difference(self) -> str | None:
        return first_difference(self.twin, self.rank)


class DecodeNode:
    """A decode rank."""

    def __init__(
        self,
        name: str,
        rank: RealRank,
        fabric: Fabric,
        network: Network,
        *,
        settings: Settings,
        units: int,
        clock: Callable[[], float],
        engine: Callable[[str, Fabric], LoopbackEngine] = LoopbackEngine,
    ) -> None:
        self.name, self.rank = name, rank
        self.engine = engine(rank.manifest.incarnation, fabric)
        self.arena = aligned_bytes(units * settings.unit_bytes, STAGING_POISON)
        # Staging only: a remote write to a live cache is a violation of the fabric.
        self.engine.register([(self.arena.data_ptr(), self.arena.numel())])
        self.endpoint = Endpoint(name.partition("'")[0], 1)
        self.identity = rank.manifest.incarnation.encode()
        self.twin = rank.twin()
        self.side = DecodeSide(
            manifest=rank.manifest,
            engine=self.engine,
            memory=rank.memory,
            arena=self.arena,
            settings=settings,
            forward=ForwardLane(torch.device("cpu")),
            post=network.post(name),
            identity=Identity(self.endpoint, self.identity),
            clock=clock,
        )
        network.attach(name, self.endpoint, self.side.handle)

    def expect(self, seed: int, place: Place, tokens: int, *, empty: frozenset[Role] = frozenset()) -> None:
        """A request has arrived here. empty: what nobody sends."""
        self.twin.write(seed, place.pages, place.slot, tokens, skip=empty)
        for role, page in itertools.product(empty, place.pages):
            self.twin.fill_tail(role, page, 0, 0x00)

    def difference(self) -> str | None:
        return first_difference(self.twin, self.rank)


def topology_of(nodes: Sequence[PrefillNode]) -> messages.Topology:
    """As the control service would tell it."""
    name = " ".join(str(hash(node.rank.manifest.incarnation)) for node in nodes)[:100]
    return messages.Topology(
        incarnation="control", ready=True, topology=name, ranks=tuple(node.entry for node in nodes)
    )
