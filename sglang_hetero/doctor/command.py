"""`sglang-hetero doctor`: what this installation is made of, whether it goes together, and with whom."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from sglang_hetero import releases
from sglang_hetero.errors import HeteroError, OptionError, UpstreamChanged
from sglang_hetero.state.ask import KEY

from . import host
from .lines import Line, as_json, fail, failed, skip, summary, text
from .source import Release

EXAMPLES = """examples:
  sglang-hetero doctor
  sglang-hetero doctor --json out/doctor.json --port 30000 --port 8998
  sglang-hetero doctor --peer http://prefill:30000 --peer http://decode:30000
  sglang-hetero doctor --peer http://prefill:30000 -- --model-path ./Qwen3.5-2B --tp-size 1 --page-size 128 --device npu
  sglang-hetero doctor --sglang ./sglang-0.5.22

A line for each thing that was looked at: ok, warn, fail or skip, what was seen, and what to do about it. Exit status 1
if any fails. --peer asks a running server for its layout (GET /hetero/instance) and plans a hand-over between each
prefill and each decode server; behind -- stand the options of a server that does not run yet. --sglang reads the source
of another release, an unpacked wheel, without importing it. docs/versions.md says what a new release needs."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor",
        help="versions, SGLang's symbols, libraries, ports and peers: does it go together",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there, too")
    parser.add_argument("--peer", action="append", default=[], metavar="URL", help="a running server; may be repeated")
    parser.add_argument("--api-key", metavar="KEY", help=f"the servers', if they have one (default: ${KEY})")
    parser.add_argument(
        "--sglang", type=Path, metavar="FOLDER", help="look at this source instead of the installed SGLang"
    )
    parser.add_argument(
        "--port",
        action="append",
        type=int,
        metavar="N",
        help=f"of a server here; may be repeated (default: {host.HTTP_PORT} and {host.BOOTSTRAP_PORT})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look at everything, print it, and say by the exit status whether anything fails."""
    if arguments.server_arguments and len(arguments.peer) != 1:
        raise OptionError("options behind -- are those of a server that is to go with ONE --peer")
    for port in arguments.port or ():
        if not 1 <= port <= host.MAX_PORT:
            raise OptionError(f"--port {port}: a TCP port is 1 to {host.MAX_PORT}")
    lines, needs = examine(arguments)
    for line in lines:
        print(text(line))
    if needs:
        print(f"\nwhat this release of SGLang needs of sglang-hetero ({len(needs)}):")
        print("\n".join(f"  {need}" for need in needs))
    print(f"\n{summary(lines)}")
    if arguments.json is not None:
        try:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_bytes(as_json(lines, needs=needs))
        except OSError as error:
            raise OptionError(f"--json {arguments.json}: {error.strerror or error}; choose another file") from None
    return 1 if failed(lines) else 0


def examine(arguments: argparse.Namespace) -> tuple[list[Line], list[str]]:
    """All lines, and what the looked at release of SGLang needs. One look that fails by itself costs its own lines."""
    found = host.device()
    needs: list[str] = []

    def symbols() -> list[Line]:
        lines, more = sglang_lines(arguments.sglang, found)
        needs.extend(more)
        return lines

    looks: list[tuple[str, Callable[[], list[Line]]]] = [
        ("platform", lambda: [host.platform_line(found)]),
        ("versions", lambda: host.versions(found)),
        ("symbols", symbols),
        ("layouts", lambda: [host.layouts(found)]),
        ("libraries", lambda: host.libraries(found)),
        ("options", lambda: host.options(os.environ)),
        ("ports", lambda: host.ports(arguments.port or (host.HTTP_PORT, host.BOOTSTRAP_PORT), found, os.environ)),
        ("peers", lambda: _peers(arguments, found)),
    ]
    lines: list[Line] = []
    for area, look in looks:
        lines += guarded(area, look)
    return lines, needs


def guarded(area: str, look: Callable[[], list[Line]]) -> list[Line]:
    """The lines of one look, or one that says why there are none."""
    try:
        return look()
    except HeteroError as error:
        return [fail(area, "look", str(error), "as the reason says")]
    except Exception as error:  # a broken installation may raise anything; the other lines are wanted all the more
        return [fail(area, "look", f"{type(error).__name__}: {error}", "this part of the installation is broken")]


def sglang_lines(folder: Path | None, found: host.Device) -> tuple[list[Line], list[str]]:
    """The symbols of the installed SGLang, or of that in `folder`, and what that release needs."""
    from . import symbols
    from .upstream import uses

    release = host.installed() if folder is None else Release(folder)
    served = releases.by_number(release.version)
    all_uses = uses(served)
    changes = symbols.changes(release, all_uses, symbols.recorded(served).symbols)
    lines = symbols.lines(release, served, changes, len(all_uses), cpu=host.reference_platform(found))
    return lines, symbols.needs(changes)


def _release(folder: Path | None) -> str:
    """The number of the SGLang that would run here; empty if there is none, which has a line of its own."""
    try:
        return (host.installed() if folder is None else Release(folder)).version
    except UpstreamChanged:
        return ""


def _peers(arguments: argparse.Namespace, found: host.Device) -> list[Line]:
    from . import local, peers

    key = arguments.api_key or os.environ.get(KEY)
    if not arguments.server_arguments:
        return peers.examine(arguments.peer, key, None)
    peer = peers.ask(arguments.peer[0], key)
    if not peer.ranks:
        return [skip(peers.AREA, peer.instance.label, f"it has no layout to plan with: {peer.why}")]
    paper = local.configured(arguments.server_arguments, peer, found.kind, _release(arguments.sglang))
    return [paper.line(peers.AREA), *peers.examine(arguments.peer, key, paper.known)]
