"""The prompts of a matrix: exact lengths, the same each time, all different."""

import json
import random
import re

import pytest

from bench_serving import matrix_data
from bench_serving.matrix_data import DataError, exactly, lengths, prompts, sentences, texts
from bench_serving.matrix_plan import FULL, SMALL, Lengths
from sglang_hetero import models

WORDS = re.compile(r"\s?\w{1,5}|\s?[^\w\s]|\s")


def words(text: str) -> int:
    """Like byte-pair encodings: pieces of up to five letters, with the space before them."""
    return len(WORDS.findall(text))


@pytest.mark.parametrize(
    "wanted", [FULL.lengths, SMALL.lengths, Lengths(2, 10, 20, 30), Lengths(3, 5, 9, 23), Lengths(4, 7, 7, 28)]
)
def test_lengths_are_exact(wanted):
    found = lengths(wanted)
    assert len(found) == wanted.count
    assert (min(found), max(found), sum(found)) == (wanted.least, wanted.most, wanted.total)
    assert found == lengths(wanted), "of a seed"


def test_lengths_fill_the_range_and_depend_on_the_seed():
    found = lengths(FULL.lengths)
    assert len(set(found)) > 45
    assert sum(length in (FULL.lengths.least, FULL.lengths.most) for length in found) == 2
    assert found != lengths(FULL.lengths, seed=1)


@pytest.mark.parametrize("total", [29, 61, 10])
def test_lengths_that_cannot_be(total):
    with pytest.raises(DataError, match=f"come to {total}"):
        lengths(Lengths(3, 10, 20, total))


def test_a_text_is_cut_at_any_number_of_tokens():
    text = " ".join(sentences(texts()))
    for tokens in random.Random(0).sample(range(1, words(text)), 60):
        found = exactly(text, tokens, words)
        assert found is not None and text.startswith(found) and words(found) == tokens


def test_where_no_cut_has_the_tokens():
    assert exactly("word " * 50, 7, lambda text: 2 * len(text.split())) is None
    assert exactly("too short", 100, words) is None


def test_prompts_are_long_as_wanted_and_share_no_beginning():
    found = prompts([300, 301, 5, 300], words, "measured")
    assert [words(text) for text in found] == [300, 301, 5, 300]
    assert len({text[:12] for text in found}) == 4
    assert found == prompts([300, 301, 5, 300], words, "measured")
    assert not set(found) & set(prompts([300, 301, 5, 300], words, "warm-up"))


def test_a_length_that_no_text_has():
    with pytest.raises(DataError, match="prompt 2 of the measured set: no text of exactly 7 tokens"):
        prompts([6, 7], lambda text: 2 * len(text), "measured")


def test_the_models_own_tokenizer_counts_the_same(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(models.path("tiny")))
    wanted = lengths(SMALL.lengths)
    found = prompts(wanted, lambda text: len(tokenizer.encode(text)), "measured")
    matrix_data.write(tmp_path / "new" / "set.jsonl", found)
    lines = [json.loads(line) for line in (tmp_path / "new" / "set.jsonl").read_text().splitlines()]
    assert [len(line["conversations"][0]["content"]) for line in lines] == wanted, "a token for each ASCII character"
    assert all(len(line["conversations"]) == 2 for line in lines), "sglang.benchmark.serving leaves out shorter ones"


def test_identity_knows_the_lengths_and_the_seed():
    one = matrix_data.identity(FULL.lengths)
    assert one == matrix_data.identity(FULL.lengths)
    assert one != matrix_data.identity(SMALL.lengths)
    assert one != matrix_data.identity(FULL.lengths, seed=1)
