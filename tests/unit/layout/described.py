"""Model geometries, and what a test of the pools does with a manifest: make it, and read memory by it."""

import ctypes
from typing import Any

import numpy as np

from sglang_hetero.layout import Component, Manifest, Role, Segment, Sharding, Side
from sglang_hetero.layout.geometry import HeadAttention, LatentAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.pools import describe
from tests.unit.layout.live_pools import (
    Pools,
    coordinates,
    value,
)


def divided(name: str, heads: int, width: int) -> Segment:
    return Segment(name, heads, width, Sharding.DIVIDED)


GDN = ModelGeometry(
    attention=HeadAttention(kv_heads=2, key_width=6, value_width=6),
    attention_layers=(1, 3),
    linear=LinearAttention(
        conv_segments=(divided("q", 4, 3), divided("k", 4, 3), divided("v", 8, 2)),
        conv_kernel=4,
        ssm_heads=8,
        ssm_rows=2,
        ssm_columns=3,
    ),
    linear_layers=(0, 2, 4),
    draft_layers=(0,),
)


def mamba2(groups: int) -> ModelGeometry:
    sharding = Sharding.DIVIDED if groups > 1 else Sharding.REPLICATED
    return ModelGeometry(
        attention=HeadAttention(kv_heads=4, key_width=4, value_width=4),
        attention_layers=(0, 1),
        linear=LinearAttention(
            conv_segments=(divided("x", 8, 2), Segment("B", groups, 3, sharding), Segment("C", groups, 3, sharding)),
            conv_kernel=4,
            ssm_heads=8,
            ssm_rows=2,
            ssm_columns=3,
        ),
        linear_layers=(0, 1),
    )


KIMI = ModelGeometry(
    attention=LatentAttention(latent_width=32, rope_width=16),
    attention_layers=(3,),
    linear=LinearAttention(
        conv_segments=tuple(divided(name, 4, 5) for name in "qkv"),
        conv_kernel=4,
        ssm_heads=4,
        ssm_rows=5,
        ssm_columns=5,
    ),
    linear_layers=(0, 1, 2),
    draft_layers=(0,),
)
MODELS = {"gdn": GDN, "mamba2-8-groups": mamba2(8), "mamba2-1-group": mamba2(1), "kimi": KIMI}


def describe_pools(pools: Pools, model: ModelGeometry, tp: int = 1, rank: int = 0, **changes: Any) -> Manifest:
    options: dict[str, Any] = {
        "side": Side.PREFILL,
        "host": "test",
        "coordinates": coordinates(tp, rank),
        "model": model,
        "fingerprint": "model",
        "incarnation": "first",
        "sglang": "0.5.23",
        "target_pool": pools.target,
        "draft_pool": pools.draft,
    }
    return describe(**options | changes)


def _read(component: Component, layer: int) -> Any:
    """[item, axes] from raw memory by nothing but the component's numbers; of a window the live rows only."""
    starts = [axis.live_rows[0] for axis in component.axes]
    shape = (component.items, *(axis.live_rows[1] for axis in component.axes))
    item, *indices = np.indices(shape, sparse=True)
    offsets = item * component.item_stride
    for axis, start, index in zip(component.axes, starts, indices, strict=True):
        offsets = offsets + (index + start) * axis.stride
    span = (component.items - 1) * component.item_stride + component.item_span
    raw = (ctypes.c_uint8 * span).from_address(component.address(layer))
    memory = np.frombuffer(raw, np.uint8)
    elements = memory[offsets[..., None] + np.arange(component.itemsize)]
    return np.ascontiguousarray(elements).view(f"u{component.itemsize}")[..., 0]


def assert_read_back(manifest: Manifest, written: dict[tuple[Role, int], tuple[int, ...]]) -> None:
    found = {(component.role, layer) for component in manifest.components for layer in component.layers}
    assert found == set(written)
    for component in manifest.components:
        for layer in component.layers:
            got, shape = _read(component, layer), written[component.role, layer]
            assert got.shape == shape, f"{component.role} of layer {layer}"
            wanted = value(component.role, layer, np.indices(shape, sparse=True), component.itemsize * 8)
            wrong = np.argwhere(got != wanted)
            assert not len(wrong), (
                f"{component.role} of layer {layer} at {tuple(wrong[0])}: read {got[tuple(wrong[0])]:#x}, written "
                f"{wanted[tuple(wrong[0])]:#x}"
            )
