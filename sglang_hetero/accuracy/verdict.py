"""What may be said of a comparison, in words. Pure.

No difference found is never called equality: the sentence says how large a difference would probably have been found.
"""

from __future__ import annotations

from enum import StrEnum

from .compare import Comparison, Mean, Outputs, Scores, Share
from .stats import ALPHA, LEVEL, POWER, Interval, seen_rate


class Finding(StrEnum):
    """Of one of the three comparisons."""

    NONE = "no difference found"
    LOWER = "lower than the reference"
    HIGHER = "higher than the reference"
    BEYOND = "more than noise"
    UNKNOWN = "cannot be told"


def score_finding(scores: Scores) -> Finding:
    """Of who was right."""
    if not scores.pairs.total:
        return Finding.UNKNOWN
    if scores.p >= ALPHA:
        return Finding.NONE
    return Finding.LOWER if scores.difference < 0 else Finding.HIGHER


def output_finding(outputs: Outputs) -> Finding:
    """Of how often outputs differ. Without repeats only equality of all can be told from noise."""
    if not outputs.between.total:
        return Finding.UNKNOWN
    if outputs.p is None or not outputs.complete:
        return Finding.UNKNOWN if outputs.between.count else Finding.NONE
    return Finding.BEYOND if outputs.p < ALPHA else Finding.NONE


def accept_finding(accept: Mean | None) -> Finding:
    """Of accept lengths: does the interval of the difference hold 0?"""
    if accept is None or accept.interval is None:
        return Finding.UNKNOWN
    if accept.interval.low <= 0 <= accept.interval.high:
        return Finding.NONE
    return Finding.LOWER if accept.mean < 0 else Finding.HIGHER


def sentences(comparison: Comparison) -> list[str]:
    """One for the score, one for the outputs, one for accept lengths if both tell them."""
    said = [_score(comparison.scores), _outputs(comparison.outputs)]
    if comparison.accept is not None:
        said.append(_accept(comparison.accept))
    return said


def _score(scores: Scores) -> str:
    finding, pairs = score_finding(scores), scores.pairs
    if finding is Finding.UNKNOWN:
        return "Score: no question has an answer from both."
    what = f"{points(scores.difference)} ({between(scores.interval)}, McNemar's p = {scores.p:.2g})"
    if finding is not Finding.NONE:
        return (
            f"Score: {finding} by {what}: alone right were {pairs.one} times the endpoint, {pairs.other} times the "
            "reference."
        )
    if scores.detectable is None:
        return (
            f"Score: no difference found, {what}, but {pairs.both + pairs.other} right answers of the reference to "
            f"{pairs.total} questions are too few to find any loss."
        )
    return (
        f"Score: no difference found, {what}. A loss of {points(scores.detectable, sign=False)} or more would probably "
        f"have been found ({whole(POWER)} of such runs)."
    )


def _outputs(outputs: Outputs) -> str:
    shared = outputs.between
    finding = output_finding(outputs)
    if not shared.total:
        return "Outputs: no question has an answer from both."
    if not shared.count and finding is Finding.NONE:
        return (
            f"Outputs: all {shared.total} are equal. If {percent(seen_rate(shared.total))} or more of such questions "
            f"differed, at least one would have ({whole(LEVEL)})."
        )
    said = f"Outputs: {counted(shared)} differ"
    if outputs.url is None or outputs.reference is None or outputs.p is None or not outputs.complete:
        return (
            f"{said}. Whether that is noise of one configuration is not known: each endpoint must answer twice "
            "(--repeat 2)."
        )
    noise = (
        f"each against itself: endpoint {counted(outputs.url)}, reference {counted(outputs.reference)}; "
        f"p = {outputs.p:.2g} over {outputs.complete} questions"
    )
    if finding is Finding.BEYOND:
        return f"{said}, more than same-configuration noise explains ({noise})."
    return f"{said}; that this is more than same-configuration noise is not shown ({noise})."


def _accept(accept: Mean) -> str:
    finding = accept_finding(accept)
    if accept.interval is None:
        return "Accept length: one question is too few to compare."
    what = f"{accept.mean:+.3f} ({accept.interval.low:+.3f} to {accept.interval.high:+.3f}, {accept.count} questions)"
    return f"Accept length: {finding}{',' if finding is Finding.NONE else ' by'} {what}."


def counted(shared: Share) -> str:
    """As `3 of 600 (0.5 %)`."""
    return f"{shared.count} of {shared.total} ({percent(shared.rate)})"


def percent(rate: float) -> str:
    """As `0.5 %`."""
    return f"{100 * rate:.1f} %"


def whole(rate: float) -> str:
    """As `95 %`."""
    return f"{100 * rate:.0f} %"


def points(rate: float, sign: bool = True) -> str:
    """A difference of rates, as `-0.5 points`."""
    return f"{100 * rate:{'+' if sign else ''}.1f} points"


def between(interval: Interval) -> str:
    """An interval of a difference of rates, as `95 %: -1.2 to +0.3`."""
    return f"{whole(LEVEL)}: {100 * interval.low:+.1f} to {100 * interval.high:+.1f}"
