"""`python -m bench_serving.matrix`: throughput and latency of topologies under load, by SGLang's own benchmark client.

Each cell (a topology under one shape of traffic, in one round) is run on servers of its own: start, warm-up, measure,
stop. docs/matrix.md says how to read what comes out.
"""

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from bench_serving import matrix_identity, matrix_plan, matrix_report
from bench_serving.matrix_plan import SCALES, TOPOLOGIES
from bench_serving.matrix_results import Results
from bench_serving.matrix_run import Matrix, clock
from bench_serving.matrix_start import Command, Launcher
from sglang_hetero import models
from sglang_hetero.errors import HeteroError, OptionError
from sglang_hetero.launcher import flags, topology
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals

OUT = Path("out/matrix")
DEFAULTS = Options(mtp=3, max_tokens=0, max_requests=0)
"""0: room for the concurrency of the cell (matrix_plan.sized)."""
FOR_ANY_SERVERS = frozenset({"model", "start_seconds"})
"""Options that hold for --start, too."""
INTERRUPTED = 130

EPILOG = """examples:
  python -m bench_serving.matrix --scale small           the five topologies on this machine, 20 minutes on 2 cores
  python -m bench_serving.matrix --scale small --rounds 3
                                                         with medians and spread: two more rounds for the results so far
  python -m bench_serving.matrix --list                  what is done and what is not
  python -m bench_serving.matrix --only p2_d1 --only '*:32x8'
                                                         some cells: a topology, a shape (output x concurrency), or both
  python -m bench_serving.matrix --report                the report of what there is, without running anything
  python -m bench_serving.matrix --start 'launch/ascend/{topology}.sh' --model qwen3.5-2b --tokenizer DIR
                                                         servers of your own: the command prints READY <url> when they
                                                         answer and ends them at SIGTERM

An interrupted run goes on where it was: run the same command again. Results are kept by everything that matters
(topology, shape, round, model, data, versions, settings, machine); after a change of those the cells are run anew.
--max-tokens 0 and --max-requests 0 make room for the concurrency of each cell."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """All flags."""
    found = argparse.ArgumentParser(
        prog="python -m bench_serving.matrix",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "--scale",
        choices=list(SCALES),
        default="full",
        help="full: prompts of 16,422 to 20,465 tokens, six shapes; small: 257 to 319, two shapes (default: full)",
    )
    found.add_argument(
        "--rounds",
        type=flags.positive,
        help="of every cell; medians and spread over them (default: "
        + ", ".join(f"{each.rounds} at scale {each.name}" for each in SCALES.values())
        + ")",
    )
    found.add_argument(
        "--topologies",
        type=lambda text: text.split(","),
        default=list(TOPOLOGIES),
        metavar="NAME[,NAME]",
        help=f"default: {','.join(TOPOLOGIES)}",
    )
    found.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="CELL",
        help="p2_d1, 32x8 or p2_d1:32x8, with * and ?; repeatable",
    )
    found.add_argument("--list", action="store_true", help="say what is done and what is to do, and end")
    found.add_argument("--report", action="store_true", help="write the report of what there is, and end")
    found.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help=f"results, logs, report (default: {OUT})"
    )
    found.add_argument("--cell-minutes", type=flags.positive, help="after these a cell counts as hung")
    found.add_argument("--start", metavar="COMMAND", help="how servers are started, if not by our launcher on the CPU")
    found.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="of the model that --start serves")
    flags.add(found, DEFAULTS)
    return found


def _starter(arguments: argparse.Namespace) -> Launcher | Command:
    if arguments.start is None:
        if arguments.tokenizer is not None:
            raise OptionError("--tokenizer: our launcher's models have one; it goes with --start")
        return Launcher(models.spec(arguments.model).name)
    if arguments.tokenizer is None:
        raise OptionError("--start needs --tokenizer: the folder of the tokenizer of the model that it serves")
    return Command(arguments.start, arguments.model, arguments.tokenizer)


def _checked(
    starter: Launcher | Command, options: Options, topologies: Sequence[str], scale: matrix_plan.Scale
) -> None:
    """What would fail in each cell fails now, and what would have no effect is refused."""
    if options.log_dir is not None:
        raise OptionError("--log-dir: the logs of a matrix go to its --out folder")
    if isinstance(starter, Command):
        mine = [
            f"--{each.name.replace('_', '-')}"
            for each in fields(Options)
            if each.name not in FOR_ANY_SERVERS and getattr(options, each.name) != getattr(DEFAULTS, each.name)
        ]
        if mine:
            raise OptionError(f"{', '.join(mine)}: of our launcher; put it into the command of --start")
    for name in topologies:
        found = topology.parse(name)
        if isinstance(starter, Launcher):
            found.check_model(models.spec(starter.model))
    if isinstance(starter, Launcher):
        for shape in scale.shapes:
            room = matrix_plan.sized(options, scale, shape)
            room.check()
            room.check_model(models.spec(starter.model))


def matrix(arguments: argparse.Namespace, server_arguments: Sequence[str] = ()) -> Matrix:
    """What the flags ask for. Raises HeteroError for what cannot be."""
    scale = SCALES[arguments.scale]
    if arguments.cell_minutes:
        scale = replace(scale, minutes=arguments.cell_minutes)
    starter = _starter(arguments)
    options = flags.options(arguments, tuple(server_arguments))
    _checked(starter, options, arguments.topologies, scale)
    plan = matrix_plan.only(
        matrix_plan.cells(scale, arguments.topologies, arguments.rounds or scale.rounds), arguments.only
    )
    out = arguments.out.absolute()
    return Matrix(
        plan,
        scale,
        options,
        starter,
        matrix_identity.identity(starter, options, scale),
        Results(out / "results.jsonl"),
        out,
        _say,
    )


def _list(found: Matrix) -> None:
    for cell in found.plan:
        result = found.result(cell)
        if result is None:
            state = "to do"
        elif result.ok:
            state = f"done in {clock(result.seconds)}"
        else:
            state = f"failed, to be tried again: {result.reason.splitlines()[0]}"
        print(f"{cell.topology:10} {cell.shape.name:>6}  round {cell.round}  {state}")
    todo = found.todo()
    left = matrix_plan.seconds_left(todo, found.results.took())
    print(f"{len(found.plan) - len(todo)} of {len(found.plan)} done" + (f", about {clock(left)} left" if left else ""))


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Nobody else measures into this folder meanwhile."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / "matrix.lock", "w")  # noqa: SIM115 (held until the end)
    except OSError as error:
        raise OptionError(f"--out {out}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(f"--out {out}: another matrix writes there; choose another folder") from None
        yield


def _run(found: Matrix, *, report_only: bool) -> int:
    matrix_report.check()  # now, and not after hours
    stopped = False
    trouble: HeteroError | None = None
    if found.results.torn:
        _say(f"{found.results.path}: {found.results.torn} lines that were cut off by an interruption are left out")
    if not report_only:
        done = len(found.plan) - len(found.todo())
        _say(
            f"{len(found.plan)} cells, {done} done before, {len(os.sched_getaffinity(0))} CPUs, results in {found.out}"
        )
        try:
            found.run()
        except Stopped:
            stopped = True
            _say("stopped; the same command goes on with the cell that was interrupted")
        except HeteroError as error:
            trouble = error
    if found.done():
        for path in matrix_report.write(found):
            print(path)
    else:
        _say("no cell has a result: no report")
    if trouble is not None:
        raise trouble
    if stopped:
        return INTERRUPTED
    return 1 if found.todo() else 0


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every cell of the plan has a result."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    arguments = parser().parse_args(given[:split])
    try:
        found = matrix(arguments, given[split + 1 :])
        if arguments.list:
            _list(found)
            return 0
        raise_on_signals()
        with _alone(found.out):
            found.results = Results(found.results.path)  # another run may just have ended
            return _run(found, report_only=arguments.report)
    except HeteroError as error:
        _say(f"matrix: {error}")
        return 1
    except Stopped:
        _say("matrix: stopped")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
