"""`sglang-hetero up TOPOLOGY`: run a fleet until SIGINT or SIGTERM."""

import argparse
import json
import sys
import time

from sglang_hetero.launcher import flags, topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals

WATCH_SECONDS = 0.5

EXAMPLES = """examples:
  sglang-hetero up p2_d1 --mtp 3             prefill TP2, decode TP1, MTP depth 3
  sglang-hetero up p2x2_d2 --model tiny-moe  two prefill servers
  sglang-hetero up p2_d2dp2 --json           decode with attention-DP 2; one line of JSON when ready
  sglang-hetero up mixed_tp1 --port 30000 -- --log-level debug
                                             what follows -- goes to every sglang.launch_server

It prints `READY <router url>` (with --json one line of JSON instead), runs until Ctrl-C or SIGTERM and stops exactly
the processes that it started, also when it is killed itself."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "up",
        help="run the servers and router of a topology on this machine's CPU",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topology", help=f"{topology.GRAMMAR}, e.g. p2_d1")
    parser.add_argument("--json", action="store_true", help="print one line of JSON with every endpoint and pid")
    flags.add(parser, Options())
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start, announce, watch, stop. Returns 0 after a signal; a process that dies raises `ProcessDied`."""
    fleet = Fleet(topology.parse(arguments.topology), flags.options(arguments, tuple(arguments.server_arguments)))
    raise_on_signals()
    try:
        with fleet:
            print(json.dumps(fleet.describe()) if arguments.json else f"READY {fleet.url}", flush=True)
            while True:
                fleet.check()
                time.sleep(WATCH_SECONDS)
    except Stopped:
        print(f"{fleet.topology.name}: stopped", file=sys.stderr)
        return 0
