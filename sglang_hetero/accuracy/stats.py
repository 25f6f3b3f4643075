"""The statistics of two endpoints that were asked the same questions. Pure; nothing random.

Rates are fractions of 1, intervals hold with 95 %. References: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927); Q. McNemar,
Psychometrika 12 (1947), in its exact form; R. G. Newcombe, Stat. Med. 17 (1998) 857 (one proportion), 873 (two) and
2635 (two of the same questions).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Of every interval."""
ALPHA = 1 - LEVEL
"""A result less likely than that, if there is no difference, is called a difference."""
POWER = 0.8
"""What "probably" means: four of five runs find a difference of the size that is named."""
Z = NormalDist().inv_cdf(1 - ALPHA / 2)
BISECTIONS = 40
"""Halvings of an interval: to a millionth of a millionth of it."""
NEGLIGIBLE = 1e-9
"""A probability that changes no figure shown."""


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, with LEVEL confidence."""

    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's score interval of a proportion; 0 to 1 when nothing was tried.

    Used instead of the textbook's p +- 1.96 s, which is empty where every answer is right.
    """
    if trials == 0:
        return Interval(0.0, 1.0)
    rate, weight = successes / trials, Z * Z / trials
    middle = (rate + weight / 2) / (1 + weight)
    half = Z * math.sqrt((rate * (1 - rate) + weight / 4) / trials) / (1 + weight)
    # Exact at the ends, where rounding leaves 1e-17.
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == trials else min(1.0, middle + half)
    return Interval(low, high)


def newcombe(successes: int, trials: int, other_successes: int, other_trials: int) -> Interval:
    """Of the difference of two proportions from different questions: Newcombe's hybrid of Wilson's intervals."""
    if not trials or not other_trials:
        return Interval(-1.0, 1.0)
    one, other = successes / trials, other_successes / other_trials
    first, second = wilson(successes, trials), wilson(other_successes, other_trials)
    difference = one - other
    return Interval(
        max(-1.0, difference - math.hypot(one - first.low, second.high - other)),
        min(1.0, difference + math.hypot(first.high - one, other - second.low)),
    )


@dataclass(frozen=True)
class Pairs:
    """Questions that both have answered, by who was right."""

    both: int
    one: int
    """Only the first."""
    other: int
    """Only the second."""
    neither: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.both + self.one + self.other + self.neither

    @property
    def difference(self) -> float:
        """Rate of the first minus rate of the second; 0 without questions."""
        return (self.one - self.other) / self.total if self.total else 0.0


def newcombe_paired(pairs: Pairs) -> Interval:
    """Of `pairs.difference`: Newcombe's method 10, for the same questions asked twice.

    Chosen before a bootstrap because it needs no seed, and is no empty interval where nobody was wrong. It takes the
    correlation of the two answers into account, with its correction for continuity.
    """
    total = pairs.total
    if not total:
        return Interval(-1.0, 1.0)
    ones, others = pairs.both + pairs.one, pairs.both + pairs.other
    one, other = ones / total, others / total
    first, second = wilson(ones, total), wilson(others, total)
    product = ones * (total - ones) * others * (total - others)
    covariance: float = pairs.both * pairs.neither - pairs.one * pairs.other
    if covariance > 0:
        covariance = max(0.0, covariance - total / 2)
    correlation = covariance / math.sqrt(product) if product else 0.0

    def reach(mine: float, theirs: float) -> float:
        return math.sqrt(max(0.0, mine * mine - 2 * correlation * mine * theirs + theirs * theirs))

    return Interval(
        max(-1.0, pairs.difference - reach(one - first.low, second.high - other)),
        min(1.0, pairs.difference + reach(first.high - one, other - second.low)),
    )


def mcnemar(one: int, other: int) -> float:
    """Exact two-sided p of McNemar's test: is it a fair coin who alone is right, `one` times and `other` times?"""
    total = one + other
    term = ways = 1
    for count in range(min(one, other)):
        term = term * (total - count) // (count + 1)
        ways += term
    return min(1.0, 2 * ways / (1 << total))


def minimum_detectable(total: int, unsteady: float) -> float | None:
    """The smallest loss of score, as a rate, that `mcnemar` would find in POWER of such runs; None if not even one of
    all questions.

    total: questions; unsteady: rate of questions in which either one alone is right without any loss (noise), half of
    them each way. Losses and gains are counted as independent of each other.
    """
    noise = unsteady / 2
    gains = _binomial(total, noise)
    likely = int(np.searchsorted(np.cumsum(gains), 1 - NEGLIGIBLE)) + 1
    needed = _needed(total, likely)

    def found(loss: float) -> float:
        lost = _binomial(total, loss + (1 - loss) * noise)
        # Entry k: probability of k losses or more.
        at_least = np.append(np.cumsum(lost[::-1])[::-1], 0.0)
        return float(sum(gains[gained] * at_least[losses] for gained, losses in enumerate(needed)))

    if found(1.0) < POWER:
        return None
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < POWER else (low, middle)
    return high


def _needed(total: int, likely: int) -> list[int]:
    """Entry k: losses that make `mcnemar` find a loss beside k gains; as far as there are so many questions."""
    needed: list[int] = []
    losses = 0
    for gained in range(likely):
        losses = max(losses, gained)
        while losses <= total and mcnemar(losses, gained) >= ALPHA:
            losses += 1
        if losses > total:
            break
        needed.append(losses)
    return needed


def _binomial(trials: int, rate: float) -> Floats:
    """Entry k: probability of exactly k successes."""
    if rate <= 0 or rate >= 1:
        return np.asarray(np.arange(trials + 1) == (0 if rate <= 0 else trials), np.float64)
    logs = np.array([math.lgamma(count + 1) for count in range(trials + 1)])
    counts = np.arange(trials + 1)
    return np.asarray(
        np.exp(logs[-1] - logs - logs[::-1] + counts * math.log(rate) + (trials - counts) * math.log1p(-rate))
    )


def seen_rate(total: int) -> float:
    """The smallest rate of differing questions of which at least one would have been among `total` with LEVEL."""
    return 1 - ALPHA ** (1 / total) if total else 1.0


def mean(values: Sequence[float]) -> tuple[float, Interval | None]:
    """The mean and Student's interval of it; None for fewer than two values, which say nothing of their spread."""
    count = len(values)
    middle = math.fsum(values) / count
    if count < 2:
        return middle, None
    error = math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (count - 1) / count)
    half = t_quantile(count - 1) * error
    return middle, Interval(middle - half, middle + half)


def t_quantile(freedom: int) -> float:
    """Student's t for a two-sided interval of LEVEL with so many degrees of freedom."""
    low, high = Z, Z
    while t_within(high, freedom) < LEVEL:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < LEVEL else (low, middle)
    return high


def t_within(t: float, freedom: int) -> float:
    """Probability that Student's t lies within -t to t: Abramowitz and Stegun's finite series 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if freedom % 2:
        term = series = math.cos(angle) if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= square * (k - 1) / k
            series += term
        return 2 / math.pi * (angle + sine * series)
    term = series = 1.0
    for k in range(2, freedom - 1, 2):
        term *= square * (k - 1) / k
        series += term
    return sine * series


def beyond_noise(questions: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> float:
    """One-sided p of an exact permutation test: do the two endpoints differ from each other more than from themselves?

    questions: for each one the outputs of the first and of the second endpoint, equally many of both. What is counted
    is the pairs of one output of each that differ. If both endpoints answer alike, noise included, it is chance which
    outputs of a question came from which of them: every way to deal them out is equally likely, in each question by
    itself. That no question is like another does no harm, and neither does it that repeats of one may differ often.
    """
    observed = 0
    chance = np.ones(1)
    kinds: Counter[tuple[int, ...]] = Counter()
    for first, second in questions:
        observed += sum(one != other for one in first for other in second)
        names: dict[Hashable, int] = {}
        kinds[tuple(sorted(names.setdefault(output, len(names)) for output in (*first, *second)))] += 1
    for kind, count in kinds.items():
        dealt = _dealt(kind)
        for _ in range(count):
            chance = np.convolve(chance, dealt)
    return min(1.0, float(chance[observed:].sum()))


def _dealt(outputs: tuple[int, ...]) -> Floats:
    """Entry k: probability of k differing pairs when the outputs are dealt out by chance, half to each endpoint."""
    half = len(outputs) // 2
    chance = np.zeros(half * half + 1)
    everything = Counter(outputs)
    for mine in itertools.combinations(range(len(outputs)), half):
        first = Counter(outputs[place] for place in mine)
        equal = sum(count * (everything[output] - count) for output, count in first.items())
        chance[half * half - equal] += 1
    # No zeros at the end: questions whose outputs are all equal must not make the arrays longer.
    return np.asarray(np.trim_zeros(chance / chance.sum(), "b"))
