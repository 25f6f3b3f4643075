"""docs/reliability.md: its table is made from the results of a run."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from .result import FaultResult, Kind, Verdict, summary

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- table: python -m tests.faults --write-docs -->", "<!-- end of the table -->"
COLUMNS = ("fault", "when", "on", "expected", "result")
TITLES = {
    Kind.HARNESS: "In the harness: real managers, pools and queues, every byte compared",
    Kind.SERVER: "On real servers, with tokens",
}


def table(results: Sequence[FaultResult]) -> str:
    """The part of the document between BEGIN and END."""
    lines = [BEGIN, ""]
    for kind, title in TITLES.items():
        own = [result for result in results if result.kind is kind]
        if not own:
            continue
        lines += [f"### {title}", "", f"`{summary(own)}`", "", *_rows(own), ""]
    return "\n".join([*lines, END])


def _rows(results: Iterable[FaultResult]) -> list[str]:
    rows = [" | ".join(COLUMNS), "|".join("---" for _ in COLUMNS)]
    rows += [
        " | ".join(_cell(text) for text in (each.fault, each.step, each.topology, each.expectation, said(each)))
        for each in results
    ]
    return [f"| {rows[0]} |", f"|{rows[1]}|", *(f"| {row} |" for row in rows[2:])]


def said(result: FaultResult) -> str:
    """The last column. Without times: they are another machine's on another day."""
    if result.verdict is Verdict.SKIPPED:
        return f"skipped: {result.skipped}"
    return "as expected" if result.verdict is Verdict.RIGHT else result.verdict.upper()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def rows(text: str) -> list[tuple[str, str, str]]:
    """Fault, step and topology of every row of a document."""
    inside = text.partition(BEGIN)[2].partition(END)[0]
    found = []
    for line in inside.splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        if line.startswith("|") and len(cells) == len(COLUMNS) and cells[0] not in {COLUMNS[0], "---"}:
            fault, step, topology = (cell.replace("\0", "|") for cell in cells[:3])
            found.append((fault, step, topology))
    return found


def write(results: Sequence[FaultResult], path: Path = DOCUMENT) -> None:
    """Put the table in the place of the one that is there. Raises ValueError where there is no place for it."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the table: two lines with {BEGIN} and {END}")
    path.write_text(before + table(results) + after)
