"""Commit after a verify: the scatter alone, and verify + commit against plain decoding."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sglang_hetero.cpu.layout import live_window, pool_slot_shape
from sglang_hetero.cpu.ops import commit, conv, delta_rule
from sglang_hetero.layout.window import ConvLayout

LAYERS, SLOTS, DIM, WINDOW, DRAFTS = 2, 6, 8, 3, 4
H, HV, K, V = 1, 2, 2, 2  # q | k | v channels: 2*H*K + HV*V = DIM


@pytest.fixture(params=list(ConvLayout), ids=lambda layout: layout.value)
def layout(request):
    return request.param


def make_caches(layout, dtype):
    """Pool tensors as SGLang allocates them; every element is NaN."""

    def nan(*shape, dtype=torch.float32):
        return torch.full(shape, math.nan, dtype=dtype)

    return SimpleNamespace(
        temporal=nan(LAYERS, SLOTS, HV, V, K),
        conv=[nan(LAYERS, SLOTS, *pool_slot_shape(DIM, WINDOW, DRAFTS, layout), dtype=dtype)],
        intermediate_ssm=nan(LAYERS, 4, DRAFTS, HV, V, K),
        intermediate_conv_window=[nan(LAYERS, 4, DRAFTS, DIM, WINDOW, dtype=dtype)],
    )


@pytest.mark.parametrize("rows", [None, [3, 0, 1, 2, 2, 2]], ids=["own row", "given rows"])
def test_scatter_leaves_out_padding(rows):
    dst, src = torch.zeros(LAYERS, SLOTS, 2, 3), torch.rand(LAYERS, 6, DRAFTS, 2, 3) + 1
    slots, steps = [4, 1, -1, 2, 99, 0], [0, 3, 1, -1, 1, DRAFTS]
    given = None if rows is None else torch.tensor(rows)
    commit.scatter_state_with_mask(dst, src, torch.tensor(slots), torch.tensor(steps), given)
    source = rows or list(range(6))
    for slot in range(SLOTS):
        if slot in (4, 1):
            request = slots.index(slot)
            assert torch.equal(dst[:, slot], src[:, source[request], steps[request]])
        else:
            assert not dst[:, slot].any()


def test_scatter_of_nothing_changes_nothing():
    dst = torch.zeros(1, 2, 3)
    commit.scatter_state_with_mask(dst, torch.ones(1, 1, 1, 3), torch.tensor([0]), torch.tensor([-1]))
    assert not dst.any()


def test_track_slots_take_their_own_step(layout):
    caches = make_caches(layout, torch.float32)
    caches.intermediate_ssm.copy_(torch.rand_like(caches.intermediate_ssm))
    caches.intermediate_conv_window[0].copy_(torch.rand_like(caches.intermediate_conv_window[0]))
    commit.scatter_states_after_verify(
        caches, torch.tensor([1, 2]), torch.tensor([3, 0]), torch.tensor([4, 5]), torch.tensor([1, -1]), layout=layout
    )
    live = live_window(caches.conv[0], WINDOW, layout)
    for slot, request, step in ((1, 0, 3), (2, 1, 0), (4, 0, 1)):
        assert torch.equal(caches.temporal[:, slot], caches.intermediate_ssm[:, request, step])
        assert torch.equal(live[:, slot], caches.intermediate_conv_window[0][:, request, step])
    assert caches.temporal[:, [0, 3, 5]].isnan().all()
    assert caches.conv[0][:, [0, 3, 5]].isnan().all()


def step(qkv, ab, weights, caches, layer, slots, layout, verify=None):  # noqa: PLR0917
    """One forward of a linear layer, as GDNAttnBackend calls the ops. qkv [n, T, DIM], ab [2, n, T, HV]."""
    requests, tokens = qkv.shape[:2]
    windows = {}
    states = {}
    if verify is not None:
        windows = {
            "intermediate_conv_window": caches.intermediate_conv_window[0][layer],
            "intermediate_state_indices": verify,
        }
        states = {
            "intermediate_states_buffer": caches.intermediate_ssm[layer],
            "intermediate_state_indices": verify,
            "disable_state_update": True,
        }
    mixed = conv.causal_conv1d_update_cpu(
        qkv.transpose(1, 2),
        caches.conv[0][layer],
        weights.conv,
        None,
        "silu",
        conv_state_indices=slots,
        layout=layout,
        **windows,
    )
    flat = mixed.transpose(1, 2).reshape(1, requests * tokens, DIM)
    q, k, v = flat.split([H * K, H * K, HV * V], dim=-1)
    return delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
        weights.A_log,
        weights.dt_bias,
        q.unflatten(-1, (H, K)),
        k.unflatten(-1, (H, K)),
        v.unflatten(-1, (HV, V)),
        *ab.flatten(1, 2),
        caches.temporal[layer],
        slots,
        torch.arange(0, requests * tokens + 1, tokens),
        True,
        **states,
    ).view(requests, tokens, HV, V)


def test_verify_and_commit_equal_plain_decoding(layout, dtype):
    """Three rounds with other accept lengths each; a second pool decodes only the accepted tokens."""
    weights = SimpleNamespace(conv=torch.randn(DIM, WINDOW + 1), A_log=torch.randn(HV), dt_bias=torch.randn(HV))
    speculative, plain = make_caches(layout, dtype), make_caches(layout, dtype)
    slots, rows = torch.tensor([4, 0, -1]), torch.tensor([2, 3, 0])
    live = [live_window(caches.conv[0], WINDOW, layout) for caches in (speculative, plain)]
    for slot in (4, 0):
        start = torch.randn(LAYERS, HV, V, K)
        window = torch.randn(LAYERS, DIM, WINDOW).to(dtype)
        for caches, view in zip((speculative, plain), live, strict=True):
            caches.temporal[:, slot] = start
            view[:, slot] = window
    for accepted in ([1, 4], [3, 2], [4, 1]):
        qkv = torch.randn(3, DRAFTS, DIM, dtype=dtype)
        ab = torch.randn(2, 3, DRAFTS, HV, dtype=dtype)
        for layer in range(LAYERS):
            forward = partial(step, weights=weights, layer=layer, layout=layout)
            drafted = forward(qkv, ab, caches=speculative, slots=slots, verify=rows)
            for request, count in enumerate(accepted):
                for t in range(count):
                    at = (slice(request, request + 1), slice(t, t + 1))
                    one = forward(qkv[at], ab[(slice(None), *at)], caches=plain, slots=slots[request : request + 1])
                    torch.testing.assert_close(one[0, 0], drafted[request, t])
        commit.scatter_states_after_verify(
            speculative, slots, torch.tensor([*accepted, 0]) - 1, None, None, rows, layout=layout
        )
        torch.testing.assert_close(speculative.temporal, plain.temporal, equal_nan=True)
        assert torch.equal(live[0].nan_to_num(-7), live[1].nan_to_num(-7))
        assert live[0][:, [4, 0]].isfinite().all()
