"""`sglang-hetero cpu`: switch the CPU reference platform on or off in this environment."""

import argparse

from sglang_hetero.cpu import enable


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "cpu",
        help="switch the CPU reference platform on or off in this Python environment",
        description="SGLang's CPU path needs sgl_kernel and torchvision, which have no build for a plain CPU beside "
        "torch 2.13.0; `enable` makes ours importable after everything else (docs/cpu.md).",
        epilog="examples:\n  sglang-hetero cpu status\n  sglang-hetero cpu enable",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["enable", "disable", "status"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it and say what is so now."""
    if arguments.action == "enable":
        enable.enable()
    elif arguments.action == "disable":
        enable.disable()
    status = enable.status()
    print(status)
    # So that a script can ask: 1 also when it is on, but something installed later stands in its way.
    return 0 if status.enabled == (arguments.action != "disable") and not status.conflict else 1
