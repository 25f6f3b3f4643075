"""The gated delta rule: token by token for decode and verify, in chunks for extend.

Per value head, with state S [V, K], key k and query q [K], value v [V], log decay g <= 0 and beta in [0, 1]:

    S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = scale * S q

(Yang et al., "Gated Delta Networks", arXiv:2412.06464; the chunked form is theirs, section 3.3.) States lie as
[HV, V, K] in the pool, as the Triton kernels of SGLang keep them. Query and key heads may be fewer than value heads;
head h of them serves the value heads h*r .. h*r + r-1.
"""
# ruff: noqa: PLR0917  the argument lists are upstream's, and it passes them by position

import torch
import torch.nn.functional as F

from sglang_hetero.cpu.ops.gates import SOFTPLUS_THRESHOLD, log_decay
from sglang_hetero.errors import HeteroError

# Tokens of a chunk. Upstream's prefix cache counts state snapshots in chunks of this size (fla/chunk_delta_h.py).
CHUNK = 64
# Added to the sum of squares before the root, as fla/l2norm.py does.
L2_EPS = 1e-6
# exp() of this is 0 in fp32 and in fp64. A floor keeps sums of log decays finite, so that no inf - inf arises.
LOG_DECAY_FLOOR = -1.0e4


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] -> the same direction, length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [T, H, K], v [T, HV, V] -> fp32 with HV heads each; q is scaled by 1/sqrt(K)."""
    scale = q.shape[-1] ** -0.5
    q, k, v = q.float(), k.float(), v.float()
    if normalise:
        q, k = l2_normalise(q), l2_normalise(k)
    repeat = v.shape[-2] // k.shape[-2]
    if repeat > 1:
        q, k = (x.repeat_interleave(repeat, dim=-2) for x in (q, k))
    return q * scale, k, v


def delta_rule_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of n requests. state [n, HV, V, K]; q (scaled), k [n, HV, K]; v [n, HV, V]; g, beta [n, HV]; fp32.

    Returns the new state and the output [n, HV, V].
    """
    state = state * g.exp()[..., None, None]
    recalled = torch.matmul(state, k.unsqueeze(-1)).squeeze(-1)
    correction = (v - recalled) * beta.unsqueeze(-1)
    state = state + correction.unsqueeze(-1) * k.unsqueeze(-2)
    return state, torch.matmul(state, q.unsqueeze(-1)).squeeze(-1)


def _read_states(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp32 copies [n, HV, V, K] of the slots; a slot below 0 is padding and reads as zeros."""
    padding = (slots < 0).view(-1, 1, 1, 1)
    return pool[slots.clamp(min=0)].float().masked_fill(padding, 0.0)


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = SOFTPLUS_THRESHOLD,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode (one token a request) and verify (D draft tokens a request), with the gates computed inside.

    q, k [1, T, H, K]; v [1, T, HV, V]; a, b [T, HV]; A_log, dt_bias [HV]; initial_state_source [slots, HV, V, K];
    initial_state_indices int [n], -1 = padding (starts from zeros, writes nothing); cu_seqlens int [n+1].
    Verify: the state after draft token t of request i goes to
    intermediate_states_buffer[intermediate_state_indices[i], t] ([rows, D, HV, V, K]) and, with
    disable_state_update, the slot stays. retrieve_parent_token int [n, D]: token t > 0 starts from the state after
    its parent; None means t-1. cache_steps repeats D. Returns [1, T, HV, V] in the dtype of v.
    Raises HeteroError for KDA and for a parent that does not precede its token.
    """
    if is_kda:
        raise HeteroError("Kimi delta attention (KDA) is not supported by the CPU reference platform; use a GDN model")
    qf, kf, vf = _prepare(q[0], k[0], v[0], use_qk_l2norm_in_kernel)
    g = log_decay(A_log, a, dt_bias, softplus_beta, softplus_threshold).view(-1, vf.shape[1])
    beta = torch.sigmoid(b.float()).view(-1, vf.shape[1])
    out = torch.zeros((1, q.shape[1], *v.shape[2:]), dtype=v.dtype)
    bounds = cu_seqlens.tolist()
    slots = initial_state_indices[: len(bounds) - 1].long()
    for requests, length in _groups_of_equal_length(bounds):
        index = torch.tensor(requests)
        tokens = torch.tensor([bounds[r] for r in requests])[:, None] + torch.arange(length)  # [n, length]
        state = _read_states(initial_state_source, slots[index])
        parents = None
        if retrieve_parent_token is not None:
            parents = _checked_parents(retrieve_parent_token[index, :length].long())
        history: list[torch.Tensor] = []
        for t in range(length):
            if t and parents is not None:
                state = torch.stack(history, dim=1)[torch.arange(len(requests)), parents[:, t]]
            at = tokens[:, t]
            state, o = delta_rule_step(state, qf[at], kf[at], vf[at], g[at], beta[at])
            out[0, at] = o.to(out.dtype)
            if parents is not None:
                history.append(state)
            if intermediate_states_buffer is not None:
                assert intermediate_state_indices is not None
                rows = intermediate_state_indices[index].long()
                kept = (rows >= 0) & (slots[index] >= 0)
                intermediate_states_buffer[rows[kept], t] = state[kept].to(intermediate_states_buffer.dtype)
        if not disable_state_update:
            kept = slots[index] >= 0
            initial_state_source[slots[index][kept]] = state[kept].to(initial_state_source.dtype)
    return out


def _groups_of_equal_length(bounds: list[int]) -> list[tuple[list[int], int]]:
    """Requests by their number of tokens; those without tokens are left out. Decode and verify have one group."""
    groups: dict[int, list[int]] = {}
    for request in range(len(bounds) - 1):
        length = bounds[request + 1] - bounds[request]
        if length > 0:
            groups.setdefault(length, []).append(request)
    return [(requests, length) for length, requests in groups.items()]


def _checked_parents(parents: torch.Tensor) -> torch.Tensor:
    later = parents[:, 1:]
    if bool(((later < 0) | (later >= torch.arange(1, parents.shape[1]))).any()):
        raise HeteroError(f"a draft token must follow its parent, got parents {parents.tolist()}")
    return parents


def delta_rule_chunked(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """T tokens of one request, in chunks of CHUNK. Shapes: state [HV, V, K]; q (scaled), k [T, HV, K]; v [T, HV, V];
    g, beta [T, HV]; all fp32.

    Returns the last state [HV, V, K], the outputs [T, HV, V] and the states at the starts of the chunks
    [ceil(T/CHUNK), HV, V, K].

    Every exponent is a difference of log decays that is <= 0, so nothing overflows however strong the decay. The sums
    are fp64: after a strong decay an fp32 sum has lost the digits of the small decays that follow it.
    """
    tokens, heads, _ = k.shape
    chunks = -(-tokens // CHUNK)
    pad = chunks * CHUNK - tokens  # tokens with k = 0, beta = 0 and g = 0 change nothing

    def by_chunk(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, pad)) if pad else x
        return x.reshape(chunks, CHUNK, *x.shape[1:]).movedim(2, 1)  # [N, HV, C, ...]

    q, k, v, beta = by_chunk(q), by_chunk(k), by_chunk(v), by_chunk(beta)
    total = by_chunk(g).double().clamp(min=LOG_DECAY_FLOOR).cumsum(-1)  # [N, HV, C], decay since the chunk's start
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill_(upper, float("-inf")).exp_()
    since_start = total.float().exp().unsqueeze(-1)
    to_end = (total[..., -1:] - total).float().exp().unsqueeze(-1)
    whole = total[..., -1].float().exp()[..., None, None]

    # Within a chunk the corrections u solve (I + A) u = beta (v - decayed S k), A strictly lower triangular.
    k_beta = k * beta.unsqueeze(-1)
    a = (k_beta @ k.transpose(-1, -2)) * between  # the solver below reads its strict lower triangle only
    rhs = torch.cat([v * beta.unsqueeze(-1), k_beta * since_start], dim=-1)
    solved = torch.linalg.solve_triangular(a, rhs, upper=False, unitriangular=True)
    u_free, u_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * between
    q_decayed = q * since_start
    k_decayed = k * to_end

    out = torch.empty(chunks, heads, CHUNK, v.shape[-1])
    starts = torch.empty(chunks, *state.shape)
    for n in range(chunks):
        starts[n] = state
        columns = state.transpose(-1, -2)  # [HV, K, V]
        u = torch.baddbmm(u_free[n], u_state[n], columns, alpha=-1)
        out[n] = torch.baddbmm(scores[n] @ u, q_decayed[n], columns)
        state = torch.baddbmm(state * whole[n], u.transpose(-1, -2), k_decayed[n])
    return state, out.movedim(1, 2).reshape(chunks * CHUNK, heads, -1)[:tokens], starts


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    initial_state_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Extend: the new tokens of every request, state read from and written to its slot.

    q, k [1, T, H, K]; v [1, T, HV, V]; g, beta [1, T, HV]; initial_state (the pool) [slots, HV, V, K];
    initial_state_indices int [n], -1 = padding (starts from zeros, writes nothing); cu_seqlens int [n+1].
    Returns the outputs [1, T, HV, V] in the dtype of v; None (the states are already in the pool); and the states
    at the chunk starts of all requests in order, [1, chunks, HV, V, K] in the pool's dtype, which the prefix cache
    reads.
    """
    if head_first:
        raise HeteroError("the delta rule of the CPU reference platform takes [tokens, heads, dim] only")
    assert initial_state_indices is not None
    qf, kf, vf = _prepare(q[0], k[0], v[0], use_qk_l2norm_in_kernel)
    gf, bf = g[0].float(), beta[0].float()
    out = torch.zeros((1, q.shape[1], *v.shape[2:]), dtype=v.dtype)
    starts = [torch.empty(0, *initial_state.shape[1:])]
    bounds = cu_seqlens.tolist()
    slots = initial_state_indices[: len(bounds) - 1].long()
    states = _read_states(initial_state, slots)
    for request, slot in enumerate(slots.tolist()):
        at = slice(bounds[request], bounds[request + 1])
        if at.start == at.stop:
            continue
        state, o, request_starts = delta_rule_chunked(states[request], qf[at], kf[at], vf[at], gf[at], bf[at])
        out[0, at] = o.to(out.dtype)
        starts.append(request_starts)
        if slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.cat(starts).unsqueeze(0).to(initial_state.dtype)
