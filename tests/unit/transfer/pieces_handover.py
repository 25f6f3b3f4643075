"""A hand-over through units of staging, in one thread and without a network: what the transfer does with its pieces.

Sources write the pieces of each window in any order, decode merges them in any order, then the units are used again.
The ranks, and the bytes that must come out, are those of tests/reshard_oracle.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_hetero.layout import Item, Role
from sglang_hetero.merge.assemble import Assembler, pack_pages
from sglang_hetero.reshard import STRICT, Plan, Policy, plan
from sglang_hetero.transfer import verify
from sglang_hetero.transfer.pieces import (
    Coverage,
    DestinationSide,
    Piece,
    SourceSide,
    StageProgram,
    StateMode,
    Window,
    window_for,
)
from sglang_hetero.transfer.staging import Arena, per_stage
from tests.harness.oracle import SOURCE_POISON
from tests.reshard_oracle.handover import STAGING_POISON, Place, Request, decode_rank, places, prefill_ranks
from tests.reshard_oracle.model import Model
from tests.reshard_oracle.rank import Rank, Shape, first_difference


def least_unit(made: Plan) -> int:
    """Bytes of the smallest unit that can work: one page of every role, one layer's state."""
    stages: dict[int, int] = {}
    for number, source in enumerate(made.sources):
        side = SourceSide(made, number)
        stage = source.coordinates.pp_rank
        stages[stage] = stages.get(stage, 0) + side.area_bytes(dict.fromkeys(side.page_bytes, 1))
    return max(stages.values())


@dataclass(frozen=True)
class Staging:
    """How the receiver's staging is to be. unit: bytes, or how many times the least that can work."""

    window: int = 3
    times_least: float = 2.0
    unit: int | None = None
    mode: StateMode = StateMode.PREPUSH


class Receiver:
    """One decode rank with one request, and all sources of it."""

    def __init__(
        self,
        sources: Sequence[Rank],
        held: Sequence[Place],
        to: Rank,
        into: Place,
        *,
        request: Request,
        staging: Staging,
        policy: Policy = STRICT,
        seed: int = 1,
    ) -> None:
        self.sources, self.held, self.to, self.into, self.request = sources, held, to, into, request
        self.mode, self.policy, self.random = staging.mode, policy, np.random.default_rng(seed)
        manifests = [source.manifest for source in sources]
        self.plan = plan(manifests, to.manifest, policy)
        unit = staging.unit or int(least_unit(self.plan) * staging.times_least)
        self.window: Window = window_for(self.plan, unit, staging.window)
        self.side = DestinationSide(self.plan, self.window)
        self.memory = _memory(to)
        self.source_memory = [_memory(source) for source in sources]
        # A source makes its own, from the manifests in whatever order they came.
        self.at_source = plan(manifests[::-1], to.manifest, policy)
        self.source_sides = [SourceSide(self.at_source, number) for number in range(len(sources))]
        self.assembler = Assembler(self.plan, self.memory)
        self.coverage = Coverage(self.plan, len(into.pages), request.tokens if seed % 2 else None)
        stages = 1 + max(source.manifest.coordinates.pp_rank for source in sources)
        # A unit more than needed: a write outside the window would land in somebody's memory.
        self.arena = np.full((staging.window * stages + 1) * unit, STAGING_POISON, dtype=np.uint8)
        books = Arena(len(self.arena), unit)
        books.request("another", 1)
        books.request("ours", staging.window * stages)
        ((_, self.foreign), (_, offsets)) = books.grants()
        self.units = per_stage(offsets, stages)
        self.merged = 0

    def programs(self, stage: int) -> tuple[StageProgram, StageProgram]:
        """As the sources of a stage build it, and as decode does."""
        # Names of roles are what a message has.
        told = {Role(str(role)): pages for role, pages in self.window.pages_per_piece.items()}
        at_source = StageProgram(self.at_source, stage, told, self.mode)
        return at_source, StageProgram(self.plan, stage, self.window.pages_per_piece, self.mode)

    def run(self) -> None:
        """Everything from the first chunk to the last byte; asserts that it is complete then and not before."""
        request = self.request
        self.assembler.begin_empty(np.array(self.into.pages, dtype=np.int64))
        self.coverage.emptied()
        chunks = request.chunks or (range(len(self.into.pages)),)
        page_size = self.to.shape.page_size
        reads: list[tuple[int, Piece]] = []
        for stage in range(len(self.units)):
            program, ours = self.programs(stage)
            sequence: list[Piece] = []
            for chunk in chunks:
                last = chunk.stop == len(self.into.pages)
                used = min(request.tokens, chunk.stop * page_size) - chunk.start * page_size
                sequence += program.chunk(chunk.start, len(chunk), used, last=last)
            assert tuple(sequence) == ours.whole([chunk.stop for chunk in chunks], request.tokens)
            for piece in sequence:
                assert Piece.from_wire(*piece.to_wire()) == piece
            self._stage(stage, ours, list(enumerate(sequence)), push=True)
            reads += [(stage, piece) for piece in ours.reads(request.tokens)]
        for number, (stage, piece) in enumerate(reads):
            self._stage(stage, self.programs(stage)[1], [(number, piece)], push=False)
        assert self.coverage.complete and self.coverage.missing() == ""
        assert self.coverage.tokens == request.tokens or not self._pages_move
        assert (self._unit(self.foreign[0]) == STAGING_POISON).all(), "another request's unit was written"

    @property
    def _pages_move(self) -> bool:
        return any(share.item is Item.PAGE for share in self.plan.shares)

    def _stage(self, stage: int, ours: StageProgram, pieces: list[tuple[int, Piece]], *, push: bool) -> None:
        """Pieces of one stage, a window at a time."""
        window = self.window.units
        for start in range(0, len(pieces), window):
            batch = pieces[start : start + window]
            writes = []
            for seq, piece in batch:
                offset = self.units[stage][seq % window]
                self._unit(offset)[:] = STAGING_POISON
                sharers = (
                    ours.sharers(piece, len(self.into.pages))
                    if push
                    else frozenset(s for s in ours.sources if self.source_sides[s].parts(piece))
                )
                assert sharers == {s for s in range(len(self.sources)) if self.source_sides[s].parts(piece)}
                writes += [(piece, offset, source) for source in sharers]
            for index in self.random.permutation(len(writes)):
                self._write(*writes[index], push=push)
            for index in self.random.permutation(len(batch)):
                seq, piece = batch[index]
                self._merge(piece, self.units[stage][seq % window])

    def _unit(self, offset: int) -> np.ndarray:
        return self.arena[offset : offset + self.window.unit_bytes]

    def _write(self, piece: Piece, unit: int, source: int, *, push: bool) -> None:
        """What an engine does with one source's descriptors; checks that all of it lies in the source's own area."""
        rank, place = self.sources[source], self.held[source]
        begin, room = self.window.areas[source]
        written = np.zeros(room, dtype=bool)
        ids = np.array(place.pages, dtype=np.int64)
        for part, moves in self.source_sides[source].descriptors(piece, ids, place.slot):
            share, gathered = part.share, None
            if moves.packed:
                assert push, "what has to be gathered cannot be read"
                gathered = np.full(piece.pages * share.staged_bytes, STAGING_POISON, dtype=np.uint8)
                pages = torch.tensor(place.pages[piece.first_page : piece.first_page + piece.pages])
                memory = self.source_memory[source][share.role, part.layer]
                pack_pages(share, memory, pages, piece.tokens, torch.from_numpy(gathered))
            rows = zip(moves.source.tolist(), moves.staged.tolist(), moves.sizes.tolist(), strict=True)
            for start, staged, size in rows:
                assert staged + size <= room, f"{size} bytes at {staged} leave source {source}'s area of {room}"
                assert not written[staged : staged + size].any()
                written[staged : staged + size] = True
                data = rank.read(start, size) if gathered is None else gathered[start : start + size]
                self.arena[unit + begin + staged : unit + begin + staged + size] = data

    def _merge(self, piece: Piece, unit: int) -> None:
        assert not self.coverage.complete and self.coverage.missing()
        for role, areas in self.side.areas(piece, torch.from_numpy(self._unit(unit))):
            assert set(areas) == set(self.assembler.sources(role, piece.layer))
            if piece.role is None:
                self.assembler.merge_slot(role, piece.layer, torch.tensor([self.into.slot]), areas)
            else:
                pages = torch.tensor(self.into.pages[piece.first_page : piece.first_page + piece.pages])
                self.assembler.merge_pages(role, piece.layer, pages, piece.tokens, areas)
        self.coverage.add(piece)
        self.merged += 1
        assert (difference := self.digests_differ(piece)) is None, difference

    def digests_differ(self, piece: Piece) -> str | None:
        """What the verification mode says about a merged piece."""
        sent = {}
        for number, (memory, place) in enumerate(zip(self.source_memory, self.held, strict=True)):
            if self.source_sides[number].parts(piece):
                sent[number] = verify.source_digests(self.plan, number, piece, memory, place.pages, place.slot)
        found = verify.destination_digests(self.plan, piece, self.memory, self.into.pages, self.into.slot)
        return verify.compare(self.plan, piece, sent, found)

    def difference(self) -> str | None:
        """The first byte of the destination that is not what it must be."""
        expected = Rank(self.to.model, self.to.side, self.to.coordinates, self.to.shape)
        request = self.request
        expected.write(request.seed, self.into.pages, self.into.slot, request.tokens, skip=self.policy.start_empty)
        for role, page in itertools.product(self.plan.missing, self.into.pages):
            expected.fill_tail(role, page, 0, 0x00)
        used = request.tokens - (len(self.into.pages) - 1) * self.to.shape.page_size
        for role, form in self.to.shape.formats.items():
            if form.encoding != "plain":
                expected.fill_tail(role, self.into.pages[-1], used, SOURCE_POISON)
        return first_difference(expected, self.to)


def serve(
    model: Model,
    prefill: tuple[int, Shape],
    decode: tuple[int, Shape],
    request: Request,
    staging: Staging,
    *,
    stages: int = 1,
    dp: tuple[int, int] = (0, 1),
    policy: Policy = STRICT,
    decode_model: Model | None = None,
    seed: int = 7,
) -> list[Receiver]:
    """One request from all ranks of a prefill replica to all decode ranks; every byte of these is compared."""
    random = np.random.default_rng(seed)
    sources = prefill_ranks(model, prefill[0], prefill[1], stages=stages, dp=dp)
    held = places(random, len(sources), prefill[1], request.tokens)
    for source, place in zip(sources, held, strict=True):
        source.write(request.seed, place.pages, place.slot, request.tokens)
    receivers = []
    for rank in range(decode[0]):
        to = decode_rank(decode_model or model, decode[0], rank, decode[1])
        into = places(random, 1, decode[1], request.tokens)[0]
        receiver = Receiver(sources, held, to, into, request=request, staging=staging, policy=policy, seed=seed + rank)
        receiver.run()
        assert (found := receiver.difference()) is None, found
        receivers.append(receiver)
    return receivers


def _memory(rank: Rank) -> dict[tuple[Role, int], torch.Tensor]:
    return {key: torch.from_numpy(rank.bytes_from(buffer.address)) for key, buffer in rank.buffers.items()}
