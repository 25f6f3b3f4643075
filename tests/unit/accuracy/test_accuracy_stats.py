"""The statistics against published figures, exact enumeration, and what must always hold."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hetero.accuracy import stats
from sglang_hetero.accuracy.stats import Pairs

FEW = settings(max_examples=50, deadline=None)


def rounded(interval, digits=4):
    return round(interval.low, digits), round(interval.high, digits)


@pytest.mark.parametrize(
    ("successes", "trials", "limits"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilson_gives_newcombes_table_of_1998(successes, trials, limits):
    """Stat. Med. 17, 857, the score method."""
    assert rounded(stats.wilson(successes, trials)) == limits


@FEW
@given(st.integers(1, 5000).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_wilson_holds_the_rate_and_mirrors(case):
    successes, trials = case
    one, mirrored = stats.wilson(successes, trials), stats.wilson(trials - successes, trials)
    assert 0 <= one.low <= successes / trials <= one.high <= 1
    assert one.low < one.high
    assert one.low == pytest.approx(1 - mirrored.high, abs=1e-12)


def test_wilson_of_nothing_says_nothing():
    assert rounded(stats.wilson(0, 0)) == (0, 1)


def test_newcombe_gives_the_table_of_1998():
    """Stat. Med. 17, 873, method 10: 56/70 and 48/80, 9/10 and 3/10, 0/10 and 0/10, 10/10 and 0/10."""
    assert rounded(stats.newcombe(56, 70, 48, 80)) == (0.0524, 0.3339)
    assert rounded(stats.newcombe(9, 10, 3, 10)) == (0.1705, 0.8090)
    assert rounded(stats.newcombe(0, 10, 0, 10)) == (-0.2775, 0.2775)
    assert rounded(stats.newcombe(10, 10, 0, 10)) == (0.6075, 1.0)


@pytest.mark.parametrize(
    ("pairs", "limits"),
    [
        # Cavo et al. 2012, as in Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, ch. 8.
        (Pairs(59, 6, 16, 80), (-0.1186, -0.0046)),
        # Newcombe 1998, Stat. Med. 17, 2635, method 10.
        (Pairs(36, 12, 2, 0), (0.0569, 0.3404)),
    ],
)
def test_paired_newcombe_gives_published_figures(pairs, limits):
    assert rounded(stats.newcombe_paired(pairs)) == limits


def counts(most):
    return st.builds(Pairs, *[st.integers(0, most)] * 4)


@FEW
@given(counts(300))
def test_paired_newcombe_holds_the_difference_and_mirrors(pairs):
    one = stats.newcombe_paired(pairs)
    mirrored = stats.newcombe_paired(Pairs(pairs.both, pairs.other, pairs.one, pairs.neither))
    assert -1 <= one.low <= pairs.difference <= one.high <= 1
    assert (one.low, one.high) == pytest.approx((-mirrored.high, -mirrored.low), abs=1e-12)


def test_paired_newcombe_covers_what_it_says():
    """Exact coverage over all tables of 20 questions, for some models of two endpoints: near 95 % in the mean."""
    total, covered = 20, []
    tables = [
        (a, b, c, total - a - b - c) for a, b, c in itertools.product(range(total + 1), repeat=3) if a + b + c <= total
    ]
    intervals = [(table, stats.newcombe_paired(Pairs(*table))) for table in tables]
    for chances in [(0.9, 0.03, 0.03, 0.04), (0.7, 0.2, 0.05, 0.05), (0.5, 0.1, 0.1, 0.3), (0.4, 0.3, 0.2, 0.1)]:
        truth = chances[1] - chances[2]
        covered.append(
            sum(
                math.factorial(total)
                * math.prod(chance**count / math.factorial(count) for chance, count in zip(chances, table, strict=True))
                for table, interval in intervals
                if interval.low <= truth <= interval.high
            )
        )
    assert min(covered) > 0.93
    assert 0.94 < sum(covered) / len(covered) < 0.985


@pytest.mark.parametrize(
    ("one", "other", "p"),
    # Bentur 2009 and Cavo 2012, in Fagerland, Lydersen and Laake, BMC Med. Res. Methodol. 13 (2013) 91; then by hand.
    [(1, 7, 0.0703), (6, 16, 0.0525), (0, 5, 0.0625), (0, 6, 0.0312), (0, 0, 1.0), (4, 4, 1.0)],
)
def test_mcnemar_gives_published_figures(one, other, p):
    assert round(stats.mcnemar(one, other), 4) == p
    assert stats.mcnemar(one, other) == stats.mcnemar(other, one)


def test_mcnemar_counts_coins():
    """Every way that eleven coins can fall, against the formula."""
    for one in range(12):
        far = sum(abs(2 * sum(coins) - 11) >= abs(2 * one - 11) for coins in itertools.product((0, 1), repeat=11))
        assert stats.mcnemar(one, 11 - one) == pytest.approx(far / 2**11)


def test_a_large_count_is_no_overflow():
    assert 0 < stats.mcnemar(4000, 5000) < 1e-20


def test_the_smallest_loss_that_would_be_found():
    """Without noise six losses are needed: 100 questions lose six or more with 80 % at a rate of 7.79 %."""
    found = stats.minimum_detectable(100, 0.0)
    at_least_six = 1 - sum(math.comb(100, k) * found**k * (1 - found) ** (100 - k) for k in range(6))
    assert at_least_six == pytest.approx(stats.POWER, abs=1e-6)
    assert stats.minimum_detectable(6, 0.0) == pytest.approx(stats.POWER ** (1 / 6), abs=1e-6)
    assert stats.minimum_detectable(5, 0.0) is None
    assert stats.minimum_detectable(0, 0.0) is None


def test_with_noise_the_smallest_loss_is_what_the_test_would_find():
    """All tables of 40 questions, each side's losses independent, against the bisection."""
    total, unsteady = 40, 0.1
    loss = stats.minimum_detectable(total, unsteady)
    noise = unsteady / 2
    lost = loss + (1 - loss) * noise

    def chance(k, rate):
        return math.comb(total, k) * rate**k * (1 - rate) ** (total - k)

    power = sum(
        chance(one, lost) * chance(other, noise)
        for one in range(total + 1)
        for other in range(total + 1)
        if one > other and stats.mcnemar(one, other) < stats.ALPHA
    )
    assert power == pytest.approx(stats.POWER, abs=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(10, 150), st.floats(0, 0.3))
def test_more_questions_find_less_and_noise_hides(total, unsteady):
    quiet, many, noisy = (
        stats.minimum_detectable(total, 0.0),
        stats.minimum_detectable(4 * total, 0.0),
        stats.minimum_detectable(total, unsteady),
    )
    assert many < quiet <= noisy + 1e-9


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (30, 2.042), (100, 1.984), (5000, 1.960)]
)
def test_students_t_gives_the_table(freedom, t):
    assert round(stats.t_quantile(freedom), 3) == t


def test_the_mean_of_the_first_five_numbers():
    middle, interval = stats.mean([1, 2, 3, 4, 5])
    assert middle == 3
    # s = 1.5811, t with 4 degrees of freedom 2.7764.
    assert rounded(interval, 3) == (1.037, 4.963)
    assert stats.mean([2.5]) == (2.5, None)


def test_seen_rate_is_three_of_n():
    """The rule of three, J. A. Hanley and A. Lippman-Hand 1983: 0 of n leaves 3/n possible."""
    assert stats.seen_rate(600) == pytest.approx(3 / 600, rel=0.01)
    assert stats.seen_rate(0) == 1


def test_three_questions_that_always_differ_are_more_than_noise():
    """Of three ways to deal out A A B B into two pairs one separates them."""
    assert stats.beyond_noise([("AA", "BB")] * 2) == pytest.approx(1 / 9)
    assert stats.beyond_noise([("AA", "BB")] * 3 + [("AA", "AA")] * 500) == pytest.approx(1 / 27)


def test_noise_of_its_own_is_no_difference():
    assert stats.beyond_noise([("AB", "AB")] * 50) == pytest.approx(1)
    assert stats.beyond_noise([]) == 1.0


def test_without_repeats_nothing_is_shown():
    assert stats.beyond_noise([("A", "B")] * 50) == 1.0


def dealt(questions):
    """The test again, by every way to deal out all questions at once."""

    def cross(first, second):
        return sum(one != other for one in first for other in second)

    ways = []
    for first, second in questions:
        everything, half = [*first, *second], len(first)
        splits = itertools.combinations(range(2 * half), half)
        ways.append(
            [
                cross([everything[i] for i in mine], [everything[i] for i in range(2 * half) if i not in mine])
                for mine in splits
            ]
        )
    observed = sum(cross(first, second) for first, second in questions)
    totals = Counter(sum(one) for one in itertools.product(*ways))
    return sum(count for value, count in totals.items() if value >= observed) / totals.total()


outputs = st.tuples(*[st.sampled_from("ABC")] * 2)


@FEW
@given(st.lists(st.tuples(outputs, outputs), max_size=4))
def test_beyond_noise_is_the_permutation_test(questions):
    assert stats.beyond_noise(questions) == pytest.approx(dealt(questions))


def test_beyond_noise_with_three_passes():
    questions = [("AAB", "BBB"), ("ABC", "CCC"), ("AAA", "AAB")]
    assert stats.beyond_noise(questions) == pytest.approx(dealt(questions))


def test_beyond_noise_keeps_its_level():
    """Two passes each of one noisy endpoint, every outcome of three questions: p <= 5 % in 5 % of them at most."""
    chances = {"A": 0.8, "B": 0.2}
    wrong = 0.0
    cases = list(itertools.product("AB", repeat=4))
    for case in itertools.combinations_with_replacement(cases, 3):
        if stats.beyond_noise([(one[:2], one[2:]) for one in case]) < stats.ALPHA:
            orders = len(set(itertools.permutations(case)))
            wrong += orders * math.prod(chances[output] for one in case for output in one)
    assert 0 < wrong <= stats.ALPHA
