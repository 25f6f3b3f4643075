"""Requests for hours, some of them given up, servers killed and started again: nothing wrong, nothing leaked, no hang.

    python -m bench_serving.soak --handoffs 2000
    python -m bench_serving.soak --handoffs 100000 --restart-every 10000 --verify --out out/soak
    python -m bench_serving.soak --hours 8 --prefill-tp 2,3 --states prepush --restart-every 20000
    python -m bench_serving.soak --servers --handoffs 2000 --restarts 10
    python -m bench_serving.soak --servers --topology p2_d1 --handoffs 100 --restarts 1 --mtp 0

On the harness (docs/harness.md; the default) there is no model. Two prefill servers of different TP sizes hand caches
to decode servers, one for each state mode, in batches of requests that are under way at the same time: mixed lengths
and chunks, a share given up on either side at any step, every other batch computed by forward passes whose layers leave
early. Each batch every byte of every decode pool is compared with the oracle, and nothing may be held any more.

With --servers real servers of a topology answer prompts of mixed lengths, and every answer is compared with what
transformers gives. Clients go away in the middle of a share of them.

A restart is kill -9 of a whole server while requests are under way, in turn of each; it is started again on the same
ports, and the others live on. Only requests that were under way on it may fail, with the cause.

What is looked at, when it is a fault, and what the picture shows: docs/soak.md. The last line is
`N handoffs, M aborted, R restarts: 0 wrong, 0 leaks, 0 hangs`, and the exit status 1 if it has other figures. Ctrl-C
ends with what has been seen so far.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from bench_serving.soak_harness import HarnessSoak, Plan
from bench_serving.soak_picture import draw
from bench_serving.soak_record import Goal, Kind, Record, told
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import flags, topology
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals
from sglang_hetero.transfer.pieces import StateMode
from tests.harness import Harness, HarnessError

HANDOFFS = 2000
SECONDS_PER_HOUR = 3600
SHOWN = 1000
"""Characters of a fault that are printed; the summary has all of it."""


def sizes(text: str) -> tuple[int, ...]:
    """Parse `2,4`."""
    return tuple(flags.positive(part) for part in text.split(","))


def states(text: str) -> tuple[str, ...]:
    """Parse `prepush,pull`."""
    chosen = tuple(text.split(","))
    unknown = [each for each in chosen if each not in list(StateMode)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(StateMode)}")
    return chosen


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def hours(text: str) -> float:
    """A positive number of hours."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--servers", action="store_true", help="real servers and a model, instead of the harness")
    ends = made.add_mutually_exclusive_group()
    ends.add_argument("--handoffs", type=flags.positive, metavar="N", help=f"requests (default: {HANDOFFS:,})")
    ends.add_argument("--hours", type=hours, metavar="H", help="for so long, instead of a number of requests")
    made.add_argument("--abort-share", type=share, default=0.1, metavar="P", help="given up by a client (default: 0.1)")
    made.add_argument("--seed", type=int, default=0, help="of lengths, contents, aborts and kills (default: 0)")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="write soak.json and soak.png there")
    harness = made.add_argument_group("on the harness")
    harness.add_argument(
        "--prefill-tp", type=sizes, default=Plan.prefill_tp, metavar="TP,TP", help="one server each (default: 2,4)"
    )
    harness.add_argument("--decode-tp", type=flags.positive, default=Plan.decode_tp, help="of each (default: 1)")
    harness.add_argument(
        "--states", type=states, default=Plan.states, help=f"a decode server each (default: {','.join(Plan.states)})"
    )
    harness.add_argument(
        "--batch", type=flags.positive, default=Plan.batch, help=f"requests at the same time (default: {Plan.batch})"
    )
    harness.add_argument("--restart-every", type=int, default=0, metavar="N", help="requests (default: no restarts)")
    harness.add_argument(
        "--rooms", type=flags.positive, default=0, metavar="N", help="use room numbers again after N (default: never)"
    )
    harness.add_argument("--verify", action="store_true", help="SGLANG_HETERO_VERIFY=1: digests of what was sent, too")
    harness.add_argument("--no-passes", action="store_true", help="no forward passes: nothing leaves before its chunk")
    servers = made.add_argument_group("with --servers")
    servers.add_argument("--topology", default="p2p4_d1", help=f"{topology.GRAMMAR} (default: p2p4_d1)")
    servers.add_argument("--restarts", type=int, default=0, metavar="R", help="spread over the run (default: none)")
    servers.add_argument("--concurrency", type=flags.positive, default=8, help="requests at the same time (default: 8)")
    servers.add_argument("--mtp", type=int, default=3, metavar="DEPTH", help="of speculation, 0 for none (default: 3)")
    servers.add_argument("--model", default="tiny", help="(default: tiny)")
    servers.add_argument("--log-dir", type=Path, metavar="FOLDER", help="of the servers (default: a new one)")
    return made


class Stopping:
    """The first SIGINT or SIGTERM asks for an end after what is under way, the second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def __call__(self) -> bool:
        return self.asked

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        print("soak: ending after the requests that are under way; once more to end at once", file=sys.stderr)
        raise_on_signals()


def main(arguments: list[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    goal = Goal(chosen.handoffs or HANDOFFS) if chosen.hours is None else Goal(seconds=chosen.hours * SECONDS_PER_HOUR)
    record = Record()
    stopping = Stopping()
    try:
        (_servers if chosen.servers else _harness)(chosen, record, goal, stopping)
    except (HeteroError, HarnessError) as error:
        record.fault(Kind.WRONG, f"the soak could not go on: {error}")
    except Stopped:
        pass
    if not goal.reached(record):
        record.note("ended before its goal was reached")
    _tell(record, chosen)
    print(record.last_line)
    return 1 if record.faults else 0


def _harness(chosen: argparse.Namespace, record: Record, goal: Goal, stopping: Callable[[], bool]) -> None:
    plan = Plan(
        prefill_tp=chosen.prefill_tp,
        decode_tp=chosen.decode_tp,
        states=chosen.states,
        batch=chosen.batch,
        abort_share=chosen.abort_share,
        restart_every=chosen.restart_every,
        rooms=chosen.rooms,
        verify=chosen.verify,
        passes=not chosen.no_passes,
        seed=chosen.seed,
    )
    _progress("starting the processes")
    with Harness() as harness:
        HarnessSoak(harness, plan, record, _progress).run(goal, stopping)


def _servers(chosen: argparse.Namespace, record: Record, goal: Goal, stopping: Callable[[], bool]) -> None:
    from bench_serving import soak_servers

    plan = soak_servers.Plan(
        topology=chosen.topology,
        model=chosen.model,
        mtp=chosen.mtp,
        concurrency=chosen.concurrency,
        abort_share=chosen.abort_share,
        restarts=chosen.restarts,
        seed=chosen.seed,
        log_dir=chosen.log_dir,
    )
    soak_servers.run(plan, record, goal, stopping, _progress)


def _tell(record: Record, chosen: argparse.Namespace) -> None:
    for line in told(f"{fault.kind}: {fault.what[:SHOWN]}" for fault in record.faults):
        print(line, file=sys.stderr)
    for growth in record.growth():
        _progress(f"memory of {growth.process}: {growth.bytes_per_handoff:+.0f} bytes per request")
    for note in record.notes:
        _progress(f"note: {note}")
    if chosen.out is None:
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    options = {name: value for name, value in vars(chosen).items() if name not in ("out", "log_dir")}
    written = record.summary() | {"options": options, "last_line": record.last_line}
    (chosen.out / "soak.json").write_text(json.dumps(written, indent=1) + "\n")
    try:
        draw(record, chosen.out / "soak.png")
    except HeteroError as error:
        _progress(f"no picture: {error}")
    _progress(f"written to {chosen.out}")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
