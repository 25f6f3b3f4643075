"""What comes out of a matrix: matrix.json, matrix.csv, and report.html, a page that needs nothing beside it."""

import base64
import csv
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_serving import matrix_plots, matrix_seed
from bench_serving.matrix_plan import Scale
from bench_serving.matrix_plots import Panel, figure_text
from bench_serving.matrix_results import CLAIM_ROUNDS, METRICS, Answer, Spread, Summary, Verdict, answers, summaries
from bench_serving.matrix_run import Matrix, clock
from sglang_hetero.errors import HeteroError

PLOTS = (
    ("req_per_s", "Requests per second", "requests/s", "higher is better"),
    ("req_per_s_per_device", "Requests per second and device", "requests/s per device", "higher is better"),
    ("tokens_per_s", "Tokens per second, input and output", "tokens/s", "higher is better"),
    ("ttft_ms", "Time to the first token (TTFT)", "ms, mean", "lower is better"),
    ("tpot_ms", "Time per output token after the first (TPOT)", "ms, mean", "lower is better"),
    ("e2e_ms", "Time of a whole request (E2E)", "ms, mean", "lower is better"),
)
HEADS = {
    "req_per_s": "req/s",
    "req_per_s_per_device": "req/s per device",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_device": "tokens/s per device",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "e2e_ms": "E2E ms",
    "accept_length": "accept length",
}
STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1f2937; background: #fff;
       max-width: 1180px; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.6rem; margin: 0 0 .2rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
.lead { color: #6b7280; margin: 0 0 1rem }
.note { border-left: 4px solid #2563eb; background: #eff6ff; padding: .6rem .9rem; margin: .7rem 0 }
.warn { border-left-color: #ea580c; background: #fff7ed } .bad { border-left-color: #dc2626; background: #fef2f2 }
table { border-collapse: collapse; font-size: 13px; width: 100% }
.wide { overflow-x: auto }
th, td { padding: .28rem .4rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap;
         font-variant-numeric: tabular-nums; vertical-align: top }
th { color: #6b7280; font-weight: 600; border-bottom: 2px solid #cbd5e1; white-space: normal; vertical-align: bottom }
.text { text-align: left } .free { text-align: left; white-space: normal }
code { white-space: nowrap }
tr.first td { border-top: 2px solid #cbd5e1 }
.seed, .spread { color: #6b7280; font-size: 12px }
figure { margin: .4rem 0 1.2rem; break-inside: avoid } img { width: 100%; height: auto }
pre { background: #f8fafc; padding: .5rem .7rem; white-space: pre-wrap; font-size: 12px; margin: .3rem 0 }
@media print { body { margin: 0; max-width: none } }
"""

DIGEST = 12
"""Letters of a digest that are shown."""

check = matrix_plots.check
Seed = Mapping[tuple[str, int, int], Mapping[str, float]]


def _escape(text: object) -> str:
    return html.escape(str(text))


def _shape(output: int, streams: int) -> str:
    return f"{output} out\nconc. {streams}"


def _panels(matrix: Matrix, found: Sequence[Summary], seed: Seed, metric: str) -> list[Panel]:
    """Ours, with what has a result, and the seed's, with all that the plan has."""
    own = {
        (each.topology, _shape(each.output, each.concurrency)): spread
        for each in found
        if (spread := each.spread(metric)) is not None
    }
    theirs = {
        (cell.topology, _shape(*cell.shape.stands_for)): Spread.of([row[metric]])
        for cell in matrix.plan
        if (row := seed.get((cell.topology, *cell.shape.stands_for))) is not None
    }
    shapes = list(dict.fromkeys(cell.shape for cell in matrix.plan))
    return [
        Panel("this run", [_shape(shape.output, shape.concurrency) for shape in shapes], own),
        Panel(f"the seed: {matrix_seed.SAID}", [_shape(*shape.stands_for) for shape in shapes], theirs),
    ]


def _table(heads: Sequence[tuple[str, str]], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """heads: class and text of each column; rows: class and cells, already HTML."""
    head = "".join(f'<th class="{kind}">{_escape(text)}</th>' for kind, text in heads)
    body = "".join(
        f'<tr class="{kind}">'
        + "".join(f'<td class="{column}">{cell}</td>' for (column, _), cell in zip(heads, cells, strict=True))
        + "</tr>\n"
        for kind, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _spread(value: Spread | None) -> str:
    if value is None:
        return "-"
    text = f"{figure_text(value.median)}"
    if value.rounds > 1:
        text += f'<br><span class="spread">{figure_text(value.least)} to {figure_text(value.most)}</span>'
    return text


def _figures(found: Sequence[Summary], seed: Seed) -> str:
    metrics = [*METRICS, "accept_length"]
    heads = [
        ("text", "output x conc."),
        ("text", "topology"),
        ("", "devices"),
        ("", "rounds"),
        *(("", HEADS[name]) for name in metrics),
    ]
    rows = []
    shape = ""
    for each in found:
        own = [_spread(each.spread(name)) for name in metrics]
        rows.append(
            (
                "first" if each.shape != shape else "",
                [each.shape.replace("x", " x "), each.topology, str(each.devices), str(len(each.rounds)), *own],
            )
        )
        shape = each.shape
        if (row := seed.get((each.topology, *each.stands_for))) is not None:
            theirs = [figure_text(row[name]) if name in row else "-" for name in metrics]
            name = "{} x {}".format(*each.stands_for)
            cells = [name, "seed", str(round(row["npus"])), "1", *theirs]
            rows.append(("", [f'<span class="seed">{cell}</span>' for cell in cells]))
    return _table(heads, rows)


MARKS = {Verdict.HIGHER: "▲", Verdict.LOWER: "▼", Verdict.NONE: "≈", Verdict.TOO_FEW: "?"}


def _ratio(each: Answer | None) -> str:
    if each is None:
        return "-"
    text = f'<span title="{_escape(each.verdict)}">{each.ratio.median:.2f} {MARKS[each.verdict]}</span>'
    if each.ratio.rounds > 1:
        text += f'<br><span class="spread">{each.ratio.least:.2f} to {each.ratio.most:.2f}</span>'
    return text if each.seed is None else f'{text}<br><span class="seed">seed {each.seed:.2f}</span>'


def _ratios(found: Sequence[Answer]) -> str:
    if not found:
        return "<p>None yet: no two topologies that are compared have a result in the same round and shape.</p>"
    shapes = list(dict.fromkeys(each.shape for each in found))
    heads = [("free", "ratio"), *(("", shape.replace("x", " x ")) for shape in shapes)]
    by_place = {(each.question, each.shape): each for each in found}
    rows = [
        ("", [_escape(question.text), *(_ratio(by_place.get((question, shape))) for shape in shapes)])
        for question in dict.fromkeys(each.question for each in found)
    ]
    return _table(heads, rows)


def _legend() -> str:
    return ", ".join(f"{MARKS[verdict]} {_escape(verdict)}" for verdict in Verdict) + "."


def _note(text: str, kind: str = "") -> str:
    return f'<p class="note {kind}">{text}</p>'


def _notes(matrix: Matrix, found: Sequence[Summary], *, cpu: bool) -> list[str]:
    """What has to be known before any figure is read."""
    notes = []
    good = sum(len(each.rounds) for each in found)
    planned = len(matrix.plan)
    if good < planned:
        failed = sum(not result.ok for _, result in matrix.done())
        notes.append(
            _note(
                f"<b>Not complete:</b> {good} of {planned} measurements have a result, {failed} failed, "
                f"{planned - good - failed} have not been run.",
                "bad",
            )
        )
    few = [each for each in found if len(each.rounds) < CLAIM_ROUNDS]
    if few:
        rounds = min(len(each.rounds) for each in few)
        what = "One round" if rounds == 1 else f"{rounds} rounds"
        where = "" if len(few) == len(found) else f" for {len(few)} of {len(found)} topologies and shapes"
        notes.append(
            _note(
                f"<b>{what}{where}: no claims.</b> Without {CLAIM_ROUNDS} rounds nothing tells a difference "
                f"between two topologies from chance. <code>--rounds {CLAIM_ROUNDS}</code> adds what is missing.",
                "warn",
            )
        )
    if cpu:
        cpus = matrix.identity["machine"]["cpus"]
        most = max((each.devices for each in found), default=0)
        notes.append(
            _note(
                f"<b>Ranks share {cpus} CPUs.</b> This ran on the CPU reference platform: up to {most} ranks on {cpus} "
                "CPUs. A topology with more ranks has no more compute here, so that ratios between topologies, and all "
                "figures per device, say that the path works and what it costs in copies and processes, not which "
                "topology is faster on accelerators.",
                "warn",
            )
        )
    return notes


def _verified(matrix: Matrix, found: Sequence[Summary]) -> str:
    requests = matrix.scale.lengths.count * sum(len(each.rounds) for each in found)
    return (
        f"{requests:,} measured requests in {sum(len(each.rounds) for each in found)} measurements: every one ended "
        "without an error, with exactly the output tokens that were asked for, and its prompt counted by the server as "
        "long as it was made."
    )


def _contract(matrix: Matrix, found: Sequence[Summary]) -> list[tuple[str, str]]:
    lengths, identity = matrix.scale.lengths, matrix.identity
    shapes = "; ".join(
        f"{shape.output} tokens x {shape.concurrency} at a time after {shape.warm_ups} warm-up requests"
        for shape in matrix.scale.shapes
    )
    machine = identity["machine"]
    settings = ", ".join(
        f"{name} {_plain(value)}" for name, value in identity["settings"].items() if value not in ((), [], "", None)
    )
    rows = [
        ("model", f"{identity['model']} ({identity['model_digest'][:DIGEST]})"),
        (
            "data",
            f"{lengths.count} prompts of {lengths.least:,} to {lengths.most:,} tokens, {lengths.mean:,.1f} on average; "
            f"seed {identity['data']['seed']}, text of this repository",
        ),
        ("traffic", f"{shapes}; output exact, end token ignored"),
        ("client", "sglang.benchmark.serving, streaming, through the router where there is one"),
        ("servers", "started anew for every measurement"),
        ("settings", settings),
        ("versions", ", ".join(f"{name} {version}" for name, version in identity["versions"].items())),
        ("machine", f"{machine['cpus']} CPUs ({machine['processor']}), {machine['memory_gib']} GiB"),
    ]
    if identity["environment"]:
        rows.append(("environment", ", ".join(f"{name}={value}" for name, value in identity["environment"].items())))
    return rows


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _scale_note(scale: Scale) -> str:
    own = [f"{shape.output} x {shape.concurrency}" for shape in scale.shapes]
    theirs = ["{} x {}".format(*shape.stands_for) for shape in scale.shapes]
    if own == theirs:
        return "Prompt lengths, output lengths and concurrency are the seed's; model and machine are not."
    pairs = ", ".join(f"{one} for the seed's {other}" for one, other in zip(own, theirs, strict=True))
    return (
        f"This is scale {_escape(scale.name)}: prompts, outputs and concurrency are smaller than the seed's ({pairs}). "
        "Left and right differ in model, machine and load: compare patterns, not heights."
    )


def _rounds(matrix: Matrix) -> str:
    rounds = max((cell.round for cell in matrix.plan), default=0)
    return "one round" if rounds == 1 else f"{rounds} rounds"


def page(matrix: Matrix, now: datetime) -> str:
    """The report as HTML."""
    seed = matrix_seed.read()
    found = _summaries(matrix)
    topologies = list(dict.fromkeys(cell.topology for cell in matrix.plan))
    failed = [(cell, result) for cell, result in matrix.done() if not result.ok]
    cpu = "start" not in matrix.identity["settings"]
    parts = [
        "<h1>Topologies under load</h1>",
        f'<p class="lead">{", ".join(topologies)}: model {_escape(matrix.starter.model)}, scale '
        f"{_escape(matrix.scale.name)}, {_rounds(matrix)}; "
        f"{now.day} {now:%B %Y, %H:%M} UTC</p>",
        *_notes(matrix, found, cpu=cpu),
    ]
    if found:
        parts += [
            _note(_verified(matrix, found)),
            "<h2>Ratios that the seed reports</h2>",
            "<p>Above 1: the first topology has more of it. Taken within each round; the median, and from least to "
            f"most, over the rounds. {_legend()}</p>",
            _ratios(answers(found, seed)),
            "<h2>This run beside the seed's</h2>",
            f"<p>{_scale_note(matrix.scale)} Bars are medians over rounds; lines reach from the least to the most.</p>",
        ]
        for metric, title, unit, better in PLOTS:
            image = base64.b64encode(matrix_plots.draw(_panels(matrix, found, seed, metric), topologies, unit)).decode()
            parts.append(
                f"<figure><figcaption><b>{_escape(title)}</b> ({better})</figcaption>"
                f'<img alt="{_escape(title)}, by shape and topology; the figures are in the table below" '
                f'src="data:image/svg+xml;base64,{image}"></figure>'
            )
        parts += [
            "<h2>All figures</h2>",
            "<p>Medians over rounds, with least and most; in grey the seed's cell that the row stands for.</p>",
            _figures(found, seed),
        ]
    if failed:
        parts.append("<h2>Measurements without a result</h2>")
        parts += [
            f"<p><b>{_escape(cell.label)}</b> after {clock(result.seconds)}</p><pre>{_escape(result.reason)}</pre>"
            for cell, result in failed
        ]
    rows = [("", [_escape(name), _escape(value)]) for name, value in _contract(matrix, found)]
    parts += [
        "<h2>What was measured, and how</h2>",
        _table([("text", ""), ("free", "")], rows),
        "<h2>The seed's figures</h2>",
        f"<p>{_escape(matrix_seed.SAID)}, from the description of xLLM's pull request on heterogeneous TP for "
        "prefill/decode disaggregation (RFC 2060). Its author calls them trends of a single round, says that "
        "comparisons must count NPUs, and that accuracy had not been checked. "
        "They were not measured with this package.</p>",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Topologies under load</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _summaries(matrix: Matrix) -> list[Summary]:
    """In the plan's order: shape by shape, whichever round of a topology has a result."""
    order = list(dict.fromkeys(cell.name for cell in matrix.plan))
    return sorted(summaries(matrix.done()), key=lambda each: order.index(f"{each.topology}:{each.shape}"))


def rows(found: Sequence[Summary], seed: Seed) -> list[dict[str, Any]]:
    """A row for each topology and shape: medians in the seed's columns, then least and most, then the seed's own."""
    result = []
    for each in found:
        row: dict[str, Any] = {
            "output_tokens": each.output,
            "concurrency": each.concurrency,
            "topology": each.topology,
            "devices": each.devices,
            "rounds": len(each.rounds),
        }
        spreads = {name: each.spread(name) for name in (*METRICS, "accept_length")}
        for part in ("median", "least", "most"):
            for name, spread in spreads.items():
                column = name if part == "median" else f"{name}_{part}"
                row[column] = "" if spread is None else round(getattr(spread, part), 4)
        theirs = seed.get((each.topology, *each.stands_for), {})
        row["seed_output_tokens"], row["seed_concurrency"] = each.stands_for
        for name in METRICS:
            row[f"seed_{name}"] = theirs.get(name, "")
        result.append(row)
    return result


def _csv(table: Sequence[Mapping[str, Any]]) -> str:
    output = io.StringIO()
    if table:
        writer = csv.DictWriter(output, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    return output.getvalue()


def _json(matrix: Matrix, found: Sequence[Summary], seed: Seed, now: datetime) -> str:
    told = {
        "written": now.isoformat(timespec="seconds"),
        "scale": asdict(matrix.scale),
        "identity": matrix.identity,
        "planned": len(matrix.plan),
        "summary": rows(found, seed),
        "rounds": [{**asdict(cell), "devices": cell.devices, **vars(result)} for cell, result in matrix.done()],
        "ratios": [
            {
                "one": each.question.one,
                "other": each.question.other,
                "metric": each.question.metric,
                "shape": each.shape,
                **asdict(each.ratio),
                "verdict": each.verdict,
                "seed": each.seed,
            }
            for each in answers(found, seed)
        ],
    }
    return json.dumps(told, indent=1) + "\n"


def write(matrix: Matrix) -> list[Path]:
    """matrix.json, matrix.csv and report.html in the matrix's folder. Raises HeteroError where they cannot be."""
    now = datetime.now(UTC)
    found, seed = _summaries(matrix), matrix_seed.read()
    texts = {
        "matrix.json": _json(matrix, found, seed, now),
        "matrix.csv": _csv(rows(found, seed)),
        "report.html": page(matrix, now),
    }
    paths = []
    for name, text in texts.items():
        path = matrix.out / name
        partial = path.with_name(f"{name}.partial")
        try:
            partial.write_text(text)
            partial.replace(path)
        except OSError as error:
            raise HeteroError(f"{path} cannot be written: {error.strerror}") from error
        paths.append(path)
    return paths
