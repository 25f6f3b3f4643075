"""One rank process: it takes the steps of a request in the order in which SGLang's event loops take them.

Each public method is a command that pair.py sends (`serve` runs them one after the other in the main thread, as a
scheduler does); what waits for a peer returns at once and is polled.
"""

import array
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from . import compare, expectation, oracle, scheduler
from .compare import Difference
from .core import CoreHandover
from .expectation import PAGED, Leftovers, Placement
from .oracle import Bits, Component
from .sides import LOOPBACK, Request, Shard, Side

TOPOLOGY_SECONDS = 10.0
"""How long a decode rank asks the bootstrap server for a topology that all prefill ranks have registered in."""
RETRY_SECONDS = 0.02


@dataclass
class Live:
    """A request that a rank holds."""

    request: Request
    req: Any
    """SGLang's Req."""
    decode_request: Any = None
    written: int = 0
    """Prompt positions whose KV the prefill rank has filled in."""


class Rank:
    """What prefill and decode have in common."""

    def __init__(self, shard: Shard, side: Side) -> None:
        self.shard = shard
        self.side = side
        self.scheduler = scheduler.build(shard, side)
        self.live: dict[int, Live] = {}

    @property
    def pools(self) -> Any:
        return self.scheduler.pools

    def buffers(self) -> list[tuple[expectation.Buffer, Bits]]:
        from . import pools

        return pools.buffers(self.pools)

    def poison(self, byte: int) -> None:
        """Fill every pool of this rank with one byte."""
        for buffer, view in self.buffers():
            view[...] = expectation.untouched(buffer, byte)

    def poke(self, component: Component, layer: int, coordinates: tuple[int, ...], flip: int) -> None:
        """Flip bits of one element, to show that a comparison sees it."""
        for buffer, view in self.buffers():
            if (buffer.component, buffer.layer) == (component, layer):
                view[coordinates] ^= view.dtype.type(flip)
                return
        raise ValueError(f"no buffer of {component!r} layer {layer}")

    def crash(self) -> None:
        """End this process at once, as a fault in native code would."""
        os.abort()

    def place(self, rooms: Sequence[int]) -> list[Placement]:
        """Where this rank keeps the requests."""
        return [self._placement(self.live[room]) for room in rooms]

    def _placement(self, live: Live) -> Placement:
        row = self.pools.requests.req_to_token[live.req.kv.req_pool_idx, : live.request.tokens].numpy()
        return Placement(
            room=live.request.room,
            seed=live.request.seed,
            tokens=live.request.tokens,
            pages=tuple(int(page) for page in row[:: self.shard.geometry.page_size] // self.shard.geometry.page_size),
            slot=int(live.req.kv.mamba_pool_idx),
            aux_row=self._aux_row(live),
        )

    def _aux_row(self, live: Live) -> int:
        raise NotImplementedError

    def _new_req(self, request: Request) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        return Req(
            rid=str(request.room),
            origin_input_text="",
            origin_input_ids=array.array("q", range(request.tokens)),
            sampling_params=SamplingParams(),
            bootstrap_host=LOOPBACK,
            bootstrap_port=self.side.bootstrap_port,
            bootstrap_room=request.room,
        )

    def _release(self, live: Live) -> None:
        """Give pages, slot and row back, as release_kv_cache does without a prefix cache."""
        pools, req = self.pools, live.req
        if not req.kv.holds_kv:
            return
        page_size = self.shard.geometry.page_size
        tokens = pools.requests.req_to_token[req.kv.req_pool_idx, : live.request.tokens]
        pools.allocator.free(tokens[::page_size].long() // page_size * page_size)
        pools.requests.free_mamba_cache(req)
        pools.requests.free(req)


class PrefillRank(Rank):
    """A prefill rank; its `poll` is the sender's."""

    def open(self, requests: Sequence[Request]) -> None:
        """Create the senders (prefill.py, PrefillBootstrapQueue.add) and take pages and slots for the prompts."""
        for request in requests:
            live = Live(request, self._new_req(request))
            queue = self.scheduler.disagg_prefill_bootstrap_queue
            if not queue.create_sender(live.req, self.shard.geometry.kv_heads):
                raise RuntimeError(f"prefill refused {request}")
            self.live[request.room] = live
            self._allocate(live)

    def poll(self, rooms: Sequence[int]) -> list[int]:
        """KVPoll of each request's sender on this rank."""
        return [int(self.live[room].req.disagg_kv_sender.poll()) for room in rooms]

    def finalize(self, rooms: Sequence[int]) -> None:
        """Bootstrap is done on all ranks: take an aux row and tell the sender its number of pages."""
        for room in rooms:
            if not self.scheduler.disagg_prefill_bootstrap_queue.finalize_bootstrap(self.live[room].req):
                raise RuntimeError("no aux row is free")

    def send_chunk(self, room: int, end: int) -> None:
        """Fill positions up to `end` in, as a forward would, and hand the chunk over (prefill.py, send_kv_chunk)."""
        live = self.live[room]
        placement = self._placement(live)
        last = end == live.request.tokens
        for buffer, view in self.buffers():
            if buffer.component in PAGED:
                self._write_pages(buffer, view, placement, live.written, end)
            elif last and buffer.component is not Component.AUX:
                view[placement.slot] = expectation.state(buffer, self.shard, placement.seed)
        live.written = live.req.extend_end = end
        if last:
            self._sample(live)
        self.scheduler.send_kv_chunk(live.req, last_chunk=last)

    def close(self, rooms: Sequence[int]) -> list[str]:
        """End the requests; returns why each failed, empty for those that did not."""
        reasons = []
        for room in rooms:
            live = self.live.pop(room)
            reasons.append(_conclude(live.req.disagg_kv_sender))
            if live.req.metadata_buffer_index >= 0:
                self.scheduler.req_to_metadata_buffer_idx_allocator.free(live.req.metadata_buffer_index)
            self._release(live)
        return reasons

    def _aux_row(self, live: Live) -> int:
        return int(live.req.metadata_buffer_index)

    def _allocate(self, live: Live) -> None:
        pools, page_size = self.pools, self.shard.geometry.page_size
        if pools.requests.alloc([live.req]) is None:
            raise RuntimeError("no request row is free")
        locations = pools.allocator.alloc(-(-live.request.tokens // page_size) * page_size)
        if locations is None:
            raise RuntimeError(f"no pages are free for {live.request}")
        row = live.req.kv.req_pool_idx
        pools.requests.write((row, slice(0, live.request.tokens)), locations[: live.request.tokens].int())
        live.req.kv.kv_allocated_len = live.request.tokens

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


class DecodeRank(Rank):
    """A decode rank; its `poll` is the receiver's, held back until the aux row is there."""

    def open(self, requests: Sequence[Request]) -> None:
        """Receiver, handshake, preallocation, metadata: decode.py, DecodePreallocQueue.add and pop_preallocated."""
        queue = self.scheduler.disagg_decode_prealloc_queue
        for request in requests:
            live = Live(request, self._new_req(request))
            self.live[request.room] = live
            self._await_topology()
            live.decode_request = queue._create_receiver_and_enqueue(live.req)
            queue._init_receiver(live.decode_request, prefill_dp_rank=0)
            locations = queue._pre_alloc(live.req)
            queue._send_kv_metadata(
                live.decode_request, locations, queue.token_to_kv_pool.page_size, self._state_indices(live)
            )
            queue.queue.remove(live.decode_request)

    def poll(self, rooms: Sequence[int]) -> list[int]:
        """KVPoll of each request's receiver on this rank, behind SGLang's aux-row gate."""
        from sglang.srt.disaggregation.utils import _apply_metadata_gate

        waiting = [self.live[room].decode_request for room in rooms]
        polls = [int(request.kv_receiver.poll()) for request in waiting]
        _apply_metadata_gate(polls, waiting, self.pools.metadata)
        return polls

    def differences(self, rooms: Sequence[int], leftovers: Leftovers) -> list[Difference]:
        """Compare every byte of every pool with what it must hold after these requests arrived."""
        found = []
        placements = self.place(rooms)
        for buffer, actual in self.buffers():
            wanted = expectation.expected(buffer, self.shard, placements, leftovers)
            owned = {item for placement in placements for item in placement.items(buffer.component)}
            difference = compare.first_difference(buffer, self.shard.rank, wanted, actual, owned)
            if difference is not None:
                found.append(difference)
        return found

    def close(self, rooms: Sequence[int]) -> list[str]:
        """End the requests; returns why each failed, empty for those that did not."""
        reasons = []
        for room in rooms:
            live = self.live.pop(room)
            reasons.append(_conclude(live.decode_request.kv_receiver))
            self.scheduler.req_to_metadata_buffer_idx_allocator.free(self._aux_row(live))
            self._release(live)
        return reasons

    def _aux_row(self, live: Live) -> int:
        return int(live.decode_request.metadata_buffer_index)

    def _await_topology(self) -> None:
        manager = self.scheduler.disagg_decode_prealloc_queue.kv_manager
        deadline = time.monotonic() + TOPOLOGY_SECONDS
        while not manager.try_ensure_parallel_info(f"{LOOPBACK}:{self.side.bootstrap_port}"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the prefill side did not register within {TOPOLOGY_SECONDS} s")
            time.sleep(RETRY_SECONDS)

    def _state_indices(self, live: Live) -> list[Any]:
        """Slot of each state component (decode.py, pop_preallocated): a hybrid model has only MAMBA."""
        pool = self.pools.requests
        slot = pool.translate_mamba_indices(pool.req_index_to_mamba_index_mapping[live.req.kv.req_pool_idx])
        return [[slot.cpu().numpy()]]


def start_bootstrap(shard: Shard, side: Side) -> None:
    """Start the bootstrap server in this process, as SGLang's tokenizer manager does."""
    from sglang.srt.managers.disagg_service import start_disagg_service

    scheduler.publish(shard, side)
    start_disagg_service()


def _conclude(endpoint: Any) -> str:
    """Clear a sender or receiver that has ended; returns its failure, if any."""
    from sglang.srt.disaggregation.base import KVPoll

    if endpoint.poll() != KVPoll.Failed:
        endpoint.clear()
        return ""
    try:
        endpoint.failure_exception()
    except Exception as error:
        return str(error)
    return "failed without a reason"


def serve(connection: Connection) -> None:
    """Run commands `(number, name, arguments)` until the other end closes.

    Replies are `(number, value, traceback of an error or "")`.
    """
    rank: Any = None
    roles = {"prefill": PrefillRank, "decode": DecodeRank, "core": CoreHandover}
    while True:
        try:
            number, name, arguments = connection.recv()
        except EOFError:
            return
        try:
            if name == "build":
                rank = roles[arguments[1].mode](*arguments)
                value = None
            elif name == "start_bootstrap":
                start_bootstrap(*arguments)
                value = None
            else:
                value = getattr(rank, name)(*arguments)
            reply = (number, value, "")
        except Exception:
            reply = (number, None, traceback.format_exc())
        connection.send(reply)
