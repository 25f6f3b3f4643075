"""`sglang-hetero router`: the router in front of prefill and decode servers."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from sglang_hetero.errors import RouterError

from . import source
from .flags import KEY, LEVELS, count, log_to_stderr, positive, seconds
from .health import Limits
from .options import Options, Settings, Unknown

POLICIES = "random, round_robin, least_tokens"
EXAMPLES = """examples:
  sglang-hetero router --prefill http://10.0.0.1:30000 8998 --decode http://10.0.0.2:30000 --port 8000
  sglang-hetero router --etcd 10.0.0.9:2379 --port 8000
  sglang-hetero router --etcd 10.0.0.9:2379 --policy mine.policies:Nearest

Flags have the names that they have in sglang_router.launch_router, and --mini-lb and --pd-disaggregation are taken as
given. GET /hetero/pairs says which servers there are and who fits whom. docs/router.md has all routes."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "router",
        help="the router in front of prefill and decode servers",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on (default: %(default)s)")
    source.add_arguments(parser)
    routing = parser.add_argument_group("which servers get a request")
    routing.add_argument(
        "--policy",
        default="least_tokens",
        metavar="NAME",
        help=f"{POLICIES}, or module:attribute of your own (default: %(default)s)",
    )
    routing.add_argument(
        "--allow-unknown",
        choices=[str(one) for one in Unknown],
        default=Options.unknown.value,
        help="what servers whose cache layout is not known are paired with: their like, any, or none "
        "(default: %(default)s)",
    )
    routing.add_argument(
        "--retry-max-retries",
        type=count,
        default=Settings.retries,
        metavar="N",
        help="further attempts before the first token has gone to the client (default: %(default)s)",
    )
    routing.add_argument("--disable-retries", action="store_true", help="the same as --retry-max-retries 0")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--request-timeout-secs",
        type=seconds,
        default=Settings.seconds,
        metavar="S",
        help="for a request with all its attempts (default: %(default)g)",
    )
    limits.add_argument(
        "--stream-idle-timeout-secs",
        type=seconds,
        default=Settings.idle,
        metavar="S",
        help="between two pieces of a stream (default: %(default)g)",
    )
    limits.add_argument(
        "--shutdown-grace-period-secs",
        type=seconds,
        default=180.0,
        metavar="S",
        help="for requests under way after SIGTERM; a second one ends them at once (default: %(default)g)",
    )
    limits.add_argument(
        "--max-payload-size",
        type=positive,
        default=Options.max_payload,
        metavar="BYTES",
        help=f"of a request (default: {Options.max_payload >> 20} MiB)",
    )
    health = parser.add_argument_group("health of servers")
    health.add_argument(
        "--health-check-interval-secs", type=seconds, default=Limits.interval, metavar="S", help="default: %(default)g"
    )
    health.add_argument(
        "--health-check-timeout-secs",
        type=seconds,
        default=Options.probe_seconds,
        metavar="S",
        help="default: %(default)g",
    )
    health.add_argument(
        "--health-check-endpoint", default=Options.health_path, metavar="PATH", help="default: %(default)s"
    )
    health.add_argument(
        "--health-failure-threshold",
        type=positive,
        default=Limits.failures,
        metavar="N",
        help="in a row, until a server gets no requests (default: %(default)s)",
    )
    health.add_argument(
        "--health-success-threshold",
        type=positive,
        default=Limits.successes,
        metavar="N",
        help="in a row, until it gets requests again (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the servers', for GET /hetero/instance, with which all on the list see it; clients send their own key, "
        "which is passed on "
        f"(default: ${KEY})",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="default: %(default)s")
    for flag in ("--mini-lb", "--pd-disaggregation"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    log_to_stderr(arguments.log_level)
    try:
        from . import app, policy
    except ImportError as missing:
        raise RouterError(
            f"{missing.name} is not installed, which comes with SGLang; install SGLang (docs/setup.md), or "
            "pip install aiohttp prometheus_client"
        ) from None
    chosen = policy.load(arguments.policy)
    members = source.members(arguments)
    try:
        made = app.make(members, chosen, options(arguments))
        host, port = arguments.host.strip("[]"), arguments.port
        try:
            asyncio.run(
                app.serve(
                    made,
                    host,
                    port,
                    ready=lambda url: print(f"READY {url}", flush=True),
                    stop=until_stopped,
                    grace=arguments.shutdown_grace_period_secs,
                )
            )
        except OSError as error:
            raise RouterError(f"cannot listen on {host} port {port}: {error}; choose another --port") from None
    finally:
        members.close()
    return 0


def options(arguments: argparse.Namespace) -> Options:
    """What the flags say."""
    return Options(
        settings=Settings(
            seconds=arguments.request_timeout_secs,
            retries=0 if arguments.disable_retries else arguments.retry_max_retries,
            idle=arguments.stream_idle_timeout_secs,
        ),
        limits=Limits(
            failures=arguments.health_failure_threshold,
            successes=arguments.health_success_threshold,
            interval=arguments.health_check_interval_secs,
        ),
        unknown=Unknown(arguments.allow_unknown),
        key=arguments.api_key or os.environ.get(KEY),
        health_path=arguments.health_check_endpoint,
        probe_seconds=arguments.health_check_timeout_secs,
        max_payload=arguments.max_payload_size,
    )


async def until_stopped() -> None:
    """Return at the first SIGINT or SIGTERM. The second one ends the process at once."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
