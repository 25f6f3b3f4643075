"""Causal convolution against a loop over tokens and taps, in both layouts, with poisoned neighbours."""

import math
from functools import partial

import pytest
import torch

from sglang_hetero.cpu.layout import live_window, pool_slot_shape
from sglang_hetero.cpu.ops import conv
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.window import ConvLayout

DIM, KERNEL, SLOTS, DRAFTS = 6, 4, 7, 4
WINDOW = KERNEL - 1


@pytest.fixture(params=list(ConvLayout), ids=lambda layout: layout.value)
def layout(request):
    return request.param


def poisoned_pool(layout, windows, dtype):
    """A pool of NaN; windows {slot: [dim, K-1]} are put into the live rows, written out per layout."""
    pool = torch.full((SLOTS, *pool_slot_shape(DIM, WINDOW, DRAFTS, layout)), math.nan, dtype=dtype)
    for slot, window in windows.items():
        for channel in range(DIM):
            for age in range(WINDOW):
                if layout is ConvLayout.WINDOW_FIRST:
                    pool[slot, DRAFTS - 1 + age, channel] = window[channel, age]
                else:
                    pool[slot, channel, age] = window[channel, age]
    return pool


def loop_conv(history, x, weight, bias, silu):
    """history [dim, K-1] and x [dim, T] in fp64 -> y [dim, T], the window after every token [T, dim, K-1]."""
    y, windows = torch.zeros_like(x), []
    past = history.clone()
    for t in range(x.shape[1]):
        line = torch.cat([past, x[:, t : t + 1]], dim=1)
        for channel in range(x.shape[0]):
            total = sum(float(line[channel, j]) * float(weight[channel, j]) for j in range(KERNEL))
            total += float(bias[channel]) if bias is not None else 0.0
            y[channel, t] = total / (1 + math.exp(-total)) if silu else total
        past = line[:, 1:]
        windows.append(past.clone())
    return y, torch.stack(windows)


def untouched(pool, before, except_slots):
    others = [slot for slot in range(SLOTS) if slot not in except_slots]
    assert torch.equal(pool[others].nan_to_num(-77), before[others].nan_to_num(-77))


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("activation", ["silu", None])
def test_extend_of_a_ragged_batch(layout, dtype, close, with_bias, activation):
    lengths, slots, continued = [1, 5, 2, 0, 9], [4, -1, 2, 0, 6], [True, False, False, True, True]
    bounds = torch.tensor([0, 1, 6, 8, 8, 17], dtype=torch.int32)
    weight, bias = torch.randn(DIM, KERNEL, dtype=dtype), torch.randn(DIM, dtype=dtype) if with_bias else None
    windows = {slot: torch.randn(DIM, WINDOW).to(dtype) for slot, known in zip(slots, continued, strict=True) if known}
    pool = poisoned_pool(layout, windows, dtype)
    before = pool.clone()
    x = torch.randn(17, DIM, dtype=dtype).t()
    out = conv.causal_conv1d_fn_cpu(
        x,
        weight,
        bias,
        activation=activation,
        conv_states=pool,
        has_initial_state=torch.tensor(continued),
        cache_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=bounds,
        seq_lens_cpu=lengths,
        layout=layout,
    )
    for i, slot in enumerate(slots):
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        if slot < 0:
            assert not out[:, part].any()
            continue
        if lengths[i] == 0:
            continue
        history = windows[slot].double() if continued[i] else torch.zeros(DIM, WINDOW, dtype=torch.float64)
        y, after = loop_conv(history, x[:, part].double(), weight, bias, activation == "silu")
        close(out[:, part], y)
        assert torch.equal(live_window(pool, WINDOW, layout)[slot].double(), after[-1])
        if layout is ConvLayout.WINDOW_FIRST:
            assert pool[slot, : DRAFTS - 1].isnan().all()
    untouched(pool, before, {4, 2, 6})


def test_decode_step(layout, dtype, close):
    slots = [5, -1, 0]
    windows = {slot: torch.randn(DIM, WINDOW).to(dtype) for slot in (5, 0)}
    pool = poisoned_pool(layout, windows, dtype)
    before = pool.clone()
    weight, bias, x = torch.randn(DIM, KERNEL), torch.randn(DIM), torch.randn(3, DIM, dtype=dtype)
    out = conv.causal_conv1d_update_cpu(
        x, pool, weight, bias, "silu", conv_state_indices=torch.tensor(slots, dtype=torch.int32), layout=layout
    )
    assert out.shape == x.shape
    assert not out[1].any()
    for row, slot in ((0, 5), (2, 0)):
        y, after = loop_conv(windows[slot].double(), x[row].double().unsqueeze(1), weight, bias, True)
        close(out[row], y[:, 0])
        assert torch.equal(live_window(pool, WINDOW, layout)[slot].double(), after[0])
    untouched(pool, before, {5, 0})


@pytest.mark.parametrize("drafts", [1, 2, 4, 6])
def test_verify_stores_every_window_and_leaves_the_slot(layout, dtype, close, drafts):
    slots, rows = [3, -1, 1], [2, 0, 4]
    windows = {slot: torch.randn(DIM, WINDOW).to(dtype) for slot in (3, 1)}
    pool = poisoned_pool(layout, windows, dtype)
    before = pool.clone()
    scratch = torch.full((5, 6, DIM, WINDOW), math.nan, dtype=dtype)
    weight, x = torch.randn(DIM, KERNEL), torch.randn(3, drafts, DIM, dtype=dtype).transpose(1, 2)
    parents = torch.full((3, drafts), 99, dtype=torch.int64)
    out = conv.causal_conv1d_update_cpu(
        x,
        pool,
        weight,
        None,
        "silu",
        conv_state_indices=torch.tensor(slots),
        intermediate_conv_window=scratch,
        intermediate_state_indices=torch.tensor(rows, dtype=torch.int32),
        retrieve_next_sibling=torch.full((3, drafts), -1),
        retrieve_parent_token=parents,
        layout=layout,
    )
    for request, slot in ((0, 3), (2, 1)):
        y, after = loop_conv(windows[slot].double(), x[request].double(), weight, None, True)
        close(out[request], y)
        assert torch.equal(scratch[rows[request], :drafts].double(), after)
        assert scratch[rows[request], drafts:].isnan().all()
    assert not out[1].any()
    assert scratch[[0, 1, 3]].isnan().all()
    untouched(pool, before, set())
    assert parents.tolist() == [[0, *range(drafts - 1)]] * 3


def test_trees_are_refused_with_the_remedy():
    with pytest.raises(HeteroError, match="speculative-eagle-topk 1"):
        conv.causal_conv1d_update_cpu(
            torch.zeros(1, DIM, 2),
            torch.zeros(1, DIM, WINDOW),
            torch.zeros(DIM, KERNEL),
            None,
            "silu",
            conv_state_indices=torch.tensor([0]),
            retrieve_next_sibling=torch.tensor([[-1, 1]]),
        )


def test_unknown_activation_is_refused():
    call = partial(conv.causal_conv1d_update_cpu, torch.zeros(1, DIM), torch.zeros(1, DIM, WINDOW))
    with pytest.raises(HeteroError, match="gelu"):
        call(torch.zeros(DIM, KERNEL), None, "gelu", conv_state_indices=torch.tensor([0]))


@pytest.mark.parametrize("requests", [1, 3])
def test_output_of_a_verify_can_be_viewed_by_token(layout, requests):
    """Upstream's caller (gdn_backend.py, forward_extend) swaps the axes and flattens all tokens without a copy."""
    x = torch.randn(requests, DRAFTS, DIM).transpose(1, 2)
    states = torch.zeros(SLOTS, *pool_slot_shape(DIM, WINDOW, DRAFTS, layout))
    slots = torch.arange(requests, dtype=torch.int32)
    out = conv.causal_conv1d_update_cpu(
        x,
        states,
        torch.randn(DIM, KERNEL),
        None,
        "silu",
        slots,
        intermediate_conv_window=torch.zeros(requests, DRAFTS, DIM, WINDOW),
        intermediate_state_indices=slots,
        layout=layout,
    )
    assert out.shape == x.shape
    flat = out.transpose(1, 2).view(requests * DRAFTS, DIM)
    assert torch.equal(flat[-1], out[-1, :, -1])
