"""Decode side: one prefill replica as this rank sees it: who its ranks are, and what comes from which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sglang_hetero.errors import TopologyError
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.layout.wire import decode as decode_manifest
from sglang_hetero.merge.assemble import Assembler, Memory
from sglang_hetero.reshard.plan import Plan, plan

from . import messages
from .lifetime import Stage
from .link import Addressee, Endpoint
from .pieces import DestinationSide, SourceSide, StageProgram, StateMode, Window, window_for


@dataclass(frozen=True)
class Addressees:
    """Who the sources are and where they hear us, by number: all that a request that has ended needs of them."""

    endpoints: tuple[Endpoint, ...]
    incarnations: tuple[str, ...]

    def is_source(self, incarnation: str, source: int) -> bool:
        """Whether source number `source` is the process that calls itself `incarnation`."""
        return 0 <= source < len(self.incarnations) and self.incarnations[source] == incarnation


@dataclass
class SourceSet:
    """All ranks (TP ranks of all pipeline stages) of one prefill replica, numbered as in the plan."""

    address: str
    """Of its bootstrap server."""
    topology: str
    plan: Plan
    window: Window
    destination: DestinationSide
    sides: tuple[SourceSide, ...]
    assembler: Assembler
    endpoints: tuple[Endpoint, ...]
    sessions: tuple[str, ...]
    """Of the sources' transfer engines, for reading."""
    programs: dict[StateMode, tuple[StageProgram, ...]] = field(default_factory=dict)
    registered: set[int] = field(default_factory=set)
    """Numbers of the sources that were sent our registration. One that has forgotten it says nothing about the next
    request: see `Inbox.heard`."""

    @cached_property
    def addressees(self) -> Addressees:
        """The sources without the plan, the same object each time."""
        return Addressees(self.endpoints, tuple(source.incarnation for source in self.sources))

    @property
    def ranks(self) -> tuple[Addressee, ...]:
        """The sources as those that are told something."""
        return tuple(map(Addressee, self.endpoints, self.addressees.incarnations))

    @property
    def sources(self) -> tuple[Manifest, ...]:
        return self.plan.sources

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The sources of each pipeline stage."""
        sizes = self.sources[0].coordinates
        return tuple(
            Stage(
                tuple(number for number, source in enumerate(self.sources) if source.coordinates.pp_rank == stage),
                self.window.units,
            )
            for stage in range(sizes.pp_size)
        )

    def programs_of(self, mode: StateMode) -> tuple[StageProgram, ...]:
        """The sequence of pieces of each stage."""
        if mode not in self.programs:
            self.programs[mode] = tuple(
                StageProgram(self.plan, stage, self.window.pages_per_piece, mode) for stage in range(len(self.stages))
            )
        return self.programs[mode]

    def bind_fields(self, source: int, units: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What a source is told of a request's window. units: per stage the offsets of its units."""
        offset, nbytes = self.window.areas[source]
        return {
            "source": self.sources[source].incarnation,
            "fingerprint": self.plan.fingerprint_of(source),
            "units": tuple(units[self.sources[source].coordinates.pp_rank]),
            "area_offset": offset,
            "area_bytes": nbytes,
            "pages_per_piece": dict(self.window.pages_per_piece),
        }


def source_set(
    address: str, topology: messages.Topology, own: Manifest, memory: Memory, *, unit_bytes: int, units: int
) -> SourceSet:
    """What comes from a replica to this decode rank. Raises HeteroError if the two do not go together."""
    ranks = {}
    for rank in topology.ranks:
        manifest = decode_manifest(rank.manifest)
        ranks[manifest.coordinates] = (manifest, Endpoint(rank.host, rank.port), rank.session)
    if not ranks:
        raise TopologyError(f"the prefill server at {address} has no ranks")
    made = plan([manifest for manifest, _, _ in ranks.values()], own)
    window = window_for(made, unit_bytes, units)
    places = [ranks[source.coordinates] for source in made.sources]
    return SourceSet(
        address,
        topology.topology,
        made,
        window,
        DestinationSide(made, window),
        tuple(SourceSide(made, number) for number in range(len(made.sources))),
        Assembler(made, memory),
        tuple(endpoint for _, endpoint, _ in places),
        tuple(session for _, _, session in places),
    )
