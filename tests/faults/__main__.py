"""`make faults`: break running pairs and servers on purpose; nothing may be lost, leaked or hung.

Prints a line per fault and what is wrong with it, and ends with `N faults, 0 wrong, 0 leaked, 0 hung`; status 1 if
anything is not 0.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.harness import Harness

from . import document, hosts, matrix, parsers, servers
from .result import FaultResult, Kind, Recorder, Verdict, complaints, name, read, summary
from .stand import Stand

EXAMPLES = """examples:
  python -m tests.faults                        all of them
  python -m tests.faults --harness-only         without the real servers
  python -m tests.faults --only mid-push P2D1   those with all of these texts in their names
  python -m tests.faults --list                 only their names
  python -m tests.faults --write-docs           make the table of docs/reliability.md from the results of all runs"""

RESULTS = Path(os.environ.get("OUT") or "out") / "faults.jsonl"
Add = Callable[[FaultResult], None]


class Report:
    """Prints results as they come, and how long the rest will take."""

    def __init__(self, total: int, recorder: Recorder) -> None:
        self.results: list[FaultResult] = []
        self._total, self._recorder = total, recorder
        self._started = time.monotonic()

    def add(self, result: FaultResult) -> None:
        """One more is done."""
        self.results.append(result)
        self._recorder.add(result)
        done = len(self.results)
        left = (time.monotonic() - self._started) / done * (self._total - done)
        took = "" if result.seconds is None else f", ended after {result.seconds:.1f} s"
        new = "" if result.recovered is None else f", new requests took {result.recovered:.1f} s"
        print(f"{done:3}/{self._total} {result.verdict}: {result.name}{took}{new} ({_minutes(left)} left)", flush=True)
        for complaint in complaints(result):
            print(f"      {complaint}", flush=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def everything(harness_only: bool = False) -> list[tuple[str, str]]:
    """Name and kind of all that a run tries, in order."""
    found = [(parsers.NAME, "parsers")]
    found += [(case.name, "harness") for case in matrix.cases()]
    found += [(name(case.fault, case.step, hosts.NAME), "hosts") for case in hosts.CASES]
    if not harness_only:
        found += [(name(case.fault, case.step, servers.NAME), "servers") for case in servers.CASES]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen faults; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="those with all of these in their names")
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    parser.add_argument("--harness-only", action="store_true", help="no real servers")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help=f"a JSON line per fault, kept from run to run; default {RESULTS}"
    )
    parser.add_argument("--write-docs", action="store_true", help="write the table of the document from the results")
    options = parser.parse_args(arguments)
    if options.write_docs:
        return _write(options.results)
    chosen = [
        (each, kind) for each, kind in everything(options.harness_only) if all(text in each for text in options.only)
    ]
    if not chosen:
        parser.error(f"no fault has {' and '.join(options.only)} in its name; --list prints them all")
    if options.list:
        print("\n".join(each for each, _ in chosen))
        return 0
    report = Report(len(chosen), Recorder(options.results))
    _run({each for each, _ in chosen}, report.add, options.results.parent / "faults")
    for result in report.results:
        if result.verdict is Verdict.SKIPPED:
            print(f"SKIPPED: {result.name}: {result.skipped}")
    print(summary(report.results))
    missing = len(chosen) - len(report.results)
    if missing:
        print(f"{missing} faults were not tried", file=sys.stderr)
    bad = {Verdict.HUNG, Verdict.WRONG, Verdict.LEAKED}
    return int(bool(missing) or any(result.verdict in bad for result in report.results))


def _write(path: Path) -> int:
    """The table; what has no result is in it as not run. Returns the exit status."""
    found = {result.name: result for result in read(path)} if path.exists() else {}
    known = {name(case.fault, case.step, servers.NAME): (case, servers.NAME, Kind.SERVER) for case in servers.CASES}
    known |= {name(case.fault, case.step, hosts.NAME): (case, hosts.NAME, Kind.HARNESS) for case in hosts.CASES}
    known |= {case.name: (case, case.topology.name, Kind.HARNESS) for case in matrix.cases()}
    lacking = [each for each, _ in everything() if each not in found]
    if parsers.NAME in lacking or not found:
        print(f"{path} has no result of {parsers.NAME}; run it first", file=sys.stderr)
        return 1
    for each in lacking:
        case, where, kind = known[each]
        found[each] = FaultResult(case.fault, case.step, where, kind, case.expectation, skipped="not run")
    results = [found[each] for each, _ in everything()]
    document.write(results)
    print(f"{document.DOCUMENT}: {summary(results)}; {len(lacking)} not run")
    return 0


def _run(names: set[str], add: Add, log_dir: Path) -> None:
    if parsers.NAME in names:
        add(parsers.run(lambda line: print(f"        {line}", flush=True)))
    in_harness = [case for case in matrix.cases() if case.name in names]
    between_hosts = [case for case in hosts.CASES if name(case.fault, case.step, hosts.NAME) in names]
    on_servers = [case for case in servers.CASES if name(case.fault, case.step, servers.NAME) in names]
    if in_harness or between_hosts:
        with Harness() as harness:
            with Stand(harness) as stand:
                for case in in_harness:
                    add(stand.run(case))
            hosts.run(between_hosts, add, harness)
    if on_servers:
        servers.run(on_servers, log_dir, add, lambda line: print(f"        {line}", flush=True))


if __name__ == "__main__":
    sys.exit(main())
