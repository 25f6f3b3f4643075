"""Command lines and environments of the servers and routers, for the CPU reference platform (docs/cpu.md)."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_hetero.backend import options as transfer
from sglang_hetero.cpu import layout
from sglang_hetero.discovery import settings as discovery
from sglang_hetero.launcher.options import Options, Router
from sglang_hetero.launcher.topology import Instance, Role

# Linear-state slots per running request: SGLang wants spare ones while a request is handed over.
SLOTS_PER_REQUEST = 2
THREADS_PER_RANK = 1
# The backends named after AMX call the ops of our sgl_kernel, which need no AMX. They must be given per phase: SGLang's
# fallback for CPUs without AMX looks at --attention-backend only. torch_native alone has no verify step.
ATTENTION = (
    *("--attention-backend", "torch_native"),
    *("--prefill-attention-backend", "intel_amx"),
    *("--decode-attention-backend", "intel_amx"),
)
# With SGLANG_USE_CPU_ENGINE SGLang sizes its pools from max_total_tokens; the fraction only has to leave room.
MEM_FRACTION = "0.2"
# Variables of the caller's shell that a server does not get: each may change arithmetic (SGLANG_MAMBA_SSM_DTYPE), keep
# our plugin out (SGLANG_PLUGINS) or choose another transport, and the fleet would not be what its options say.
# The options of the transfer (docs/options.md) are passed on: they have no other way in.
FOREIGN = ("SGLANG_", "MC_", "MOONCAKE_")

# The others answer /health before they know any server; /readiness waits for healthy ones.
ROUTER_HEALTH = {Router.MINI: "/health", Router.RUST: "/readiness", Router.HETERO: "/readiness"}
# All processes start at the same time, so that our router meets servers that are not there yet. On one machine a look
# costs nothing, and the fleet is ready so much sooner.
PROBE_SECONDS = 2


@dataclass(frozen=True)
class Endpoint:
    """Where one server listens. bootstrap_port: prefill only. dist_port: first of a block, attention-DP only."""

    host: str
    port: int
    nccl_port: int
    bootstrap_port: int | None = None
    dist_port: int | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def dist_ports(instance: Instance) -> int:
    """How many consecutive ports SGLang derives from dist_init_addr with attention-DP (server_args.PortArgs).

    The address itself, six fixed ones and, with SGLANG_RUST_SERVER, one per DP rank.
    """
    return 7 + instance.dp


def _bind(ranks: int, first: int) -> str:
    """SGLANG_CPU_OMP_THREADS_BIND: one CPU per rank, round robin; SGLang demands an entry per rank."""
    cpus = sorted(os.sched_getaffinity(0))
    return "|".join(str(cpus[(first + rank) % len(cpus)]) for rank in range(ranks))


def server_env(base: Mapping[str, str], options: Options, instance: Instance, first_rank: int) -> dict[str, str]:
    """Environment of one server, from that of the launcher; its ranks are the fleet's from `first_rank` on.

    Raises OptionError where it has an option of the transfer that does not exist or a value that cannot be.
    """
    inherited = {
        name: value for name, value in base.items() if name.startswith(transfer.PREFIX) or not name.startswith(FOREIGN)
    }
    environment = inherited | _platform(options, instance, first_rank) | dict(_of_role(options, instance.role))
    transfer.read(environment)
    return environment


def _of_role(options: Options, role: Role) -> tuple[tuple[str, str], ...]:
    return {Role.PREFILL: options.prefill_env, Role.DECODE: options.decode_env}.get(role, ())


def _platform(options: Options, instance: Instance, first_rank: int) -> dict[str, str]:
    return {
        **({discovery.ENDPOINTS.variable: options.etcd} if options.etcd else {}),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": _bind(instance.tp, first_rank),
        # More threads spin against each other as soon as this machine does anything else: with two of them on two busy
        # cores the prompts of the demo took about ten times as long as with one.
        "OMP_NUM_THREADS": str(THREADS_PER_RANK),
        "TOKENIZERS_PARALLELISM": "false",
        layout.CONV_LAYOUT_ENV: options.conv_layout.value,
        # The conv state in the arithmetic's own type, so that tokens can be compared exactly.
        "SGLANG_MAMBA_CONV_DTYPE": options.dtype.value,
        # The early send of a cached prefix records a CUDA event (disaggregation/prefill.py).
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Mooncake: TCP over this host's address, no RDMA device search.
        "MC_FORCE_TCP": "1",
        "SGLANG_HOST_IP": options.host,
        "SGLANG_LOCAL_IP_NIC": "lo",
        "no_proxy": f"{options.host},127.0.0.1,localhost",
        "NO_PROXY": f"{options.host},127.0.0.1,localhost",
    }


def _speculation(depth: int) -> list[str]:
    if not depth:
        return []
    return [
        *("--speculative-algorithm", "NEXTN"),
        *("--speculative-num-steps", str(depth)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(depth + 1)),
    ]


def _cache(options: Options) -> list[str]:
    if options.radix_cache:
        return ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    return ["--disable-radix-cache"]


def _role(instance: Instance, endpoint: Endpoint) -> list[str]:
    if instance.role is Role.MIXED:
        return []
    arguments = [
        *("--disaggregation-mode", instance.role.value),
        *("--disaggregation-transfer-backend", "mooncake"),
    ]
    if endpoint.bootstrap_port is not None:
        arguments += ["--disaggregation-bootstrap-port", str(endpoint.bootstrap_port)]
    if instance.role is Role.DECODE:
        # Without linear state SGLang backs retracted requests up in a pool of pinned memory, which it asks CUDA for.
        arguments += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return arguments


def _attention_dp(instance: Instance, endpoint: Endpoint) -> list[str]:
    if instance.dp == 1:
        return []
    return [
        *("--dp-size", str(instance.dp)),
        "--enable-dp-attention",
        *("--dist-init-addr", f"{endpoint.host}:{endpoint.dist_port}"),
        # On by default on decode where every rank is a DP group; the collective has no CPU implementation.
        "--no-enable-tp-lm-head-all-to-all",
    ]


def server_command(model_path: str, options: Options, instance: Instance, endpoint: Endpoint) -> list[str]:
    """The usual `sglang.launch_server` for one server."""
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", model_path),
        *("--served-model-name", options.model),
        *("--device", "cpu"),
        *("--dtype", options.dtype.value),
        *("--host", endpoint.host),
        *("--port", str(endpoint.port)),
        *("--nccl-port", str(endpoint.nccl_port)),
        *("--tp-size", str(instance.tp)),
        *_attention_dp(instance, endpoint),
        *_role(instance, endpoint),
        *ATTENTION,
        *_speculation(options.mtp_of(instance.role)),
        *_cache(options),
        *("--page-size", str(options.page_size)),
        *("--chunked-prefill-size", str(options.chunk)),
        *("--mem-fraction-static", MEM_FRACTION),
        *("--max-total-tokens", str(options.max_tokens)),
        *("--max-running-requests", str(options.max_requests)),
        *("--max-mamba-cache-size", str(options.max_requests * SLOTS_PER_REQUEST)),
        # Idle schedulers would spin, each on a core, and slow everything else on this machine down.
        "--sleep-on-idle",
        *options.server_arguments,
    ]


ROUTER_MODULES: Mapping[Router, Sequence[str]] = {
    Router.MINI: ("sglang_router.launch_router", "--pd-disaggregation", "--mini-lb"),
    Router.RUST: ("sglang_router.launch_router", "--pd-disaggregation"),
    Router.HETERO: ("sglang_hetero", "router", "--health-check-interval-secs", str(PROBE_SECONDS)),
}
"""What `python -m` runs, and what only this one is given."""


def router_command(options: Options, port: int, prefills: Sequence[Endpoint], decodes: Sequence[Endpoint]) -> list[str]:
    """The router before these servers, which it is given by URL or looks for in etcd."""
    command = [
        *(sys.executable, "-m", *ROUTER_MODULES[options.router]),
        *("--host", options.host),
        *("--port", str(port)),
    ]
    if options.etcd:
        return [*command, "--etcd", options.etcd]
    for endpoint in prefills:
        command += ["--prefill", endpoint.url, str(endpoint.bootstrap_port)]
    for endpoint in decodes:
        command += ["--decode", endpoint.url]
    return command
