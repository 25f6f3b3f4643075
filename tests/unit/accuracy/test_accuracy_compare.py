"""Passes counted and compared, and what is said of them."""

import pytest

from sglang_hetero.accuracy.asking import order
from sglang_hetero.accuracy.compare import Answer, Failure, compare, first_difference, score
from sglang_hetero.accuracy.verdict import Finding, accept_finding, output_finding, score_finding, sentences


def one_pass(*texts, right="good", accept=None, tokens=True):
    """Question i was answered with texts[i]; None: not at all."""
    return {
        f"q{i}": Failure("no answer")
        if text is None
        else Answer(text, text.startswith(right), tuple(text.encode()) if tokens else (), accept)
        for i, text in enumerate(texts)
    }


def test_errors_are_no_wrong_answers_and_empty_ones_are():
    counted = score(one_pass("good", "good", "bad", "", None, None))
    assert (counted.right.count, counted.right.total, counted.failed, counted.empty) == (2, 4, 2, 1)
    assert counted.right.rate == 0.5
    assert counted.accept is None


def test_nothing_answered_is_no_score():
    counted = score(one_pass(None, None))
    assert (counted.right.total, counted.right.rate, counted.failed) == (0, 0.0, 2)
    assert (counted.right.interval.low, counted.right.interval.high) == (0, 1)


def test_the_first_difference():
    assert first_difference("abc", "abd") == 2
    assert first_difference("ab", "abd") == 2
    assert first_difference("", "abd") == 0


def test_equal_outputs_say_how_rare_a_difference_must_be():
    answers = one_pass(*["good"] * 100)
    compared = compare([answers, answers], [answers, answers])
    assert compared.outputs.between.count == 0
    assert (score_finding(compared.scores), output_finding(compared.outputs)) == (Finding.NONE, Finding.NONE)
    said = sentences(compared)
    assert said == [
        "Score: no difference found, +0.0 points (95 %: -3.7 to +3.7, McNemar's p = 1). A loss of 7.8 points or more "
        "would probably have been found (80 % of such runs).",
        "Outputs: all 100 are equal. If 3.0 % or more of such questions differed, at least one would have (95 %).",
    ]


def test_a_loss_is_found_with_who_was_right():
    good, worse = one_pass(*["good"] * 20), one_pass(*["good"] * 12, *["bad"] * 8)
    compared = compare([worse, worse], [good, good])
    assert score_finding(compared.scores) is Finding.LOWER
    assert score_finding(compare([good], [worse]).scores) is Finding.HIGHER
    assert compared.scores.difference == -0.4
    assert (compared.scores.pairs.both, compared.scores.pairs.one, compared.scores.pairs.other) == (12, 0, 8)
    assert sentences(compared)[0].startswith("Score: lower than the reference by -40.0 points (95 %: -")
    assert "alone right were 0 times the endpoint, 8 times the reference" in sentences(compared)[0]
    assert output_finding(compared.outputs) is Finding.BEYOND
    assert "more than same-configuration noise explains" in sentences(compared)[1]


def test_few_questions_claim_nothing():
    good, worse = one_pass(*["good"] * 5), one_pass(*["bad"] * 5)
    said = sentences(compare([worse, worse], [good, good]))[0]
    assert said.endswith("but 5 right answers of the reference to 5 questions are too few to find any loss.")


def test_who_knows_nothing_can_lose_nothing():
    """100 questions would find a loss of 7.8 points, were there any to lose."""
    hopeless = one_pass(*["good"] * 7, *["bad"] * 93)
    compared = compare([hopeless] * 2, [hopeless] * 2)
    assert compared.scores.detectable is None
    assert "7 right answers of the reference to 100 questions are too few" in sentences(compared)[0]
    able = one_pass(*["good"] * 8, *["bad"] * 92)
    assert compare([able] * 2, [able] * 2).scores.detectable == pytest.approx(0.0779, abs=1e-4)


def test_noise_of_one_configuration_is_told_apart():
    """597 of 600: three that differ, and the same three differ within each endpoint."""
    first = one_pass(*["good"] * 600)
    second = {**first, **{f"q{i}": Answer("good!", True, tuple(b"good!")) for i in range(3)}}
    compared = compare([first, second], [second, first])
    outputs = compared.outputs
    assert (outputs.between.count, outputs.between.total) == (3, 600)
    assert (outputs.url.count, outputs.reference.count) == (3, 3)
    assert [difference.unsteady for difference in outputs.differences] == [True] * 3
    assert output_finding(outputs) is Finding.NONE
    assert "is not shown (each against itself: endpoint 3 of 600 (0.5 %), reference 3 of 600" in sentences(compared)[1]
    steady = compare([first, first], [second, second]).outputs
    assert output_finding(steady) is Finding.BEYOND
    assert steady.p == pytest.approx(1 / 27)
    assert not any(difference.unsteady for difference in steady.differences)


def test_without_repeats_a_difference_may_be_noise():
    compared = compare([one_pass("good", "bad")], [one_pass("good", "good")])
    assert compared.outputs.p is None
    assert output_finding(compared.outputs) is Finding.UNKNOWN
    assert "--repeat 2" in sentences(compared)[1]


def test_questions_without_an_answer_are_left_out_of_what_needs_it():
    url = [one_pass("good", None, "good", "bad"), one_pass("good", "good", None, "bad")]
    compared = compare(url, [one_pass(*["good"] * 4)] * 2)
    assert compared.outputs.between.total == 3
    assert compared.scores.pairs.total == 3
    assert compared.outputs.url.total == 2
    assert compared.outputs.complete == 2


def test_nothing_in_common_is_said():
    compared = compare([one_pass("good", None)] * 2, [one_pass(None, "good")] * 2)
    assert score_finding(compared.scores) is output_finding(compared.outputs) is Finding.UNKNOWN
    assert sentences(compared) == [
        "Score: no question has an answer from both.",
        "Outputs: no question has an answer from both.",
    ]


def test_token_ids_are_compared_where_all_tell_them():
    """Two tokens may have the same text, as halves of a character have none."""
    one, other = {"q": Answer("x", True, (1, 2))}, {"q": Answer("x", True, (1, 3))}
    compared = compare([one], [other]).outputs
    assert (compared.unit, compared.between.count, compared.differences[0].position) == ("token", 1, 1)
    plain = {"q": Answer("x", True)}
    assert compare([one], [plain]).outputs.between.count == 0
    assert compare([one], [plain]).outputs.unit == "character"
    assert compare([one], [{"q": Answer("", False)}]).outputs.unit == "token"


def test_where_outputs_begin_to_differ():
    first = one_pass("good", *["good and so on"] * 5)
    second = one_pass("good", "bad", "gxod and so on", "gooX and so on", "good bnd", "good and so oX")
    assert compare([first], [second]).outputs.positions == {"0": 1, "1": 1, "2-3": 1, "4-7": 1, "8-15": 1}
    assert compare([first], [first]).outputs.positions == {}


def test_accept_lengths_are_compared_question_by_question():
    """Questions differ more than endpoints do."""
    lengths = [1.0, 2.0, 3.0, 4.0]
    reference = {f"q{i}": Answer("a", True, (1,), accept) for i, accept in enumerate(lengths)}
    url = {f"q{i}": Answer("a", True, (1,), accept - 0.5 - 0.01 * i) for i, accept in enumerate(lengths)}
    compared = compare([url], [reference])
    assert compared.accept.mean == pytest.approx(-0.515)
    assert accept_finding(compared.accept) is Finding.LOWER
    assert sentences(compared)[2].startswith("Accept length: lower than the reference by -0.515 (-0.5")
    assert accept_finding(compare([reference], [reference]).accept) is Finding.NONE
    assert compare([reference], [one_pass("a")]).accept is None


def test_passes_alternate_so_that_drift_meets_both():
    assert order(2, 3) == [0, 1, 1, 0, 0, 1]
    assert order(1, 2) == [0, 0]
