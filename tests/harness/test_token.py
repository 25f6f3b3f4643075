"""Pairs with a token: bytes as without one, and peers that have another one or none are refused on both sides."""

import random
import secrets
from pathlib import Path

import pytest

from . import Handoff, Harness
from .product import PULL, PUSH, SCARCE, around_pages, check, check_all_is_back, check_ours, geometry
from .test_product_ends import SOON, _random_handoff, hand_over

SHAPE = geometry(64)


def _token(folder: Path, name: str) -> dict[str, str]:
    path = folder / name
    path.write_text(secrets.token_hex())
    path.chmod(0o600)
    return {"SGLANG_HETERO_TOKEN_FILE": str(path)}


def test_with_the_same_token_every_byte_arrives_and_others_are_refused(harness: Harness, tmp_path: Path) -> None:
    token, other = _token(tmp_path, "token"), _token(tmp_path, "other")
    with harness.pair(
        SHAPE, prefill_tp=2, decode_tp=1, prefill_env=token, decode_env=[token, other, {}], seed=7
    ) as pair:
        check(pair, around_pages(64))
        check_ours(pair)
        result = hand_over(pair, [Handoff(100, 2, seed=11, decode=decode) for decode in (0, 1, 2)])
        right, another, without = result.outcomes
        assert right.succeeded, right.reasons
        for outcome, words in ((another, "not of this side's token"), (without, "this side has none")):
            assert not outcome.prefill
            assert not outcome.decode
            assert any(words in reason for reason in outcome.decode_reasons), outcome
        assert result.seconds < SOON
        assert not any(counters.get("unsealed") for counters in pair.hetero("hetero_counters"))
        check_all_is_back(pair)
        check(pair, around_pages(64, seed=20))


@pytest.mark.full
def test_a_prefill_without_the_token_is_refused(harness: Harness, tmp_path: Path) -> None:
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env=[_token(tmp_path, "token"), {}]) as pair:
        refused, served = hand_over(pair, [Handoff(100, 2, seed=11), Handoff(100, 2, seed=12, decode=1)]).outcomes
        assert served.succeeded, served.reasons
        assert not refused.prefill
        assert not refused.decode
        assert any("has no seal" in reason for reason in refused.decode_reasons), refused
        check_all_is_back(pair)


@pytest.mark.full
@pytest.mark.parametrize("mode", [PUSH, PULL], ids=["push", "pull"])
def test_no_message_of_a_busy_pair_is_taken_for_one_sent_again(
    harness: Harness, tmp_path: Path, mode: dict[str, str]
) -> None:
    """Several threads seal and send at the same time, so that messages overtake each other; requests are aborted."""
    rng = random.Random(f"{mode}")
    token = _token(tmp_path, "token")
    with harness.pair(
        SHAPE, prefill_tp=2, decode_tp=4, prefill_env=token, decode_env={**mode, **SCARCE, **token}
    ) as pair:
        for _ in range(10):
            batch = [_random_handoff(rng) for _ in range(5)]
            result = hand_over(pair, batch)
            for handoff, outcome in zip(batch, result.outcomes, strict=True):
                assert outcome.succeeded or handoff.abort is not None, outcome.reasons
        counters = pair.hetero("hetero_counters")
        assert not any(each.get("unsealed") or each.get("dropped") for each in counters), counters
        check_ours(pair)
        check_all_is_back(pair)
