"""The prefill ranks: a request's way through PrefillBootstrapQueue, its chunks, and the queue of transfers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import expectation, oracle
from .expectation import PAGED, Placement
from .oracle import Bits, Component
from .rank import Live, Rank, failure
from .replay import WAITING_FOR_INPUT, Replay
from .sides import Forward, Request, Turn


class PrefillRank(Rank):
    """A prefill rank; its `poll` is the sender's."""

    poison_byte = oracle.SOURCE_POISON
    replay_class = Replay
    _replay: Replay | None = None

    @property
    def queue(self) -> Any:
        return self.scheduler.disagg_prefill_bootstrap_queue

    @property
    def manager(self) -> Any:
        return self.queue.kv_manager

    def open(self, requests: Sequence[Request]) -> None:
        """Create the senders (prefill.py, PrefillBootstrapQueue.add)."""
        for request in requests:
            live = Live(request, self._new_req(request))
            if not self.queue.create_sender(live.req, self.shard.geometry.kv_heads):
                raise RuntimeError(f"prefill refused {request}")
            self.queue.queue.append(live.req)
            self.live[request.room] = live

    def poll(self, rooms: Sequence[int]) -> list[int]:
        """KVPoll of each request's sender on this rank."""
        return [int(self.live[room].req.disagg_kv_sender.poll()) for room in rooms]

    def admit(self, rooms: Sequence[int], unbound: Sequence[int]) -> list[int]:
        """Bootstrap is done on all ranks: take an aux row, tell the sender its number of pages, take the memory.

        With those that are `unbound` it is not, as in SGLang's optimistic prefill: the sender is told later.
        Returns the rooms for which there was enough, in order; the others have to wait.
        """
        for index, room in enumerate(rooms):
            live = self.live[room]
            if not self._fits(live.request):
                return list(rooms[:index])
            take = self.queue.ensure_metadata_buffer if room in unbound else self.queue.finalize_bootstrap
            if not take(live.req):
                raise RuntimeError("no aux row is free")
            self.queue.queue.remove(live.req)
            self._allocate(live)
        return list(rooms)

    def fill(self, room: int, end: int) -> None:
        """Fill positions up to `end` in, as a forward would; with the last one also the linear state."""
        live = self.live[room]
        placement = self._placement(live)
        last = end == live.request.tokens
        for buffer, view in self.buffers():
            if buffer.component in PAGED:
                self._write_pages(buffer, view, placement, live.written, end)
            elif last and buffer.component is not Component.AUX:
                view[placement.slot] = expectation.state(buffer, self.shard, placement.seed)
        live.written = end

    def send(self, room: int, end: int) -> None:
        """Hand the chunk that ends there over (prefill.py, send_kv_chunk)."""
        live = self.live[room]
        last = end == live.request.tokens
        self.locate(live, end)
        live.req.extend_end = end
        if last:
            self._sample(live)
            self.scheduler.disagg_prefill_inflight_queue.append(live.req)
        self.scheduler.send_kv_chunk(live.req, last_chunk=last)

    def send_chunk(self, room: int, end: int) -> None:
        """One chunk of a prompt."""
        self.fill(room, end)
        self.send(room, end)

    def turn(self, chunks: Sequence[tuple[int, int]], forward: Forward, bound: Sequence[int] = ()) -> Turn:
        """One round of the scheduler's loop with a batch of chunks (room, end), or without one.

        bound: of the rooms that run without their handshake, those whose handshake is done now on all ranks.
        """
        if self._replay is None:
            self._replay = self.replay_class(self)
        return self._replay.turn(chunks, forward, bound)

    def bind(self, room: int) -> None:
        """The handshake of a request that has run without is done (process_disagg_prefill_inflight_queue)."""
        req = self.live[room].req
        if req.pending_bootstrap and self.scheduler.handle_pending_bootstrap(req, WAITING_FOR_INPUT):
            self.scheduler.send_kv_chunk(req, last_chunk=True)

    def abort(self, room: int) -> None:
        """AbortReq for a request that waits for its bootstrap or for its transfer (scheduler.py, abort_request)."""
        self.live[room].req.disagg_kv_sender.abort()

    def retire(self, room: int) -> str:
        """AbortReq between two chunks: the memory is free at once (scheduler.py, the end of a chunked request)."""
        live = self.live.pop(room)
        if self._replay is not None:
            self._replay.forget(live)
        self.scheduler.clear_pending_chunk_send(live.req)
        live.req.disagg_kv_sender.abort()
        self._end(live)
        return "aborted between two chunks"

    def conclude(self, room: int, failed: bool) -> str:
        """The request has ended on all ranks, or failed on one; returns why, empty if it has not.

        Memory is free at once (prefill.py, process_disagg_prefill_inflight_queue and handle_bootstrap_failure).
        """
        live = self.live.pop(room)
        sender = live.req.disagg_kv_sender
        reason = ""
        if failed:
            reason = failure(sender)
        else:
            sender.clear()
        self._end(live)
        return reason

    def _end(self, live: Live) -> None:
        for queue in (self.queue.queue, self.scheduler.disagg_prefill_inflight_queue):
            if live.req in queue:
                queue.remove(live.req)
        self._release(live)
        if live.req.metadata_buffer_index >= 0:
            self.scheduler.req_to_metadata_buffer_idx_allocator.free(live.req.metadata_buffer_index)
            self._poison_aux_row(live.req.metadata_buffer_index)
            live.req.metadata_buffer_index = -1

    def _aux_row(self, live: Live) -> int:
        return int(live.req.metadata_buffer_index)

    def _allocate(self, live: Live) -> None:
        pools, page_size = self.pools, self.shard.geometry.page_size
        if pools.requests.alloc([live.req]) is None:
            raise RuntimeError("no request row is free")
        locations = pools.allocator.alloc(-(-live.request.tokens // page_size) * page_size)
        if locations is None:
            raise RuntimeError(f"no pages are free for {live.request}")
        live.locations = locations[: live.request.tokens]
        live.req.kv.kv_allocated_len = live.request.tokens

    def locate(self, live: Live, end: int) -> None:
        """Say where the tokens up to `end` are. SGLang does so chunk by chunk: until then the row is an earlier
        request's."""
        start = live.req.prefix_len
        self.pools.requests.write((live.req.kv.req_pool_idx, slice(start, end)), live.locations[start:end].int())

    def _locations(self, live: Live) -> Any:
        return live.locations

    def _write_pages(self, buffer: expectation.Buffer, view: Bits, placement: Placement, start: int, end: int) -> None:
        positions = np.arange(start, end)
        page_size = self.shard.geometry.page_size
        pages = np.asarray(placement.pages)[positions // page_size]
        view[pages, positions % page_size] = expectation.kv(buffer, self.shard, placement.seed, range(start, end))

    def _sample(self, live: Live) -> None:
        """What the last chunk's forward leaves on the request: its first token and the draft's inputs."""
        import torch

        geometry, request, req = self.shard.geometry, live.request, live.req
        fields = oracle.aux_fields(geometry, request.seed, request.room)
        req.output_ids.append(oracle.first_token(request.seed))
        if geometry.draft_tokens:
            req.output_topk_p = torch.from_numpy(fields["output_topk_p"].view(np.float32))
            req.output_topk_index = torch.from_numpy(fields["output_topk_index"].view(np.int64))
            hidden = fields["output_hidden_states"]
            dtype = getattr(torch, geometry.hidden_dtype)
            req.hidden_states_tensor = torch.from_numpy(hidden.view(f"i{hidden.itemsize}")).view(dtype)
