"""What the answers of the rows come to: figures with intervals, and what each row must show. Pure.

Intervals hold with 95 %: Wilson's of a score, Student's of the mean accept length of an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_hetero.accuracy.stats import Interval, mcnemar, mean, wilson
from sglang_hetero.errors import HeteroError

from .faults import MergeFault
from .plan import BLIND_SPOTS, Row
from .record import Answer, RowRecord

Tie = Callable[[int, int], bool]
"""Whether at a question (its number) the token at a position (of the answer) is a matter of rounding."""


class Verdict(StrEnum):
    """What a row has shown."""

    REFERENCE = "reference"
    """The undivided server itself."""
    EQUAL = "equal"
    """Token for token the undivided server's answers."""
    DIFFERS = "DIFFERS"
    """They should be equal and are not."""
    SEEN = "seen"
    """A fault that shows in the score or the accept length."""
    NOT_SEEN = "NOT SEEN"
    BLIND = "not seen: a known blind spot"
    """Of the model; plan.BLIND_SPOTS."""

    @property
    def good(self) -> bool:
        return self not in (Verdict.DIFFERS, Verdict.NOT_SEEN)


@dataclass(frozen=True)
class Figures:
    """One row.

    right, asked: by depth. accept: mean tokens of a round of draft and verify, None without speculation. differing:
    questions with another answer than the undivided server's, ties apart; ties: questions whose first other token is
    one that rounding decides. same_drafts: questions with the undivided server's rounds and accepted drafts. chance:
    exact two-sided p of McNemar's test against the whole row. merged, hit: requests that the hook has met and changed.
    """

    row: Row
    says: str
    right: tuple[tuple[float, int, int], ...]
    score: Interval
    accept: float | None
    accept_interval: Interval | None
    differing: int
    ties: int
    same_drafts: int
    chance: float | None
    merged: int
    hit: int
    seen_in: tuple[str, ...]
    verdict: Verdict

    @property
    def correct(self) -> int:
        return sum(right for _, right, _ in self.right)

    @property
    def asked(self) -> int:
        return sum(asked for _, _, asked in self.right)

    @property
    def rate(self) -> float:
        return self.correct / self.asked


def apart(one: Interval | None, other: Interval | None) -> bool:
    """Whether two intervals have nothing in common; never where one is not known."""
    return one is not None and other is not None and (one.high < other.low or other.high < one.low)


def by_depth(record: RowRecord) -> tuple[tuple[float, int, int], ...]:
    """Depth, right answers, questions."""
    found: dict[float, list[int]] = {}
    for depth, answer in zip(record.depths, record.answers, strict=True):
        sums = found.setdefault(depth, [0, 0])
        sums[0] += answer.right
        sums[1] += 1
    return tuple((depth, right, asked) for depth, (right, asked) in found.items())


def accept_length(answers: Sequence[Answer]) -> tuple[float | None, Interval | None]:
    """Mean over the answers of tokens per round; None where nothing was drafted."""
    lengths = [1 + answer.accepted / answer.rounds for answer in answers if answer.rounds]
    return mean(lengths) if lengths else (None, None)


def compare(record: RowRecord, reference: RowRecord, tie: Tie) -> tuple[int, int]:
    """Questions that are answered otherwise than by the reference, and those where that is a matter of rounding."""
    differing = ties = 0
    for number, (mine, theirs) in enumerate(zip(record.answers, reference.answers, strict=True)):
        if mine.tokens == theirs.tokens:
            continue
        first = next(at for at, pair in enumerate(zip(mine.tokens, theirs.tokens, strict=True)) if pair[0] != pair[1])
        if tie(number, first):
            ties += 1
        else:
            differing += 1
    return differing, ties


def evaluate(
    records: Mapping[Row, RowRecord], reference: Row, faults: Mapping[str, MergeFault], tie: Tie
) -> list[Figures]:
    """The figures of every row that there is a record of. Raises HeteroError where one has nothing to stand beside."""
    for row in records:
        for needed in (reference, row.whole):
            if needed not in records:
                raise HeteroError(f"{row.name} stands beside {needed.name}, of which there is no result; run that, too")
    return [_figures(row, records, reference, faults, tie) for row in records]


def _figures(
    row: Row, records: Mapping[Row, RowRecord], reference: Row, faults: Mapping[str, MergeFault], tie: Tie
) -> Figures:
    record, first, whole = records[row], records[reference], records[row.whole]
    differing, ties = compare(record, first, tie)
    score = _score(record)
    accept, accept_interval = accept_length(record.answers)
    fault = faults[row.fault] if row.fault else None
    seen: list[str] = []
    chance = None
    if fault is not None:
        chance = mcnemar(
            sum(one.right and not other.right for one, other in zip(whole.answers, record.answers, strict=True)),
            sum(other.right and not one.right for one, other in zip(whole.answers, record.answers, strict=True)),
        )
        if apart(score, _score(whole)):
            seen.append("score")
        if apart(accept_interval, accept_length(whole.answers)[1]):
            seen.append("accept length")
    return Figures(
        row,
        fault.says if fault is not None else "whole",
        by_depth(record),
        score,
        accept,
        accept_interval,
        differing,
        ties,
        sum(
            (mine.rounds, mine.accepted) == (theirs.rounds, theirs.accepted)
            for mine, theirs in zip(record.answers, first.answers, strict=True)
        ),
        chance,
        record.merged,
        record.hit,
        tuple(seen),
        _verdict(row, reference, fault, differing, seen),
    )


def _verdict(row: Row, reference: Row, fault: MergeFault | None, differing: int, seen: Sequence[str]) -> Verdict:
    if row == reference:
        return Verdict.REFERENCE
    if fault is None or fault.harmless:
        return Verdict.DIFFERS if differing else Verdict.EQUAL
    if fault.drafts_only and differing:
        return Verdict.DIFFERS  # greedy answers do not depend on drafts
    if seen:
        return Verdict.SEEN
    return Verdict.BLIND if row in BLIND_SPOTS else Verdict.NOT_SEEN


def _score(record: RowRecord) -> Interval:
    return wilson(sum(answer.right for answer in record.answers), len(record.answers))
