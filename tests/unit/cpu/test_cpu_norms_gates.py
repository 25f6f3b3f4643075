"""Norms and gates against their formulas, written out in fp64 element by element."""

import math

import pytest
import torch

from sglang_hetero.cpu.ops import gates, norms

EPS = 1e-6


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def rms_rows(x, weight):
    rows = []
    for row in x.double().tolist():
        scale = 1 / math.sqrt(sum(value * value for value in row) / len(row) + EPS)
        rows.append([value * scale * w for value, w in zip(row, weight, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def test_rmsnorm_gated(dtype, close):
    x, gate = torch.randn(5, 16, dtype=dtype), torch.randn(5, 16, dtype=dtype)
    weight = torch.randn(16, dtype=dtype)
    silu = torch.tensor([[g * sigmoid(g) for g in row] for row in gate.double().tolist()], dtype=torch.float64)
    out = norms.fused_rmsnorm_gated_cpu(x, weight, gate, EPS)
    assert out.dtype is dtype
    close(out, rms_rows(x, weight.double().tolist()) * silu)


def test_qk_norm_is_per_head_and_counts_the_weight_from_one(dtype, close):
    heads, kv_heads, dim = 4, 2, 8
    q, k = torch.randn(3, heads * dim, dtype=dtype), 9 * torch.randn(3, kv_heads * dim, dtype=dtype)
    qw, kw = torch.randn(dim, dtype=dtype), torch.randn(dim, dtype=dtype)
    qn, kn = norms.fused_qk_gemma_rmsnorm_cpu(q, k, qw, kw, EPS, dim)
    close(qn, rms_rows(q.view(-1, dim), (1 + qw.double()).tolist()))
    close(kn, rms_rows(k.view(-1, dim), (1 + kw.double()).tolist()))


def test_qk_norm_with_gate_takes_query_and_gate_from_each_head(dtype, close):
    heads, dim = 3, 8
    q_gate, k = torch.randn(2, heads * 2 * dim, dtype=dtype), torch.randn(2, dim, dtype=dtype)
    weight = torch.randn(dim, dtype=dtype)
    q, _, gate = norms.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, weight, weight, EPS, dim, heads)
    for token in range(2):
        for head in range(heads):
            start = head * 2 * dim
            row = token * heads + head
            close(
                q[row : row + 1],
                rms_rows(q_gate[token : token + 1, start : start + dim], (1 + weight.double()).tolist()),
            )
            assert torch.equal(gate[row], q_gate[token, start + dim : start + 2 * dim])
    assert gate.data_ptr() != q_gate.data_ptr()


def test_log_decay_with_small_and_large_steps(close):
    a = torch.tensor([[-30.0, -1.0, 0.0, 5.0, 19.0, 25.0, 80.0]])
    A_log, dt_bias = torch.randn(7), torch.randn(7)
    expected = [
        -math.exp(A) * math.log1p(math.exp(x + bias))
        for x, A, bias in zip(a[0].tolist(), A_log.tolist(), dt_bias.tolist(), strict=True)
    ]
    g = gates.log_decay(A_log, a, dt_bias)
    close(g[0], torch.tensor(expected, dtype=torch.float64))
    assert (g <= 0).all()


def test_gdn_gating_rounds_beta_to_the_dtype_of_b(dtype):
    a, b = torch.randn(6, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    g, beta = gates.fused_gdn_gating_cpu(torch.randn(4), a, b, torch.randn(4))
    assert g.shape == beta.shape == (1, 6, 4)
    assert g.dtype is beta.dtype is torch.float32
    exact = torch.tensor([[sigmoid(x) for x in row] for row in b.double().tolist()], dtype=torch.float64)
    torch.testing.assert_close(beta[0].double(), exact, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=0)
    assert torch.equal(beta, beta.to(dtype).float())


def test_sigmoid_mul_is_in_place_and_takes_a_strided_gate(dtype, close):
    x = torch.randn(4, 6, dtype=dtype)
    packed = torch.randn(4, 2, 2, 3, dtype=dtype)
    gate = packed[:, :, 1]  # [4, 2, 3], strided
    expected = [
        [value * sigmoid(g) for value, g in zip(row, gate_row, strict=True)]
        for row, gate_row in zip(x.double().tolist(), gate.reshape(4, 6).double().tolist(), strict=True)
    ]
    gates.fused_sigmoid_mul_cpu(x, gate)
    close(x, torch.tensor(expected, dtype=torch.float64))


def test_shared_expert_gate(dtype, close):
    hidden, shared, final = (torch.randn(5, 8, dtype=dtype) for _ in range(3))
    weight = torch.randn(8, dtype=dtype)
    expected = final.double().clone()
    for row in range(5):
        dot = sum(x * w for x, w in zip(hidden[row].double().tolist(), weight.double().tolist(), strict=True))
        expected[row] += sigmoid(dot) * shared[row].double()
    gates.gate_sigmoid_mul_add(hidden, weight, shared, final)
    close(final, expected, tol=5e-5)


@pytest.mark.parametrize(("hk", "hv", "dk", "dv"), [(2, 4, 3, 5), (1, 1, 4, 4)])
def test_qkvzba_split_names_every_channel(hk, hv, dk, dv):
    qkv_dim, z_dim = 2 * hk * dk + hv * dv, hv * dv
    qkvz = torch.arange(3 * (qkv_dim + z_dim)).view(3, -1)
    ba = torch.arange(3 * 2 * hv).view(3, -1)
    qkv, z, b, a = gates.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, hk, hv, dk, dv)
    assert qkv.tolist() == [row[:qkv_dim] for row in qkvz.tolist()]
    assert z.flatten(1).tolist() == [row[qkv_dim:] for row in qkvz.tolist()]
    assert z.shape == (3, hv, dv)
    assert b.tolist() == [row[:hv] for row in ba.tolist()]
    assert a.tolist() == [row[hv:] for row in ba.tolist()]
    assert all(part.is_contiguous() for part in (qkv, z, b, a))
