"""docs/perf.md says what the code measures, no more and no less."""

from pathlib import Path

from sglang_hetero.backend import metrics
from sglang_hetero.perf.perfetto import NAMES
from sglang_hetero.perf.records import ReceivedRecord, SentRecord

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "perf.md").read_text()


def first_column(after: str, header: str) -> list[str]:
    body = TEXT[TEXT.index(header, TEXT.index(after)) :].splitlines()[2:]
    table = body[: next(number for number, line in enumerate(body) if not line.startswith("|"))]
    return [line.strip("|").split("|")[0].strip().strip("`") for line in table]


def test_every_field_of_a_line_is_described():
    common = first_column("Both sides:", "| field |")
    assert common + first_column("\nPrefill:", "| field |") == list(SentRecord("r", 1).line())
    assert common + first_column("\nDecode:", "| field |") == list(ReceivedRecord("r", 1).line())


def test_metrics():
    rows = [
        *(f"| `{metrics.PREFIX}:{name}` | histogram | {what} |" for name, what in metrics.HISTOGRAMS.items()),
        *(
            f"| `{metrics.PREFIX}:{name}_total` | counter, `component` | {what} |"
            for name, what in metrics.BY_COMPONENT.items()
        ),
    ]
    header = "| metric | kind | what it is |"
    body = TEXT[TEXT.index(header) :].splitlines()[2:]
    assert body[: len(rows)] == rows
    assert not body[len(rows)].startswith("|")


def test_groups():
    assert first_column("## The trace", "| group |") == list(NAMES.values())
