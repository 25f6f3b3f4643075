"""The smallest object that SGLang's PD queues accept as their scheduler.

The queues, and through them KVArgs, the manager, the senders and the receivers, are SGLang's own and are built by
their own constructors, so a plugin's hook on any of them acts here as it does in a server.
"""

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from . import pools as pools_module
from .geometry import Geometry
from .pools import Pools
from .sides import Shard, Side

TOPOLOGY_SECONDS = 10.0
"""How long a decode rank asks the bootstrap server for a topology that all prefill ranks have registered in."""
TOPOLOGY_RETRY_SECONDS = 0.02
ROLE_SWITCH_ENV = "HARNESS_ROLE_SWITCH"
"""`1`: the server has --enable-pd-role-switch, which our path does not serve (backend/support.py)."""
VOCABULARY = 1 << 16
"""Tokens of the model; oracle.first_token is one of them."""


@dataclass
class Group:
    """A process group that nobody may communicate over: the harness itself takes the minimum over ranks."""

    world_size: int
    rank_in_group: int = 0
    is_last_rank: bool = True
    cpu_group: None = None


def publish(shard: Shard, side: Side) -> Any:
    """Install SGLang's process-wide configuration as run_scheduler_process does; returns the ServerArgs."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.runtime_context import SpawnRanks, get_parallel
    from sglang.srt.runtime_context import publish as publish_config
    from sglang.srt.server_args import ServerArgs

    geometry = shard.geometry
    server_args = ServerArgs(model_path="dummy")
    server_args.resolve_once()
    declare_resolution(
        server_args,
        "test harness",
        tp_size=shard.tp * side.dp_size,
        attn_dp_size=side.dp_size,
        page_size=geometry.page_size,
        host=side.host,
        port=side.http_port,
        disaggregation_mode=side.mode,
        disaggregation_transfer_backend=side.backend,
        disaggregation_bootstrap_port=side.bootstrap_port,
        speculative_num_draft_tokens=geometry.draft_tokens or None,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        enable_pd_role_switch=os.environ.get(ROLE_SWITCH_ENV) == "1",
    )
    world_rank = side.dp_rank * shard.tp + shard.rank
    publish_config(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=0))
    alone = Group(world_size=1)
    attention = Group(world_size=shard.tp, rank_in_group=shard.rank)
    everyone = Group(world_size=shard.tp * side.dp_size, rank_in_group=world_rank)
    get_parallel().override_permanently(pp_group=alone, attn_cp_group=alone, attn_tp_group=attention, tp_group=everyone)
    return server_args


def start_engine() -> None:
    """Create the process-wide Mooncake engine when the backend wants one, as initialize_model_parallel does."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        maybe_init_shared_mooncake_transfer_engine,
    )

    maybe_init_shared_mooncake_transfer_engine(gpu_id=0)


def model_config(shard: Shard) -> SimpleNamespace:
    """The attributes of ModelConfig that the PD queues and our backend read."""
    geometry = shard.geometry
    config = text_config(geometry)
    return SimpleNamespace(
        num_hidden_layers=geometry.layers,
        get_total_num_kv_heads=lambda: geometry.kv_heads,
        dtype=geometry.kv_dtype,
        vocab_size=VOCABULARY,
        hf_config=config,
        hf_text_config=config,
    )


def text_config(geometry: Geometry) -> SimpleNamespace:
    """What transformers would read from the config.json of a Qwen3.5 with these caches, without linear layers a Qwen3.

    It is the checkpoint's, so it says nothing of the dtypes of the caches, and it has the MTP module whether or not a
    server speculates.
    """
    full = set(geometry.full_attention_layers)
    common = {
        "dtype": "bfloat16",
        "hidden_size": geometry.hidden_size,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.kv_heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
    }
    if not geometry.linear_layers:
        return SimpleNamespace(model_type="qwen3", architectures=["Qwen3ForCausalLM"], **common)
    return SimpleNamespace(
        model_type="qwen3_5_text",
        architectures=["Qwen3_5ForCausalLM"],
        **common,
        layer_types=["full_attention" if layer in full else "linear_attention" for layer in range(geometry.layers)],
        full_attention_layer_ids=list(geometry.full_attention_layers),
        linear_conv_kernel_dim=geometry.conv_kernel,
        linear_num_key_heads=geometry.linear_key_heads,
        linear_num_value_heads=geometry.linear_value_heads,
        linear_key_head_dim=geometry.linear_key_dim,
        linear_value_head_dim=geometry.linear_value_dim,
        mtp_num_hidden_layers=1,
    )


def build(shard: Shard, side: Side) -> Any:
    """A prefill or decode scheduler with real pools and queues, ready for requests."""
    from sglang.srt.disaggregation.utils import DisaggregationMode, ReqToMetadataIdxAllocator, TransferBackend
    from sglang.srt.managers import scheduler as upstream

    class Scheduler(upstream.Scheduler):  # type: ignore[misc]
        """SGLang's methods on attributes that are set here and, for forward passes, in replay.py."""

        def __init__(self) -> None:
            pass

    geometry = shard.geometry
    server_args = publish(shard, side)
    start_engine()
    pools = pools_module.build(shard, decode=side.mode == DisaggregationMode.DECODE.value)
    tokens = geometry.pages * geometry.page_size
    scheduler: Any = Scheduler()
    scheduler.pools = pools
    scheduler.server_args = server_args
    scheduler.model_config = model_config(shard)
    scheduler.tp_worker = SimpleNamespace(
        is_hybrid_swa=False,
        model_runner=SimpleNamespace(
            kv_cache_dtype_str=geometry.kv_dtype,
            effective_logical_max_total_num_tokens=tokens,
            max_token_pool_size=tokens,
        ),
    )
    scheduler.req_to_token_pool = pools.requests
    scheduler.token_to_kv_pool_allocator = pools.allocator
    scheduler.disagg_metadata_buffers = pools.metadata
    scheduler.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(geometry.slots)
    # release_kv_cache asks it who frees a request's memory; rank.py puts itself there.
    scheduler.tree_cache = SimpleNamespace(
        maybe_hand_to_session=lambda request: None,
        supports_mamba=lambda: bool(geometry.linear_layers),
        supports_prefix_sharing=lambda: False,
        claim_kv_row=None,
        checkpoint=lambda request, up_to: None,
        finish=lambda handle, outcome: None,
    )
    # Where SGLang streams the error of a request that it refuses.
    scheduler.output_streamer = SimpleNamespace(stream_output=lambda requests, return_logprob: None)
    scheduler.disaggregation_mode = DisaggregationMode(side.mode)
    scheduler.transfer_backend = TransferBackend(side.backend)
    scheduler.kv_shard_widening = 1
    scheduler.random_seed = 0
    scheduler.rust_server = None
    scheduler.enable_hisparse = scheduler.enable_staging = scheduler.enable_overlap = False
    scheduler.enable_decode_hicache = False
    scheduler.kv_checksum_computer = None
    scheduler.disagg_prefill_pending_chunk_rids = set()
    scheduler.disagg_prefill_inflight_queue = []
    scheduler.spec_algorithm = None
    pools_module.shuffle_free_lists(pools, scheduler.req_to_metadata_buffer_idx_allocator, side.shuffle_seed)
    if side.mode == DisaggregationMode.PREFILL.value:
        scheduler.disagg_prefill_bootstrap_queue = _prefill_queue(scheduler, pools, side, tokens)
    else:
        _decode_queues(scheduler, pools, side, tokens)
    return scheduler


def _prefill_queue(scheduler: Any, pools: Pools, side: Side, tokens: int) -> Any:
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    return PrefillBootstrapQueue(
        token_to_kv_pool=pools.target,
        draft_token_to_kv_pool=pools.draft,
        req_to_metadata_buffer_idx_allocator=scheduler.req_to_metadata_buffer_idx_allocator,
        metadata_buffers=pools.metadata,
        gpu_id=0,
        bootstrap_port=side.bootstrap_port,
        max_total_num_tokens=tokens,
        scheduler=scheduler,
        scheduler_stage_metrics=None,
        transfer_backend=scheduler.transfer_backend,
    )


def _decode_queues(scheduler: Any, pools: Pools, side: Side, tokens: int) -> None:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue

    scheduler.disagg_decode_prealloc_queue = None
    scheduler.disagg_decode_transfer_queue = DecodeTransferQueue(
        req_to_metadata_buffer_idx_allocator=scheduler.req_to_metadata_buffer_idx_allocator,
        metadata_buffers=pools.metadata,
        scheduler=scheduler,
        tree_cache=scheduler.tree_cache,
    )
    scheduler.disagg_decode_prealloc_queue = DecodePreallocQueue(
        req_to_token_pool=pools.requests,
        token_to_kv_pool_allocator=pools.allocator,
        draft_token_to_kv_pool=pools.draft,
        req_to_metadata_buffer_idx_allocator=scheduler.req_to_metadata_buffer_idx_allocator,
        metadata_buffers=pools.metadata,
        scheduler=scheduler,
        transfer_queue=scheduler.disagg_decode_transfer_queue,
        tree_cache=scheduler.tree_cache,
        gpu_id=0,
        bootstrap_port=side.bootstrap_port,
        max_total_num_tokens=tokens,
        num_reserved_decode_tokens=0,
        transfer_backend=scheduler.transfer_backend,
    )
    # SGLang's scheduler asks once a second; a harness that did would be as slow.
    scheduler.disagg_decode_prealloc_queue._ensure_retry_interval = TOPOLOGY_RETRY_SECONDS
    scheduler.disagg_decode_prealloc_queue._max_ensure_retries = int(TOPOLOGY_SECONDS / TOPOLOGY_RETRY_SECONDS)
