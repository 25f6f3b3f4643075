"""The decode ranks: a request's way through DecodePreallocQueue and DecodeTransferQueue."""

import time
from collections.abc import Sequence
from typing import Any

from . import compare, expectation, oracle
from .compare import Difference
from .expectation import Leftovers
from .rank import Live, Rank, failure
from .sides import Request


class DecodeRank(Rank):
    """A decode rank; its `poll` is the receiver's, held back until the aux row is there."""

    poison_byte = oracle.DESTINATION_POISON

    @property
    def queue(self) -> Any:
        return self.scheduler.disagg_decode_prealloc_queue

    @property
    def transfers(self) -> Any:
        return self.scheduler.disagg_decode_transfer_queue

    @property
    def manager(self) -> Any:
        return self.queue.kv_manager

    def open(self, requests: Sequence[Request]) -> None:
        """Create the receivers; the handshake goes on in `poll` (decode.py, DecodePreallocQueue.add)."""
        for request in requests:
            live = Live(request, self._new_req(request))
            self.live[request.room] = live
            self.queue.add(live.req)
            if not self.queue.queue or self.queue.queue[-1].req is not live.req:
                raise RuntimeError(f"decode refused {request}")
            live.decode_request = self.queue.queue[-1]

    def poll(self, rooms: Sequence[int]) -> list[int]:
        """KVPoll of each request's receiver on this rank, behind SGLang's aux-row gate."""
        from sglang.srt.disaggregation.utils import _apply_metadata_gate

        self.queue._resolve_pending_reqs()
        waiting = [self.live[room].decode_request for room in rooms]
        polls = [int(request.kv_receiver.poll()) for request in waiting]
        _apply_metadata_gate(polls, waiting, self.pools.metadata)
        return polls

    def admit(self, rooms: Sequence[int]) -> list[int]:
        """The handshake is done on all ranks: preallocate, send the metadata (decode.py, pop_preallocated).

        Returns the rooms for which there was enough memory, in order; the others have to wait.
        """
        for index, room in enumerate(rooms):
            live = self.live[room]
            if not self._fits(live.request):
                return list(rooms[:index])
            locations = self.queue._pre_alloc(live.req)
            self.queue._send_kv_metadata(
                live.decode_request, locations, self.queue.token_to_kv_pool.page_size, self._state_indices(live)
            )
            self.queue.queue.remove(live.decode_request)
            self.transfers.extend([live.decode_request])
        return list(rooms)

    def abort(self, room: int) -> None:
        """AbortReq before the request runs (scheduler.py, abort_request)."""
        self.live[room].decode_request.kv_receiver.abort()

    def give_up_servers(self) -> None:
        """SGLang's heartbeat has missed all prefill servers twice, whether they live or not."""
        for address in list(self.manager.prefill_info_table):
            self.manager._handle_node_failure(address)

    def commit(self, room: int) -> None:
        """It has arrived on all ranks (decode.py, _commit_transfer_to_req), and makes its first step; the request keeps
        its memory."""
        self.transfers.queue.remove(self.live[room].decode_request)
        self.live[room].decode_request.kv_receiver.clear()
        self.step([room])

    def step(self, rooms: Sequence[int]) -> None:
        """Decode has processed a step of these requests, as our hook on SGLang's batch result processor is told.

        Without it every record waits for its request's first step for minutes, and a long run looks like a leak.
        """
        from types import SimpleNamespace

        from sglang_hetero.backend import steps

        batch = SimpleNamespace(reqs=[self.live[room].req for room in rooms])
        steps.around_decode_result(lambda *_: None, None, batch, None)

    def fail(self, room: int) -> tuple[str, bool]:
        """The request has failed on one rank or more (decode.py, _update_handshake_waiters and pop_transferred).

        Returns why it did here, and whether SGLang keeps its memory until prefill has drained.
        """
        live = self.live[room]
        request = live.decode_request
        receiver = request.kv_receiver
        reason = failure(receiver)
        if request in self.queue.queue:  # nothing has been allocated
            self.queue.queue.remove(request)
            self.queue.pending_reqs = [each for each in self.queue.pending_reqs if each is not request]
            return reason, False
        self.transfers.queue.remove(request)
        deferrable = self.transfers.enable_deferred_kv_release and receiver.kv_mgr.enable_deferred_decode_kv_release
        if deferrable and not receiver.abort_notified:
            receiver.ensure_abort_notified(force_arm=True)
        live.deadline = time.monotonic() + self.transfers.deferred_kv_release_timeout
        return reason, deferrable and receiver.abort_notified

    def drained(self, rooms: Sequence[int]) -> list[bool]:
        """Has prefill drained, or has it had its time (decode.py, resolve_deferred_releases)?"""
        answers = []
        for room in rooms:
            receiver = self.live[room].decode_request.kv_receiver
            # A rank that holds the memory for a peer's sake waits for no acknowledgement of its own.
            wanted = len(receiver.bootstrap_infos) if receiver.abort_notified else 0
            drained = receiver.kv_mgr.is_abort_release_safe(room, wanted)
            answers.append(drained or time.monotonic() >= self.live[room].deadline)
        return answers

    def release(self, room: int, deferred: bool) -> None:
        """Free a failed request's memory, in SGLang's order: pages, then receiver (decode.py, _do_release)."""
        live = self.live[room]
        request, row = live.decode_request, self._aux_row(live)
        if row < 0:
            request.kv_receiver.clear()
        elif deferred:
            self.transfers._do_release(request, row)
        else:
            self.transfers._release_request(request)
            request.kv_receiver.clear()
            self.pools.metadata.clear_slot(row)
            self.scheduler.req_to_metadata_buffer_idx_allocator.free(row)
        if row >= 0:
            self._poison_aux_row(row)
        del self.live[room]

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

    def close(self, rooms: Sequence[int]) -> None:
        """End requests that arrived."""
        for room in rooms:
            live = self.live[room]
            row = self._aux_row(live)
            self._release(live)
            self.scheduler.req_to_metadata_buffer_idx_allocator.free(row)
            self._poison_aux_row(row)
            del self.live[room]

    def _aux_row(self, live: Live) -> int:
        return int(live.decode_request.metadata_buffer_index)

    def _state_indices(self, live: Live) -> list[Any]:
        """Slot of each state component (decode.py, pop_preallocated): a hybrid model has only MAMBA."""
        if not self._hybrid:
            return []
        pool = self.pools.requests
        slot = pool.translate_mamba_indices(pool.req_index_to_mamba_index_mapping[live.req.kv.req_pool_idx])
        return [[slot.cpu().numpy()]]
