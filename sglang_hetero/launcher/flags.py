"""Command-line flags for `Options`, shared by every command that starts servers."""

import argparse
import re
from pathlib import Path

from sglang_hetero import models
from sglang_hetero.launcher.options import DEFAULT_CHUNK, DType, Options, Router
from sglang_hetero.layout.window import ConvLayout

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def positive(text: str) -> int:
    """Type of a flag that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def variable(text: str) -> tuple[str, str]:
    """Type of a flag that sets an environment variable."""
    name, equals, value = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add(parser: argparse.ArgumentParser, defaults: Options) -> None:
    """Add one flag per field of `Options`; `defaults` are the command's own."""
    group = parser.add_argument_group("the fleet")
    group.add_argument(
        "--model",
        default=defaults.model,
        metavar="NAME",
        help=f"one of {', '.join(models.names())} (default: {defaults.model})",
    )
    group.add_argument(
        "--mtp",
        type=int,
        default=defaults.mtp,
        metavar="DEPTH",
        help=f"depth of NEXTN speculation, 0 for none (default: {defaults.mtp})",
    )
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}-mtp",
            type=int,
            metavar="DEPTH",
            help=f"the same of the {role} servers, where they differ (docs/speculation.md)",
        )
    group.add_argument(
        "--conv-layout",
        choices=[layout.value for layout in ConvLayout],
        default=defaults.conv_layout.value,
        help="conv state as on CUDA (channels first) or as on Ascend NPUs (window first)",
    )
    group.add_argument(
        "--dtype",
        choices=[d.value for d in DType],
        default=defaults.dtype.value,
        help=f"arithmetic, KV and conv state (default: {defaults.dtype.value})",
    )
    group.add_argument(
        "--page-size",
        type=int,
        default=defaults.page_size,
        metavar="TOKENS",
        help=f"of the KV cache (default: {defaults.page_size})",
    )
    group.add_argument(
        "--chunk",
        type=int,
        default=defaults.chunk,
        metavar="TOKENS",
        help=f"prompt tokens of one prefill step (default: {DEFAULT_CHUNK})",
    )
    group.add_argument("--radix-cache", action="store_true", help="prefix cache on (no_buffer strategy)")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=defaults.max_tokens,
        metavar="TOKENS",
        help=f"KV cache size (default: {defaults.max_tokens})",
    )
    group.add_argument(
        "--max-requests",
        type=int,
        default=defaults.max_requests,
        metavar="N",
        help=f"that run at the same time on one server (default: {defaults.max_requests})",
    )
    group.add_argument(
        "--router",
        choices=[r.value for r in Router],
        default=defaults.router.value,
        help="sglang-router's mini load balancer, its Rust router, or the router of this package "
        f"(default: {defaults.router.value})",
    )
    group.add_argument(
        "--etcd",
        default=defaults.etcd,
        metavar="HOST:PORT",
        help="with --router hetero: servers register there, and the router follows them (docs/discovery.md); it must "
        "run already (default: the router is given their URLs)",
    )
    group.add_argument("--host", default=defaults.host, help=f"address to listen on (default: {defaults.host})")
    group.add_argument(
        "--port", type=int, default=defaults.port, help="port of the router, or of a mixed server (default: a free one)"
    )
    group.add_argument(
        "--start-seconds", type=float, default=defaults.start_seconds, help="give up when not healthy by then"
    )
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}-env",
            type=variable,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"environment variable of the {role} servers, may be given several times (docs/options.md)",
        )
    group.add_argument(
        "--log-dir", type=Path, metavar="FOLDER", help="a log file per process; it stays (default: a new one)"
    )


def options(arguments: argparse.Namespace, server_arguments: tuple[str, ...] = ()) -> Options:
    """The `Options` that the parsed flags stand for."""
    return Options(
        model=arguments.model,
        mtp=arguments.mtp,
        prefill_mtp=arguments.prefill_mtp,
        decode_mtp=arguments.decode_mtp,
        conv_layout=ConvLayout(arguments.conv_layout),
        dtype=DType(arguments.dtype),
        page_size=arguments.page_size,
        chunk=arguments.chunk,
        radix_cache=arguments.radix_cache,
        max_tokens=arguments.max_tokens,
        max_requests=arguments.max_requests,
        router=Router(arguments.router),
        etcd=arguments.etcd,
        host=arguments.host,
        port=arguments.port,
        start_seconds=arguments.start_seconds,
        log_dir=arguments.log_dir,
        server_arguments=server_arguments,
        prefill_env=tuple(arguments.prefill_env),
        decode_env=tuple(arguments.decode_env),
    )
