"""What one rank tells its peers about itself: where it stands, and what each byte of its caches means."""

import hashlib
from enum import StrEnum

import msgspec

from sglang_hetero.errors import ManifestError, TopologyError

from . import limits
from .axes import AxisName
from .checks import Struct, check_name
from .component import Component, Item, Role
from .row import Column


class Side(StrEnum):
    """The two sides of a disaggregated server."""

    PREFILL = "prefill"
    DECODE = "decode"


class Coordinates(Struct, frozen=True, kw_only=True):
    """Where a rank stands. tp is the attention TP group, so the ranks of one attention-DP replica."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        for dimension in ("tp", "pp", "dp"):
            rank, size = getattr(self, f"{dimension}_rank"), getattr(self, f"{dimension}_size")
            if not (1 <= size <= limits.MAX_RANKS and 0 <= rank < size):
                raise ManifestError(
                    f"{dimension}_rank {rank} of {dimension}_size {size}: ranks go from 0 to the size less 1, "
                    f"sizes from 1 to {limits.MAX_RANKS}"
                )

    def __str__(self) -> str:
        parts = [f"TP{self.tp_rank}/{self.tp_size}"]
        if self.pp_size > 1:
            parts.append(f"PP{self.pp_rank}/{self.pp_size}")
        if self.dp_size > 1:
            parts.append(f"DP{self.dp_rank}/{self.dp_size}")
        return " ".join(parts)


class Manifest(Struct, frozen=True, kw_only=True):
    """One rank's description of itself; consistent in itself once it exists.

    host: how a person finds the process. page_size: tokens. model: fingerprint of the checkpoint's configuration.
    incarnation: differs for each start of the process, so that addresses of a former one are never used. sglang: the
    release of SGLang that made the caches, as it tells it. row: columns of the metadata that goes with a first token.
    Raises ManifestError for what contradicts itself, TopologyError for heads that its TP size cannot shard.
    """

    side: Side
    host: str
    coordinates: Coordinates
    page_size: int
    model: str
    incarnation: str
    sglang: str
    components: tuple[Component, ...]
    row: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        for name in ("host", "model", "incarnation", "sglang"):
            check_name(getattr(self, name), name)
        if not 1 <= self.page_size <= limits.MAX_ELEMENTS:
            raise ManifestError(f"{self.label}: page_size is {self.page_size}, must be 1 to {limits.MAX_ELEMENTS}")
        if not 1 <= len(self.components) <= limits.MAX_COMPONENTS:
            raise ManifestError(
                f"{self.label}: {len(self.components)} components, must be 1 to {limits.MAX_COMPONENTS}"
            )
        if len(self.row) > limits.MAX_COLUMNS or len({column.name for column in self.row}) < len(self.row):
            raise ManifestError(
                f"{self.label}: {len(self.row)} columns of metadata, must be at most {limits.MAX_COLUMNS}, none twice"
            )
        if (nbytes := sum(column.nbytes for column in self.row)) > limits.MAX_ROW_BYTES:
            raise ManifestError(f"{self.label}: {nbytes} bytes of metadata, must be at most {limits.MAX_ROW_BYTES}")
        seen: set[tuple[Role, int]] = set()
        owners: dict[int, Component] = {}
        for component in self.components:
            try:
                self._check(component, seen)
                if owners.setdefault(component.addresses[0], component) is not component:
                    raise ManifestError(f"{component.role} lies where {owners[component.addresses[0]].role} lies")
            except (ManifestError, TopologyError) as error:
                raise type(error)(f"{self.label}: {error}") from None

    def _check(self, component: Component, seen: set[tuple[Role, int]]) -> None:
        for layer in component.layers:
            if (component.role, layer) in seen:
                raise ManifestError(f"layer {layer} of {component.role} is described twice")
            seen.add((component.role, layer))
        if component.item is Item.PAGE and component.axis(AxisName.TOKEN).size != self.page_size:
            raise ManifestError(
                f"{component.role}: its pages hold {component.axis(AxisName.TOKEN).size} tokens, page_size is "
                f"{self.page_size}"
            )
        component.check_sharding(self.coordinates.tp_size, self.coordinates.tp_rank)

    @property
    def label(self) -> str:
        """Name of the rank in messages and logs, for example `prefill TP1/2 (10.0.0.7:8998)`."""
        return f"{self.side} {self.coordinates} ({self.host})"

    def of(self, role: Role) -> tuple[Component, ...]:
        """The components of that role; several where layers differ in geometry."""
        return tuple(component for component in self.components if component.role is role)

    @property
    def roles(self) -> frozenset[Role]:
        """Roles that this rank holds."""
        return frozenset(component.role for component in self.components)

    @property
    def fingerprint(self) -> str:
        """Digest of the layout: for two ranks with the same one, an item of one is an item of the other byte for byte.

        It covers what the bytes mean, so model, release of SGLang, page size, TP rank and size, and the row of
        metadata; where the process runs, how many items it has and where they lie are left out. That sizes are equal
        means nothing.
        """
        ordered = sorted(self.components, key=lambda component: (component.role, component.layers))
        geometry = [_meaning(component) for component in ordered]
        tp = (self.coordinates.tp_rank, self.coordinates.tp_size)
        return digest((tp, self.page_size, self.model, self.sglang, geometry, self.row))


def _meaning(component: Component) -> object:
    """All of the component but where it lies; the stride along an axis of one element says nothing."""
    axes = [
        (axis.name, axis.size, axis.stride if axis.size > 1 else None, axis.segments, axis.live_rows)
        for axis in component.axes
    ]
    return (component.role, component.item, component.dtype, component.layers, component.encoding, axes)


def digest(value: object) -> str:
    """Hexadecimal digest of any value that msgspec can encode; the same in every process and on every machine."""
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).hexdigest()
