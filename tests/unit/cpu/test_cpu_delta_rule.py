"""The gated delta rule against the textbook recurrence, one token at a time in fp64."""

import math

import pytest
import torch

from sglang_hetero.cpu.ops import delta_rule
from sglang_hetero.errors import HeteroError

H, HV, K, V, SLOTS = 2, 4, 8, 6, 9


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def textbook(state, q, k, v, g, beta):  # noqa: PLR0917  the order of the op
    """One request: q, k [T, H, K], v [T, HV, V], g, beta [T, HV], state [HV, V, K]; all fp64.

    S <- S (I - beta k k^T) exp(g) + beta v k^T, written with the matrices. Returns outputs and the state after each
    token.
    """
    outputs, states = [], []
    for t in range(len(q)):
        new = torch.zeros_like(state)
        out = torch.zeros(HV, V, dtype=torch.float64)
        for head in range(HV):
            key, query = unit(k[t, head // (HV // H)]), unit(q[t, head // (HV // H)]) / math.sqrt(K)
            forget = torch.eye(K, dtype=torch.float64) - beta[t, head] * torch.outer(key, key)
            new[head] = torch.exp(g[t, head]) * state[head] @ forget + beta[t, head] * torch.outer(v[t, head], key)
            out[head] = new[head] @ query
        state = new
        outputs.append(out)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def random_inputs(tokens, dtype, decay=None):
    q, k = torch.randn(1, tokens, H, K, dtype=dtype), torch.randn(1, tokens, H, K, dtype=dtype)
    v = torch.randn(1, tokens, HV, V, dtype=dtype)
    g = -torch.rand(1, tokens, HV) if decay is None else decay(tokens)
    return q, k, v, g, torch.rand(1, tokens, HV)


def poisoned_pool(slots, dtype=torch.float32):
    pool = torch.full((SLOTS, HV, V, K), math.nan, dtype=dtype)
    for slot in slots:
        pool[slot] = torch.randn(HV, V, K)
    return pool


def bounds_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def check_extend(lengths, slots, dtype, close, *, decay=None, pool_dtype=torch.float32):
    q, k, v, g, beta = random_inputs(sum(lengths), dtype, decay)
    pool = poisoned_pool([slot for slot in slots if slot >= 0], pool_dtype)
    before = pool.clone()
    bounds = bounds_of(lengths)
    out, none, starts = delta_rule.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, pool, bounds, initial_state_indices=torch.tensor(slots, dtype=torch.int32)
    )
    assert none is None
    assert out.dtype is dtype
    chunk = 0
    for i, slot in enumerate(slots):
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        first = before[slot].double() if slot >= 0 else torch.zeros(HV, V, K, dtype=torch.float64)
        if not lengths[i]:
            continue
        expected, states = textbook(first, *(x[0, part].double() for x in (q, k, v, g, beta)))
        close(out[0, part], expected)
        if slot >= 0:
            close(pool[slot], states[-1])
        for token in range(0, lengths[i], 64):
            close(starts[0, chunk], first if token == 0 else states[token - 1])
            chunk += 1
    assert chunk == starts.shape[1]
    others = [slot for slot in range(SLOTS) if slot not in slots or not lengths[slots.index(slot)]]
    assert torch.equal(pool[others].nan_to_num(-7), before[others].nan_to_num(-7))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 200])
def test_extend_at_chunk_borders(tokens, dtype, close):
    check_extend([tokens], [3], dtype, close)


def test_extend_of_a_ragged_batch_with_padding(dtype, close):
    check_extend([5, 64, 0, 70, 1], [8, -1, 2, 0, 4], dtype, close)


def test_extend_with_a_bf16_pool(close):
    check_extend([70, 3], [1, 0], torch.bfloat16, close, pool_dtype=torch.bfloat16)


DECAYS = {
    "none": lambda tokens: torch.zeros(1, tokens, HV),
    "strong": lambda tokens: -300 * torch.rand(1, tokens, HV),
    # An fp32 sum of these loses the small ones behind the large ones.
    "mixed": lambda tokens: -torch.where(torch.rand(1, tokens, HV) < 0.3, 3000.0, 1e-3 * torch.rand(1, tokens, HV)),
    "infinite": lambda tokens: -torch.where(torch.rand(1, tokens, HV) < 0.1, math.inf, 0.1),
}


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS.keys())
def test_extend_is_robust_against(decay, close):
    check_extend([130], [2], torch.float32, close, decay=decay)


def test_extend_in_two_pieces_equals_one():
    q, k, v, g, beta = random_inputs(150, torch.float32)
    pools = [poisoned_pool([0]).clone() for _ in range(2)]
    pools[1][0] = pools[0][0]
    slot = torch.tensor([0])
    whole, _, _ = delta_rule.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, pools[0], bounds_of([150]), initial_state_indices=slot
    )
    pieces = []
    for lo, hi in ((0, 37), (37, 150)):
        part = (x[:, lo:hi] for x in (q, k, v, g, beta))
        pieces.append(
            delta_rule.chunk_gated_delta_rule_cpu(*part, pools[1], bounds_of([hi - lo]), initial_state_indices=slot)[0]
        )
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pools[1][0], pools[0][0], rtol=1e-5, atol=1e-5)


def test_idle_batch():
    q, k, v, g, beta = random_inputs(0, torch.float32)
    out, _, starts = delta_rule.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, poisoned_pool([]), torch.tensor([0]), initial_state_indices=torch.tensor([], dtype=torch.long)
    )
    assert out.shape == (1, 0, HV, V)
    assert starts.shape == (1, 0, HV, V, K)


def gate_inputs(tokens, dtype):
    return torch.randn(HV), torch.randn(HV), torch.randn(tokens, HV, dtype=dtype), torch.randn(tokens, HV, dtype=dtype)


def gates_fp64(A_log, dt_bias, a, b):
    g = -torch.exp(A_log.double()) * torch.log1p(torch.exp(a.double() + dt_bias.double()))
    return g, 1 / (1 + torch.exp(-b.double()))


def recurrent(gating, qkv, pool, slots, bounds, **verify):
    A_log, dt_bias, a, b = gating
    return delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log, dt_bias, *qkv, a, b, pool, torch.tensor(slots, dtype=torch.int32), bounds, True, **verify
    )


@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 1, 0, 3]], ids=["decode", "ragged"])
def test_decode(lengths, dtype, close):
    slots = [6, -1, 0, 2][: len(lengths)]
    qkv = random_inputs(sum(lengths), dtype)[:3]
    gating = gate_inputs(sum(lengths), dtype)
    pool = poisoned_pool([slot for slot in slots if slot >= 0])
    before = pool.clone()
    bounds = bounds_of(lengths)
    out = recurrent(gating, qkv, pool, slots, bounds)
    g, beta = gates_fp64(*gating)
    written = set()
    for i, slot in enumerate(slots):
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        if not lengths[i]:
            continue
        first = before[slot].double() if slot >= 0 else torch.zeros(HV, V, K, dtype=torch.float64)
        expected, states = textbook(first, *(x[0, part].double() for x in qkv), g[part], beta[part])
        close(out[0, part], expected)
        if slot >= 0:
            close(pool[slot], states[-1])
            written.add(slot)
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(pool[others].nan_to_num(-7), before[others].nan_to_num(-7))


@pytest.mark.parametrize("drafts", [2, 4, 6])
@pytest.mark.parametrize("parents", ["none", "chain", "star"])
def test_verify_keeps_every_state_and_leaves_the_slot(drafts, parents, dtype, close):
    slots, rows = [5, -1, 1], [0, 1, 3]
    qkv = random_inputs(3 * drafts, dtype)[:3]
    gating = gate_inputs(3 * drafts, dtype)
    pool = poisoned_pool([5, 1])
    before = pool.clone()
    scratch = torch.full((4, 6, HV, V, K), math.nan)
    parent_of = {"none": None, "chain": [0, *range(drafts - 1)], "star": [0] * drafts}[parents]
    out = recurrent(
        gating,
        qkv,
        pool,
        slots,
        bounds_of([drafts] * 3),
        disable_state_update=True,
        intermediate_states_buffer=scratch,
        intermediate_state_indices=torch.tensor(rows),
        cache_steps=drafts,
        retrieve_parent_token=None if parent_of is None else torch.tensor([parent_of] * 3),
    )
    g, beta = gates_fp64(*gating)
    for request, slot in ((0, 5), (2, 1)):
        states = {}
        for t in range(drafts):
            at = slice(request * drafts + t, request * drafts + t + 1)
            parent = (parent_of or [0, *range(drafts - 1)])[t]
            first = before[slot].double() if t == 0 else states[parent]
            expected, after = textbook(first, *(x[0, at].double() for x in qkv), g[at], beta[at])
            states[t] = after[0]
            close(out[0, at], expected)
            close(scratch[rows[request], t], after[0])
        assert scratch[rows[request], drafts:].isnan().all()
    assert scratch[[1, 2]].isnan().all()
    assert torch.equal(pool.nan_to_num(-7), before.nan_to_num(-7))


def test_a_parent_must_precede_its_token():
    with pytest.raises(HeteroError, match="parent"):
        recurrent(
            gate_inputs(2, torch.float32),
            random_inputs(2, torch.float32)[:3],
            poisoned_pool([0]),
            [0],
            bounds_of([2]),
            retrieve_parent_token=torch.tensor([[0, 1]]),
        )


def test_kda_is_refused():
    with pytest.raises(HeteroError, match="KDA"):
        recurrent(
            gate_inputs(1, torch.float32),
            random_inputs(1, torch.float32)[:3],
            poisoned_pool([0]),
            [0],
            bounds_of([1]),
            is_kda=True,
        )
