"""What two endpoints answered to the same questions, counted and compared. Pure.

A pass is one endpoint's answers to all questions, by the question's name. Every endpoint gives several passes: two
of one endpoint differ by the noise of its configuration (how requests were batched, what was cached), two of different
endpoints by this noise and whatever else differs. Scores are those of first passes: repeats of one question are not
further questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from . import stats
from .stats import Interval, Pairs


@dataclass(frozen=True)
class Answer:
    """What came back. tokens: their ids, empty where the endpoint tells none; right: as the task scores it; accept:
    tokens per verify step of speculation, None without it or where it is not told."""

    text: str
    right: bool
    tokens: tuple[int, ...] = ()
    accept: float | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Failure:
    """No answer came back, which says nothing of what the model knows."""

    reason: str


Pass = Mapping[str, Answer | Failure]


@dataclass(frozen=True)
class Share:
    """`count` of `total`, with the interval of the rate."""

    count: int
    total: int
    rate: float
    interval: Interval


@dataclass(frozen=True)
class Mean:
    """Of `count` values; the interval is None for a single one."""

    count: int
    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class Score:
    """One pass. failed: questions without an answer, which are not in `right`; empty: answers without any text, which
    are wrong ones; accept: of the answers that tell one."""

    right: Share
    failed: int
    empty: int
    accept: Mean | None
    prompt_tokens: Mean | None


@dataclass(frozen=True)
class Difference:
    """A question whose outputs differ between first passes. position: of the first token or character that does;
    unsteady: an endpoint has also given different outputs to it by itself."""

    name: str
    position: int
    unsteady: bool


@dataclass(frozen=True)
class Scores:
    """Who was right, of the questions that both answered in their first pass. difference: url minus reference;
    p: McNemar's; detectable: the loss that would probably have been found, None if none would, since there are too few
    questions or the reference has too few right answers to lose."""

    pairs: Pairs
    difference: float
    interval: Interval
    p: float
    detectable: float | None


@dataclass(frozen=True)
class Outputs:
    """How often outputs differ. between: first passes; url, reference: of each, its first pass against its second,
    None if there is none; p: of `stats.beyond_noise` over all passes and the `complete` questions that have an answer
    in each, None without repeats; positions: label of a range of positions -> first differences there."""

    unit: str
    between: Share
    url: Share | None
    reference: Share | None
    complete: int
    p: float | None
    positions: dict[str, int]
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Comparison:
    """accept: url minus reference, question by question, where both tell an accept length."""

    scores: Scores
    outputs: Outputs
    accept: Mean | None


def share(count: int, total: int) -> Share:
    """With Wilson's interval."""
    return Share(count, total, count / total if total else 0.0, stats.wilson(count, total))


def mean(values: Sequence[float]) -> Mean | None:
    """With Student's interval; None of nothing."""
    return Mean(len(values), *stats.mean(values)) if values else None


def score(one: Pass) -> Score:
    """Count a pass."""
    answers = [answer for answer in one.values() if isinstance(answer, Answer)]
    return Score(
        right=share(sum(answer.right for answer in answers), len(answers)),
        failed=len(one) - len(answers),
        empty=sum(not answer.text for answer in answers),
        accept=mean([answer.accept for answer in answers if answer.accept is not None]),
        prompt_tokens=mean([answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]),
    )


def part(one: Pass, names: Sequence[str]) -> Pass:
    """A pass over some of its questions."""
    return {name: one[name] for name in names if name in one}


def compare(url: Sequence[Pass], reference: Sequence[Pass]) -> Comparison:
    """Passes of one task, equally many of both endpoints, over the same questions."""
    unit = unit_of([*url, *reference])
    both = _answered([url[0], reference[0]])
    accept = [
        one.accept - other.accept for one, other in both.values() if one.accept is not None and other.accept is not None
    ]
    return Comparison(_scores(list(both.values())), _outputs(url, reference, unit, both), mean(accept))


def _scores(both: Sequence[Sequence[Answer]]) -> Scores:
    kinds = Counter((one.right, other.right) for one, other in both)
    pairs = Pairs(kinds[True, True], kinds[True, False], kinds[False, True], kinds[False, False])
    # Of the two ways to differ, the rarer one bounds what is noise; the rest may be the loss that is looked for.
    unsteady = 2 * min(pairs.one, pairs.other) / pairs.total if pairs.total else 0.0
    detectable = stats.minimum_detectable(pairs.total, unsteady)
    most = (pairs.both + pairs.other) / pairs.total if pairs.total else 0.0
    return Scores(
        pairs=pairs,
        difference=pairs.difference,
        interval=stats.newcombe_paired(pairs),
        p=stats.mcnemar(pairs.one, pairs.other),
        detectable=detectable if detectable is not None and detectable <= most else None,
    )


def _outputs(
    url: Sequence[Pass], reference: Sequence[Pass], unit: str, both: Mapping[str, Sequence[Answer]]
) -> Outputs:
    complete = _answered([*url, *reference])
    outputs = {name: [_output(answer, unit) for answer in answers] for name, answers in complete.items()}
    dealt = [(found[: len(url)], found[len(url) :]) for found in outputs.values()]
    unsteady = {name for name, one in zip(outputs, dealt, strict=True) if any(len(set(side)) > 1 for side in one)}
    differences = []
    for name, answers in both.items():
        one, other = (_output(answer, unit) for answer in answers)
        if one != other:
            differences.append(Difference(name, first_difference(one, other), name in unsteady))
    return Outputs(
        unit=unit,
        between=share(len(differences), len(both)),
        url=noise(url, unit),
        reference=noise(reference, unit),
        complete=len(complete),
        p=stats.beyond_noise(dealt) if len(url) > 1 else None,
        positions=_positions([difference.position for difference in differences]),
        differences=tuple(differences),
    )


def noise(passes: Sequence[Pass], unit: str) -> Share | None:
    """One endpoint against itself."""
    if len(passes) < 2:
        return None
    both = _answered(passes[:2])
    return share(sum(_output(one, unit) != _output(other, unit) for one, other in both.values()), len(both))


def _answered(passes: Sequence[Pass]) -> dict[str, list[Answer]]:
    """Questions that have an answer in each pass, in the order of the first one."""
    found = {}
    for name in passes[0]:
        answers = [answer for one in passes if isinstance(answer := one.get(name), Answer)]
        if len(answers) == len(passes):
            found[name] = answers
    return found


def unit_of(passes: Sequence[Pass]) -> str:
    """What outputs are compared by: token ids where every answer with a text has them."""
    answers = [answer for one in passes for answer in one.values() if isinstance(answer, Answer)]
    told = any(answer.tokens for answer in answers)
    return "token" if told and all(answer.tokens or not answer.text for answer in answers) else "character"


def _output(answer: Answer, unit: str) -> Sequence[Hashable]:
    return answer.tokens if unit == "token" else answer.text


def first_difference(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Position, from 0; where one ends earlier, the first position that it lacks."""
    for position, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return position
    return min(len(one), len(other))


def _positions(found: Sequence[int]) -> dict[str, int]:
    """First differences in ranges that double: 0, 1, 2-3, 4-7, ... The first token is prefill's own, so a difference
    at 1 or soon after is where state that decode was not handed would show."""
    counts = Counter(position.bit_length() for position in found)
    return {_range(bits): counts[bits] for bits in range(max(counts, default=0) + 1)} if found else {}


def _range(bits: int) -> str:
    """Numbers that have so many bits."""
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return str(low) if low == high else f"{low}-{high}"
