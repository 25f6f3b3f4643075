"""`sglang-hetero models`: list the tiny models, or make one and print its folder."""

import argparse

from sglang_hetero import models


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "models",
        help="list the seeded tiny models, or make one",
        epilog="examples:\n  sglang-hetero models\n  sglang-hetero models tiny-moe   prints the checkpoint's folder",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="make this model if it is not in the cache, and print its folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List, or make one."""
    if arguments.name:
        print(models.path(arguments.name))
        return 0
    for name in models.names():
        print(f"{name:16} {models.spec(name).purpose}")
    return 0
