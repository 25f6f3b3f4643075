"""Every symbol of SGLang 0.5.23 that the backend overrides, calls or relies on, checked at start. One row, one line.

SGLang swallows a plugin's exceptions, and a method that is overridden under a name which upstream has dropped is never
called, without a word. So whoever is told of a change here must stop the process (plugin.py).
"""

import hashlib
import importlib
import inspect
from collections.abc import Iterable, Sequence
from textwrap import dedent
from typing import Any

from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.releases import MADE_FOR
from sglang_hetero.releases.symbol import COMMON, MOONCAKE, Symbol

ASCEND = "sglang.srt.disaggregation.ascend.conn"
UTILS = "sglang.srt.disaggregation.utils"
SERVICE = "sglang.srt.managers.disagg_service"
PREFILL = "sglang.srt.disaggregation.prefill"
DECODE = "sglang.srt.disaggregation.decode"
MEMORY_POOL = "sglang.srt.mem_cache.memory_pool"
SCHEDULER = "sglang.srt.managers.scheduler"
HYBRID_ATTENTION = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
ALLOCATOR = "sglang.srt.mem_cache.allocator.base"
PREFIX_CACHE = "sglang.srt.mem_cache.base_prefix_cache"
MOE = "sglang.srt.layers.moe.utils"
CONTEXT = "sglang.srt.runtime_context"

_MADE_FOR = f"this release is made for SGLang {MADE_FOR.number}; install that version"
SHOWN = 8
"""Changes that a message lists; where there are more it is another version altogether."""


BOOTSTRAP: tuple[Symbol, ...] = (
    Symbol(UTILS, "get_kv_class", "transfer_backend class_type"),
    Symbol(SERVICE, "start_disagg_service", ""),
    Symbol(COMMON, "CommonKVBootstrapServer.__init__", "host port"),
    Symbol(COMMON, "CommonKVBootstrapServer._setup_routes"),
    Symbol(COMMON, "CommonKVBootstrapServer.run"),
    Symbol(COMMON, "CommonKVBootstrapServer.close"),
)
"""What the process with the bootstrap server needs: it has not loaded the scheduler, and need not for our sake."""

SERVING: tuple[Symbol, ...] = (
    Symbol("sglang.srt.managers.tokenizer_manager", "SignalHandler.sigterm_handler", "signum frame"),
    Symbol(CONTEXT, "get_serving"),
    Symbol(CONTEXT, "get_disagg"),
    Symbol(CONTEXT, "get_parallel"),
    Symbol("sglang.srt.utils.network", "get_local_ip_auto", "fallback"),
)
"""What an HTTP process needs that registers in etcd; it has loaded these modules."""

RANK: tuple[Symbol, ...] = (
    Symbol(UTILS, "setup_state_kv_args", "kv_args token_to_kv_pool"),
    Symbol(UTILS, "MetadataBuffers.get_buf_infos"),
    Symbol(UTILS, "MetadataBuffers.get_buf", "idx"),
    Symbol(UTILS, "MetadataBuffers.set_buf", "req"),
    Symbol(COMMON, "CommonKVManager.__init__", "args disaggregation_mode server_args is_mla_backend"),
    Symbol(COMMON, "CommonKVManager.check_status", "bootstrap_room"),
    Symbol(COMMON, "CommonKVManager.update_status", "bootstrap_room status"),
    Symbol(COMMON, "CommonKVManager.record_failure", "bootstrap_room failure_reason"),
    Symbol(COMMON, "CommonKVManager.try_ensure_parallel_info", "bootstrap_addr"),
    Symbol(COMMON, "CommonKVManager._resolve_rank_mapping", "info"),
    Symbol(COMMON, "CommonKVManager.register_to_bootstrap"),
    Symbol(COMMON, "CommonKVManager._make_worker_recv", "socket timeout_ms"),
    Symbol(COMMON, "CommonKVManager._handle_node_failure", "failed_bootstrap_addr"),
    Symbol(COMMON, "PrefillServerInfo", "attn_tp_size attn_cp_size dp_size pp_size page_size kv_cache_dtype"),
    Symbol(COMMON, "CommonKVSender.__init__", "mgr bootstrap_addr bootstrap_room"),
    Symbol(COMMON, "CommonKVSender.init", "num_kv_indices aux_index"),
    Symbol(COMMON, "CommonKVSender.poll"),
    Symbol(COMMON, "CommonKVSender.poll_pp_consensus"),
    Symbol(COMMON, "CommonKVSender._poll_with_status", "check_status"),
    Symbol(COMMON, "CommonKVSender.clear"),
    Symbol(COMMON, "CommonKVSender.failure_exception"),
    Symbol(COMMON, "CommonKVSender.abort"),
    Symbol(COMMON, "CommonKVReceiver.__init__", "mgr bootstrap_addr bootstrap_room"),
    Symbol(COMMON, "CommonKVReceiver.init", "prefill_dp_rank"),
    Symbol(COMMON, "CommonKVReceiver.poll"),
    Symbol(COMMON, "CommonKVReceiver.send_metadata", "kv_indices aux_index state_indices decode_prefix_len"),
    Symbol(COMMON, "CommonKVReceiver.clear"),
    Symbol(COMMON, "CommonKVReceiver.abort"),
    Symbol(COMMON, "CommonKVReceiver.failure_exception"),
    Symbol(COMMON, "CommonKVReceiver.ensure_abort_notified", "force_arm"),
    Symbol(COMMON, "CommonKVReceiver._setup_bootstrap_infos"),
    Symbol(COMMON, "CommonKVReceiver._register_kv_args"),
    Symbol(MOONCAKE, "MooncakeKVManager.__init__", "args disaggregation_mode server_args is_mla_backend"),
    Symbol(MOONCAKE, "MooncakeKVManager.init_engine"),
    Symbol(MOONCAKE, "MooncakeKVManager._registerable_regions"),
    Symbol(MOONCAKE, "MooncakeKVManager.register_buffer_to_engine"),
    Symbol(MOONCAKE, "MooncakeKVManager.start_prefill_thread"),
    Symbol(MOONCAKE, "MooncakeKVManager.start_decode_thread"),
    Symbol(MOONCAKE, "MooncakeKVManager.get_session_id"),
    Symbol(MOONCAKE, "MooncakeKVManager.build_receiver_registration_message"),
    Symbol(
        MOONCAKE,
        "MooncakeKVManager.add_transfer_request",
        "bootstrap_room kv_indices index_slice is_last_chunk aux_index state_indices num_kv_tokens",
    ),
    Symbol(MOONCAKE, "KVArgsRegisterInfo.from_zmq", "msg"),
    Symbol(MOONCAKE, "MooncakeKVSender.supports_host_tensor_indices", None),
    Symbol(MOONCAKE, "MooncakeKVReceiver", "mgr bootstrap_addr bootstrap_room"),
    Symbol(MOONCAKE, "MooncakeKVBootstrapServer", "host port"),
    Symbol(
        ASCEND,
        "AscendKVManager.__init__",
        "args disaggregation_mode server_args is_mla_backend dcp_remote_decode_layout",
    ),
    Symbol(ASCEND, "AscendKVManager.init_engine"),
    Symbol(ASCEND, "AscendKVManager.register_buffer_to_engine"),
    Symbol(PREFILL, "PrefillBootstrapQueue._init_kv_manager"),
    Symbol(PREFILL, "SchedulerDisaggregationPrefillMixin.send_kv_chunk", "req last_chunk end_idx"),
    Symbol(PREFILL, "SchedulerDisaggregationPrefillMixin.checkpoint_disagg_prefill", "req"),
    Symbol(ALLOCATOR, "BaseTokenToKVPoolAllocator.translate_kv_indices_for_transfer", "kv_indices"),
    Symbol(PREFIX_CACHE, "BasePrefixCache.supports_prefix_sharing"),
    Symbol(MOE, "is_tbo_enabled"),
    Symbol(DECODE, "DecodePreallocQueue._init_kv_manager"),
    Symbol(DECODE, "DecodeTransferQueue._release_request", "decode_req"),
    Symbol(DECODE, "DecodeTransferQueue._commit_transfer_to_req", "decode_req"),
    Symbol(RESULTS, "SchedulerBatchResultProcessor.process_batch_result_decode", "batch result"),
    Symbol(RESULTS, "SchedulerBatchResultProcessor.process_batch_result_prebuilt", "batch"),
    Symbol(SCHEDULER, "Scheduler.run_batch", "batch"),
    Symbol(HYBRID_ATTENTION, "HybridLinearAttnBackend.forward_extend", "layer forward_batch"),
    Symbol(MEMORY_POOL, "HybridLinearKVPool.set_kv_buffer", "layer loc_info cache_k cache_v"),
    Symbol(MEMORY_POOL, "MHATokenToKVPool.set_kv_buffer", "layer loc_info cache_k cache_v"),
    Symbol(MEMORY_POOL, "HybridReqToTokenPool.translate_mamba_indices", "mamba_indices"),
    Symbol(CONTEXT, "get_parallel"),
    Symbol(CONTEXT, "get_disagg"),
    Symbol(CONTEXT, "get_memory"),
    Symbol(CONTEXT, "get_serving"),
)
"""What the scheduler process of a rank needs."""


def check(symbols: Iterable[Symbol] = BOOTSTRAP + RANK) -> list[str]:
    """What is missing or changed, one line each, in the order of the table; empty if all is as it should be.

    Call it before anything is replaced. It imports the modules of the rows.
    """
    return [problem for symbol in symbols if (problem := _problem(symbol)) is not None]


def require(symbols: Iterable[Symbol] = BOOTSTRAP + RANK) -> None:
    """Raise UpstreamChanged with the list of what is missing or changed."""
    if problems := check(symbols):
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UpstreamChanged(f"SGLang has changed: {'; '.join(problems[:SHOWN])}{more}; {_MADE_FOR}")


def find(symbol: Symbol) -> tuple[Any, str]:
    """The module or class that holds the symbol, and its name there.

    Raises ImportError, also for a module that fails while it is imported, or AttributeError.
    """
    try:
        home: Any = importlib.import_module(symbol.module)
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error
    *owners, name = symbol.name.split(".")
    for owner in owners:
        home = getattr(home, owner)
    getattr(home, name)
    return home, name


def _problem(symbol: Symbol) -> str | None:
    try:
        home, name = find(symbol)
    except (ImportError, AttributeError) as error:
        return f"{symbol} is missing ({error})"
    value = getattr(home, name)
    if symbol.parameters is None:
        return None
    if not callable(value):
        return f"{symbol} is no function any more"
    found = tuple(parameter for parameter in inspect.signature(value).parameters if parameter != "self")
    if problem := misfit(symbol, found):
        return problem
    if symbol.digest is not None and digest_of(value) != symbol.digest:
        return f"{symbol} does something else now (its source has digest {digest_of(value)}, not {symbol.digest})"
    return None


def misfit(symbol: Symbol, found: Sequence[str]) -> str | None:
    """Why parameters of these names, without self, are not those that the row needs; None if they are."""
    if symbol.parameters is None:
        return None
    wanted = symbol.parameters.split()
    if [parameter for parameter in found if parameter in wanted] == wanted:
        return None
    return f"{symbol} takes ({', '.join(found)}), expected ({', '.join(wanted)})"


def digest_of(function: Any) -> str:
    """Digest of a function's source, whatever its indentation; for a row of the table."""
    try:
        return digest_of_source(dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return "none"


def digest_of_source(source: str) -> str:
    """The same of source that is indented as if it stood in no class."""
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
