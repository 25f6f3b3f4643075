"""The console script `sglang-hetero`."""

import argparse
import os
import sys
from collections.abc import Sequence

from sglang_hetero import __version__
from sglang_hetero.errors import HeteroError

STDERR = 2


def _parser() -> argparse.ArgumentParser:
    from sglang_hetero.accuracy import command as accuracy
    from sglang_hetero.cpu import commands as cpu
    from sglang_hetero.demo import command as demo
    from sglang_hetero.discovery import command as instances
    from sglang_hetero.doctor import command as doctor
    from sglang_hetero.explain import command as explain
    from sglang_hetero.launcher import up
    from sglang_hetero.models import commands as models
    from sglang_hetero.perf import command as trace
    from sglang_hetero.router import command as router
    from sglang_hetero.router import sync_command as sync_router
    from sglang_hetero.state import command as state
    from sglang_hetero.validate import command as validate

    parser = argparse.ArgumentParser(
        prog="sglang-hetero",
        description="Prefill and decode with different tensor-parallel sizes on SGLang.",
        epilog="`sglang-hetero COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"sglang-hetero {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    up.add_parser(subparsers)
    demo.add_parser(subparsers)
    explain.add_parser(subparsers)
    trace.add_parser(subparsers)
    state.add_parser(subparsers)
    doctor.add_parser(subparsers)
    validate.add_parser(subparsers)
    instances.add_parser(subparsers)
    router.add_parser(subparsers)
    sync_router.add_parser(subparsers)
    accuracy.add_parser(subparsers)
    models.add_parser(subparsers)
    cpu.add_parser(subparsers)
    return parser


def _open_standard_streams() -> None:
    """Give descriptors 0 to 2 something to be: where the caller closed one, the next pipe would take its number."""
    descriptor = 0
    while descriptor <= STDERR:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error meant for a person is printed as it is and gives exit status 1."""
    _open_standard_streams()
    given = list(sys.argv[1:] if argv is None else argv)
    # argparse would take what follows `--` for positional arguments of the command.
    split = given.index("--") if "--" in given else len(given)
    arguments = _parser().parse_args(given[:split])
    arguments.server_arguments = given[split + 1 :]
    try:
        result: int = arguments.run(arguments)
    except HeteroError as error:
        print(f"sglang-hetero: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return result
