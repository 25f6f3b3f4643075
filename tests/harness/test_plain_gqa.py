"""A plain GQA transformer, without linear layers and without a draft: every byte of every decode pool.

Its pools are SGLang's MHATokenToKVPool and ReqToTokenPool; there is no slot and no state to send.
"""

from dataclasses import replace

import pytest

from . import Geometry, Handoff, Harness
from .product import ALWAYS, PULL, PUSH, VERIFY, around_pages, check, check_all_is_back, check_ours, geometry
from .sides import Request

PLAIN = {"layers": 3, "full_attention_layers": (0, 1, 2), "draft_tokens": 0}
SIZES = [(2, 1, 4), (1, 2, 4), (4, 1, 2), (2, 4, 2), (2, 3, 6)]
"""Prefill TP, decode TP, KV heads: cut, replicated on one side, and sizes of which neither divides the other."""


def plain(page_size: int, **fields: object) -> Geometry:
    return geometry(page_size, **PLAIN, **fields)


@pytest.mark.parametrize("page", [1, 64, 128])
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "heads"), SIZES)
def test_every_byte_arrives_and_no_other_is_written(
    harness: Harness, prefill_tp: int, decode_tp: int, heads: int, page: int
) -> None:
    shape = plain(page, kv_heads=heads)
    modes = [PUSH, {**PULL, **VERIFY}]
    with harness.pair(shape, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_env=modes, seed=page) as pair:
        for seed in range(2):
            check(pair, [*around_pages(page, 10 * seed, 0)[seed::2], *around_pages(page, 10 * seed, 1)[seed::2]])
        check_ours(pair)
        check_all_is_back(pair)


def test_equal_sizes(harness: Harness) -> None:
    with harness.pair(plain(64), prefill_tp=2, decode_tp=2, prefill_env=ALWAYS, decode_env=ALWAYS) as pair:
        check(pair, around_pages(64))
        check_ours(pair)
        check_all_is_back(pair)


def test_a_long_prompt_and_those_after_it(harness: Harness) -> None:
    with harness.pair(replace(plain(64), pages=100), prefill_tp=2, decode_tp=1) as pair:
        for tokens in (6000, 300):
            check(pair, [Handoff(tokens, chunks=2, seed=tokens)])
        check_all_is_back(pair)


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "heads"), SIZES)
def test_the_core_alone(harness: Harness, prefill_tp: int, decode_tp: int, heads: int) -> None:
    requests = [Request(1, tokens=129, seed=1), Request(2, tokens=64, seed=2), Request(3, tokens=63, seed=3)]
    process = harness.core(plain(64, kv_heads=heads))
    assert not [str(found) for found in process.call("run", prefill_tp, decode_tp, requests, 100)]


def test_a_model_without_linear_layers_has_no_draft() -> None:
    with pytest.raises(ValueError, match="draft_tokens must be 0"):
        replace(Geometry(), **{**PLAIN, "draft_tokens": 3})
