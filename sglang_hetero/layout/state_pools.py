"""Linear-attention state of SGLang's MambaPool as components: the conv windows and the SSM states of every layer.

sglang/srt/mem_cache/memory_pool.py, MambaPool. A slot belongs to one request; slot 0 is padding. The pool's conv tensor
is [layer, slot, channel, window] on CUDA and CPU; on a CPU with AMX the same shape over bytes that lie window first
(sglang/srt/layers/amx_utils.py, `_init_amx_conv_state`); [layer, slot, window, channel] on an NPU, where the window has
more rows with speculation (`_init_npu_conv_state` in memory_pool_npu.py), and for Kimi everywhere.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, cast

from sglang_hetero.errors import ManifestError

from .axes import AxisName, Segment, cut_size
from .component import Component, Item, Role
from .geometry import LinearAttention
from .manifest import Coordinates
from .strided import Registered, Tensor, check_complete, component_of, read

_POOL = "MambaPool"
_TRANSFERRED = ("conv", "temporal")
_SCRATCH = ("intermediate_ssm", "intermediate_conv_window")
"""Per-draft-token snapshots of a verify step: they never outlive it and never travel."""
_RING = "replayssm_"
"""Prefix of the rings that hold updates which the SSM state does not contain yet."""


class LiveRows(StrEnum):
    """Which rows of a conv window with room for draft tokens hold the inputs that the next forward reads."""

    FIRST = "first"
    LAST = "last"
    """As SGLang's NPU backend has it (hardware_backend/npu/attention/ascend_gdn_backend.py)."""


class _State(Protocol):
    conv: Sequence[Tensor]
    temporal: Tensor


class _StatePool(Registered, Protocol):
    size: int
    mamba_layer_ids: Sequence[int]
    mamba_cache: _State


def state_layers(pool: object) -> tuple[int, ...]:
    """Ids of the layers whose state this pool keeps. Raises ManifestError for a pool that is not described."""
    name = type(pool).__name__
    # Not isinstance: a subclass may arrange its bytes differently, or hand out virtual slots.
    if name != _POOL:
        raise ManifestError(f"{name}: is no pool whose linear state is described, supported is {_POOL}")
    return tuple(cast(_StatePool, pool).mamba_layer_ids)


def state_components(
    pool: object,
    linear: LinearAttention,
    coordinates: Coordinates,
    *,
    live_rows: LiveRows,
    window_axis: int | None,
) -> tuple[Component, ...]:
    """Conv and SSM of all layers of this pool; empty for a pool without layers.

    live_rows, window_axis: see `describe`. Raises ManifestError where the pool does not fit the model and the TP size,
    TopologyError where that size does not divide the heads.
    """
    layers = state_layers(pool)
    source = cast(_StatePool, pool)
    _check_plain(source)
    components = (
        (
            _conv(source, layers, linear, coordinates, live_rows=live_rows, window_axis=window_axis),
            _ssm(source, layers, linear, coordinates),
        )
        if layers
        else ()
    )
    check_complete(source, components, _POOL)
    return components


def _check_plain(pool: _StatePool) -> None:
    for sibling in getattr(pool, "_slot_siblings", ()):
        raise ManifestError(f"{_POOL}: {type(sibling).__name__} keeps more state per slot, which is not described")
    for name, value in vars(pool.mamba_cache).items():
        if value is None or name in _TRANSFERRED or name in _SCRATCH:
            continue
        if name.startswith(_RING):
            raise ManifestError(
                f"{_POOL}: {name} holds updates that its SSM state lacks; start without --enable-linear-replayssm and "
                "--enable-linear-replayssm-spec"
            )
        raise ManifestError(f"{_POOL}: {name} is state of a kind that is not described")
    if len(pool.mamba_cache.conv) != 1:
        raise ManifestError(f"{_POOL}: found {len(pool.mamba_cache.conv)} conv tensors, expected 1")


def _conv(
    pool: _StatePool,
    layers: Sequence[int],
    linear: LinearAttention,
    coordinates: Coordinates,
    *,
    live_rows: LiveRows,
    window_axis: int | None,
) -> Component:
    segments = linear.conv_segments
    _check_groups(pool, segments)
    channels, live = (
        cut_size(segments, coordinates.tp_size, coordinates.tp_rank, "linear attention"),
        linear.live_window,
    )
    whole = read(pool.mamba_cache.conv[0], "conv").expect(
        "layer, slot, channel and window", len(layers), pool.size + 1, None, None
    )
    axis = window_axis_of((whole.shape[2], whole.shape[3]), channels, live, window_axis)
    # Items of every layer as [slot, channel, window], whatever the order in memory.
    order = (0, 1, 2) if axis == 1 else (0, 2, 1)
    views = {layer: view.transposed(*order) for layer, view in zip(layers, whole.unbind(), strict=True)}
    spare = whole.shape[2 + axis] - live
    first = spare if live_rows is LiveRows.LAST else 0
    return component_of(
        Role.CONV,
        Item.SLOT,
        views,
        (AxisName.CHANNEL, AxisName.WINDOW),
        segments={AxisName.CHANNEL: segments},
        live={AxisName.WINDOW: (first, live)} if spare else None,
    )


def _check_groups(pool: _StatePool, segments: Sequence[Segment]) -> None:
    """Compare with the pool's own word on the channels before sharding, which it has for q, k, v only."""
    groups = getattr(pool, "conv_shard_groups", None)
    expected = [segment.heads * segment.width for segment in segments]
    if groups is not None and list(groups) != expected:
        raise ManifestError(f"conv: found segments of {list(groups)} channels, expected {expected}")


def window_axis_of(item: tuple[int, int], channels: int, live: int, hint: int | None = None) -> int:
    """Which of the two axes of a conv slot is the window: 0 or 1.

    channels: what this rank holds. live: K-1. A window behind the channels has exactly K-1 rows; one before them may
    have more, for draft tokens. Both can only be true of one shape where channels == K-1 on both axes: then nothing
    but a hint tells, and without one ManifestError is raised, as it is where neither is true or the hint is wrong.
    """
    first, second = item
    possible = []
    if second == channels and first >= live:
        possible.append(0)
    if first == channels and second == live:
        possible.append(1)
    if not possible:
        raise ManifestError(
            f"conv: found slots of {list(item)}, expected [channel, window] = [{channels}, {live}] "
            f"or [window, channel] = [{live} or more, {channels}]"
        )
    if hint is None and len(possible) > 1:
        raise ManifestError(
            f"conv: slots of {list(item)} have as many channels as window rows, so their order cannot be read off; "
            "state conv_window_axis (0 on an NPU and for Kimi, else 1)"
        )
    if hint is not None and hint not in possible:
        raise ManifestError(f"conv: conv_window_axis is {hint}, but slots of {list(item)} have it at {possible[0]}")
    return possible[0] if hint is None else hint


def _ssm(pool: _StatePool, layers: Sequence[int], linear: LinearAttention, coordinates: Coordinates) -> Component:
    heads = linear.ssm_segments
    whole = read(pool.mamba_cache.temporal, "ssm").expect(
        "layer, slot, head, state row, state column",
        len(layers),
        pool.size + 1,
        cut_size(heads, coordinates.tp_size, coordinates.tp_rank, "linear attention"),
        linear.ssm_rows,
        linear.ssm_columns,
    )
    return component_of(
        Role.SSM,
        Item.SLOT,
        dict(zip(layers, whole.unbind(), strict=True)),
        (AxisName.HEAD, AxisName.STATE_ROW, AxisName.STATE_COLUMN),
        segments={AxisName.HEAD: heads},
    )
