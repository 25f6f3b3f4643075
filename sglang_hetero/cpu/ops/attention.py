"""Attention over the paged KV cache, with torch's scaled dot product attention.

K and V buffers are per layer, [slots, Hk, D]; req_to_token [requests, max_len] names the slot of every position.
Grouped queries: query head h reads KV head h // (H / Hk).
"""
# ruff: noqa: PLR0917  the argument lists are upstream's, and it passes them by position

import torch
import torch.nn.functional as F

from sglang_hetero.errors import HeteroError

# Query rows per masked block: bounds the mask to [QUERY_BLOCK, keys]; 256 to 1024 are equally fast.
QUERY_BLOCK = 512


def _refuse(op: str, **unsupported: object) -> None:
    """One clear error for a feature of the full kernel that no Qwen hybrid model uses."""
    for name, used in unsupported.items():
        if used:
            raise HeteroError(f"{op}: {name} is not supported by the CPU reference platform")


def _by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [Lq, H, D], k, v [Lk, Hk, D] -> fp32 q [Hk, r, Lq, D] and k, v [Hk, r, Lk, D] without copies per group.

    KV heads are the batch axis and k, v are expanded over the r query heads, so the fused kernel serves grouped
    queries (with enable_gqa torch may fall back to the kernel that materialises all scores).
    """
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    q = q.float().reshape(q.shape[0], kv_heads, group, q.shape[2]).permute(1, 2, 0, 3)
    k, v = (x.float().transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    return q, k, v


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sliding_window: int = 0
) -> torch.Tensor:
    """The last Lq of Lk tokens attend to themselves and to what precedes them.

    q [Lq, H, D]; k [Lk, Hk, D]; v [Lk, Hk, Dv]; sliding_window: how many keys a query sees, itself included, 0 = all.
    Returns fp32 [Lq, H, Dv]. No mask is built if the tokens have no prefix; otherwise one per QUERY_BLOCK rows.
    """
    new, prefix = q.shape[0], k.shape[0] - q.shape[0]
    q, k, v = _by_group(q, k, v)
    if prefix == 0 and sliding_window <= 0:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for lo in range(0, new, QUERY_BLOCK):
            hi = min(lo + QUERY_BLOCK, new)
            last = torch.arange(prefix + lo, prefix + hi).unsqueeze(1)
            keys = torch.arange(prefix + hi)
            seen = keys <= last
            if sliding_window > 0:
                seen &= keys > last - sliding_window
            out[:, :, lo:hi] = F.scaled_dot_product_attention(
                q[:, :, lo:hi], k[:, :, : prefix + hi], v[:, :, : prefix + hi], attn_mask=seen, scale=scale
            )
    return out.flatten(0, 1).transpose(0, 1)


def attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Every query attends to every key. Shapes and result as in attend_causal."""
    q, k, v = _by_group(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, scale=scale).flatten(0, 1).transpose(0, 1)


def _rows(req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> list[tuple[int, int]]:
    """(row of req_to_token, length) of every request.

    req_pool_indices may be longer than seq_lens: attention-DP pads it with rows of no request, and for the draft model
    SGLang takes the lengths before that (intel_amx_backend.py, extend_metadata). The output of padding is not read.
    """
    requests = seq_lens.tolist()
    return list(zip(req_pool_indices.tolist()[: len(requests)], requests, strict=True))


def decode_attention_cpu(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One new token a request: store its key and value at loc, then attend to all seq_lens tokens.

    query [n, H, D]; key [n, Hk, D] (None: already stored); output [n, H, Dv] is written; loc int [n]; seq_lens int
    [n], the new token included, 0 = padding (output zero). attn_logits is scratch of the fused kernel and not used.
    """
    _refuse(
        "decode_attention_cpu",
        logit_cap=logit_cap > 0,
        cross_attention=is_cross_attn or encoder_lens is not None,
        sinks=sinks is not None,
        kv_scale=(k_scale, v_scale) != (1.0, 1.0),
    )
    if key is not None and value is not None:
        k_cache[loc.long()] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc.long()] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for i, (row, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        if length <= 0:
            output[i].zero_()
            continue
        first = max(0, length - sliding_window_size) if sliding_window_size > 0 else 0
        slots = req_to_token[row, first:length].long()
        output[i : i + 1] = attend_all(query[i : i + 1], k_cache[slots], v_cache[slots], sm_scale).to(output.dtype)


def extend_attention_cpu(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """The new tokens of every request attend to its prefix and causally to themselves.

    q_extend [T, H, D]; o_extend [T, H, Dv] is written at the requests' tokens; seq_lens int [n] counts prefix and new
    tokens, extend_seq_lens int [n] the new ones, which start at extend_start_loc; req_pool_indices int [n or more].
    Keys and values are read from the buffers, where the caller has stored the new ones; k_extend and v_extend repeat
    them.
    """
    _refuse(
        "extend_attention_cpu",
        logit_cap=logit_cap > 0,
        cross_attention=is_cross_attn or encoder_lens is not None,
        sinks=sinks is not None,
        tree_mask=tree_mask is not None,
        sliding_window_without_causal_mask=sliding_window_size > 0 and not is_causal,
        kv_scale=(k_scale, v_scale) != (1.0, 1.0),
    )
    rows = _rows(req_pool_indices, seq_lens)
    spans = zip(extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True)
    for (row, length), (new, start) in zip(rows, spans, strict=True):
        if new <= 0:
            continue
        slots = req_to_token[row, :length].long()
        q, k, v = q_extend[start : start + new], k_buffer[slots], v_buffer[slots]
        out = attend_causal(q, k, v, sm_scale, sliding_window_size) if is_causal else attend_all(q, k, v, sm_scale)
        o_extend[start : start + new] = out.to(o_extend.dtype)
