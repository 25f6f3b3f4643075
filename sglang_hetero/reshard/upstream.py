"""What stock SGLang 0.5.23 would do for the same hand-over: the baseline that `explain` compares with.

Counts follow sglang/srt/disaggregation/mooncake/conn.py (`send_kvcache_slice`, `_send_mamba_state_slice`) and
disaggregation/utils.py (`compute_mamba_state_slice_blocks`), with SGLang's optional staging buffer off, as it is by
default: with unequal TP sizes one descriptor per token slot and entry for attention KV, and for conv one per segment
where SGLang knows the segments; with equal sizes one per run of pages and one per slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Component, Item, Role
from sglang_hetero.layout.manifest import Manifest

from .bind import Pages, item_runs
from .compatibility import roles_of
from .plan import Plan


@dataclass(frozen=True)
class Upstream:
    """What one stock sender would send to one decode rank of one request, and what is known to be wrong with it.

    kv_senders, state_senders: prefill ranks that write attention KV and state to this decode rank, replicas included.
    """

    kv_descriptors: int
    kv_descriptor_bytes: int
    state_descriptors: int
    kv_senders: int
    state_senders: int
    faults: tuple[str, ...]


def upstream(plan: Plan, pages: Pages, chunks: Sequence[range]) -> Upstream:
    """The stock path's figures for a request that lies in `pages` of the first source, sent in `chunks`."""
    source, destination = plan.sources[0], plan.destination
    source_tp, destination_tp = source.coordinates.tp_size, destination.coordinates.tp_size
    equal = source_tp == destination_tp
    state = largest = 0
    kv_of_chunks = [0] * len(chunks)
    for component in source.components:
        layers = len(component.layers)
        if component.item is Item.SLOT:
            state += layers * (1 if equal else _state_blocks(component, source))
            continue
        whole_pages = equal or _latent(component)
        for number, chunk in enumerate(chunks):
            runs = item_runs(pages[chunk.start : chunk.stop])
            tokens = len(chunk) * source.page_size
            kv_of_chunks[number] += layers * (len(runs) if whole_pages else tokens)
            if whole_pages:
                largest = max(largest, component.item_stride * max(len(run) for run in runs))
        if not whole_pages:
            largest = max(largest, _token_bytes(component, destination))
    senders = 1 if equal else max(1, source_tp // destination_tp)
    return Upstream(
        kv_descriptors=sum(kv_of_chunks),
        kv_descriptor_bytes=largest,
        state_descriptors=state,
        # Of ranks that hold the same latent rows one sends them; heads are sent by every rank, replica or not.
        kv_senders=1 if _has_kda(source) else senders,
        state_senders=senders,
        faults=(
            *speculation_faults(plan.sources, destination),
            *(() if equal else _faults(source, destination, max(kv_of_chunks))),
        ),
    )


def speculation_faults(sources: Sequence[Manifest], destination: Manifest) -> Iterator[str]:
    """What the stock path does wrong whatever the TP sizes, because the two sides speculate differently.

    sources: all ranks of a prefill replica. Prefill's sizes are taken for decode's (mooncake/conn.py, `send_aux` and
    `_send_mamba_state`), and buffers are paired by their place in a list.
    """
    theirs, ours = drafts(sources), drafts([destination])
    columns = [[column.nbytes for column in rank.row] for rank in (sources[0], destination)]
    if theirs != ours or columns[0] != columns[1]:
        what = (
            f"prefill {_speculates(theirs)}, decode {_speculates(ours)}"
            if theirs != ours
            else "columns of the row with the first token have other sizes on prefill than on decode"
        )
        yield (
            f"{what}: prefill's columns of the row with the first token are taken for decode's, so that a hidden state "
            "lands in another request's row"
        )
    windows = [
        component.axis(AxisName.WINDOW).size for rank in (*sources, destination) for component in rank.of(Role.CONV)
    ]
    if len(set(windows)) > 1:
        yield (
            f"conv slots have {windows[0]} rows on prefill and {windows[-1]} on decode: prefill's size is taken for "
            "decode's, so that other requests' slots are overwritten"
        )


def _speculates(draft: bool) -> str:
    return "speculates" if draft else "does not speculate"


def drafts(ranks: Sequence[Manifest]) -> bool:
    """Whether a server with these ranks has a draft model."""
    return any(role.draft for role in roles_of(ranks))


def _has_kda(source: Manifest) -> bool:
    """Kimi-Linear's layers: of the families that are described only that one has latent attention."""
    return Role.TARGET_LATENT in source.roles


def _latent(component: Component) -> bool:
    """Pages that SGLang takes to be the same on every rank; not a draft's heads, even where they are."""
    return component.cut_axis.name is AxisName.CHANNEL


def _window_first(component: Component) -> bool:
    return component.axis(AxisName.WINDOW).stride > component.axis(AxisName.CHANNEL).stride


def _has_groups(component: Component) -> bool:
    """SGLang declares the segments (`conv_shard_groups`) for q, k and v, not for the x, B and C of Mamba-2."""
    return [segment.name for segment in component.cut_axis.segments] == ["q", "k", "v"]


def _state_blocks(component: Component, source: Manifest) -> int:
    """Descriptors of one slot of one layer."""
    if component.role is not Role.CONV:
        return 1
    segments = len(component.cut_axis.segments)
    if _has_kda(source):
        return segments * component.axis(AxisName.WINDOW).size
    return segments if _has_groups(component) and not _window_first(component) else 1


def _token_bytes(component: Component, destination: Manifest) -> int:
    """Bytes of one token's descriptor: the heads that both ranks have."""
    heads = component.cut_axis.size
    for other in destination.of(component.role):
        heads = min(heads, other.cut_axis.size)
    return heads * component.axis(AxisName.CHANNEL).size * component.itemsize


# Measured: Mooncake's TCP transport takes batches of 1,024 descriptors and refuses 4,096; docs/upstream_faults.md.
_REFUSED_BATCH = 4096


def _faults(source: Manifest, destination: Manifest, largest_batch: int) -> list[str]:
    source_tp, destination_tp = source.coordinates.tp_size, destination.coordinates.tp_size
    faults = []
    if max(source_tp, destination_tp) % min(source_tp, destination_tp):
        faults.append(f"TP {source_tp} to {destination_tp}: neither divides the other, which is not checked")
    conv = source.of(Role.CONV)
    if any(_window_first(component) for component in conv) and not _has_kda(source):
        faults.append("conv: the window is taken for the channels, other requests' slots are overwritten")
    elif not all(_has_groups(component) for component in conv):
        faults.append("conv: x, B and C are cut as one block, so that channels end up in each other's places")
    if largest_batch >= _REFUSED_BATCH:
        faults.append(
            f"attention KV: {largest_batch:,} descriptors in a batch; Mooncake's TCP transport refuses that and gives "
            "the peer up (other transports were not measured)"
        )
    return faults
