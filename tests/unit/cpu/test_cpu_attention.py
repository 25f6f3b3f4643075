"""Paged attention against a naive softmax in fp64; slots that no request owns hold NaN."""

import math

import pytest
import torch

from sglang_hetero.cpu.ops import attention
from sglang_hetero.errors import HeteroError

H, HK, D, SLOTS, MAX_LEN = 4, 2, 8, 160, 64
SCALE = 0.3


def naive(q, k, v, first_position, window=0):
    """q [Lq, H, D] at positions from first_position on; k, v [Lk, HK, D]; fp64 [Lq, H, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        last = first_position + i
        first = max(0, last - window + 1) if window else 0
        for head in range(H):
            kv = head // (H // HK)
            scores = [float(q[i, head].double() @ k[j, kv].double()) * SCALE for j in range(first, last + 1)]
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            for j, w in zip(range(first, last + 1), weights, strict=True):
                out[i, head] += w / sum(weights) * v[j, kv].double()
    return out


class Paged:
    """Buffers in which every request owns scattered slots; all others are NaN."""

    def __init__(self, lengths, dtype):
        order = torch.randperm(SLOTS - 1)[: sum(lengths)] + 1
        self.k = torch.full((SLOTS, HK, D), math.nan, dtype=dtype)
        self.v = torch.full((SLOTS, HK, D), math.nan, dtype=dtype)
        self.k[order], self.v[order] = torch.randn(2, sum(lengths), HK, D).to(dtype)
        self.req_to_token = torch.zeros(len(lengths) + 2, MAX_LEN, dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
        for row, slots in zip(self.rows.tolist(), order.split(lengths), strict=True):
            self.req_to_token[row, : len(slots)] = slots

    def of(self, request, length):
        slots = self.req_to_token[self.rows[request], :length].long()
        return self.k[slots], self.v[slots]


def extend(paged, q, out, lengths, new, *, window=0, causal=True, **other):
    new = torch.tensor(new)
    features = {
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "encoder_lens": None,
        "sinks": None,
        "tree_mask": None,
        "k_scale": 1.0,
    } | other
    attention.extend_attention_cpu(
        q_extend=q,
        k_extend=None,
        v_extend=None,
        o_extend=out,
        k_buffer=paged.k,
        v_buffer=paged.v,
        v_scale=1.0,
        req_to_token=paged.req_to_token,
        req_pool_indices=paged.rows,
        seq_lens=torch.tensor(lengths),
        extend_seq_lens=new,
        extend_start_loc=new.cumsum(0) - new,
        max_len_extend=int(new.max()),
        sm_scale=SCALE,
        sliding_window_size=window,
        is_causal=causal,
        **features,
    )


@pytest.mark.parametrize("window", [0, 3], ids=["full", "window"])
@pytest.mark.parametrize("block", [4, 512])
def test_extend_with_and_without_prefix(window, block, dtype, close, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    lengths, new = [7, 12, 5, 20], [7, 9, 0, 1]
    paged = Paged(lengths, dtype)
    q = torch.randn(sum(new), H, D, dtype=dtype)
    out = torch.full_like(q, math.nan)
    extend(paged, q, out, lengths, new, window=window)
    start = 0
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        k, v = paged.of(i, length)
        close(out[start : start + count], naive(q[start : start + count], k, v, length - count, window))
        start += count


def test_rows_that_attention_dp_padded_are_left_out(dtype, close):
    lengths, new = [9, 4], [2, 4]
    paged = Paged(lengths, dtype)
    q = torch.randn(sum(new), H, D).to(dtype)
    plain, padded = torch.zeros_like(q), torch.zeros_like(q)
    extend(paged, q, plain, lengths, new)
    paged.rows = torch.cat([paged.rows, torch.zeros(3, dtype=paged.rows.dtype)])
    extend(paged, q, padded, lengths, new)
    assert torch.equal(padded, plain)
    with pytest.raises(ValueError, match="zip"):  # more requests than rows is no padding
        extend(paged, q, padded, [9, 4, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1])


def test_extend_without_mask_sees_everything(dtype, close):
    paged = Paged([6], dtype)
    q = torch.randn(3, H, D, dtype=dtype)
    out = torch.empty_like(q)
    extend(paged, q, out, [6], [3], causal=False)
    k, v = paged.of(0, 6)
    close(out, torch.cat([naive(q[i : i + 1], k, v, 5) for i in range(3)]))


@pytest.mark.parametrize("window", [0, 3], ids=["full", "window"])
def test_decode_stores_the_new_token_first(window, dtype, close):
    lengths = [5, 1, 9]
    paged = Paged(lengths, dtype)
    q, key, value = torch.randn(3, H, D, dtype=dtype), *torch.randn(2, 3, HK, D).to(dtype)
    loc = torch.stack([paged.req_to_token[row, n - 1] for row, n in zip(paged.rows.tolist(), lengths, strict=True)])
    paged.k[loc.long()], paged.v[loc.long()] = math.nan, math.nan
    before = paged.k.clone()
    out = torch.full_like(q, math.nan)
    attention.decode_attention_cpu(
        q, paged.k, paged.v, 1.0, 1.0, out, key, value, loc, torch.empty(0), paged.req_to_token, paged.rows,
        torch.tensor(lengths), SCALE, 0.0, False, window, None, None,
    )  # fmt: skip
    for i, length in enumerate(lengths):
        k, v = paged.of(i, length)
        assert torch.equal(k[-1], key[i])
        assert torch.equal(v[-1], value[i])
        close(out[i : i + 1], naive(q[i : i + 1], k, v, length - 1, window))
    others = [slot for slot in range(SLOTS) if slot not in loc.tolist()]
    assert torch.equal(paged.k[others].nan_to_num(-7), before[others].nan_to_num(-7))


def test_decode_of_a_padding_request_gives_zero():
    paged = Paged([4], torch.float32)
    out = torch.full((2, H, D), math.nan)
    attention.decode_attention_cpu(
        torch.randn(2, H, D), paged.k, paged.v, 1.0, 1.0, out, None, None, torch.tensor([0, 0]), torch.empty(0),
        paged.req_to_token, torch.cat([paged.rows, paged.rows]), torch.tensor([4, 0]), SCALE, 0.0, False, 0, None, None,
    )  # fmt: skip
    assert not out[1].any()
    assert out[0].isfinite().all()


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        ("logit_cap", 30.0),
        ("is_cross_attn", True),
        ("encoder_lens", torch.ones(1)),
        ("sinks", torch.zeros(1)),
        ("tree_mask", torch.ones(1)),
        ("k_scale", 0.5),
    ],
)
def test_unsupported_features_are_refused(feature, value):
    paged = Paged([2], torch.float32)
    q = torch.randn(2, H, D)
    with pytest.raises(HeteroError, match="not supported"):
        extend(paged, q, torch.empty_like(q), [2], [2], **{feature: value})


def test_a_window_without_a_mask_is_refused():
    paged = Paged([2], torch.float32)
    q = torch.randn(2, H, D)
    with pytest.raises(HeteroError, match="sliding_window_without_causal_mask is not supported"):
        extend(paged, q, torch.empty_like(q), [2], [2], window=1, causal=False)


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        ("logit_cap", 30.0),
        ("is_cross_attn", True),
        ("encoder_lens", torch.ones(1)),
        ("sinks", torch.zeros(1)),
        ("v_scale", 0.5),
    ],
)
def test_decode_refuses_them_too_and_stores_nothing(feature, value):
    paged = Paged([2], torch.float32)
    before = paged.k.clone()
    features = {
        "k_scale": 1.0,
        "v_scale": 1.0,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "encoder_lens": None,
        "sinks": None,
    } | {feature: value}
    with pytest.raises(HeteroError, match="not supported"):
        attention.decode_attention_cpu(
            query=torch.randn(1, H, D),
            k_cache=paged.k,
            v_cache=paged.v,
            output=torch.empty(1, H, D),
            key=torch.randn(1, HK, D),
            value=torch.randn(1, HK, D),
            loc=torch.tensor([3]),
            attn_logits=torch.empty(0),
            req_to_token=paged.req_to_token,
            req_pool_indices=paged.rows,
            seq_lens=torch.tensor([2]),
            sm_scale=SCALE,
            sliding_window_size=0,
            **features,
        )
    assert torch.equal(paged.k.nan_to_num(-7), before.nan_to_num(-7))


def test_a_long_prompt_builds_no_quadratic_mask(monkeypatch):
    """No mask without a prefix, and at most QUERY_BLOCK rows of it with one."""
    masks = []
    real = attention.F.scaled_dot_product_attention

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        masks.append((None if attn_mask is None else tuple(attn_mask.shape), is_causal))
        return real(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    k = torch.randn(1300, 1, D)
    attention.attend_causal(torch.randn(1300, 2, D), k, k, SCALE)
    assert masks == [(None, True)]
    masks.clear()
    attention.attend_causal(torch.randn(1200, 2, D), k, k, SCALE)
    assert [shape for shape, _ in masks] == [(512, 612), (512, 1124), (176, 1300)]
