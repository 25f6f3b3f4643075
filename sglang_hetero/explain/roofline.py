"""A roofline on paper: how long the bytes of one request take over a link and through memory, and nothing else.

What it leaves out makes the real thing slower: the start of a kernel and of an engine's call, descriptors, waiting, and
whatever else uses the link or the memory. What has no NPU here cannot be measured here; `validate` measures it there.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sglang_hetero.layout.component import Role
from sglang_hetero.reshard.explain import Explanation

MIB = 1 << 20
TO_AND_FRO = 2
"""A copy reads each byte and writes it."""
MICROSECONDS = 1e6


class Shape(StrEnum):
    """What ranks that send to several, or receive from several, have to share."""

    PAIRS = "nothing: a link between each two"
    PORT = "a port each"


@dataclass(frozen=True)
class Link:
    """per_second: bytes that one source's writes reach to one destination; measured, in one direction."""

    name: str
    per_second: float
    shape: Shape


@dataclass(frozen=True)
class Machine:
    """memory: bytes a second that the device's memory moves, nominal, reads and writes together."""

    name: str
    memory: float
    links: tuple[Link, ...]


MACHINES = {
    "910B": Machine(
        "Ascend 910B (Atlas A2)",
        1.6e12,
        (Link("HCCS", 19.2e9, Shape.PAIRS), Link("RoCE", 22.6e9, Shape.PORT)),
    ),
    "A3": Machine(
        "one die of an Ascend 910C (Atlas A3)",
        1.6e12,
        (Link("HCCS", 115.1e9, Shape.PORT), Link("RoCE", 22.7e9, Shape.PORT)),
    ),
}
"""Links: writes from device to device in blocks of 2 MiB, as CANN's HIXL publishes them for A2 and A3
(benchmarks/A2_benchmark_performance.md and its twin for A3); an A2's RoCE port has 200 Gb/s, 25e9 bytes. On an A2 each
two NPUs of a server have a link of their own; an A3's HCCS goes through switches, where ranks are taken to share what
one pair reaches, a cautious guess. Memory: half of what a 910C has, which is two dies: 3.2 TB/s in "Serving Large
Language Models on Huawei CloudMatrix384" (Zuo et al., 2025). Huawei publishes no figure for the 910B."""


class What(StrEnum):
    """Kinds of layers, by what they keep of a request."""

    ATTENTION = "attention layer: K and V"
    LINEAR = "linear layer: conv and SSM"
    DRAFT = "draft: K and V"


_LINEAR = (Role.CONV, Role.SSM)


@dataclass(frozen=True)
class Row:
    """What arrives at one decode rank. bytes and times are of one layer, or of all where `layers` is the request's.

    link_us: by link; from the first byte to the last. merge_us: from staging into the caches, 0 where SGLang's own path
    writes in place. pack_us: at the prefill rank that gathers most, where it must (P < D), else 0.
    """

    what: str
    layers: int
    bytes: int
    link_us: dict[str, float]
    merge_us: float
    pack_us: float


@dataclass(frozen=True)
class Roofline:
    """rows: one for each kind of layer, then the whole request."""

    machine: str
    decode_rank: int
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Nothing but dictionaries, lists, strings and numbers."""
        return asdict(self)


Bytes = defaultdict[int, float]
"""By source."""


def _none() -> Bytes:
    return defaultdict(float)


@dataclass
class _Layer:
    """What sources send to this decode rank, to all of them, and of the latter what each gathers."""

    here: Bytes = field(default_factory=_none)
    everywhere: Bytes = field(default_factory=_none)
    packed: Bytes = field(default_factory=_none)

    def add(self, source: int, size: float, *, here: bool, packed: bool) -> None:
        for sent, counts in ((self.here, here), (self.everywhere, True), (self.packed, packed)):
            if counts:
                sent[source] += size

    def join(self, other: "_Layer") -> None:
        for mine, theirs in zip(self._all(), other._all(), strict=True):
            for source, size in theirs.items():
                mine[source] += size

    def _all(self) -> tuple[Bytes, Bytes, Bytes]:
        return self.here, self.everywhere, self.packed


def roofline(explanation: Explanation, machine: Machine, decode_rank: int = 0) -> Roofline:
    """What one request's hand-over to one decode rank takes at least on these machines."""
    found: dict[tuple[What, int], _Layer] = defaultdict(_Layer)
    merges = False
    for number, source in enumerate(explanation.sources):
        for route in source.to:
            here = route.decode_rank == decode_rank
            merges |= here and route.staged
            for part in route.parts:
                size = part.bytes / len(part.layers)
                for layer in part.layers:
                    found[_kind(Role(part.role)), layer].add(number, size, here=here, packed=part.packed)
    rows = []
    for kind in What:
        own = [layer for (other, _), layer in found.items() if other is kind and layer.here]
        if own:
            # Layers of a kind differ in who sends them, at most: the one that takes longest stands for all.
            slowest = max(own, key=lambda layer: max(layer.here.values()))
            rows.append(_row(kind, len(own), slowest, machine, merges=merges))
    whole = _Layer()
    for each in found.values():
        whole.join(each)
    rows.append(_row("the request", sum(row.layers for row in rows), whole, machine, merges=merges))
    return Roofline(machine.name, decode_rank, tuple(rows))


def _kind(role: Role) -> What:
    if role.draft:
        return What.DRAFT
    return What.LINEAR if role in _LINEAR else What.ATTENTION


def _row(what: str, layers: int, sent: _Layer, machine: Machine, *, merges: bool) -> Row:
    total = sum(sent.here.values())
    return Row(
        str(what),
        layers,
        round(total),
        {link.name: _over(sent, link) for link in machine.links},
        _copied(total, machine) if merges else 0.0,
        _copied(max(sent.packed.values(), default=0.0), machine),
    )


def _over(sent: _Layer, link: Link) -> float:
    """Microseconds of the busiest link, or of the busiest port at either end."""
    busiest = max(sent.here.values())
    if link.shape is Shape.PORT:
        busiest = max(sum(sent.here.values()), *(sent.everywhere[source] for source in sent.here))
    return busiest / link.per_second * MICROSECONDS


def _copied(size: float, machine: Machine) -> float:
    """Microseconds."""
    return TO_AND_FRO * size / machine.memory * MICROSECONDS


def cells(row: Row, links: Sequence[str]) -> list[str]:
    """A row as text: what, layers, MiB, microseconds over each link, of the merge and of gathering."""
    times = [*(row.link_us[link] for link in links), row.merge_us, row.pack_us]
    return [row.what, str(row.layers), f"{row.bytes / MIB:,.2f}", *(f"{time:,.0f}" if time else "" for time in times)]


def header(links: Sequence[str]) -> list[str]:
    """Names of the cells."""
    return ["", "layers", "MiB", *(f"{link} us" for link in links), "merge us", "gather us"]
