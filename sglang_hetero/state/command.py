"""`sglang-hetero state`: what running servers say of themselves."""

from __future__ import annotations

import argparse
import os
import sys

from sglang_hetero.errors import PeerAway, StateError

from .ask import KEY, ask
from .report import Report, State, decode_state

PATH = "/hetero/state"
MIB = 1 << 20
POOLS = ("pages", "rows", "slots", "aux_rows")
QUEUES = (
    "bootstrapping",
    "in_flight",
    "unresolved",
    "preallocating",
    "retracted",
    "receiving",
    "waiting",
    "running",
)

EXAMPLES = """examples:
  sglang-hetero state --url http://127.0.0.1:30000
  sglang-hetero state --url http://prefill:30000 --url http://decode:30000
  sglang-hetero state --url http://prefill:30000 --json

One line per rank, then what is wrong or not known. Exit status 1 if anything is, or if a server does not answer. The
URLs are those of SGLang's own servers, not of a router. docs/state.md says what the figures mean."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "state",
        help="what running servers hold, and what is wrong with them",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", action="append", required=True, metavar="URL", help="of a server; may be repeated")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's, if it has one (default: ${KEY})")
    parser.add_argument("--json", action="store_true", help="what the servers answer, one JSON object per line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask every server; a line per rank, then what is wrong."""
    key = arguments.api_key or os.environ.get(KEY)
    wrong: list[str] = []
    for url in arguments.url:
        try:
            data = ask(url.rstrip("/"), PATH, key)
            state = decode_state(data)
        except (PeerAway, StateError) as error:
            wrong.append(f"fault: {url}: {error}")
            continue
        if arguments.json:
            print(data.decode())
        else:
            print("\n".join(_lines(url, state)))
        wrong += [f"fault: {fault}" for fault in state.faults]
        wrong += [f"not known: {problem}" for problem in state.problems]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _lines(url: str, state: State) -> list[str]:
    kind = state.side or "neither prefill nor decode"
    found = [f"{url}: {kind}, SGLANG_HETERO={state.mode}, {'ok' if state.ok else 'NOT OK'}"]
    if state.control is not None:
        one = state.control
        found.append(f"  control service: port {one.port}, {one.ranks} ranks, {one.parked} messages parked")
    if state.discovery is not None:
        found.append(f"  discovery: {state.discovery.standing}, {state.discovery.key or 'no record'} in etcd")
    found += [f"  {_rank(one)}" for one in state.ranks]
    return found


def _rank(one: Report) -> str:
    ours, process = dict(one.ours), one.process
    parts = []
    if "units" in ours:
        units, free, apart = ours.pop("units"), ours.pop("units_free", 0), ours.pop("units_quarantined", 0)
        ours.pop("units_held", 0)
        parts.append(f"units {free}/{units} free, {apart} quarantined")
    if ours:
        parts.append(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in ours.items()))
    pools = [
        f"{name.replace('_', ' ')} {one.sglang[f'{name}_free']}/{one.sglang[name]}"
        for name in POOLS
        if name in one.sglang and f"{name}_free" in one.sglang
    ]
    if pools:
        parts.append(f"free: {', '.join(pools)}")
    queues = [f"{name.replace('_', ' ')} {one.sglang[name]}" for name in QUEUES if one.sglang.get(name)]
    if queues:
        parts.append(f"queues: {', '.join(queues)}")
    if process:
        parts.append(
            f"{process.get('threads', 0)} threads, {process.get('sockets', 0)} sockets, "
            f"{process.get('rss_bytes', 0) // MIB} MiB"
        )
    parts.append(f"{one.age:.1f} s old")
    return f"{one.rank}: {'; '.join(parts)}"
