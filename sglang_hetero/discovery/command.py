"""`sglang-hetero instances`: who has registered in etcd."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_hetero.errors import DiscoveryError, OptionError, RecordError

from .record import Instance, encode
from .settings import add_flags, of_flags

FINGERPRINT_SHOWN = 8
"""Characters that tell layouts apart in a table."""
COLUMNS = (
    "role",
    "url",
    "bootstrap",
    "model",
    "tp",
    "dp",
    "pp",
    "layout",
    "requests",
    "tokens",
    "release",
    "incarnation",
)
EXAMPLES = """examples:
  sglang-hetero instances --etcd 10.0.0.5:2379
  sglang-hetero instances --etcd 10.0.0.5:2379,10.0.0.6:2379 --etcd-prefix /team/fleet
  sglang-hetero instances --etcd 10.0.0.5:2379 --etcd-ca ca.pem --etcd-user router --etcd-password-file password
  sglang-hetero instances --json

A line per server that has registered; servers with the same layout can stand in for each other. Exit status 1 if there
is none, or a record that cannot be read. docs/discovery.md says what the columns mean."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "instances",
        help="which servers have registered in etcd",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the records, one JSON object per line")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read all records once. Raises OptionError, or DiscoveryError if etcd does not answer."""
    from .etcd import MAX_INSTANCES, Etcd  # with requests and etcd3gw, which no other command waits for
    from .members import bounded, entered, in_order

    options = of_flags(arguments)
    if options is None:
        raise OptionError("which etcd? Give --etcd host:port, or set SGLANG_HETERO_ETCD")
    etcd = Etcd(options)
    try:
        listing = etcd.read(f"{options.prefix}/")
    except DiscoveryError as error:
        raise DiscoveryError(f"etcd cannot be read: {error}") from None
    finally:
        etcd.close()
    found, wrong = [], []
    for key, held in sorted(listing.records.items()):
        try:
            found.append(entered(options.prefix, key, held))
        except RecordError as error:
            wrong.append(f"left out: {ascii(bounded(key))[1:-1]}: {error}")
    if listing.truncated:
        wrong.append(f"not known: there are more than {MAX_INSTANCES} records")
    if not found:
        wrong.append(f"no server has registered under {options.prefix}/ in etcd at {', '.join(options.endpoints)}")
    if arguments.json:
        for one in in_order(found):
            print(encode(one).decode())
    elif found:
        print("\n".join(table(in_order(found))))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def table(instances: Sequence[Instance]) -> list[str]:
    """A header and a line for each server."""
    rows = [COLUMNS, *map(_row, instances)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(one: Instance) -> tuple[str, ...]:
    numbers = (one.tp_size, one.dp_size, one.pp_size)
    return (
        str(one.role),
        one.url,
        _number(one.bootstrap_port),
        one.model or "-",
        *map(_number, numbers),
        one.fingerprint[:FINGERPRINT_SHOWN] or "-",
        _number(one.requests),
        _number(one.tokens),
        one.release or "-",
        one.incarnation[:FINGERPRINT_SHOWN] or "-",
    )


def _number(value: int) -> str:
    return str(value) if value else "-"
