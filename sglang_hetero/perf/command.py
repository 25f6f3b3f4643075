"""`sglang-hetero trace`: what servers wrote with SGLANG_HETERO_TRACE, for a person to look at."""

import argparse
import sys
from pathlib import Path

from sglang_hetero.errors import TraceError

from . import parts, perfetto
from .parts import Parts
from .records import Component

MILLISECOND = 1_000_000
"""Nanoseconds."""
MIB = 1 << 20
UNKNOWN = "-"

EXAMPLES = """examples:
  SGLANG_HETERO_TRACE=out/trace sglang-hetero up p2_d1         its servers write a trace
  sglang-hetero trace out/trace --list                         the requests in it
  sglang-hetero trace out/trace -o trace.json                  all of it, for https://ui.perfetto.dev
  sglang-hetero trace out/trace --room 42 -o trace.json        one request
  sglang-hetero trace out/trace --room 42 --png timeline.png   a picture of it

docs/perf.md says what is in a trace."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "trace",
        help="a run's trace for Perfetto, or as a picture",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="what SGLANG_HETERO_TRACE was")
    parser.add_argument("--room", type=int, metavar="N", help="only this request (default: all)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write Chrome trace JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a timeline (needs matplotlib)")
    parser.add_argument("--list", action="store_true", help="print the requests (default if nothing is written)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the folder, and write or print what is asked for."""
    found = parts.read(arguments.directory)
    if note := parts.where(found):
        print(note, file=sys.stderr)
    if not found.events:
        raise TraceError(f"{arguments.directory}: the trace has no events yet")
    chosen = found if arguments.room is None else found.of(arguments.room)
    if arguments.output is not None:
        perfetto.write(chosen, arguments.output)
        print(f"{arguments.output}: {len(chosen.events)} events; open it in https://ui.perfetto.dev")
    if arguments.png is not None:
        from . import picture

        picture.draw(chosen, arguments.png, arguments.room)
        print(f"{arguments.png}: a timeline")
    if arguments.list or (arguments.output is None and arguments.png is None):
        print(_table(chosen))
    return 0


def _table(found: Parts) -> str:
    """One line per request; times in milliseconds."""
    heads = ["room", "at", "tokens", "prefill", *(f"{each} MiB" for each in Component), "link", "early", "response"]
    zero = min(event.at for event in found.events)
    rows = [heads]
    for room in perfetto.rooms(found):
        begun = room.at if room.first_pass is None else room.first_pass
        rows.append(
            [
                str(room.room),
                _ms(zero, room.at),
                str(room.tokens or UNKNOWN),
                _ms(room.first_pass, room.prefill_ended),
                *(f"{room.nbytes.get(each, 0) / MIB:.2f}" for each in Component),
                _ms(room.first_byte, room.last_byte),
                UNKNOWN if room.early is None else f"{room.early:.0%}",
                _ms(begun, room.first_response),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, NOTE])


NOTE = (
    "Times in ms. at: after the start of the trace. prefill: forward passes. link: first byte to last byte. early:\n"
    "bytes that were written when prefill had ended. response: from the first pass to the end of decode's first step."
)


def _ms(start: int | None, end: int | None) -> str:
    return UNKNOWN if start is None or end is None else f"{(end - start) / MILLISECOND:.1f}"
