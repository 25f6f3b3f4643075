"""How requests on our path end when not all goes well: aborts, refusals, peers without this package."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.transfer.reception import MAX_READERS

from . import Abort, Geometry, Handoff, Harness, Leftovers, On, Pair, Result
from .product import OFF, PULL, PUSH, SCARCE, SIXES, around_pages, check, check_all_is_back, check_ours, geometry

SHAPE = geometry(64)
SOON = 10.0
"""Seconds in which an abort or a refusal must have reached both sides; SGLang's own limits are 40 s here."""
ABORTS = 100
BATCH = 5
CHUNKS = 4
MODES = pytest.mark.parametrize("mode", [PUSH, PULL], ids=["push", "pull"])
BOTH_SIDES = pytest.mark.parametrize("on", list(On), ids=lambda on: on.value)


def hand_over(pair: Pair, handoffs: Sequence[Handoff]) -> Result:
    """Hand over, wait until nobody can write any more, and compare: what belongs to no request that arrived is poison.

    Memory of a request that failed was overwritten when it was released, so a late byte in it is a difference.
    """
    result = pair.handoff_many(handoffs, Leftovers.UNTOUCHED, before_compare=lambda pair, _: pair.quiet())
    assert not result.differences, [str(difference) for difference in result.differences]
    assert result.seconds < SOON
    return result


@pytest.mark.parametrize(
    "abort", [(0, 0), (0, 1), (1, 0), (2, 0), (CHUNKS, 0), (CHUNKS, 1)], ids=lambda abort: f"chunk{abort[0]}+{abort[1]}"
)
@BOTH_SIDES
def test_an_abort_ends_the_request_on_both_sides_and_no_other(harness: Harness, on: On, abort: tuple[int, int]) -> None:
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env={"SGLANG_HETERO_WINDOW": "2"}) as pair:
        check(pair, [Handoff(10)])  # the sides know each other
        gone = Handoff(250, CHUNKS, seed=1, abort=Abort(on, *abort))
        result = hand_over(pair, [gone, Handoff(129, 2, seed=2), replace(gone, seed=3)])
        aborted, other, third = result.outcomes
        assert other.succeeded, other.reasons
        for outcome in (aborted, third):
            # A request that had arrived before the abort came is right or not, but never on one side by mistake.
            assert outcome.prefill == outcome.decode or (outcome.decode and on is On.PREFILL), outcome
            if not outcome.decode:
                assert outcome.prefill_reasons and outcome.decode_reasons, outcome
        if abort < (CHUNKS, 0):
            assert not aborted.prefill and not aborted.decode
        check_all_is_back(pair)
        check(pair, [Handoff(250, CHUNKS, seed=4)])


@MODES
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (2, 4)], ids=lambda tp: f"{tp}")
def test_a_hundred_random_aborts_leave_nothing(
    harness: Harness, mode: dict[str, str], prefill_tp: int, decode_tp: int
) -> None:
    rng = random.Random(f"{mode} {prefill_tp}")
    with harness.pair(SHAPE, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_env={**mode, **SCARCE}) as pair:
        check(pair, around_pages(64))
        before = [rank.call("threads") for rank in pair.ranks]
        aborts = 0
        while aborts < ABORTS // 2:
            batch = [_random_handoff(rng) for _ in range(BATCH)]
            result = hand_over(pair, batch)
            for handoff, outcome in zip(batch, result.outcomes, strict=True):
                assert outcome.succeeded or handoff.abort is not None, outcome.reasons
                aborts += handoff.abort is not None
            assert not pair.busy()
        check_all_is_back(pair)
        check(pair, around_pages(64, seed=50))
        for rank, threads in zip(pair.ranks, before, strict=True):
            # Readers are started when they are first needed, each once.
            readers = MAX_READERS if mode == PULL else 0
            assert rank.call("threads") <= threads + readers, f"{rank.name} has more threads than before"


def _random_handoff(rng: random.Random) -> Handoff:
    chunks = rng.randint(1, CHUNKS)
    abort = Abort(rng.choice(list(On)), rng.randint(0, chunks), rng.randint(0, 3)) if rng.random() < 0.6 else None
    return Handoff(rng.randint(chunks, 200), chunks, seed=rng.randrange(1 << 20), abort=abort)


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        pytest.param(SHAPE, replace(SHAPE, page_size=128), ("64", "128", "page"), id="page-size"),
        pytest.param(SHAPE, replace(SHAPE, kv_dtype="float16"), ("bfloat16", "float16"), id="kv-dtype"),
        pytest.param(SHAPE, replace(SHAPE, ssm_dtype="bfloat16"), ("float32", "bfloat16"), id="ssm-dtype"),
        pytest.param(SHAPE, replace(SHAPE, head_dim=16), (), id="another-model"),
        pytest.param(SHAPE, replace(SHAPE, conv_kernel=5), (), id="another-conv-kernel"),
    ],
)
def test_sides_that_do_not_go_together_are_refused_on_both(
    harness: Harness, prefill: Geometry, decode: Geometry, words: tuple[str, ...]
) -> None:
    """Cases 13, 14, 18, 33: before a byte moves, with the reason, in no time; and the ranks live."""
    with harness.pair(prefill, prefill_tp=2, decode_tp=1, decode_geometry=decode) as pair:
        for seed in range(2):
            result = pair.handoff_many([Handoff(70, seed=seed)])
            assert result.seconds < SOON
            assert not result.differences, [str(difference) for difference in result.differences]
            (outcome,) = result.outcomes
            assert not outcome.prefill and not outcome.decode
            assert outcome.prefill_reasons and outcome.decode_reasons, outcome
            for word in words:
                assert any(word in reason for reason in outcome.decode_reasons), outcome.decode_reasons
        assert not pair.leaks()


@pytest.mark.parametrize("layout", ConvLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize("stock", list(On), ids=lambda on: f"stock-{on.value}")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 2)], ids=lambda tp: f"{tp}")
def test_a_stock_peer_of_equal_size_is_served(
    harness: Harness, layout: ConvLayout, stock: On, prefill_tp: int, decode_tp: int
) -> None:
    shape = replace(SHAPE, conv_layout=layout)
    with harness.pair(shape, prefill_tp=prefill_tp, decode_tp=decode_tp, **{f"{stock.value}_env": OFF}) as pair:
        result = pair.handoff_many(around_pages(64), Leftovers.COPIED)
        assert result.succeeded, result.outcomes
        assert not result.differences, [str(difference) for difference in result.differences]


@pytest.mark.parametrize("stock", list(On), ids=lambda on: f"stock-{on.value}")
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)], ids=lambda tp: f"{tp}")
def test_a_stock_peer_of_another_size_is_served_where_upstream_is_right(
    harness: Harness, stock: On, prefill_tp: int, decode_tp: int
) -> None:
    with harness.pair(SHAPE, prefill_tp=prefill_tp, decode_tp=decode_tp, **{f"{stock.value}_env": OFF}) as pair:
        result = pair.handoff_many(around_pages(64), Leftovers.COPIED)
        assert result.succeeded, result.outcomes
        assert not result.differences, [str(difference) for difference in result.differences]


@pytest.mark.parametrize("stock", list(On), ids=lambda on: f"stock-{on.value}")
@pytest.mark.parametrize(
    ("shape", "prefill_tp", "decode_tp"),
    [
        pytest.param(replace(SHAPE, **SIXES), 2, 3, id="P2D3"),
        pytest.param(replace(SHAPE, **SIXES), 3, 2, id="P3D2"),
    ],
)
def test_a_stock_peer_is_refused_where_upstream_is_wrong(
    harness: Harness, stock: On, shape: Geometry, prefill_tp: int, decode_tp: int
) -> None:
    environment = {f"{stock.value}_env": OFF}
    with harness.pair(shape, prefill_tp=prefill_tp, decode_tp=decode_tp, **environment) as pair:
        result = pair.handoff_many([Handoff(70, seed=1)])
        (outcome,) = result.outcomes
        assert not outcome.prefill and not outcome.decode, outcome
        assert any("divides" in reason for reason in outcome.reasons), outcome.reasons
        assert not result.differences, [str(difference) for difference in result.differences]


def test_off_takes_no_part(harness: Harness) -> None:
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, prefill_env=OFF, decode_env=OFF) as pair:
        result = pair.handoff_many(around_pages(64))
        assert result.succeeded and not result.differences
        assert not any(counters.get("bytes") for counters in pair.hetero("hetero_counters"))
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1) as pair:
        check(pair, around_pages(64))
        check_ours(pair)
