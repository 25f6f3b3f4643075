"""The figures of a table as JSON and as CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_hetero.accuracy.stats import Interval

from .plan import Row
from .record import RecordError
from .verdict import Figures, Verdict

COLUMNS = (
    *("row", "what", "verdict", "right", "asked", "score", "score_low", "score_high"),
    *("accept_length", "accept_low", "accept_high", "differing", "ties", "same_drafts", "mcnemar_p", "merged", "hit"),
)


@dataclass(frozen=True)
class Summary:
    """about: model, questions, settings and versions, as they are told in the document."""

    about: Mapping[str, str]
    figures: tuple[Figures, ...]


def to_json(summary: Summary) -> str:
    """One object: `about`, and `rows` with a field per figure."""
    return (
        json.dumps({"about": dict(summary.about), "rows": [asdict(each) for each in summary.figures]}, indent=1) + "\n"
    )


def read(path: Path) -> Summary:
    """What `to_json` has written. Raises RecordError for anything else."""
    try:
        said = json.loads(path.read_text())
        return Summary(dict(said["about"]), tuple(_figures(each) for each in said["rows"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path} is no table of python -m tests.accuracy ({type(error).__name__}: {error}); it writes table.json"
        ) from error


def _figures(said: dict[str, Any]) -> Figures:
    interval = said["accept_interval"]
    return Figures(
        **{
            **said,
            "row": Row(**said["row"]),
            "right": tuple((depth, right, asked) for depth, right, asked in said["right"]),
            "score": Interval(**said["score"]),
            "accept_interval": None if interval is None else Interval(**interval),
            "seen_in": tuple(said["seen_in"]),
            "verdict": Verdict(said["verdict"]),
        }
    )


def to_csv(figures: Sequence[Figures]) -> str:
    """A line per row; then a column for the right answers of each depth."""
    depths = list(dict.fromkeys(depth for each in figures for depth, _, _ in each.right))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"right_at_{depth:g}" for depth in depths)])
    for each in figures:
        at = {depth: right for depth, right, _ in each.right}
        accept = each.accept_interval
        writer.writerow(
            [
                *(each.row.name, each.says, each.verdict.value, each.correct, each.asked, each.rate),
                *(each.score.low, each.score.high, each.accept),
                *(accept.low if accept else None, accept.high if accept else None),
                *(each.differing, each.ties, each.same_drafts, each.chance, each.merged, each.hit),
                *(at.get(depth) for depth in depths),
            ]
        )
    return out.getvalue()
