"""The stand-in packages: what SGLang looks for is there, and what would mislead it is not."""

import importlib

import pytest
import torch

from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.window import ConvLayout


@pytest.fixture
def sgl_kernel(shims):
    module = importlib.import_module("sgl_kernel")
    assert hasattr(module, "IS_HETERO_CPU_REFERENCE"), "a real sgl_kernel is installed"
    return module


def test_sglang_sees_no_amx_build(sgl_kernel):
    """The attribute that srt/utils/common.py asks for; with it SGLang would call AMX kernels."""
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


@pytest.mark.parametrize(
    "name",
    [
        "decode_attention_cpu",
        "extend_attention_cpu",
        "fused_gdn_gating_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
        "fused_rmsnorm_gated_cpu",
        "fused_sigmoid_gating_delta_rule_update_cpu",
        "fused_sigmoid_mul_cpu",
    ],
)
def test_ops_are_registered_for_cpu(sgl_kernel, name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sgl_kernel::{name}", "CPU")


def test_a_registered_op_computes_and_writes_in_place(sgl_kernel):
    x, gate = torch.randn(3, 4), torch.randn(3, 4)
    expected = x * torch.sigmoid(gate)
    assert torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(x, gate) is None
    torch.testing.assert_close(x, expected)


def test_delta_rule_op_takes_sglangs_keywords(sgl_kernel):
    """The keywords of TritonGDNKernel.target_verify."""
    pool, scratch = torch.zeros(2, 1, 3, 2), torch.zeros(1, 2, 1, 3, 2)
    out = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(1),
        q=torch.randn(1, 2, 1, 2),
        k=torch.randn(1, 2, 1, 2),
        v=torch.randn(1, 2, 1, 3),
        a=torch.zeros(2, 1),
        b=torch.zeros(2, 1),
        initial_state_source=pool,
        initial_state_indices=torch.tensor([1], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=False,
        disable_state_update=True,
        intermediate_states_buffer=scratch,
        intermediate_state_indices=torch.tensor([0]),
        cache_steps=2,
        retrieve_parent_token=None,
    )
    assert out.shape == (1, 2, 1, 3)
    assert not pool.any()
    assert scratch.any()


def test_conv_is_bound_to_the_layout_of_the_process(sgl_kernel, monkeypatch):
    mamba = importlib.import_module("sgl_kernel.mamba")
    monkeypatch.setenv(CONV_LAYOUT_ENV, "window_first")
    try:
        importlib.reload(mamba)
        assert mamba.causal_conv1d_fn_cpu.keywords == {"layout": ConvLayout.WINDOW_FIRST}
        assert mamba.causal_conv1d_update_cpu.keywords == {"layout": ConvLayout.WINDOW_FIRST}
    finally:
        monkeypatch.delenv(CONV_LAYOUT_ENV)
        importlib.reload(mamba)


@pytest.mark.parametrize(
    "name",
    ["torchvision.io", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.transforms.v2"],
)
def test_torchvision_imports_but_does_not_pretend_to_work(shims, name):
    module = importlib.import_module(name)
    torchvision = importlib.import_module("torchvision")
    assert hasattr(torchvision, "IS_HETERO_CPU_REFERENCE"), "a real torchvision is installed"
    with pytest.raises(HeteroError, match="no image processing"):
        module.resize(None)
    assert not hasattr(module, "__wrapped__")
