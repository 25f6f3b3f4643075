"""The recall task alone: its prompts, its answers, its score."""

import hashlib
import random
import re
import subprocess
import sys
from itertools import pairwise

import pytest

from sglang_hetero.accuracy import Question, questions, score
from sglang_hetero.accuracy.recall import ANSWER_DIGITS, MOST_PAIRS, document, pair_count
from sglang_hetero.errors import HeteroError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def lines(prompt: str) -> list[tuple[str, str]]:
    return re.findall(r"^([A-Z]{2})=(\d{8})$", prompt, re.MULTILINE)


@pytest.mark.parametrize("characters", [64, 128, 511, 512, 4096, 16384])
def test_a_prompt_has_its_length_and_the_asked_pair_at_its_depth(characters: int) -> None:
    for question in questions(characters, DEPTHS, 3, seed=5):
        assert len(question.prompt) == question.characters == characters and question.prompt.isascii()
        pairs = lines(question.prompt)
        assert len(pairs) == pair_count(characters)
        key = question.prompt[-3:-1]
        assert question.prompt.endswith(f"\n{key}=")
        asked = [i for i, (name, _) in enumerate(pairs) if name == key]
        assert asked == [round(question.depth * (len(pairs) - 1))]
        assert pairs[asked[0]][1] == question.answer and len(question.answer) == ANSWER_DIGITS


def test_pairs_stand_at_even_distances() -> None:
    (question,) = questions(512, [0.0], 1, seed=0)
    starts = [match.start() for match in re.finditer(r"^[A-Z]{2}=\d", question.prompt, re.MULTILINE)][:-1]
    gaps = {b - a for a, b in pairwise(starts)}
    assert max(gaps) - min(gaps) <= 1 and abs(starts[0] + 12 - min(gaps)) <= 1


def test_three_characters_determine_the_next_one_of_every_value() -> None:
    for question in questions(4096, [0.5], 20, seed=2):
        following: dict[str, set[str]] = {}
        for key, value in lines(question.prompt):
            line = f"{key}={value}\n"
            for end in range(3, len(line)):
                following.setdefault(line[end - 3 : end], set()).add(f"{key}{end}")
        assert len(following) == 32 * 9 and all(len(where) == 1 for where in following.values())


def test_few_values_differ_in_each_of_their_first_digits() -> None:
    for question in questions(800, [0.5], 20, seed=3):
        values = [value for _, value in lines(question.prompt)]
        assert len(values) == 8 and all(len({value[place] for value in values}) == 8 for place in range(3))


def test_values_are_not_guessable() -> None:
    answers = "".join(q.answer for q in questions(512, DEPTHS, 200, seed=1))
    assert all(abs(answers.count(digit) / len(answers) - 0.1) < 0.02 for digit in "0123456789")
    assert len({q.answer for q in questions(512, DEPTHS, 200, seed=1)}) == 1000


def test_the_same_prompts_on_every_machine() -> None:
    text = "".join(q.prompt + q.answer for q in questions(512, DEPTHS, 2, seed=7))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "e0f6d8ebabe0a6e5043a9af4547da15d554fbab93d25dcd8e8b938d75945305a"
    )


def test_a_sweep_can_be_extended_and_seeds_differ() -> None:
    some = questions(512, [0.5], 3, seed=7)
    assert set(some) < set(questions(512, [0.0, 0.5], 4, seed=7))
    assert set(some).isdisjoint(questions(512, [0.5], 3, seed=8))


@pytest.mark.parametrize(
    ("said", "right"),
    [("12345678", True), (" 12345678\nQK=", True), ("1234567", False), ("123456789", False), ("x12345678", False)],
)
def test_score(said: str, right: bool) -> None:
    assert score(said, Question("QK=", "12345678", 0.0, 3)) is right


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(HeteroError, match="no room for 2 pairs"):
        questions(29, [0.0], 1, seed=0)
    with pytest.raises(HeteroError, match=r"depth 1\.5"):
        questions(512, [1.5], 1, seed=0)
    with pytest.raises(HeteroError, match="1 to 32 pairs"):
        document(random.Random(0), 4096, MOST_PAIRS + 1)
    text, pairs = document(random.Random(0), 27, 2)
    assert len(text) == 27 and len(pairs) == 2


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, sglang_hetero.accuracy; print([m for m in ('torch', 'sglang', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
