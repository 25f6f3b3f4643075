"""P prefill ranks and D decode ranks in one process: real threads and memory, a network and a clock of the test's."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from sglang_hetero.errors import ControlError
from sglang_hetero.layout import Coordinates, Side
from sglang_hetero.reshard import plan
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fabric, LoopbackEngine
from sglang_hetero.transfer.lifetime.stillness import AWAY_SECONDS
from sglang_hetero.transfer.outbox import FirstToken
from sglang_hetero.transfer.pieces import StateMode
from sglang_hetero.transfer.reception import Progress, Settings
from sglang_hetero.transfer.sources import SourceSet
from tests.reshard_oracle.handover import Place
from tests.reshard_oracle.model import Model, stage_of
from tests.reshard_oracle.rank import Shape
from tests.unit.transfer.pieces_handover import least_unit

from .network import Network
from .nodes import DecodeNode, PrefillNode, RealRank, topology_of
from .parts import Clock, Crashes, Request

SECONDS = 20.0
"""A test that waits longer has found a hang."""
BOOKS_EVERY = 8
"""Steps between two looks at the books, which take two thirds as long as a step."""
_worlds = itertools.count()


class World:
    """The ranks of one prefill replica and of one decode server."""

    def __init__(
        self,
        model: Model,
        tp: tuple[int, int],
        *,
        stages: int = 1,
        mode: StateMode = StateMode.PREPUSH,
        window: int = 3,
        times_least: float = 2.0,
        capacity: int = 2,
        page_size: int = 4,
        pages: int = 40,
        slots: int = 12,
        verify: bool = False,
        parallel: bool = True,
        seed: int = 1,
        packs: int = 2,
        pack_bytes: int | None = None,
        shapes: tuple[Shape, Shape] | None = None,
        engine: Callable[[str, Fabric], LoopbackEngine] = LoopbackEngine,
        network: Callable[[int], Network] = Network,
        announce: bool = True,
        decode_model: Model | None = None,
    ) -> None:
        """capacity: requests whose windows the arena holds. announce: tell prefill its topology. decode_model: what
        decode has, if it is something else."""
        self.tag = f"w{next(_worlds)}"
        self.models = {Side.PREFILL: model, Side.DECODE: decode_model or model}
        self.tp, self.stages, self.engine = tp, stages, engine
        self.network, self.fabric, self.clock = network(seed), Fabric(), Clock()
        self.random = np.random.default_rng(seed)
        self.shapes = shapes or (Shape(page_size, pages, slots), Shape(page_size, pages, slots))
        self._free = [self._ids(shape) for shape in self.shapes]
        self.requests: dict[int, Request] = {}
        self._steps = 0
        sources = [self._rank(Side.PREFILL, r, s) for s in range(stages) for r in range(tp[0])]
        ranks = [self._rank(Side.DECODE, r, 0) for r in range(tp[1])]
        unit = max(int(least_unit(plan([s.manifest for s in sources], r.manifest)) * times_least) for r in ranks)
        self.unit = -(-unit // 64) * 64
        self.units = window * stages * capacity
        self.settings = Settings(self.unit, window, mode, parallel, verify, 20.0, 30.0)
        self._packs = (pack_bytes or self.unit, packs)
        self.prefill = [self._prefill(rank) for rank in sources]
        self.decode = [self._decode(rank) for rank in ranks]
        self.topology = topology_of(self.prefill)
        self.sets: list[SourceSet] = [node.side.join("prefill", self.topology) for node in self.decode]
        self._crashes = Crashes()
        logging.getLogger("sglang_hetero.transfer").addHandler(self._crashes)
        if announce:
            self.announce()

    def announce(self) -> None:
        for node in self.prefill:
            node.side.topology(self.topology)

    def _ids(self, shape: Shape) -> tuple[list[int], list[int]]:
        pages = [int(page) for page in self.random.permutation(np.arange(1, shape.pages + 1))]
        return pages, [int(slot) for slot in self.random.permutation(np.arange(1, shape.slots + 1))]

    def _rank(self, side: Side, rank: int, stage: int) -> RealRank:
        tp, stages = (self.tp[0], self.stages) if side is Side.PREFILL else (self.tp[1], 1)
        place = Coordinates(tp_rank=rank, tp_size=tp, pp_rank=stage, pp_size=stages)
        model = stage_of(self.models[side], stage, stages)
        name = f"{self.tag}{side[0]}{stage}{rank}"
        return RealRank(model, side, place, self.shapes[side is Side.DECODE], name)

    def _prefill(self, rank: RealRank) -> PrefillNode:
        nbytes, packs = self._packs
        return PrefillNode(
            rank.manifest.host,
            rank,
            self.fabric,
            self.network,
            control=self.control,
            clock=self.clock,
            pack_bytes=nbytes,
            packs=packs,
        )

    def _decode(self, rank: RealRank, name: str = "") -> DecodeNode:
        return DecodeNode(
            name or rank.manifest.host,
            rank,
            self.fabric,
            self.network,
            settings=self.settings,
            units=self.units,
            clock=self.clock,
            engine=self.engine,
        )

    def control(self, message: messages.Message) -> None:
        """The control service: each target gets the message with its own epoch."""
        first = messages.decode(messages.encode(message))
        assert isinstance(first, messages.FirstGeneration)
        for target in first.targets:
            for node in self.decode:
                if node.identity == target.identity:
                    own = replace(first, epoch=target.epoch, targets=(target,))
                    try:
                        self.network.put("control", node.name, own)
                    except OSError as error:
                        raise ControlError(str(error)) from None  # as the client and backend/peers.py

    def restart_decode(self, number: int) -> DecodeNode:
        """Another process takes a decode rank's place, at the same endpoint; the former one is dead."""
        old = self.decode[number]
        old.engine.close()
        old.side.close()
        self.network.detach(old.name)
        rank = self._rank(Side.DECODE, number, 0)
        node = self.decode[number] = self._decode(rank, name=f"{rank.manifest.host}'{rank.manifest.incarnation}")
        self.sets[number] = node.side.join("prefill", self.topology)
        return node

    def restart_prefill(self, number: int) -> PrefillNode:
        """The same for a prefill rank; the others of its replica stay, and all learn the new topology."""
        old = self.prefill[number]
        old.engine.close()
        old.side.close()
        self.network.detach(old.name)
        place = old.rank.coordinates
        node = self.prefill[number] = self._prefill(self._rank(Side.PREFILL, place.tp_rank, place.pp_rank))
        before = self.topology
        self.topology = topology_of(self.prefill)
        assert before.topology != self.topology.topology
        self.announce()
        for position, each in enumerate(self.decode):
            self.sets[position] = each.side.join("prefill", self.topology)
            each.side.gone(frozenset({old.rank.manifest.incarnation}))
        return node

    # What the schedulers do.

    def request(
        self,
        room: int,
        tokens: int,
        *cuts: int,
        seed: int = 0,
        gate: Callable[[], bool] | None = None,
        computed: bool = True,
    ) -> Request:
        """Pages and slots everywhere, the prompt's caches at prefill. cuts: pages after each chunk but the last.

        computed: whether prefill's caches hold the prompt; otherwise they are somebody else's yet.
        """
        pages = -(-tokens // self.shapes[0].page_size)
        source = self._place(0, pages)
        places = [self._place(1, pages)] * len(self.decode)
        made = Request(room, tokens, (*cuts, pages), seed or room, source, places)
        if gate is not None:
            made.gate = gate
        for node in self.prefill:
            for rank in (node.rank, node.twin)[not computed :]:
                rank.write(made.seed, source.pages, source.slot, tokens)
        self.requests[room] = made
        return made

    def _place(self, side: int, pages: int) -> Place:
        free, slots = self._free[side]
        assert len(free) >= pages and slots, "the test has more requests than pages"
        return Place(tuple(free.pop() for _ in range(pages)), slots.pop())

    def open(self, request: Request) -> Request:
        """Decode's scheduler: metadata is sent."""
        request.bound_before = {node.name: node.events.count("bound", request.room) for node in self.prefill}
        for node, known, place in zip(self.decode, self.sets, request.places, strict=True):
            node.side.open(request.room, known, np.array(place.pages), place.slot)
        return request

    def start(self, room: int, tokens: int, *cuts: int, **options: object) -> Request:
        """A request on both sides: prefill's schedulers have it, and decode's have pages for it."""
        for node in self.prefill:
            node.side.claim(room)
        return self.open(self.request(room, tokens, *cuts, **options))  # type: ignore[arg-type]

    def is_bound(self, request: Request) -> bool:
        return all(node.events.count("bound", request.room) > request.bound_before[node.name] for node in self.prefill)

    def send_chunk(self, request: Request, **changes: object) -> None:
        """Prefill's schedulers hand the next chunk over."""
        for node in self.prefill:
            self.send_chunk_of(node, request, request.sent, **changes)
        request.sent += 1

    def send_chunk_of(self, node: PrefillNode, request: Request, number: int, **changes: object) -> None:
        """One scheduler hands a chunk over."""
        page_size = self.shapes[0].page_size
        begin, end = ((0, *request.ends)[number], request.ends[number])
        last = number == len(request.ends) - 1
        place = node.rank.coordinates
        speaks = last and place.tp_rank == 0 and place.pp_rank == place.pp_size - 1
        fields: dict[str, object] = {
            "first_page": begin,
            "pages": np.array(request.source.pages[begin:end]),
            "tokens": min(request.tokens, end * page_size) - begin * page_size,
            "last": last,
            "slot": request.source.slot if last else -1,
            "first": FirstToken(7000 + request.seed, (b"row",), request.tokens) if speaks else None,
            "ready": request.gate,
        }
        node.side.send(request.room, **{**fields, **changes})  # type: ignore[arg-type]

    def step(self, *, send: bool = True) -> None:
        """Once around: messages, prefill's polls and chunks, decode's polls."""
        self.network.pump()
        for request in list(self.requests.values()):
            for node in self.prefill:
                node.side.check(request.room)
            if send and request.sent < len(request.ends) and request.bound_before and self.is_bound(request):
                self.send_chunk(request)
            for node in self.decode:
                if node.side.holds(request.room):
                    progress = request.results[node.name] = node.side.poll(request.room)
                    if progress is Progress.FAILED:
                        request.reasons[node.name] = node.side.reason(request.room)
        self._steps += 1
        if self._steps % BOOKS_EVERY == 0:
            self.check_books()

    def check_books(self) -> None:
        """The books of every side agree, at any time."""
        for node in (*self.prefill, *self.decode):
            assert not (wrong := node.side.check_integrity()), wrong

    def until(self, true: Callable[[], bool], *, send: bool = True, what: str = "") -> None:
        """Go around until it is so."""
        end = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < end, f"{what or 'it'} did not happen: {self.describe()}"
            self.step(send=send)
            time.sleep(0.0003)

    def rounds(self, count: int = 20, *, send: bool = True) -> None:
        """Go around a few times, for what must not happen."""
        for _ in range(count):
            self.step(send=send)
            time.sleep(0.001)

    def elapse(self, seconds: float) -> None:
        """Let time go by in which every rank is polled; a leap would be a pause of the process."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(self.clock.now + AWAY_SECONDS / 2, end)
            self.step()

    def describe(self) -> str:
        states = [(node.name, node.side.state) for node in (*self.prefill, *self.decode)]
        results = {room: (one.sent, one.results, one.reasons) for room, one in self.requests.items()}
        return f"{states} {results} {[n.events.reasons for n in self.prefill]} {self.network.errors}"

    def epoch(self, room: int, rank: int = 0) -> int:
        """Of the newest use of a room at a decode rank."""
        name = self.decode[rank].name
        binds = [one.message for one in self.network.sent(messages.Bind, room=room) if one.sender == name]
        return max(bind.epoch for bind in binds)

    def ids(self, node: PrefillNode | DecodeNode, room: int, rank: int = 0) -> dict[str, object]:
        """Room, epoch (of that decode rank) and incarnation of a message that `node` would send."""
        return {"room": room, "epoch": self.epoch(room, rank), "incarnation": node.rank.manifest.incarnation}

    def complete(self, request: Request) -> bool:
        arrived = all(request.results.get(node.name) is Progress.COMPLETE for node in self.decode)
        return arrived and all(node.events.count("succeeded", request.room) for node in self.prefill)

    def failed(self, request: Request) -> bool:
        """On all ranks of both sides."""
        ours = all(request.results.get(node.name) is Progress.FAILED for node in self.decode)
        return ours and all(node.side.failure(request.room) is not None for node in self.prefill)

    def end(self, request: Request) -> None:
        """The schedulers let go. What did not arrive is somebody else's memory from now on."""
        for node, known, place in zip(self.decode, self.sets, request.places, strict=True):
            done = request.results.get(node.name) is Progress.COMPLETE
            if done:
                assert node.side.first(request.room).token == 7000 + request.seed
                node.expect(request.seed, place, request.tokens, empty=known.plan.missing)
            node.side.settle(request.room)
            if not done:
                node.rank.scrub(place)
        for node in self.prefill:
            node.side.release(request.room)
        del self.requests[request.room]

    def serve(self, *requests: Request) -> None:
        """All of these must arrive, byte for byte."""
        self.until(lambda: all(self.complete(request) for request in requests), what="completion")
        for request in requests:
            self.end(request)

    # What must hold.

    @property
    def idle(self) -> bool:
        """Whether every side holds what it held at the start."""
        sources = all(s["rooms"] == s["in_flight"] == 0 for s in (node.side.state for node in self.prefill))
        return sources and all(
            s["units_free"] == s["units"] and s["rooms"] == s["inboxes"] == s["waiting"] == 0
            for s in (node.side.state for node in self.decode)
        )

    def check(self, *, idle: bool = True) -> None:
        """Bytes, violations, threads, and, if wanted, that everything is free again."""
        if idle:
            self.until(lambda: self.idle, what="everything free again")
        self.check_books()
        assert not self.network.errors, self.network.errors
        assert not self.fabric.violations, self.fabric.violations
        assert not self._crashes.found, self._crashes.found
        for node in (*self.prefill, *self.decode):
            assert (difference := node.difference()) is None, difference
        names = [thread.name for thread in threading.enumerate() if self.tag in thread.name]
        mergers = len({name for name in names if "merger" in name})
        movers = sum(node.side.state["peers"] for node in self.prefill)
        assert mergers == len(self.decode), names
        assert sum("mover" in name for name in names) == movers, names

    def close(self) -> None:
        logging.getLogger("sglang_hetero.transfer").removeHandler(self._crashes)
        for node in (*self.prefill, *self.decode):
            node.side.close()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def labels(nodes: Sequence[PrefillNode] | Sequence[DecodeNode]) -> list[str]:
    return [node.rank.manifest.label for node in nodes]
