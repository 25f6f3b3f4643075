"""What a run came to: one JSON file, and one page for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_hetero.doctor.lines import Line, as_json, failed, summary

MARKS = {"ok": "pass", "warn": "pass, but", "fail": "**FAIL**", "skip": "skip"}


def json_of(lines: Sequence[Line], seconds: Mapping[str, float], about: Mapping[str, str]) -> bytes:
    """All lines, what the run was, and the seconds that each stage took."""
    return as_json(lines, about=dict(about), seconds={name: round(value, 1) for name, value in seconds.items()})


def page_of(lines: Sequence[Line], seconds: Mapping[str, float], about: Mapping[str, str]) -> str:
    """Markdown: what the run was, then a row for each line; failures first, because somebody has to act on them."""
    wrong = [line for line in lines if line.status == "fail"]
    parts = [
        f"# sglang-hetero validate: {'FAIL' if failed(lines) else 'pass'}",
        "",
        f"{summary(lines)}. " + ", ".join(f"{name} {value}" for name, value in about.items()) + ".",
        "",
    ]
    if wrong:
        parts += ["## To do", "", *(f"* **{line.area}, {line.name}**: {line.remedy}" for line in wrong), ""]
    parts += ["| stage | what | | seen | figures | remedy |", "|---|---|---|---|---|---|"]
    parts += [_row(line) for line in lines]
    times = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items() if value)
    parts += ["", f"Seconds: {times or 'none'}.", ""]
    return "\n".join(parts)


def _row(line: Line) -> str:
    figures = ", ".join(f"{name} {value:g}" for name, value in line.figures.items())
    cells = (line.area, line.name, MARKS[line.status], line.seen, figures, line.remedy)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
