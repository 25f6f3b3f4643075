"""Prefill's turns as SGLang's loops take them, with a timer in place of the model's arithmetic.

The batch is a ScheduleBatch; `run_batch`, `process_prefill_chunk` and `process_batch_result_disagg_prefill` are
SGLang's own, and so is the way from a layer to its cache: HybridLinearAttnBackend for both kinds of layers,
`set_kv_buffer` of the pool. What a plugin hooks there acts as in a server. Instead of a model each layer waits for its
time and then stores what the oracle says. Which requests make a batch is decided by flow.py, and what SGLang measures
and prints is left out.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import expectation, oracle
from .expectation import PAGED, Buffer
from .oracle import Bits, Component
from .rank import Live
from .sides import Forward, Turn

INTERMEDIATE = 1 << 40
"""Set in the seed of the linear state that a middle chunk leaves, which nobody may send."""
BOOTSTRAPPING, WAITING_FOR_INPUT = 1, 2
"""SGLang's KVPoll."""
Chunk = tuple[Live, int, int]
"""A request in a batch, and where its chunk starts and ends."""


class Silent:
    """Takes every call and answers nothing: metrics, profiler, log-probabilities."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Moment:
    """An event of a device whose stream has always caught up: run_batch returns here when its layers have run."""

    def record(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Replay:
    """The forward side of one prefill rank: `turn` is one round of SGLang's loop."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        self.scheduler = rank.scheduler
        self.pools = rank.pools
        self.geometry = rank.shard.geometry
        self.stored: dict[tuple[Component, int], tuple[Buffer, Bits]] = {
            (buffer.component, buffer.layer): (buffer, view) for buffer, view in rank.buffers()
        }
        self.forward = Forward()
        self._chunks: list[Chunk] = []
        self._results: deque[tuple[Any, Any]] = deque()
        self._last_batch: Any = None
        self._bound: frozenset[int] = frozenset()
        self._moved: dict[int, int] = {}
        """Tokens of each room that are in other pages than it got."""
        self._slept = 0.0
        self._ended = 0.0, 0
        """When the layers had run, and what had left the rank by then."""
        self._backend = self._attention()
        _prepare(self.scheduler, self)

    def turn(self, chunks: Sequence[tuple[int, int]], forward: Forward, bound: Sequence[int]) -> Turn:
        """One round of event_loop_normal_disagg_prefill or, with overlap, event_loop_overlap_disagg_prefill.

        chunks: (room, end) of the batch, at most one of them not its prompt's last; none for a round without a batch.
        bound: rooms that have run without their handshake, which is done now.
        """
        scheduler = self.scheduler
        self._bound = frozenset(bound)
        self.forward, scheduler.enable_overlap = forward, forward.overlap
        scheduler.tree_cache.supports_prefix_sharing = lambda: forward.moves
        scheduler.tree_cache.checkpoint = self._move if forward.moves else lambda request, up_to: None
        scheduler.process_prefill_chunk(last_batch=None, running_batch=SimpleNamespace(batch_is_full=False))
        batch, before, taken = None, self._sent(), (0.0, 0.0)
        self._ended = 0.0, before
        if chunks:
            batch = self._batch(chunks)
            with mock.patch.object(torch.cuda, "Event", Moment):
                self._slept, clocks = 0.0, (time.monotonic(), time.thread_time())
                result = scheduler.run_batch(batch)
                taken = time.monotonic() - clocks[0] - self._slept, time.thread_time() - clocks[1]
            self._results.append((batch.copy() if forward.overlap else batch, result))
        ended, sent = self._ended
        finished = self._last_batch if forward.overlap else batch
        handed_over: list[int] = []
        if finished is not None:
            of, result = self._results.popleft()
            # Those whose last chunk this is, as process_batch_result_disagg_prefill sees it.
            handed_over = [req.bootstrap_room for req in of.reqs if req.inflight_middle_chunks <= 0]
            scheduler.process_batch_result_disagg_prefill(of, result)
        self._last_batch = batch
        return Turn(tuple(handed_over), sent - before, sent, ended, *taken)

    def forget(self, live: Live) -> None:
        """The client of a request that prefill runs has gone (scheduler.py, abort_request)."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        if self.scheduler.chunked_req is live.req:
            self.scheduler.chunked_req = None
        live.req.to_finish = FINISH_ABORT("the client has gone")

    def check_bootstrap(self, req: Any) -> bool:
        """SGLang's, without its all-reduce of the polls, which flow.py has taken."""
        if not req.pending_bootstrap:
            return True
        poll = WAITING_FOR_INPUT if req.bootstrap_room in self._bound else BOOTSTRAPPING
        return bool(self.scheduler.handle_pending_bootstrap(req, poll))

    def _sent(self) -> int:
        return int(self.rank.hetero("hetero_counters").get("bytes", 0))

    def _move(self, request: Any, up_to: int) -> None:
        """As a prefix cache does that has the pages of a chunk already: the request gets those, its own are free.

        The next owner overwrites them at once. The last page of a chunk that is not the last is taken over with the
        next one only, when it has been handed over, as where SGLang's keys are pairs of tokens.
        """
        room = request.bootstrap_room
        live, page_size = self.rank.live[room], self.geometry.page_size
        start, end = self._moved.get(room, 0), up_to // page_size * page_size
        end -= page_size if up_to < live.request.tokens else 0
        if end <= start:
            return
        left, found = live.locations[start:end], self.pools.allocator.alloc(end - start)
        if found is None:
            return  # it has nothing of this prompt
        old, new = (places[::page_size] // page_size for places in (left, found))
        for buffer, view in self.stored.values():
            if buffer.component in PAGED:
                view[new.numpy()] = view[old.numpy()]
                view[old.numpy()] = expectation.untouched(buffer, self.rank.poison_byte)
        self.pools.allocator.free(left[::page_size].long())
        live.locations = torch.cat([live.locations[:start], found, live.locations[end:]])
        self.pools.requests.write((request.kv.req_pool_idx, slice(start, end)), found.int())
        self._moved[room] = end

    # The batch.

    def _batch(self, chunks: Sequence[tuple[int, int]]) -> Any:
        """What get_new_batch_prefill and prepare_for_extend make of requests that have their memory already."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        scheduler = self.scheduler
        scheduler.chunked_req = None
        self._chunks = []
        for room, end in chunks:
            live = self.rank.live[room]
            self.rank.locate(live, end)
            live.req.extend_end = end
            self._chunks.append((live, live.req.prefix_len, end))
            if end < live.request.tokens:
                if scheduler.chunked_req is not None:
                    raise ValueError("SGLang puts one request in a batch whose prompt does not end there")
                scheduler.chunked_req = live.req
                live.req.inflight_middle_chunks += 1
        reqs = [live.req for live, _, _ in self._chunks]
        batch = ScheduleBatch.init_new(
            reqs,
            self.pools.requests,
            self.pools.allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
            chunked_req=scheduler.chunked_req,
        )
        rows = [req.kv.req_pool_idx for req in reqs]
        batch.forward_mode = ForwardMode.EXTEND
        batch.prefix_lens = [start for _, start, _ in self._chunks]
        batch.extend_lens = [end - start for _, start, end in self._chunks]
        batch.extend_num_tokens = sum(batch.extend_lens)
        batch.seq_lens_cpu = torch.tensor([end for _, _, end in self._chunks])
        batch.seq_lens = batch.seq_lens_cpu.clone()
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        batch.orig_seq_lens = torch.tensor([live.request.tokens for live, _, _ in self._chunks], dtype=torch.int32)
        batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor(rows)
        batch.prefill_input_ids_cpu = torch.zeros(batch.extend_num_tokens, dtype=torch.int64)
        batch.extend_logprob_start_lens = list(batch.extend_lens)
        batch.out_cache_loc = torch.cat([live.locations[start:end] for live, start, end in self._chunks])
        return batch

    # The forward pass.

    def forward_batch_generation(self, batch: Any, **_: Any) -> Any:
        """What the model's worker does for a batch: target layers, then the draft's, each after its time."""
        from sglang.srt.managers.utils import GenerationBatchResult

        passed = SimpleNamespace(
            forward_mode=batch.forward_mode,
            logical_forward_mode=batch.forward_mode,
            batch_size=len(batch.reqs),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            extend_num_tokens=batch.extend_num_tokens,
            extend_prefix_lens_cpu=batch.prefix_lens,
            extend_seq_lens_cpu=batch.extend_lens,
        )
        started = time.monotonic()
        for layer in range(self.geometry.layers):
            # From the start of the pass: storing takes a part of the layer's time and does not add to it.
            self._wait(started, layer + 1)
            if layer in self.forward.hidden:
                self._store_hidden(layer)
            else:
                described = SimpleNamespace(layer_id=layer)
                self._backend(layer=described, forward_batch=passed)
        for number, layer in enumerate(self.geometry.draft_layers, 1):
            self._wait(started, self.geometry.layers + number)
            self._set_kv(self.pools.draft, layer, batch.out_cache_loc, Component.DRAFT_KEY, Component.DRAFT_VALUE)
        self._ended = time.monotonic(), self._sent()
        fields = [oracle.aux_fields(self.geometry, live.request.seed, live.request.room) for live, _, _ in self._chunks]
        return GenerationBatchResult(
            next_token_ids=torch.tensor([int(each["output_ids"][0]) for each in fields]),
            next_draft_input=self._draft_input(fields) if self.geometry.draft_tokens else None,
        )

    def _wait(self, started: float, layers: int) -> None:
        if self.forward.layer_seconds:
            now = time.monotonic()
            time.sleep(max(0.0, started + layers * self.forward.layer_seconds - now))
            self._slept += time.monotonic() - now

    def _draft_input(self, fields: Sequence[dict[str, Bits]]) -> Any:
        def rows(name: str, dtype: torch.dtype) -> torch.Tensor:
            bits = [each[name].view(f"i{each[name].itemsize}") for each in fields]
            return torch.stack([torch.from_numpy(row).view(dtype) for row in bits])

        return SimpleNamespace(
            topk_p=rows("output_topk_p", torch.float32),
            topk_index=rows("output_topk_index", torch.int64),
            hidden_states=rows("output_hidden_states", getattr(torch, self.geometry.hidden_dtype)),
            dsa_topk_indices=None,
        )

    # The layers.

    def _attention(self) -> Any:
        """What a model's RadixAttention calls, around our two kinds of layers."""
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

        full = SimpleNamespace(
            token_to_kv_pool=self.pools.target,
            req_to_token_pool=self.pools.requests,
            kv_index_translator=None,
            needs_cpu_seq_lens=True,
            use_captured_forward_metadata_for_breakable_cuda_graph=False,
            forward_extend=self._full_layer,
        )
        linear = SimpleNamespace(
            needs_cpu_seq_lens=True,
            supports_prefill_graph_extend=lambda: False,
            forward_extend=self._linear_layer,
        )
        if not self.geometry.linear_layers:
            return lambda layer, forward_batch: self._full_layer(None, None, None, layer, forward_batch)
        return HybridLinearAttnBackend(full, linear, list(self.geometry.full_attention_layers)).forward

    def _full_layer(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
        self._set_kv(self.pools.target, layer.layer_id, forward_batch.out_cache_loc, Component.KEY, Component.VALUE)

    def _linear_layer(self, *, layer: Any, **_: Any) -> None:
        self._store_state(layer.layer_id)

    def _set_kv(self, pool: Any, layer: int, locations: torch.Tensor, key: Component, value: Component) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        keys, values = (
            torch.cat([self.kv(self.stored[component, layer][0], *chunk) for chunk in self._chunks])
            for component in (key, value)
        )
        described = SimpleNamespace(layer_id=layer)
        pieces = zip(*(tensor.chunk(self.forward.parts) for tensor in (locations, keys, values)), strict=True)
        for number, (where, key_part, value_part) in enumerate(pieces):
            if number:
                time.sleep(self.forward.layer_seconds)
            pool.set_kv_buffer(described, KVWriteLoc(where), key_part, value_part)

    def _store_state(self, layer: int) -> None:
        for live, _, end in self._chunks:
            for component in (Component.CONV, Component.SSM):
                buffer, view = self.stored[component, layer]
                self.state(buffer, view, live, end)

    def _store_hidden(self, layer: int) -> None:
        """The same bytes by no function of SGLang, as when a graph is replayed."""
        if layer in self.geometry.linear_layers:
            self._store_state(layer)
            return
        for component in (Component.KEY, Component.VALUE):
            buffer, view = self.stored[component, layer]
            tokens = view.reshape(-1, *view.shape[2:])
            for live, start, end in self._chunks:
                tokens[live.locations[start:end].numpy()] = expectation.kv(
                    buffer, self.rank.shard, live.request.seed, range(start, end)
                )

    def kv(self, buffer: Buffer, live: Live, start: int, end: int) -> torch.Tensor:
        """K or V that a layer computes for a chunk: `[tokens, local heads, head_dim]` of the pool's dtype."""
        bits = expectation.kv(buffer, self.rank.shard, live.request.seed, range(start, end))
        signed = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy())
        return signed.view(getattr(torch, self.geometry.kv_dtype))

    def state(self, buffer: Buffer, view: Bits, live: Live, end: int) -> None:
        """Store conv or SSM as a layer leaves it after a chunk: the request's after the last one only."""
        last = end == live.request.tokens
        seed = live.request.seed if last else live.request.seed ^ INTERMEDIATE
        view[int(live.req.kv.mamba_pool_idx)] = expectation.state(buffer, self.rank.shard, seed)


def _prepare(scheduler: Any, worker: Any) -> None:
    """What run_batch and the processing of its result find on a scheduler, besides what the PD queues need."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    draft = bool(worker.geometry.draft_tokens)
    silent = Silent()
    for name in (
        "metrics_reporter",
        "profiler_manager",
        "batch_result_processor",
        "beam_coordinator",
        "future_map",
        "forward_stream",
        "schedule_stream",
    ):
        setattr(scheduler, name, silent)
    for name in ("scheduler_stage_metrics", "scripted_scheduler_hook", "forward_sleep_time", "chunked_req"):
        setattr(scheduler, name, None)
    for name in ("enable_pdmux", "enable_unified_cache_external_linker", "enable_unified_memory", "attn_dp_enabled"):
        setattr(scheduler, name, False)
    scheduler.forward_ct = scheduler.processed_tokens_counter = 0
    scheduler._sched_idled = False
    scheduler._confidence_budget_prepare = None
    scheduler.is_generation = True
    scheduler.batch_record_ct, scheduler.batch_record_buf = 0, [None, None]
    scheduler.forward_stream_ctx = nullcontext()
    scheduler.device_module = SimpleNamespace(Event=Moment)
    scheduler.pp_group = SimpleNamespace(is_last_rank=True)
    scheduler.model_worker, scheduler.check_bootstrap = worker, worker.check_bootstrap
    scheduler.waiting_queue = []
    scheduler.spec_algorithm = SpeculativeAlgorithm.EAGLE if draft else SpeculativeAlgorithm.NONE
    # What the next decode step would need, and what is printed.
    for name in ("_relay_forward_payload", "_copy_result_to_cpu", "maybe_send_health_check_signal"):
        setattr(scheduler, name, lambda *_, **__: None)
