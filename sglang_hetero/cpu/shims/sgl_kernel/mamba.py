"""sgl_kernel.mamba: convolution and chunked delta rule, bound to the conv layout of this process."""

from functools import partial

from sglang_hetero.cpu.layout import conv_layout_from_env
from sglang_hetero.cpu.ops import conv
from sglang_hetero.cpu.ops.delta_rule import chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]

_LAYOUT = conv_layout_from_env()
causal_conv1d_fn_cpu = partial(conv.causal_conv1d_fn_cpu, layout=_LAYOUT)
causal_conv1d_update_cpu = partial(conv.causal_conv1d_update_cpu, layout=_LAYOUT)
