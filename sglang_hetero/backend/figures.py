"""How full SGLang's pools and queues are, read from another thread than the scheduler's.

Each figure is one length or one number, so that no lock is needed; figures that are read one after the other need not
fit together while requests move. One that a model or a role has not, or that cannot be read now, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FIGURES: dict[str, Callable[[Any], int]] = {
    "pages": lambda s: s.token_to_kv_pool_allocator.size // s.token_to_kv_pool_allocator.page_size,
    "pages_free": lambda s: s.token_to_kv_pool_allocator.available_size() // s.token_to_kv_pool_allocator.page_size,
    # Decode has some beside those of requests that run, for requests that arrive.
    "rows": lambda s: s.req_to_token_pool.size + s.req_to_token_pool.pre_alloc_size,
    "rows_free": lambda s: len(s.req_to_token_pool.free_slots),
    "slots": lambda s: s.req_to_token_pool.mamba_allocator.size,
    "slots_free": lambda s: s.req_to_token_pool.mamba_allocator.available_size(),
    "aux_rows": lambda s: s.req_to_metadata_buffer_idx_allocator.size,
    "aux_rows_free": lambda s: s.req_to_metadata_buffer_idx_allocator.available_size(),
    "cached_tokens": lambda s: _cached(s.tree_cache),
    "cached_slots": lambda s: s.tree_cache.mamba_evictable_size(),
    "running": lambda s: len(s.running_batch.reqs),
    "waiting": lambda s: len(s.waiting_queue),
    "bootstrapping": lambda s: len(s.disagg_prefill_bootstrap_queue.queue),
    "in_flight": lambda s: len(s.disagg_prefill_inflight_queue),
    "unresolved": lambda s: len(s.disagg_decode_prealloc_queue.pending_reqs),
    "preallocating": lambda s: len(s.disagg_decode_prealloc_queue.queue),
    "retracted": lambda s: len(s.disagg_decode_prealloc_queue.retracted_queue),
    "receiving": lambda s: len(s.disagg_decode_transfer_queue.queue),
}
"""Names, and where they are in SGLang's scheduler."""


def figures_of(scheduler: Any) -> dict[str, int]:
    """All that can be read. Raises nothing."""
    found: dict[str, int] = {}
    for name, read in FIGURES.items():
        try:
            found[name] = int(read(scheduler))
        except Exception:
            continue
    return found


def _cached(cache: Any) -> int:
    """Tokens of the prefix cache that no request uses; they are given up when pages are needed."""
    hybrid = cache.supports_mamba() and cache.supports_prefix_sharing()
    return int(cache.full_evictable_size() if hybrid else cache.evictable_size())
