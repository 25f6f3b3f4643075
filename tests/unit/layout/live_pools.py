"""SGLang's own cache pools on CPU, in the arrangement of each platform, and a write through their own views.

Platforms are chosen by the flags that sglang/srt/mem_cache/memory_pool.py reads at import time; its real constructors
then run on CPU tensors.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.hardware_backend.npu import memory_pool_npu
from sglang.srt.mem_cache import memory_pool

from sglang_hetero.layout import Coordinates, Role
from sglang_hetero.layout.geometry import LatentAttention, LinearAttention, ModelGeometry

PAGE = 4
PAGES = 3
SLOTS = 2
DRAFT_TOKENS = 3
PLATFORMS = ("cuda", "amx", "npu", "npu-fia")


@dataclass
class Pools:
    """The live pools of one rank. kda: the linear state has Kimi's shapes."""

    target: Any
    draft: Any
    mamba: Any
    platform: str
    kda: bool

    def window_first(self) -> bool:
        """True where the shape of a conv slot is [window, channel]."""
        return self.kda or self.platform.startswith("npu")


@contextmanager
def platform(name: str) -> Iterator[None]:
    """SGLang's pools as that platform builds them."""
    npu = name.startswith("npu")
    flags = {"_is_npu": npu, "_is_cpu": name == "amx", "_cpu_has_amx_support": name == "amx"}
    parallel = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0)
    with ExitStack() as stack:
        for flag, value in flags.items():
            stack.enter_context(patch.object(memory_pool, flag, value))
        stack.enter_context(patch.object(memory_pool_npu, "get_parallel", lambda: parallel))
        stack.enter_context(patch.dict("os.environ", ASCEND_USE_FIA=str(name == "npu-fia")))
        yield


def cache_params(linear: LinearAttention, layers: tuple[int, ...], tp: int, *, kda: bool) -> Any:
    """SGLang's description of one rank's linear state."""
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    if kda:
        shape = KimiLinearStateShape.create(
            tp_world_size=tp, num_heads=linear.ssm_heads, head_dim=linear.ssm_rows, conv_kernel_size=linear.conv_kernel
        )
        return KimiLinearCacheParams(shape=shape, layers=list(layers), dtype=dtype)
    first, groups, last = linear.conv_segments
    if first.name == "q":
        sizes = [segment.heads * segment.width for segment in linear.conv_segments]
        inner = last.heads * last.width
    else:
        sizes, inner = None, first.heads * first.width
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=inner,
        n_groups=groups.heads,
        num_heads=linear.ssm_heads,
        head_dim=linear.ssm_rows,
        state_size=linear.ssm_columns,
        conv_kernel=linear.conv_kernel,
        conv_shard_groups=sizes,
    )
    return Mamba2CacheParams(shape=shape, layers=list(layers), dtype=dtype)


def mamba_pool(params: Any, layers: tuple[int, ...], **options: Any) -> Any:
    """A MambaPool; call it inside `platform`."""
    return memory_pool.MambaPool(
        size=SLOTS,
        spec_state_size=SLOTS,
        cache_params=params,
        mamba_layer_ids=list(layers),
        device="cpu",
        speculative_num_draft_tokens=options.pop("draft_tokens", DRAFT_TOKENS),
        **options,
    )


def kv_pool(model: ModelGeometry, layers: tuple[int, ...], tp: int, mamba: Any, name: str, **options: Any) -> Any:
    """A HybridLinearKVPool with the platform's pool of full attention in it; call it inside `platform`."""
    latent = isinstance(model.attention, LatentAttention)
    npu = name.startswith("npu")
    classes = {
        (False, True): memory_pool_npu.NPUMHATokenToKVPool,
        (True, True): memory_pool_npu.NPUMLATokenToKVPool,
    }
    if latent:
        sizes = {
            "head_num": 1,
            "head_dim": 1,
            "use_mla": True,
            "kv_lora_rank": model.attention.latent_width,
            "qk_rope_head_dim": model.attention.rope_width,
        }
    else:
        # As ModelConfig.get_num_kv_heads has it.
        sizes = {"head_num": max(1, model.attention.kv_heads // tp), "head_dim": model.attention.key_width}
    page_size = options.pop("page_size", PAGE)
    return memory_pool.HybridLinearKVPool(
        **{
            "size": PAGES * page_size,
            "page_size": page_size,
            "dtype": torch.bfloat16,
            "full_attention_layer_ids": list(layers),
            "device": "cpu",
            "mamba_pool": mamba,
            "full_kv_pool_class": classes.get((latent, npu)),
        }
        | sizes
        | options
    )


def build(
    model: ModelGeometry,
    tp: int,
    name: str = "cuda",
    *,
    kda: bool = False,
    draft: ModelGeometry | None = None,
    draft_tp: int | None = None,
    **options: Any,
) -> Pools:
    """All pools of one rank of that model: every rank of a TP size has pools of the same shape.

    draft, draft_tp: where the draft's pool is that of another model or TP size.
    """
    other, other_tp = draft or model, draft_tp or tp
    with platform(name):
        mamba = mamba_pool(cache_params(model.linear, model.linear_layers, tp, kda=kda), model.linear_layers)
        target = kv_pool(model, model.attention_layers, tp, mamba, name, **options)
        drafts = kv_pool(other, other.draft_layers, other_tp, mamba, name, **options) if model.draft_layers else None
    return Pools(target, drafts, mamba, name, kda)


def value(role: Role, layer: int, indices: Any, bits: int) -> Any:
    """f(role, layer, item, axes...): a hash, so that neighbours along any axis differ. `bits` wide, unsigned."""
    mixed = np.full(np.broadcast_shapes(*(index.shape for index in indices)), list(Role).index(role) + 1, np.uint64)
    for index in (np.uint64(layer), *(index.astype(np.uint64) for index in indices)):
        mixed = (mixed ^ index) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(64 - bits)).astype(f"u{bits // 8}")


def write(view: torch.Tensor, role: Role, layer: int, order: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Fill a pool's own view with `value`.

    shape: [item, axes in canonical order]; order: which of those each axis of the view is, after flattening of the
    pages and tokens by the caller.
    """
    bits = view.element_size() * 8
    values = value(role, layer, np.indices(shape, sparse=True), bits).transpose(order)
    signed = torch.from_numpy(values.astype(f"i{bits // 8}", casting="unsafe"))
    view.view({8: torch.int8, 16: torch.int16, 32: torch.int32}[bits]).copy_(signed)


def fill(pools: Pools, model: ModelGeometry) -> dict[tuple[Role, int], tuple[int, ...]]:
    """Write every cache of the rank through the pool's own accessors.

    Returns the canonical shape of each role and layer: [page, token, head, channel], [page, token, channel],
    [slot, channel, window] of the live rows, [slot, head, row, column].
    """
    written: dict[tuple[Role, int], tuple[int, ...]] = {}
    for pool, layers, roles in (
        (pools.target, model.attention_layers, (Role.TARGET_KEY, Role.TARGET_VALUE)),
        (pools.draft, model.draft_layers, (Role.DRAFT_KEY, Role.DRAFT_VALUE)),
    ):
        for layer in layers if pool is not None else ():
            if isinstance(model.attention, LatentAttention):
                written |= _fill_latent(pools, pool, layer, draft=roles[0].draft)
                continue
            for role, view in zip(roles, (pool.get_key_buffer(layer), pool.get_value_buffer(layer)), strict=True):
                paged = view.view(-1, pool.page_size, *view.shape[-2:])
                write(paged, role, layer, (0, 1, 2, 3), tuple(paged.shape))
                written[role, layer] = tuple(paged.shape)
    live = model.linear.live_window
    for layer in model.linear_layers:
        state = pools.mamba.mamba2_layer_cache(pools.mamba.mamba_layer_ids.index(layer))
        conv, ssm = state.conv[0], state.temporal
        conv.view(torch.int16).fill_(-1)  # what is not live must not be read
        if pools.window_first():
            window = conv[:, -live:]
            shape = (window.shape[0], window.shape[2], live)
            write(window, Role.CONV, layer, (0, 2, 1), shape)
        else:
            shape = tuple(conv.shape)
            write(conv, Role.CONV, layer, (0, 1, 2), shape)
        written[Role.CONV, layer] = shape
        write(ssm, Role.SSM, layer, (0, 1, 2, 3), tuple(ssm.shape))
        written[Role.SSM, layer] = tuple(ssm.shape)
    return written


def _fill_latent(pools: Pools, pool: Any, layer: int, *, draft: bool) -> dict[tuple[Role, int], tuple[int, ...]]:
    latent, rope = (Role.DRAFT_LATENT, Role.DRAFT_ROPE) if draft else (Role.TARGET_LATENT, Role.TARGET_ROPE)
    buffers = {latent: pool.get_key_buffer(layer)}
    if pools.platform.startswith("npu"):
        buffers[rope] = pool.get_value_buffer(layer)
    shapes = {}
    for role, view in buffers.items():
        paged = view.view(-1, pool.page_size, view.shape[-1])
        write(paged, role, layer, (0, 1, 2), tuple(paged.shape))
        shapes[role, layer] = tuple(paged.shape)
    return shapes


def coordinates(tp: int, rank: int, **others: int) -> Coordinates:
    """A rank of a TP size."""
    return Coordinates(tp_rank=rank, tp_size=tp, **others)
