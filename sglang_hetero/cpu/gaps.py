"""Gaps of SGLang 0.5.23's CPU path, closed by replacing upstream symbols.

Each row of the table names one symbol, why it does not work on a plain CPU, and what takes its place. All rows are
checked and all new values made before anything is replaced: if a symbol is missing, its parameters have changed or its
replacement cannot be made, the installed SGLang is not the one that this release was made for, and nothing is
replaced. The plugin then stops the process (plugin.py).

A module that did `from x import name` before the replacement keeps the old function, so a row lists such modules
(`bound_in`); those imported later see the new one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from sglang_hetero import releases
from sglang_hetero.cpu.layout import conv_layout_from_env, pool_slot_shape
from sglang_hetero.cpu.ops import commit, gates
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.window import ConvLayout

_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_ALLOCATION = "sglang.srt.mem_cache.allocation"
_SCATTER_PARAMETERS = ("dst", "src", "dst_indices_raw", "step_indices_raw", "src_indices_raw")


@dataclass(frozen=True)
class Gap:
    """One upstream symbol.

    module, owner, name: where it is (owner: a class in the module, or None). why: what fails without the replacement.
    replacement: from the present value to the new one, called once; it sets nothing itself. parameters: the names of
    the callable's parameters that the replacement relies on; None for a plain value. absent: the symbol is expected NOT
    to exist yet. bound_in: modules that import the symbol by name.
    """

    module: str
    name: str
    why: str
    replacement: Callable[[Any], Any]
    owner: str | None = None
    parameters: tuple[str, ...] | None = None
    absent: bool = False
    bound_in: tuple[str, ...] = ()

    @property
    def symbol(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


def _const(value: Any) -> Callable[[Any], Any]:
    return lambda _old: value


def _replicate_kv_heads(adjust: Callable[..., Any]) -> Callable[..., Any]:
    """adjust_config_with_unaligned_cpu_tp that replicates KV heads if tp_size is a multiple of them.

    Upstream pads the number of KV heads up to tp_size with zero heads; on every other platform rank r reads head
    r // (tp_size / heads). During the call the model reports tp_size KV heads, so that upstream finds nothing to
    pad; sizes that do not divide are left to upstream.
    """

    @wraps(adjust)
    def adjust_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
        heads = model_config.get_total_num_kv_heads()
        if model_config.num_attention_heads % tp_size or tp_size % heads:
            return adjust(model_config, load_config, tp_size)
        model_config.get_total_num_kv_heads = lambda: tp_size
        try:
            adjusted = adjust(model_config, load_config, tp_size)
        finally:
            del model_config.get_total_num_kv_heads
        for config in (model_config.hf_config, model_config.hf_text_config):
            config.original_total_num_kv_heads = heads
        return adjusted

    return adjust_config


def _get_last_loc_torch(_old: Callable[..., Any]) -> Callable[..., Any]:
    replacement: Callable[..., Any] = importlib.import_module(_ALLOCATION).get_last_loc_torch
    return replacement


def _pool_with_layout(init: Callable[..., None], layout: ConvLayout) -> Callable[..., None]:
    """MambaPool.__init__ whose conv slots lie in this layout."""
    if layout is ConvLayout.CHANNELS_FIRST:
        return init

    @wraps(init)
    def init_with_layout(self: Any, **kwargs: Any) -> None:
        init(self, **kwargs)
        draft_tokens = kwargs.get("speculative_num_draft_tokens")
        conv = self.mamba_cache.conv
        for i, slots in enumerate(conv):
            dim, window = slots.shape[-2:]
            conv[i] = slots.new_zeros(*slots.shape[:-2], *pool_slot_shape(dim, window, draft_tokens, layout))

    return init_with_layout


def _prefill_keeps_draft_rows(skips: Callable[[], bool], layout: ConvLayout) -> Callable[[], bool]:
    """Whether a prefill's linear-state pool leaves out what only a verify needs: never in the layout of an NPU.

    Upstream asks for the platform here: on an NPU the pool is told the draft tokens on prefill, too, so that the slots
    of both sides have equally many rows.
    """
    if layout is ConvLayout.CHANNELS_FIRST:
        return skips
    return lambda: False


def _no_cuda_synchronize(synchronize: Callable[..., None]) -> Callable[..., None]:
    import torch

    if torch.cuda.is_available():
        return synchronize
    return lambda device=None: None


def gaps() -> tuple[Gap, ...]:
    """The table. It is a function because four rows depend on the conv layout of this process.

    They are the two commits that move conv windows, MambaPool.__init__ and _pd_prefill_skips_mamba_spec_state; the last
    two leave upstream's own value in place with channels_first. Raises HeteroError if the environment names no layout.
    """
    layout = conv_layout_from_env()
    return (
        Gap(
            "sglang.kernels.ops.attention.fla.layernorm_gated",
            "_use_cpu",
            "RMSNormGated takes the sgl_kernel op only with AMX and a Triton kernel otherwise",
            _const(True),
        ),
        Gap(
            "sglang.kernels.ops.attention.fla.fused_norm_gate",
            "_use_cpu",
            "FusedRMSNormGated takes the sgl_kernel op only with AMX and a Triton kernel otherwise",
            _const(True),
        ),
        Gap(
            _SCATTER,
            "fused_mamba_state_scatter_with_mask",
            "the commit of a verified state refuses CPU tensors",
            _const(commit.scatter_state_with_mask),
            parameters=_SCATTER_PARAMETERS,
            bound_in=(_HYBRID,),
        ),
        Gap(
            _SCATTER,
            "fused_conv_window_scatter_with_mask",
            "the commit of a verified conv window refuses CPU tensors",
            _const(partial(commit.scatter_conv_window_with_mask, layout=layout)),
            parameters=_SCATTER_PARAMETERS,
            bound_in=(_HYBRID,),
        ),
        Gap(
            _SCATTER,
            "scatter_mamba_states_after_mtp_verify",
            "the commit after MTP verify refuses CPU tensors",
            _const(partial(commit.scatter_states_after_verify, layout=layout)),
            parameters=(
                "mamba_caches",
                "state_indices_tensor",
                "last_correct_step_indices",
                "mamba_track_indices",
                "mamba_steps_to_track",
                "src_indices_raw",
            ),
            bound_in=(_HYBRID,),
        ),
        Gap(
            "sglang.srt.disaggregation.mooncake.conn",
            "supports_host_tensor_indices",
            "with it the prefill asks for pinned memory and a CUDA event per chunk",
            _const(False),
            owner="MooncakeKVSender",
        ),
        Gap(
            _ALLOCATION,
            "get_last_loc",
            "with pages of more than one token it takes a Triton kernel unless a backend is torch_native",
            _get_last_loc_torch,
            parameters=("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        ),
        Gap(
            "sglang.kernels.ops.elementwise.elementwise",
            "fused_gate_sigmoid_mul_add",
            "the gate of the shared expert of Qwen MoE layers is a Triton kernel without a CPU branch",
            _const(gates.gate_sigmoid_mul_add),
            parameters=("hidden_states", "gate_weight", "shared_output", "final_hidden_states"),
            bound_in=("sglang.srt.models.qwen2_moe",),
        ),
        Gap(
            "sglang.srt.configs.update_config",
            "adjust_config_with_unaligned_cpu_tp",
            "on CPU only, TP above the number of KV heads pads them with zeros instead of replicating",
            _replicate_kv_heads,
            parameters=("model_config", "load_config", "tp_size"),
            bound_in=("sglang.srt.model_executor.model_runner",),
        ),
        Gap(
            "torch.cuda",
            "synchronize",
            "Qwen3-Next's set_embed_and_head calls it without asking for the device",
            _no_cuda_synchronize,
            parameters=("device",),
        ),
        Gap(
            "sglang.srt.layers.attention.torch_native_backend",
            "get_cpu_graph_seq_len_fill_value",
            "DP attention pads the batch and asks every CPU backend for the length of a padding request",
            _const(lambda self: 1),
            owner="TorchNativeAttnBackend",
            absent=True,
        ),
        Gap(
            "sglang.srt.mem_cache.memory_pool",
            "__init__",
            "conv slots in the layout of an NPU, if SGLANG_HETERO_CPU_CONV_LAYOUT asks for it",
            partial(_pool_with_layout, layout=layout),
            owner="MambaPool",
            parameters=("self", "size", "cache_params", "speculative_num_draft_tokens"),
        ),
        Gap(
            "sglang.srt.mem_cache.kv_cache_configurator",
            "_pd_prefill_skips_mamba_spec_state",
            "off an NPU a prefill's conv slots have no rows for draft tokens, in the layout of an NPU they have",
            partial(_prefill_keeps_draft_rows, layout=layout),
            parameters=(),
        ),
    )


def _changed(what: str) -> HeteroError:
    return HeteroError(
        f"{what}, so the gaps of SGLang's CPU path cannot be closed; "
        f"this release is made for SGLang {releases.MADE_FOR.number}, install that version (requirements/cpu.lock)"
    )


def _home(gap: Gap) -> Any:
    """The module or class that holds the symbol. Raises HeteroError if it is not as the table says."""
    try:
        home: Any = importlib.import_module(gap.module)
        if gap.owner:
            home = getattr(home, gap.owner)
    except (ImportError, AttributeError) as error:
        raise _changed(f"{gap.symbol} is missing ({error})") from error
    present = hasattr(home, gap.name)
    if gap.absent:
        if present:
            raise _changed(f"{gap.symbol} exists upstream now")
        return home
    if not present:
        raise _changed(f"{gap.symbol} is missing")
    if gap.parameters is not None:
        found = tuple(inspect.signature(getattr(home, gap.name)).parameters)
        lost = [name for name in gap.parameters if name not in found]
        if lost:
            raise _changed(f"{gap.symbol} has no parameter {', '.join(lost)} (it has {', '.join(found)})")
    return home


def _replaced(gap: Gap, old: Any) -> Any:
    try:
        return gap.replacement(old)
    except Exception as error:
        raise _changed(f"{gap.symbol} cannot be replaced ({type(error).__name__}: {error})") from error


def close_gaps(table: tuple[Gap, ...] | None = None) -> None:
    """Check every row, make every new value, then replace.

    Raises HeteroError, before anything is replaced, if a row does not fit or its new value cannot be made.
    """
    rows = tuple(gap for gap in gaps() if releases.installed().has(gap.symbol)) if table is None else table
    homes = [_home(gap) for gap in rows]
    old = [getattr(home, gap.name, None) for gap, home in zip(rows, homes, strict=True)]
    new = [_replaced(gap, value) for gap, value in zip(rows, old, strict=True)]
    for gap, home, before, after in zip(rows, homes, old, new, strict=True):
        setattr(home, gap.name, after)
        for user in gap.bound_in:
            module = sys.modules.get(user)
            if module is not None and getattr(module, gap.name, None) is before:
                setattr(module, gap.name, after)
