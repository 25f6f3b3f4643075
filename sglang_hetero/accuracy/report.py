"""The result of a run: a table for people, JSON for programs, and which limits are broken. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from . import verdict
from .compare import Answer, Comparison, Failure, Mean, Pass, Score, Share, compare, noise, part, score, unit_of
from .verdict import Finding, counted, percent

SCHEMA = 1
"""Of the JSON; a field that means something else gets another number."""
SHOWN_FAILURES = 5
"""Kinds of failures in the table; JSON has all."""
ROLES = ("endpoint", "reference")


@dataclass(frozen=True)
class Group:
    """Questions that are also counted by themselves: of one length and depth."""

    characters: int
    depth: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """All answers to one task. by: who asked; passes: of the endpoint, and of the reference if there is one."""

    name: str
    by: str
    passes: Sequence[Sequence[Pass]]
    groups: Sequence[Group] = ()

    @cached_property
    def comparison(self) -> Comparison | None:
        """With the reference."""
        return compare(self.passes[0], self.passes[1]) if len(self.passes) > 1 else None

    @property
    def failures(self) -> Counter[str]:
        """How often each reason came, in all passes."""
        return Counter(
            answer.reason
            for passes in self.passes
            for one in passes
            for answer in one.values()
            if isinstance(answer, Failure)
        )


@dataclass(frozen=True)
class Limits:
    """What makes the exit status 1; None where nothing does."""

    fail_under: float | None = None
    max_differences: int | None = None
    max_errors: int = 0
    fail_if_worse: bool = False


@dataclass
class Run:
    """Everything that was asked. skipped: task -> why, which is no failure; failed: task -> why."""

    endpoints: list[dict[str, str | None]]
    settings: dict[str, Any]
    tasks: list[Task] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def broken(run: Run, limits: Limits) -> list[str]:
    """A sentence for everything that makes the exit status 1."""
    found = [f"{name}: {why}" for name, why in run.failed.items()]
    for task in run.tasks:
        right = score(task.passes[0][0]).right
        failures, compared = task.failures.total(), task.comparison
        if failures > limits.max_errors:
            found.append(f"{task.name}: {failures} requests failed, {limits.max_errors} may (--max-errors)")
        if not right.total:
            found.append(f"{task.name}: the endpoint has answered nothing")
        elif limits.fail_under is not None and right.rate < limits.fail_under:
            found.append(f"{task.name}: a score of {percent(right.rate)} is under {percent(limits.fail_under)}")
        if compared is None:
            continue
        if right.total and not compared.outputs.between.total:
            found.append(f"{task.name}: no question has an answer from both, so nothing was compared")
        different = compared.outputs.between.count
        if limits.max_differences is not None and different > limits.max_differences:
            found.append(f"{task.name}: {different} outputs differ, {limits.max_differences} may (--max-differences)")
        if limits.fail_if_worse:
            found += [f"{task.name}: {what}: {finding} (--fail-if-worse)" for what, finding in _worse(compared)]
    return found


def _worse(compared: Comparison) -> list[tuple[str, Finding]]:
    return [
        (what, finding) for what, finding in findings(compared).items() if finding in (Finding.LOWER, Finding.BEYOND)
    ]


def findings(compared: Comparison) -> dict[str, Finding]:
    """One word for each comparison."""
    return {
        "score": verdict.score_finding(compared.scores),
        "outputs": verdict.output_finding(compared.outputs),
        "accept": verdict.accept_finding(compared.accept),
    }


def as_json(run: Run, limits: Limits, version: str) -> dict[str, Any]:
    """As docs/accuracy.md describes it."""
    wrong = broken(run, limits)
    return {
        "schema": SCHEMA,
        "version": version,
        "endpoints": dict(zip(ROLES, run.endpoints, strict=False)),
        "settings": run.settings,
        "limits": asdict(limits),
        "notes": run.notes,
        "tasks": [_task_json(task) for task in run.tasks],
        "skipped": run.skipped,
        "failed": run.failed,
        "broken": wrong,
        "ok": not wrong,
    }


def _task_json(task: Task) -> dict[str, Any]:
    compared = task.comparison
    roles = list(zip(ROLES, task.passes, strict=False))
    return {
        "task": task.name,
        "by": task.by,
        "passes": {role: [asdict(score(one)) for one in passes] for role, passes in roles},
        "noise": {role: _dict(noise(passes, unit_of(passes))) for role, passes in roles},
        "groups": [
            {"characters": group.characters, "depth": group.depth}
            | {role: asdict(score(part(passes[0], group.names))) for role, passes in roles}
            for group in task.groups
        ],
        "failures": dict(task.failures),
        "comparison": asdict(compared) if compared else None,
        "findings": {name: finding.value for name, finding in findings(compared).items()} if compared else {},
        "verdict": verdict.sentences(compared) if compared else [],
        "differing": _differing(task, compared) if compared else [],
    }


def _dict(shared: Share | None) -> dict[str, Any] | None:
    return asdict(shared) if shared else None


def _differing(task: Task, compared: Comparison) -> list[dict[str, Any]]:
    """What both said, in their first passes."""
    found = []
    for difference in compared.outputs.differences:
        said = {}
        for role, passes in zip(ROLES, task.passes, strict=True):
            answer = passes[0][difference.name]
            assert isinstance(answer, Answer)
            said[role] = {"text": answer.text, "tokens": answer.tokens, "right": answer.right}
        found.append(asdict(difference) | said)
    return found


def lines(run: Run) -> list[str]:
    """The table."""
    found = [
        f"{role}: {one['url']} ({one['route']}, model {one['model'] or 'not told'})"
        for role, one in zip(ROLES, run.endpoints, strict=False)
    ]
    found += [f"note: {note}" for note in run.notes]
    for task in run.tasks:
        found += ["", *_task_lines(task)]
    found += [f"\n{name}: skipped: {why}" for name, why in run.skipped.items()]
    return found


def _task_lines(task: Task) -> list[str]:
    scores = [[score(one) for one in passes] for passes in task.passes]
    found = [f"{task.name} (asked by {task.by})"]
    rows = [["", "pass", "answers", "failed", "empty", "right", "score", "95 %", "accept length", "prompt tokens"]]
    for role, counts in zip(ROLES, scores, strict=False):
        rows += [[role, str(number), *_score_cells(one)] for number, one in enumerate(counts, 1)]
    found += _aligned(rows)
    if task.groups:
        found += ["", "first passes, by length and depth (0: the first pair of the text, 1: the last)"]
        heads = [cell for role in ROLES[: len(scores)] for cell in (role, "95 %")]
        rows = [["characters", "depth", *heads]]
        for group in task.groups:
            row = [str(group.characters), f"{group.depth:.2f}"]
            for passes in task.passes:
                right = score(part(passes[0], group.names)).right
                row += [f"{right.count}/{right.total}", _range(right)]
            rows.append(row)
        found += _aligned(rows)
    failures = task.failures
    if failures:
        found += ["", "requests that failed, which are in no score:"]
        found += [f"  {count} x {reason}" for reason, count in failures.most_common(SHOWN_FAILURES)]
        if len(failures) > SHOWN_FAILURES:
            found.append(f"  and {len(failures) - SHOWN_FAILURES} other reasons")
    return [*found, "", *_comparison_lines(task)]


def _comparison_lines(task: Task) -> list[str]:
    compared = task.comparison
    if compared is None:
        own = noise(task.passes[0], unit_of(task.passes[0]))
        return [f"Outputs: {counted(own)} differ between the first two passes of the endpoint."] if own else []
    found = verdict.sentences(compared)
    outputs = compared.outputs
    if outputs.positions:
        where = ", ".join(f"{label}: {count}" for label, count in outputs.positions.items() if count)
        found.append(f"First difference at {outputs.unit} (from 0) -> questions: {where}")
    return found


def _score_cells(one: Score) -> list[str]:
    right = one.right
    return [
        str(right.total),
        str(one.failed),
        str(one.empty),
        str(right.count),
        percent(right.rate) if right.total else "-",
        _range(right),
        _mean(one.accept),
        f"{one.prompt_tokens.mean:.0f}" if one.prompt_tokens else "-",
    ]


def _range(right: Share) -> str:
    return f"{100 * right.interval.low:.1f}-{100 * right.interval.high:.1f}" if right.total else "-"


def _mean(one: Mean | None) -> str:
    if one is None:
        return "-"
    if one.interval is None:
        return f"{one.mean:.2f}"
    return f"{one.mean:.2f} ({one.interval.low:.2f}-{one.interval.high:.2f})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, each as wide as its widest cell; the first one to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
