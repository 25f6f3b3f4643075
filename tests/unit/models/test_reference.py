"""The reference agrees with itself, with transformers' own generate() and with recorded SGLang runs."""

import functools

import pytest
import torch

from sglang_hetero import models
from tests.reference import Speculation, greedy, greedy_with_mtp
from tests.reference.mtp import load_head
from tests.reference.target import load

ONE_PER_FAMILY = ["tiny", "tiny-moe", "tiny-next"]
"""Of those with an MTP head."""

# What SGLang 0.5.23 returned for prompt(length), 32 tokens, fp32 on a CPU, TP 1, NEXTN:
# (model, depth, length, first tokens, last tokens, spec_correct_drafts_histogram). A change of specs or weights
# makes these out of date: run the engine again rather than copy the reference's own answer.
RECORDED = [
    ("tiny", 1, 43, [229, 456, 84, 325], [474, 119], [15, 8]),
    ("tiny", 1, 600, [172, 453, 83, 387], [139, 225], [11, 10]),
    ("tiny", 5, 43, [229, 456, 84, 325], [474, 119], [13, 3, 1, 1, 1]),
    ("tiny", 5, 600, [172, 453, 83, 387], [139, 225], [8, 6, 2, 0, 1]),
    ("tiny-gqa2", 3, 43, [433, 259, 470, 130], [67, 125], [5, 6, 4, 1]),
    ("tiny-gqa2", 3, 600, [323, 216, 98, 110], [90, 89], [4, 4, 4, 2]),
    ("tiny-moe", 3, 43, [84, 221, 158, 282], [319, 469], [9, 6, 2, 1]),
    ("tiny-moe", 3, 600, [424, 378, 42, 44], [447, 444], [14, 3, 1, 2]),
    ("tiny-next", 3, 43, [436, 392, 234, 72], [272, 494], [5, 3, 2, 4]),
    ("tiny-next", 3, 600, [77, 362, 112, 331], [283, 178], [9, 9, 0, 1]),
]


def prompt(length: int) -> list[int]:
    return [(37 * i + 11) % 250 for i in range(length)]


@functools.cache
def run(name: str, length: int, n: int, depth: int) -> Speculation:
    return greedy_with_mtp(models.path(name), prompt(length), n, depth)


@pytest.mark.parametrize("name", [*ONE_PER_FAMILY, "tiny-gqa"])
def test_greedy_equals_generate(name: str) -> None:
    (ours,) = greedy(models.path(name), [prompt(43)], 16)
    theirs = load(models.path(name)).generate(
        torch.tensor([prompt(43)]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert ours.tokens == theirs[0, 43:].tolist()
    assert ours.hidden.shape == (43 + 15, models.spec(name).hidden_size)
    assert all(value <= 0 for value in ours.logprobs) and all(gap > 0 for gap in ours.gaps)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_drafts_do_not_change_the_tokens(name: str) -> None:
    (plain,) = greedy(models.path(name), [prompt(43)], 32)
    for depth in (1, 3):
        result = run(name, 43, 32, depth)
        assert result.tokens == plain.tokens
        assert result.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("length", [1, 43, 200])
def test_counters_are_consistent(length: int, depth: int) -> None:
    n = 32
    result = run("tiny", length, n, depth)
    histogram = result.spec_correct_drafts_histogram
    assert len(result.tokens) == n
    assert sum(histogram) == result.spec_verify_ct
    assert sum(a * rounds for a, rounds in enumerate(histogram)) == result.spec_num_correct_drafts
    assert result.spec_num_proposed_drafts == depth * result.spec_verify_ct
    assert len(histogram) <= depth + 1 and histogram[-1] > 0
    # The rounds reach n tokens, and did not before the last one.
    steps = [a + 1 for a in result.accepted_per_round]
    assert 1 + sum(steps[:-1]) < n <= 1 + sum(steps)


def test_first_rounds_do_not_depend_on_n() -> None:
    short, long = run("tiny", 43, 8, 3), run("tiny", 43, 32, 3)
    assert long.tokens[:8] == short.tokens
    assert long.accepted_per_round[: len(short.accepted_per_round)] == short.accepted_per_round


def test_a_deeper_draft_begins_like_a_shallow_one() -> None:
    """The first round starts from the same state: its accepted drafts are the same up to the smaller depth."""
    for length in (1, 43, 200):
        deep = run("tiny", length, 12, 5).accepted_per_round[0]
        assert run("tiny", length, 12, 3).accepted_per_round[0] == min(deep, 3)
        assert run("tiny", length, 12, 1).accepted_per_round[0] == min(deep, 1)


def test_one_token_has_no_round() -> None:
    result = run("tiny", 20, 1, 3)
    assert (result.accepted_per_round, result.meta_info()) == ([], {})


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
@torch.inference_mode()
def test_rounds_without_a_cache_are_the_same(name: str) -> None:
    """The same rounds the slow way: the head runs over all entries again for every single draft."""
    length, n, depth = 43, 16, 3
    (known,) = greedy(models.path(name), [prompt(length)], n + depth)
    text = prompt(length) + known.tokens
    head = load_head(models.path(name))
    accepted = []
    confirmed = length + 1
    while confirmed < length + n:
        tokens, hidden = text[1:confirmed], known.hidden[: confirmed - 1]
        drafts: list[int] = []
        for _ in range(depth):
            states, guesses = head(torch.tensor(tokens + drafts), hidden, 0, head.empty_cache())
            hidden = torch.cat([hidden, states[-1:]])
            drafts.append(int(guesses[-1]))
        equal = [a == b for a, b in zip(drafts, text[confirmed:], strict=False)]
        accepted.append([*equal, False].index(False))
        confirmed += accepted[-1] + 1
    assert accepted == run(name, length, n, depth).accepted_per_round


@pytest.mark.parametrize(
    ("name", "depth", "length", "first", "last", "histogram"), RECORDED, ids=lambda value: str(value).replace(" ", "")
)
def test_equals_what_sglang_returned(
    *, name: str, depth: int, length: int, first: list[int], last: list[int], histogram: list[int]
) -> None:
    result = run(name, length, 32, depth)
    assert (result.tokens[:4], result.tokens[-2:]) == (first, last)
    assert result.spec_correct_drafts_histogram == histogram


@pytest.mark.parametrize("depth", [1, 3])
def test_a_prompt_without_draft_caches_costs_drafts_and_no_token(depth: int) -> None:
    """The head's cache of the prompt is 0 then; what it drafts first is the first token again."""
    drafted = run("tiny", 43, 32, depth)
    result = greedy_with_mtp(models.path("tiny"), prompt(43), 32, depth, prompt_drafted=False)
    assert (result.tokens, result.logprobs) == (drafted.tokens, drafted.logprobs)
    assert result.accepted_per_round != drafted.accepted_per_round
    assert (result.accepted_per_round[0] > 0) == (result.tokens[1] == result.tokens[0])
