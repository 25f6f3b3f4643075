"""`sglang-hetero validate`: what works on this host, stage by stage; a JSON file and one page."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

from sglang_hetero import __version__
from sglang_hetero.doctor import host
from sglang_hetero.doctor.lines import Line, failed, summary, text
from sglang_hetero.errors import HeteroError, OptionError
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals

from . import report
from .runner import run_all
from .stage import Settings, chosen

KINDS = ("cpu", "npu", "cuda")
CHIP = "LAUNCH_CHIP"

EXAMPLES = """examples:
  sglang-hetero validate --device cpu --json out/validate.json --report out/validate.md
  sglang-hetero validate --device cpu --quick
  sglang-hetero validate --only kernels --only environment
  LAUNCH_CHIP=910b launch/ascend/validate.sh          the same on a host with NPUs
  launch/cuda/validate.sh                             the same on a host with GPUs

A line for each thing: ok, warn, fail or skip, the figure, and what to do. Exit status 1 if any fails. Each stage runs
in a process of its own with a time limit; one that crashes or hangs fails, and the others go on. docs/validate.md."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "validate",
        help="what works on this host: kernels, engines, servers end to end",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=KINDS, help="what to validate (default: what this host has)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all lines there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write one page there, in Markdown")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="may be repeated; see --list")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, and one mode for the linear state")
    parser.add_argument("--matrix", action="store_true", help="also serve the other topologies (docs/matrix.md)")
    parser.add_argument("--list", action="store_true", help="print the names of the stages")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("out/validate"),
        metavar="DIR",
        help="for logs and what stages leave to each other (default: %(default)s)",
    )
    parser.add_argument(
        "--fleet", type=Path, metavar="SCRIPT", help="launch/lib/fleet.sh, which starts servers on an NPU or GPU"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the stages; the exit status says whether any line fails."""
    from . import table

    every = table.stages(matrix=arguments.matrix)
    if arguments.list:
        print("\n".join(stage.name for stage in every))
        return 0
    try:
        wanted = chosen(every, arguments.only)
    except KeyError as unknown:
        names = ", ".join(stage.name for stage in every)
        raise OptionError(f"--only {unknown.args[0]!r}: no such stage; there are {names}") from None
    settings = _settings(arguments)
    about = {
        "device": f"{settings.count} {settings.device}",
        "host": platform.node(),
        "sglang-hetero": __version__,
        "SGLang": host.release_of("sglang") or "none",
        "at": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    lines: list[Line] = []
    seconds: dict[str, float] = {}
    started = time.monotonic()

    def tell(words: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {words}", file=sys.stderr, flush=True)

    try:
        raise_on_signals()
        for stage, said, took in run_all(wanted, settings, tell):
            lines += said
            seconds[stage.name] = took
            print("\n".join(map(text, said)), flush=True)
    except Stopped:
        tell("stopped")
        _write(arguments, lines, seconds, about)
        return 1
    print(f"\n{summary(lines)}")
    _write(arguments, lines, seconds, about)
    return 1 if failed(lines) else 0


def _settings(arguments: argparse.Namespace) -> Settings:
    found = host.device()
    kind = arguments.device or found.kind
    folder: Path = arguments.folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--folder {folder}: {error.strerror or error}; choose another") from None
    for file in (*folder.glob("*-tokens.json"), *folder.glob("serve-*/*.log")):
        file.unlink()  # of a former run: nothing may be compared with it, or judged by it
    fleet = arguments.fleet
    if fleet is not None and not os.access(fleet, os.X_OK):
        raise OptionError(f"--fleet {fleet}: there is no such script")
    count = found.count if kind == found.kind else int(kind == "cpu")
    return Settings(
        device=kind,
        count=count,
        folder=str(folder),
        quick=arguments.quick,
        fleet=str(fleet.absolute()) if fleet is not None else "",
        chip=os.environ.get(CHIP, ""),
    )


def _write(arguments: argparse.Namespace, lines: list[Line], seconds: dict[str, float], about: dict[str, str]) -> None:
    for option, path, data in (
        ("--json", arguments.json, report.json_of(lines, seconds, about)),
        ("--report", arguments.report, report.page_of(lines, seconds, about).encode()),
    ):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise HeteroError(f"{option} {path}: {error.strerror or error}; choose another file") from None
        print(f"{path}: written", file=sys.stderr)
