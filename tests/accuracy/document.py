"""docs/accuracy_topologies.md: its table is made from the results of a run, which stand beside it."""

from collections.abc import Sequence
from pathlib import Path

from sglang_hetero.accuracy.stats import Interval

from .summary import Summary
from .verdict import Figures, Verdict

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = DOCS / "accuracy_topologies.md"
RESULTS = DOCS / "recall_table.json"
PICTURE = DOCS / "recall_table.png"
BEGIN, END = "<!-- table: python -m tests.accuracy --write-docs -->", "<!-- end of the table -->"
COLUMNS = (
    *("servers", "merge", "right", "score, 95 %", "accept length, 95 %"),
    *("differ (ties)", "p", "hit", "verdict"),
)


def table(summary: Summary) -> str:
    """What stands between BEGIN and END, these included."""
    return "\n".join([BEGIN, "", *markdown(summary), "", END])


def markdown(summary: Summary) -> list[str]:
    """Lines: what was run, the table, and by depth."""
    about = "; ".join(f"{name} {value}" for name, value in summary.about.items())
    depths = [f"{depth:g}" for depth, _, _ in summary.figures[0].right] if summary.figures else []
    return [
        f"{about[:1].upper()}{about[1:]}.",
        "",
        f"`{last_line(summary.figures)}`",
        "",
        *_rows(COLUMNS, [_cells(each) for each in summary.figures]),
        "",
        "Right answers by depth of the asked pair (0: first of the prompt, 1: last):",
        "",
        *_rows(
            ("servers", "merge", *depths),
            [
                [_servers(each), each.says, *(f"{right}/{asked}" for _, right, asked in each.right)]
                for each in summary.figures
            ],
        ),
    ]


def last_line(figures: Sequence[Figures]) -> str:
    """What a run ends with: how many rows have shown what they must."""
    whole = [each for each in figures if each.verdict in (Verdict.EQUAL, Verdict.DIFFERS)]
    blind = sum(each.verdict is Verdict.BLIND for each in figures)
    broken = [each for each in figures if each.verdict in (Verdict.SEEN, Verdict.NOT_SEEN, Verdict.BLIND)]
    equal = sum(each.verdict is Verdict.EQUAL for each in whole)
    seen = sum(each.verdict is Verdict.SEEN for each in broken)
    said = f"{equal}/{len(whole)} whole rows equal to the undivided server, {seen}/{len(broken)} broken merges seen"
    return said + (f", {blind} of the others a known blind spot of the model" if blind else "")


def _rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in body]
    return [f"| {lines[0]} |", f"|{lines[1]}|", *(f"| {line} |" for line in lines[2:])]


def _servers(each: Figures) -> str:
    return f"`{each.row.topology}`" + (", window first" if "window" in each.row.conv_layout else "")


def _cells(each: Figures) -> list[str]:
    seen = f" in {' and '.join(each.seen_in)}" if each.verdict is Verdict.SEEN else ""
    return [
        _servers(each),
        each.says,
        f"{each.correct}/{each.asked}",
        f"{each.rate:.3f} ({_between(each.score)})",
        "" if each.accept is None else f"{each.accept:.2f} ({_between(each.accept_interval)})",
        f"{each.differing}" + (f" ({each.ties})" if each.ties else ""),
        "" if each.chance is None else f"{each.chance:.1g}",
        f"{each.hit}" if each.row.fault else "",
        f"{each.verdict.value}{seen}",
    ]


def _between(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


def write(summary: Summary, path: Path = DOCUMENT) -> None:
    """Put the table in the place of the one that is there. Raises ValueError where there is no place for it."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the table: two lines with {BEGIN} and {END}")
    path.write_text(before + table(summary) + after)
