"""`python -m tests.accuracy`: the recall table. What is lost or mixed up at a hand-over shows as a score.

Real servers of each topology answer the same questions (sglang_hetero/accuracy/recall.py): their answers must be the
undivided server's, token for token. Then a decode server breaks what it has merged, in one way after the other: each
must show in the score or in the accept length. The status is 1 if one of that is not so.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from sglang_hetero import models
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import flags
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals

from . import document, picture, summary
from .ask import CHARACTERS, DEPTHS, PER_DEPTH, SEED, Sheet
from .plan import UNDIVIDED, Row, only, rows
from .record import Records
from .run import SETTINGS, Table
from .ties import tie_of
from .verdict import evaluate

OUT = Path("out/accuracy")
MODEL = "recall"
INTERRUPTED = 130
EXAMPLES = """examples:
  python -m tests.accuracy                       everything
  python -m tests.accuracy --list                what is done and what is not
  python -m tests.accuracy --only p2_d1          one topology with its broken merges; the undivided server stands beside
  python -m tests.accuracy --only 'p2_d1:ssm*' p1_d2
  python -m tests.accuracy --report              the table of what there is, without running anything
  python -m tests.accuracy --write-docs          docs/accuracy_topologies.md from out/accuracy/table.json

An interrupted run goes on where it was: run the same command again. A row counts as long as the model, the questions,
the settings, SGLang and the code that moves state are the same."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """All flags."""
    found = argparse.ArgumentParser(
        prog="python -m tests.accuracy",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--only", nargs="+", default=[], metavar="ROW", help="names, or their beginnings, with * and ?")
    found.add_argument("--list", action="store_true", help="say what is done, and end")
    found.add_argument("--report", action="store_true", help="write the table of what there is, and end")
    found.add_argument("--model", default=MODEL, choices=models.names(), help=f"default: {MODEL}")
    found.add_argument("--per-depth", type=flags.positive, default=PER_DEPTH, help=f"questions; default: {PER_DEPTH}")
    found.add_argument("--characters", type=flags.positive, default=CHARACTERS, help=f"default: {CHARACTERS}")
    found.add_argument("--seed", type=int, default=SEED, help=f"of the questions; default: {SEED}")
    found.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help=f"answers, table, logs; default: {OUT}")
    found.add_argument("--write-docs", action="store_true", help="put a table into the document, and end")
    found.add_argument("--results", type=Path, metavar="FILE", help="for --write-docs; default: table.json of --out")
    return found


def wanted(patterns: Sequence[str]) -> list[Row]:
    """The rows that were asked for and those that they stand beside."""
    every = rows()
    chosen = only(every, patterns)
    beside = {each for row in chosen for each in (Row(UNDIVIDED), row.whole)}
    return [row for row in every if row in beside or row in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.write_docs:
            return _write_docs(options.results or options.out / "table.json")
        chosen = wanted(options.only)
        if options.only and not only(rows(), options.only):
            raise HeteroError(f"no row is called {' or '.join(options.only)}; --list tells them all")
        sheet = Sheet(options.characters, DEPTHS, options.per_depth, options.seed)
        table = Table(chosen, options.model, sheet, Records(options.out / "answers.jsonl"), options.out, _say)
        if options.list:
            for row in table.rows:
                print(f"{row.name:28} {'done' if table.record(row) else 'to do'}")
            return 0
        if not options.report:
            raise_on_signals()
            table.run()
        return _report(table)
    except Stopped:
        _say("stopped; the same command goes on")
        return INTERRUPTED
    except HeteroError as error:
        _say(f"error: {error}")
        return 1


def about(table: Table) -> dict[str, str]:
    """What the document tells of a table."""
    sheet = table.sheet
    return {
        "model": f"`{table.model}`, fp32",
        "questions": f"{len(table.questions)} of {sheet.characters} tokens (seed {sheet.seed})",
        "output": f"{sheet.tokens} tokens, greedy",
        "MTP depth": str(SETTINGS.mtp),
        "pages": f"of {SETTINGS.page_size}",
        "prefill steps": f"of {SETTINGS.chunk}",
        "SGLang": metadata.version("sglang"),
    }


def _report(table: Table) -> int:
    done = {row: record for row in table.rows if (record := table.record(row)) is not None}
    beside = {row: record for row, record in done.items() if Row(UNDIVIDED) in done and row.whole in done}
    if not beside:
        raise HeteroError("there are no results yet: run without --report")
    model_path = models.path(table.model)
    found = summary.Summary(
        about(table),
        tuple(evaluate(beside, Row(UNDIVIDED), table.faults, tie_of(model_path, table.questions, table.sheet.tokens))),
    )
    table.out.mkdir(parents=True, exist_ok=True)
    (table.out / "table.json").write_text(summary.to_json(found))
    (table.out / "table.csv").write_text(summary.to_csv(found.figures))
    (table.out / "table.md").write_text("\n".join(document.markdown(found)) + "\n")
    picture.draw(found, table.out / "table.png")
    print("\n".join(document.markdown(found)))
    bad = [each for each in found.figures if not each.verdict.good]
    for each in bad:
        _say(f"{each.verdict.value}: {each.row.name} ({each.says})")
    _say(f"table.json, table.csv, table.md, table.png in {table.out}")
    print(document.last_line(found.figures))
    return int(bool(bad) or len(beside) < len(table.rows))


def _write_docs(results: Path) -> int:
    found = summary.read(results)
    missing = [row.name for row in rows() if row not in {each.row for each in found.figures}]
    if missing:
        raise HeteroError(f"{results} has no {', '.join(missing)}; run them first")
    document.write(found)
    if results.resolve() != document.RESULTS:
        shutil.copyfile(results, document.RESULTS)
    picture.draw(found, document.PICTURE)
    print(f"{document.DOCUMENT.name}: {document.last_line(found.figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
