"""SGLang's own cache pools on CPU for one rank, and numpy views of their bytes.

The constructor arguments follow mem_cache/kv_cache_configurator.py (`_build_hybrid_req_pool`,
`_build_hybrid_mamba_decode_req_pool`, `_build_hybrid_linear_kv_pool`; of a plain transformer `_build_decode_req_pool`,
`_build_mha_kv_pool`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_hetero.layout.window import ConvLayout

from .expectation import PAGED, Buffer
from .geometry import Geometry
from .oracle import Bits, Component, bits_dtype
from .sides import Shard

DEVICE = "cpu"

_KV_AXES = ("page", "token", "head", "channel")
_CONV_AXES = {
    ConvLayout.CHANNELS_FIRST: ("slot", "channel", "window row"),
    ConvLayout.WINDOW_FIRST: ("slot", "window row", "channel"),
}
_SSM_AXES = ("slot", "head", "value channel", "key channel")
_AUX_AXES = ("row", "column")
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Pools:
    """The live pools of one rank."""

    shard: Shard
    requests: Any
    """HybridReqToTokenPool, or HybridMambaDecodeReqToTokenPool on decode; without linear layers ReqToTokenPool or
    DecodeReqToTokenPool."""
    target: Any
    """HybridLinearKVPool of the target model, without linear layers MHATokenToKVPool."""
    draft: Any
    """HybridLinearKVPool of the MTP layer, None without MTP."""
    allocator: Any
    """PagedTokenToKVPoolAllocator, or TokenToKVPoolAllocator for pages of one token."""
    metadata: Any
    """MetadataBuffers: the aux rows."""


def build(shard: Shard, *, decode: bool) -> Pools:
    """Allocate the pools of one rank as SGLang does for this model and TP size."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    geometry = shard.geometry
    requests, target, draft = _hybrid(shard, decode) if geometry.linear_layers else _plain(shard, decode)
    hidden_size, hidden_dtype = geometry.hidden_row
    return Pools(
        shard=shard,
        requests=requests,
        target=target,
        draft=draft,
        allocator=_allocator(geometry, target),
        metadata=MetadataBuffers(
            geometry.slots,
            hidden_size=hidden_size,
            hidden_states_dtype=getattr(torch, hidden_dtype),
            max_sampling_mask_tokens=1,
        ),
    )


def _plain(shard: Shard, decode: bool) -> tuple[Any, Any, None]:
    from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    geometry = shard.geometry
    common = {
        "size": geometry.slots,
        "max_context_len": geometry.pages * geometry.page_size,
        "device": DEVICE,
        "enable_memory_saver": False,
    }
    requests = DecodeReqToTokenPool(**common, pre_alloc_size=0) if decode else ReqToTokenPool(**common)
    target = MHATokenToKVPool(
        geometry.pages * geometry.page_size,
        page_size=geometry.page_size,
        dtype=getattr(torch, geometry.kv_dtype),
        head_num=geometry.local_kv_heads(shard.tp),
        head_dim=geometry.head_dim,
        layer_num=geometry.layers,
        device=DEVICE,
        enable_memory_saver=False,
        start_layer=0,
        end_layer=geometry.layers,
    )
    return requests, target, None


def _hybrid(shard: Shard, decode: bool) -> tuple[Any, Any, Any]:
    from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

    geometry = shard.geometry
    common = {
        "size": geometry.slots,
        "mamba_size": geometry.slots,
        "max_context_len": geometry.pages * geometry.page_size,
        "device": DEVICE,
        "enable_memory_saver": False,
        "cache_params": _cache_params(shard),
        "mamba_layer_ids": list(geometry.linear_layers),
        "enable_mamba_extra_buffer": False,
        "enable_overlap_schedule": False,
    }
    draft_tokens = geometry.draft_tokens or None
    if decode:
        requests = HybridMambaDecodeReqToTokenPool(
            **common, speculative_num_draft_tokens=draft_tokens, pre_alloc_size=0
        )
    else:
        # Off an NPU a prefill pool is not told of the draft tokens (kv_cache_configurator.py,
        # _pd_prefill_skips_mamba_spec_state); window-first slots stand for an NPU's, which have the rows on both sides.
        if geometry.conv_layout is ConvLayout.CHANNELS_FIRST:
            draft_tokens = None
        requests = HybridReqToTokenPool(
            **common, speculative_num_draft_tokens=draft_tokens, mamba_spec_state_size=geometry.slots
        )
    stored = requests.mamba_pool.mamba_cache.conv[0].shape[-2:]
    if geometry.window not in stored:
        raise RuntimeError(
            f"conv slots are {tuple(stored)}, {geometry.conv_layout} wants {geometry.window} window rows"
        )

    def kv_pool(layers: tuple[int, ...]) -> Any:
        return HybridLinearKVPool(
            size=geometry.pages * geometry.page_size,
            page_size=geometry.page_size,
            dtype=getattr(torch, geometry.kv_dtype),
            head_num=geometry.local_kv_heads(shard.tp),
            head_dim=geometry.head_dim,
            full_attention_layer_ids=list(layers),
            device=DEVICE,
            mamba_pool=requests.mamba_pool,
        )

    draft = kv_pool(geometry.draft_layers) if geometry.draft_tokens else None
    return requests, kv_pool(geometry.full_attention_layers), draft


def shuffle_free_lists(pools: Pools, aux_allocator: Any, seed: int) -> None:
    """Permute every free list, so that SGLang's allocators hand out scattered pages and slots.

    All ranks of a side must use one seed: they keep a request in the same pages.
    """
    rng = np.random.default_rng(seed)

    def permuted(values: Any) -> list[int]:
        return [int(value) for value in rng.permutation(np.asarray(values))]

    pools.allocator.free_pages = torch.tensor(permuted(pools.allocator.free_pages), dtype=torch.int64)
    if pools.shard.geometry.linear_layers:
        slots = pools.requests.mamba_allocator
        slots.free_slots = torch.tensor(permuted(slots.free_slots), dtype=slots.free_slots.dtype)
    pools.requests.free_slots[:] = permuted(pools.requests.free_slots)
    aux_allocator.free_slots.extend(permuted([aux_allocator.free_slots.popleft() for _ in range(aux_allocator.size)]))


def buffers(pools: Pools) -> list[tuple[Buffer, Bits]]:
    """Every transferred buffer of a rank with a view of its bytes, `[items, ...]` as described by `Buffer.axes`."""
    geometry = pools.shard.geometry
    found = []

    def add(component: Component, layer: int, name: str, axes: tuple[str, ...], tensor: torch.Tensor) -> None:
        view = _bits(tensor)
        if component in PAGED:
            view = view.reshape(-1, geometry.page_size, *view.shape[1:])
        found.append((Buffer(component, layer, name, axes, view.shape, view.itemsize), view))

    roles = [(pools.target, geometry.full_attention_layers, Component.KEY, Component.VALUE, "target")]
    if pools.draft is not None:
        roles.append((pools.draft, geometry.draft_layers, Component.DRAFT_KEY, Component.DRAFT_VALUE, "draft"))
    for pool, layers, key, value, role in roles:
        for layer in layers:
            add(key, layer, f"{role} K", _KV_AXES, pool.get_key_buffer(layer))
            add(value, layer, f"{role} V", _KV_AXES, pool.get_value_buffer(layer))
    for index, layer in enumerate(geometry.linear_layers):
        state = pools.requests.mamba_pool.mamba_cache
        add(Component.CONV, layer, "conv", _CONV_AXES[geometry.conv_layout], state.conv[0][index])
        add(Component.SSM, layer, "SSM", _SSM_AXES, state.temporal[index])
    aux = [(name, value) for name, value in vars(pools.metadata).items() if isinstance(value, torch.Tensor)]
    for index, (name, tensor) in enumerate(aux):
        add(Component.AUX, index, name, _AUX_AXES, tensor)
    return found


def _bits(tensor: torch.Tensor) -> Bits:
    view: Bits = tensor.view(_SIGNED[tensor.element_size()]).numpy()
    return view.view(bits_dtype(tensor.element_size()))


def _cache_params(shard: Shard) -> Any:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    geometry = shard.geometry
    value_channels = geometry.linear_value_heads * geometry.linear_value_dim
    shape = Mamba2StateShape.create(
        tp_world_size=shard.tp,
        intermediate_size=value_channels,
        n_groups=geometry.linear_key_heads,
        num_heads=geometry.linear_value_heads,
        head_dim=geometry.linear_value_dim,
        state_size=geometry.linear_key_dim,
        conv_kernel=geometry.conv_kernel,
        conv_shard_groups=[segment.heads * segment.head_width for segment in geometry.conv_segments],
    )
    dtype = Mamba2StateDType(conv=getattr(torch, geometry.conv_dtype), temporal=getattr(torch, geometry.ssm_dtype))
    return Mamba2CacheParams(shape=shape, layers=list(geometry.linear_layers), dtype=dtype)


def _allocator(geometry: Geometry, pool: Any) -> Any:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    common = {
        "size": geometry.pages * geometry.page_size,
        "dtype": getattr(torch, geometry.kv_dtype),
        "device": DEVICE,
        "kvcache": pool,
        "need_sort": False,
    }
    if geometry.page_size == 1:
        return TokenToKVPoolAllocator(**common)
    return PagedTokenToKVPoolAllocator(page_size=geometry.page_size, **common)
