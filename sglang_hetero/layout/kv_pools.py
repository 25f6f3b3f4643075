"""Attention caches of SGLang's pools as components.

Read: the tensors' shapes and strides. Known by class: what their axes are (sglang/srt/mem_cache/memory_pool.py and
sglang/srt/hardware_backend/npu/memory_pool_npu.py). A pool keeps one page of padding in front, page 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from sglang_hetero.errors import ManifestError

from .axes import AxisName, cut_size
from .component import ITEMSIZE, PLAIN, Component, Item, Role
from .geometry import HeadAttention, LatentAttention
from .known_pools import MHA, MLA, NPU_MHA, NPU_MLA, KVPool, check_plain
from .manifest import Coordinates
from .strided import Strided, Tensor, check_complete, component_of, dtype_name, read

FIA_NZ = "npu_fia_nz"
"""Encoding of latent pages that are written as [channel / 16][token][16] though their tensors say [token][channel]
(NPUMLATokenToKVPool with SGLANG_USE_FIA_NZ)."""

_BYTES = "uint8"
"""dtype under which torch keeps 8-bit floats, as it cannot index them (KVCache.store_dtype)."""

_HEAD_AXES = (AxisName.TOKEN, AxisName.HEAD, AxisName.CHANNEL)
_LATENT_AXES = (AxisName.TOKEN, AxisName.CHANNEL)


class _HeadPool(KVPool, Protocol):
    k_buffer: Sequence[Tensor]
    v_buffer: Sequence[Tensor]


class _LatentPool(KVPool, Protocol):
    kv_buffer: Sequence[Tensor]


def attention_components(
    pool: KVPool,
    layers: Sequence[int],
    attention: HeadAttention | LatentAttention,
    coordinates: Coordinates,
    *,
    draft: bool,
) -> tuple[Component, ...]:
    """All that one attention pool keeps of a request; empty for a pool without layers.

    Raises ManifestError where the pool does not fit the model and the TP size, TopologyError where these heads cannot
    be sharded over that size.
    """
    name = type(pool).__name__
    check_plain(pool)
    layout, kind = _LAYOUTS[name]
    if not isinstance(attention, kind):
        raise ManifestError(f"{name}: the model has {type(attention).__name__}, this pool is for {kind.__name__}")
    components = tuple(layout(pool, layers, attention, coordinates, draft)) if layers else ()
    check_complete(pool, components, name)
    return components


def _head_layout(
    pool: KVPool, layers: Sequence[int], attention: HeadAttention, coordinates: Coordinates, draft: bool
) -> list[Component]:
    """K and V per head: [token rows, head, channel] per layer; on an NPU [page, token, head, channel], or with
    ASCEND_USE_FIA [token rows, 1, head, channel] on the same bytes.

    A draft's cache may have all heads on every rank. Heads that SGLang has padded are not taken for that: the target's
    are padded in the same way, and it is described first and must have its share of the model's.
    """
    heads = attention.segments
    local = cut_size(heads, coordinates.tp_size, coordinates.tp_rank, "attention")
    key, value = (Role.DRAFT_KEY, Role.DRAFT_VALUE) if draft else (Role.TARGET_KEY, Role.TARGET_VALUE)
    source = cast(_HeadPool, pool)
    if draft and _heads_held(source.k_buffer) == {attention.kv_heads}:
        heads, local = attention.whole_segments(coordinates.tp_size), attention.kv_heads
    described = []
    for role, buffers, width in (
        (key, source.k_buffer, attention.key_width),
        (value, source.v_buffer, attention.value_width),
    ):
        views = {
            layer: _head_pages(pool, view, local, width) for layer, view in _layer_views(pool, layers, buffers, role)
        }
        dtype = _logical_dtype(pool, views)
        described.append(component_of(role, Item.PAGE, views, _HEAD_AXES, segments={AxisName.HEAD: heads}, dtype=dtype))
    return described


def _heads_held(buffers: Sequence[Tensor]) -> set[int]:
    """How many heads the buffers have; in all three arrangements the channel is the only axis inside the head's."""
    return {size for buffer in buffers for size in buffer.shape[-2:-1]}


def _head_pages(pool: KVPool, view: Strided, heads: int, width: int) -> Strided:
    """[page, token, head, channel] of whichever of the three arrangements this is."""
    if type(pool).__name__ == MHA:
        rows = view.expect("token row, head, channel", None, heads, width)
    elif getattr(pool, "use_fia", False):
        rows = view.expect("token row, 1, head, channel", None, 1, heads, width).without(1)
        return rows.pages(pool.page_size, _pages(pool) * pool.page_size)
    else:
        return view.expect("page, token, head, channel", _pages(pool), pool.page_size, heads, width)
    return rows.pages(pool.page_size, _rows(pool, rows))


def _latent_layout(
    pool: KVPool, layers: Sequence[int], attention: LatentAttention, coordinates: Coordinates, draft: bool
) -> list[Component]:
    """One buffer per layer, [token row, 1, latent then rope]."""
    role = Role.DRAFT_LATENT if draft else Role.TARGET_LATENT
    segments = attention.latent_segments + attention.rope_segments
    width = attention.latent_width + attention.rope_width
    views = {}
    for layer, view in _layer_views(pool, layers, cast(_LatentPool, pool).kv_buffer, role):
        rows = view.expect("token row, 1, channel", None, 1, width).without(1)
        views[layer] = rows.pages(pool.page_size, _rows(pool, rows))
    dtype = _logical_dtype(pool, views)
    return [component_of(role, Item.PAGE, views, _LATENT_AXES, segments={AxisName.CHANNEL: segments}, dtype=dtype)]


def _split_latent_layout(
    pool: KVPool, layers: Sequence[int], attention: LatentAttention, coordinates: Coordinates, draft: bool
) -> list[Component]:
    """On an NPU latent and rope have a buffer each, called K and V: [page, token, 1, channel] per layer."""
    source = cast(_HeadPool, pool)
    if source.k_buffer is None or source.v_buffer is None:
        raise ManifestError(f"{type(pool).__name__}: has no cache on the device (SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD)")
    latent, rope = (Role.DRAFT_LATENT, Role.DRAFT_ROPE) if draft else (Role.TARGET_LATENT, Role.TARGET_ROPE)
    encoding = FIA_NZ if getattr(pool, "use_fia_nz", False) else PLAIN
    described = []
    for role, buffers, segments, width in (
        (latent, source.k_buffer, attention.latent_segments, attention.latent_width),
        (rope, source.v_buffer, attention.rope_segments, attention.rope_width),
    ):
        views = {
            layer: view.expect("page, token, 1, channel", _pages(pool), pool.page_size, 1, width).without(2)
            for layer, view in _layer_views(pool, layers, buffers, role)
        }
        cut = {AxisName.CHANNEL: segments}
        dtype = _logical_dtype(pool, views)
        described.append(
            component_of(role, Item.PAGE, views, _LATENT_AXES, segments=cut, dtype=dtype, encoding=encoding)
        )
    return described


_LAYOUTS: dict[str, tuple[Callable[..., list[Component]], type]] = {
    MHA: (_head_layout, HeadAttention),
    NPU_MHA: (_head_layout, HeadAttention),
    MLA: (_latent_layout, LatentAttention),
    NPU_MLA: (_split_latent_layout, LatentAttention),
}


def _layer_views(
    pool: KVPool, layers: Sequence[int], buffers: Sequence[Tensor], role: Role
) -> list[tuple[int, Strided]]:
    # A list of tensors, or one tensor with a layer axis; indexing serves both.
    if len(buffers) != len(layers):
        raise ManifestError(f"{type(pool).__name__}: {len(buffers)} buffers of {role} for {len(layers)} layers")
    return [(layer, read(buffers[index], f"{role} of layer {layer}")) for index, layer in enumerate(layers)]


def _pages(pool: KVPool) -> int:
    """Pages of a pool that allocates pages, the padding page included."""
    return pool.size // pool.page_size + 1


def _rows(pool: KVPool, view: Strided) -> int:
    """Token rows of a pool that allocates tokens, the padding page included.

    A pool that is sized after graph capture has reserved more rows than it may use (`post_capture_active`).
    """
    rows = pool.size + pool.page_size
    if view.shape[0] != rows and not getattr(pool, "post_capture_active", False):
        raise ManifestError(
            f"{view.what}: found {view.shape[0]} token rows, expected {pool.size} and a page of {pool.page_size}"
        )
    return rows


def _logical_dtype(pool: KVPool, views: Mapping[int, Strided]) -> str:
    """What the elements are: 8-bit floats lie in tensors of bytes."""
    logical = dtype_name(pool.dtype)
    for view in views.values():
        if view.dtype != logical and not (view.dtype == _BYTES and ITEMSIZE.get(logical) == 1):
            raise ManifestError(f"{view.what}: found a tensor of {view.dtype}, expected the pool's {logical}")
    return logical
