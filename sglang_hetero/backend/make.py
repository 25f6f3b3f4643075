"""The parts of our path, made from what SGLang has: staging memory, engine, the two sides."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_hetero.device import ForwardLane, Lane, memory_info
from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.layout.manifest import Manifest, Side
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.decode import DecodeSide
from sglang_hetero.transfer.engine.base import Engine
from sglang_hetero.transfer.link import Endpoint
from sglang_hetero.transfer.pieces import unit_bytes_for
from sglang_hetero.transfer.prefill import PrefillSide
from sglang_hetero.transfer.reception import Identity, Settings
from sglang_hetero.transfer.staging import ARENA_ALIGN, arena_bytes, check_budget
from sglang_hetero.transfer.writer import PackBuffers

from .layerwise import Layerwise
from .options import Options
from .rank import Rank

logger = logging.getLogger(__name__)

DEFAULT_REQUESTS = 16
"""Requests that are received at a time unless SGLANG_HETERO_STAGING_MB says otherwise; more of them wait their turn."""
PACK_BUFFERS = 4
"""Movers that may gather at the same time (P < D); the others wait for one engine write."""
MIB = 1 << 20


def unit_bytes(rank: Rank, options: Options) -> int:
    """Size of a unit of staging."""
    assert rank.manifest is not None
    return options.unit_bytes or unit_bytes_for(rank.manifest)


def staging(rank: Rank, options: Options, server_args: Any) -> torch.Tensor:
    """The memory that peers may write to (decode) or that is gathered into (prefill), 2 MiB aligned.

    Raises StagingError, which ends the server's start, if the device has not enough left for it.
    """
    unit = unit_bytes(rank, options)
    if rank.side is Side.PREFILL:
        total = least = -(-unit * PACK_BUFFERS // ARENA_ALIGN) * ARENA_ALIGN
    else:
        least = arena_bytes(unit, options.window, 1, 1)
        requests = min(rank.requests, DEFAULT_REQUESTS)
        total = options.staging_bytes or arena_bytes(unit, options.window, 1, requests)
        total = -(-total // ARENA_ALIGN) * ARENA_ALIGN
    free, memory = memory_info(rank.device)
    check_budget(
        total + ARENA_ALIGN,
        free,
        least=least,
        memory=memory,
        fraction=getattr(server_args, "mem_fraction_static", None),
    )
    logger.info(
        "%s: staging of %d MiB, units of %d KiB, %d per request%s",
        rank.name,
        total // MIB,
        unit >> 10,
        options.window,
        "" if rank.side is Side.DECODE else " (for gathering only)",
    )
    whole = torch.zeros(total + ARENA_ALIGN, dtype=torch.uint8, device=rank.device)
    start = -whole.data_ptr() % ARENA_ALIGN
    return whole[start : start + total]


def engine(upstream: Any) -> Engine:
    """SGLang's engine object behind our protocol."""
    name = type(upstream).__name__
    if name == "AscendTransferEngine":
        from sglang_hetero.transfer.engine.memfabric import MemFabric

        return MemFabric(upstream)
    if name == "MooncakeTransferEngine":
        from sglang_hetero.transfer.engine.mooncake import Mooncake

        return Mooncake(upstream)
    raise UpstreamChanged(f"SGLang has a transfer engine {name}, which this release does not know")


def waiting_timeout() -> float:
    """SGLang's limit in seconds for a whole transfer."""
    from sglang.srt.environ import envs

    return float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())


def bootstrap_timeout() -> float:
    """SGLang's limit in seconds for decode to say where a request goes."""
    from sglang.srt.environ import envs

    return float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())


def own_bootstrap(manager: Any) -> str:
    """Address of the bootstrap server of a prefill rank's own server, as SGLang finds it (register_to_bootstrap)."""
    from sglang.srt.utils.network import NetworkAddress

    if manager.dist_init_addr:
        host = NetworkAddress.parse(manager.dist_init_addr).resolved().host
    else:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(manager.bootstrap_host, manager.bootstrap_host)
    return str(NetworkAddress(host, manager.bootstrap_port).to_host_port_str())


def prefill_side(rank: Rank, options: Options, engine: Engine, memory: torch.Tensor, **links: Any) -> PrefillSide:
    """The transfer at a prefill rank. links: post, control, events, counters, stall_seconds of PrefillSide."""
    assert rank.manifest is not None and rank.memory is not None
    return PrefillSide(
        manifest=rank.manifest,
        engine=engine,
        memory=rank.memory,
        packs=PackBuffers(memory, unit_bytes(rank, options)),
        lane=Lane(rank.device),
        **links,
    )


def layerwise(rank: Rank, options: Options, side: PrefillSide) -> Layerwise:
    """What follows the forward passes of a prefill rank, and where its requests are kept."""
    manifest = rank.manifest
    assert manifest is not None
    stages = manifest.coordinates.pp_size
    if options.layerwise and stages > 1:
        logger.info("%s: with pipeline stages everything is sent at the end of each chunk", rank.name)
    return Layerwise(rank.scheduler, side, rank.pool, rank.device, early=options.layerwise and stages == 1)


def _server(manifest: Manifest) -> str:
    """A name that all ranks of this replica know without asking, and no other server has at the same time."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Ranks on one node have its address and the server's port in common, ranks on several only where they met.
    place = parallel.dist_init_addr if parallel.nnodes > 1 else manifest.host
    return f"{place} DP{manifest.coordinates.dp_rank}"


def decode_side(
    rank: Rank, options: Options, engine: Engine, memory: torch.Tensor, *, endpoint: Endpoint, **links: Any
) -> DecodeSide:
    """The transfer at a decode rank. links: post and counters of DecodeSide."""
    manifest = rank.manifest
    assert manifest is not None and rank.memory is not None
    identity = messages.control_identity("decode", endpoint.host, str(manifest.coordinates), manifest.incarnation)
    return DecodeSide(
        manifest=manifest,
        engine=engine,
        memory=rank.memory,
        arena=memory,
        settings=Settings(
            unit_bytes(rank, options),
            options.window,
            options.state,
            options.parallel_pull,
            options.verify,
            options.window_seconds(bootstrap_timeout()),
            options.stall_seconds(waiting_timeout()),
        ),
        # Without the overlap schedule forward passes run on the scheduler's own stream, the current one.
        forward=ForwardLane(
            rank.device, rank.scheduler.forward_stream if getattr(rank.scheduler, "enable_overlap", False) else None
        ),
        identity=Identity(endpoint, identity, _server(manifest)),
        **links,
    )
