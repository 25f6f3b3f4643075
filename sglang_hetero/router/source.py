"""The flags that say which servers there are: given by URL, or followed in etcd."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_hetero.discovery import settings
from sglang_hetero.errors import OptionError

if TYPE_CHECKING:
    from sglang_hetero.discovery.members import Members

MOST_PREFILL_VALUES = 2
"""URL and bootstrap port."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--prefill and --decode as sglang-router has them, and those of etcd."""
    group = parser.add_argument_group("which servers there are", "either by URL, or from etcd")
    group.add_argument(
        "--prefill",
        nargs="+",
        action="append",
        default=[],
        metavar=("URL", "BOOTSTRAP_PORT"),
        help="a prefill server and its --disaggregation-bootstrap-port; may be repeated. A server with this package "
        "tells its port itself",
    )
    group.add_argument(
        "--decode", nargs="+", action="append", default=[], metavar="URL", help="a decode server; may be repeated"
    )
    settings.add_flags(parser)


def prefills(given: Sequence[Sequence[str]]) -> list[tuple[str, int | None]]:
    """What --prefill says: URL and bootstrap port, None if there is none. Raises OptionError."""
    found: list[tuple[str, int | None]] = []
    for url, *rest in given:
        if len(rest) >= MOST_PREFILL_VALUES:
            raise OptionError(f"--prefill {' '.join([url, *rest])}: takes a URL and a bootstrap port; repeat the flag")
        port = rest[0] if rest else "none"
        if port.lower() != "none" and not port.isdecimal():
            raise OptionError(f"--prefill {url} {port}: the bootstrap port must be a number or none")
        found.append((url, None if port.lower() == "none" else int(port)))
    return found


def members(arguments: argparse.Namespace) -> Members:
    """The servers that the flags name, or those in etcd. Raises OptionError, RecordError or DiscoveryError."""
    from sglang_hetero.discovery.members import EtcdMembers, StaticMembers  # with requests, which takes a while

    given = prefills(arguments.prefill), [url for urls in arguments.decode for url in urls]
    if any(given):
        if arguments.etcd is not None:
            raise OptionError("--etcd, or --prefill and --decode: give one of the two")
        if not all(given):
            raise OptionError("give at least one --prefill and one --decode, or --etcd")
        return StaticMembers(*given)
    options = settings.of_flags(arguments)
    if options is None:
        raise OptionError("which servers? Give --prefill and --decode, or --etcd host:port, or set SGLANG_HETERO_ETCD")
    return EtcdMembers(options)
