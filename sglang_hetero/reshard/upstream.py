"""What stock SGLang 0.5.23 would do for the same hand-over: the baseline that `explain` compares with.

Counts follow sglang/srt/disaggregation/mooncake/conn.py (`send_kvcache_slice`, `_send_mamba_state_slice`) and
disaggregation/utils.py (`compute_mamba_state_slice_blocks`): with unequal TP sizes one descriptor per token slot and
entry for attention KV, one per conv segment for the state; with equal sizes one per run of pages and one per slot.
"""

from dataclasses import dataclass

from sglang_hetero.layout.axes import AxisName, Sharding
from sglang_hetero.layout.component import Component, Item, Role
from sglang_hetero.layout.manifest import Manifest

from .bind import Pages, item_runs
from .plan import Plan


@dataclass(frozen=True)
class Upstream:
    """One stock sender's share of one request, and what is known to be wrong with it.

    senders: prefill ranks that write heads to this decode rank, replicas included.
    """

    kv_descriptors: int
    kv_descriptor_bytes: int
    state_descriptors: int
    senders: int
    faults: tuple[str, ...]


def upstream(plan: Plan, pages: Pages, chunks: list[range]) -> Upstream:
    """The stock path's figures for a request that lies in `pages` of the first source, sent in `chunks`."""
    source, destination = plan.sources[0], plan.destination
    source_tp, destination_tp = source.coordinates.tp_size, destination.coordinates.tp_size
    equal = source_tp == destination_tp
    kv = state = largest = 0
    runs = sum(len(item_runs(pages[chunk.start : chunk.stop])) for chunk in chunks)
    for component in source.components:
        layers = len(component.layers)
        if component.item is Item.SLOT:
            state += layers * (1 if equal else _state_blocks(component))
        elif equal or _replicated(component):
            kv += layers * runs
            largest = max(largest, component.item_stride * max(len(chunk) for chunk in chunks))
        else:
            kv += layers * len(pages) * source.page_size
            largest = max(largest, _token_bytes(component, destination))
    return Upstream(
        kv, largest, state, 1 if equal else max(1, source_tp // destination_tp), tuple(_faults(source, destination, kv))
    )


def _replicated(component: Component) -> bool:
    return all(segment.sharding is Sharding.REPLICATED for segment in component.cut_axis.segments)


def _state_blocks(component: Component) -> int:
    return len(component.cut_axis.segments) if component.role is Role.CONV else 1


def _token_bytes(component: Component, destination: Manifest) -> int:
    """Bytes of one token's descriptor: the heads that both ranks have."""
    heads = component.cut_axis.size
    for other in destination.of(component.role):
        heads = min(heads, other.cut_axis.size)
    return heads * component.axis(AxisName.CHANNEL).size * component.itemsize


# Measured: Mooncake's TCP transport takes batches of 1,024 descriptors and refuses 4,096; docs/upstream_faults.md.
_REFUSED_BATCH = 4096


def _faults(source: Manifest, destination: Manifest, kv: int) -> list[str]:
    source_tp, destination_tp = source.coordinates.tp_size, destination.coordinates.tp_size
    if source_tp == destination_tp:
        return []
    faults = []
    if max(source_tp, destination_tp) % min(source_tp, destination_tp):
        faults.append(f"TP {source_tp} to {destination_tp}: neither divides the other, which is not checked")
    for component in source.of(Role.CONV):
        window, channel = component.axis(AxisName.WINDOW), component.axis(AxisName.CHANNEL)
        if window.stride > channel.stride:
            faults.append("conv: the window is taken for the channels, other requests' slots are overwritten")
            break
    if kv >= _REFUSED_BATCH:
        faults.append("attention KV: a batch of so many descriptors is refused over TCP and the peer is given up")
    return faults
