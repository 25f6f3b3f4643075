"""One SGLang scheduler process as the transfer sees it: its caches described, its memory, its place among the ranks."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hetero import releases
from sglang_hetero.device import numbered
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.config import config_fingerprint, geometry_from_config
from sglang_hetero.layout.manifest import Coordinates, Manifest, Side
from sglang_hetero.layout.pools import describe
from sglang_hetero.transfer.memory import memory_of

from .conv_axis import conv_of
from .first_token import described
from .pairing import Conv, Here, kv_buffers_at_decode
from .support import reasons, sglang_reader

logger = logging.getLogger(__name__)

_building: list[Any] = []
"""The queue whose manager is being constructed: SGLang hands the manager addresses only, not the pools."""


@contextmanager
def building(queue: Any) -> Iterator[None]:
    """While SGLang's queue constructs its manager."""
    _building.append(queue)
    try:
        yield
    finally:
        _building.pop()


@dataclass(frozen=True)
class Rank:
    """What this process is. manifest and memory are None if its caches are of a kind that is not described."""

    side: Side
    scheduler: Any
    pool: Any
    """Of the target model's attention KV."""
    metadata: Any
    """SGLang's MetadataBuffers: rows with a request's first token and what belongs to it."""
    requests: int
    """How many rows of metadata there are, so how many requests can be under way."""
    here: Here
    device: torch.device
    place: Coordinates
    manifest: Manifest | None = None
    memory: dict[tuple[Role, int], torch.Tensor] | None = None

    @property
    def name(self) -> str:
        return self.here.name


def current_rank(side: Side, kv_args: Any) -> Rank:
    """The rank whose manager is being constructed. kv_args: SGLang's, complete."""
    queue = _building[-1]
    coordinates = _coordinates(kv_args)
    host = _host()
    unsupported = list(reasons(side, sglang_reader()))
    manifest = memory = None
    pools = [queue.token_to_kv_pool, queue.draft_token_to_kv_pool, _mamba_pool(queue)]
    try:
        config = queue.scheduler.model_config.hf_config
        manifest = describe(
            side=side,
            host=host,
            coordinates=coordinates,
            model=geometry_from_config(config),
            fingerprint=config_fingerprint(config),
            incarnation=uuid.uuid4().hex,
            sglang=releases.number(),
            target_pool=queue.token_to_kv_pool,
            draft_pool=queue.draft_token_to_kv_pool,
            mamba_pool=_mamba_pool(queue),
            row=described(queue.metadata_buffers),
        )
        memory = memory_of(manifest, [pool for pool in pools if pool is not None])
    except HeteroError as error:
        manifest = memory = None
        unsupported.append(f"{error}")
    except Exception as error:
        # A pool of a kind that nobody has thought of must not stop a server that takes SGLang's own path.
        logger.exception("this rank's caches cannot be described")
        manifest = memory = None
        unsupported.append(f"its caches cannot be described: {type(error).__name__}: {error}")
    device = numbered(torch.device(queue.token_to_kv_pool.device))
    return Rank(
        side,
        queue.scheduler,
        queue.token_to_kv_pool,
        queue.metadata_buffers,
        queue.req_to_metadata_buffer_idx_allocator.size,
        _here(f"{side} {coordinates} ({host})", queue, kv_args, coordinates, manifest, unsupported=tuple(unsupported)),
        device,
        coordinates,
        manifest,
        memory,
    )


def _mamba_pool(queue: Any) -> Any:
    requests = getattr(queue.scheduler, "req_to_token_pool", None)
    return getattr(requests, "mamba_pool", None)


def _coordinates(kv_args: Any) -> Coordinates:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # As SGLang's bootstrap server numbers replicas (common/conn.py, _handle_route_put).
    if parallel.dp_size == 1 or parallel.attn_dp_size > 1:
        dp_rank, dp_size = parallel.attn_dp_rank, parallel.attn_dp_size
    else:
        dp_rank, dp_size = kv_args.system_dp_rank or 0, parallel.dp_size
    return Coordinates(
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        pp_rank=kv_args.pp_rank,
        pp_size=parallel.pp_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )


def _host() -> str:
    """Where a person finds this process: address and HTTP port of its server."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

    return str(NetworkAddress(get_local_ip_auto(), get_serving().port).to_host_port_str())


def _here(
    name: str,
    queue: Any,
    kv_args: Any,
    coordinates: Coordinates,
    manifest: Manifest | None,
    *,
    unsupported: tuple[str, ...],
) -> Here:
    mamba = _mamba_pool(queue)
    return Here(
        name=name,
        tp=coordinates.tp_size,
        page_size=kv_args.page_size,
        kv_dtype=kv_args.kv_cache_dtype_str,
        kv_heads=0
        if queue.is_mla_backend or getattr(kv_args, "is_hybrid_mla_backend", False)
        else queue.scheduler.model_config.get_total_num_kv_heads(),
        conv=Conv.NONE if mamba is None else conv_of(mamba, coordinates.tp_size),
        pp=coordinates.pp_size,
        kv_buffers_at_decode=_kv_buffers_at_decode(queue, kv_args, coordinates, manifest),
        kv_item_lens=tuple(kv_args.kv_item_lens),
        state_item_lens=tuple(length for lengths in kv_args.state_item_lens for length in lengths),
        state_dims=tuple(dim for dims in getattr(kv_args, "state_dim_per_tensor", None) or () for dim in dims),
        unsupported=unsupported,
    )


def _kv_buffers_at_decode(
    queue: Any, kv_args: Any, coordinates: Coordinates, manifest: Manifest | None
) -> tuple[int, ...]:
    if manifest is None or coordinates.pp_size == 1:
        return ()
    model = geometry_from_config(queue.scheduler.model_config.hf_config)
    drafts = not queue.scheduler.spec_algorithm.is_none()
    return kv_buffers_at_decode(manifest, model, len(kv_args.kv_item_lens), drafts=drafts)
