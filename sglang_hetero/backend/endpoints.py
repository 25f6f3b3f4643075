"""SGLang's sender and receiver of one request, with our path in front; requests of other pairs take SGLang's."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from sglang_hetero.errors import HeteroError
from sglang_hetero.transfer.link import Addressee
from sglang_hetero.transfer.reception import Progress
from sglang_hetero.transfer.sources import SourceSet

from .first_token import write_row

logger = logging.getLogger(__name__)


class SenderMixin:
    """Prefill side. SGLang polls it until the request has arrived or failed, then clears it."""

    kv_mgr: Any
    bootstrap_room: int
    conclude_state: Any
    hetero_unseen: bool = False
    """Whether a chunk of the request was computed without being followed: then the later ones are not either."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, **others: Any) -> None:
        if mgr.hetero_prefill is not None:
            mgr.hetero_prefill.retire(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, **others)  # type: ignore[call-arg]
        if mgr.hetero_prefill is not None:
            mgr.hetero_prefill.claim(bootstrap_room, self)

    @property
    def supports_host_tensor_indices(self) -> bool:
        """Whether SGLang may hand page ids over in pinned memory, to be waited for; ours come as they are."""
        manager = self.kv_mgr
        return bool(manager.hetero_cuda and not manager.hetero_owns(self.bootstrap_room))

    def _poll_with_status(self, check_status: Any) -> Any:
        """Behind SGLang's poll() and, with pipeline stages, poll_pp_consensus()."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager = self.kv_mgr
        if self.conclude_state is None and manager.hetero_prefill is not None:
            manager.hetero_prefill.check(self.bootstrap_room)
            reason = manager.hetero_prefill.failure(self.bootstrap_room)
            if reason is not None:
                if not manager.hetero_prefill.may_free(self.bootstrap_room):
                    return KVPoll.Transferring
                manager.hetero_fail(self.bootstrap_room, reason)
        return super()._poll_with_status(check_status)  # type: ignore[misc]

    def failure_exception(self) -> None:
        """Another rank of this server may have failed the request, and SGLang tells its client what rank 0 knows."""
        manager = self.kv_mgr
        if manager.hetero_owns(self.bootstrap_room):
            manager.hetero_explain(self.bootstrap_room, manager.hetero_prefill.explain(self.bootstrap_room))
        super().failure_exception()  # type: ignore[misc]

    def clear(self) -> None:
        super().clear()  # type: ignore[misc]
        if self.kv_mgr.hetero_prefill is not None:
            self.kv_mgr.hetero_prefill.release(self.bootstrap_room, self)

    def abort(self) -> None:
        side = self.kv_mgr.hetero_prefill
        if side is not None:
            side.fail(self.bootstrap_room, "the client gave the request up (prefill)")
            if not side.may_free(self.bootstrap_room):
                return  # poll() says that it has failed when decode reads its pages no more
        super().abort()  # type: ignore[misc]


class ReceiverMixin:
    """Decode side. SGLang's scheduler polls it, and frees pages and slot after clear() or failure_exception()."""

    kv_mgr: Any
    bootstrap_addr: str
    bootstrap_room: int
    bootstrap_infos: Any
    conclude_state: Any
    prefill_dp_rank: int | None = None
    _hetero: bool = False
    """Whether the request takes our path."""
    _opened: bool = False
    """Whether decode's side holds it for us; another request may have the same room."""
    _told: bool = False
    """Whether prefill has been told, or will be, that the request is not going to be bound."""
    _measured: bool = False
    """Whether the room's figures are this request's, and have not ended."""
    _source_set: SourceSet | None = None
    _aux_index: int | None = None

    def init(self, prefill_dp_rank: int) -> None:
        if self.conclude_state is not None:
            return  # given up while its prefill server was asked for
        self.prefill_dp_rank = prefill_dp_rank
        reason = self.kv_mgr.hetero_refusal(self.bootstrap_addr)
        if reason is not None:
            self._give_up(reason)
            return
        try:
            self._hetero = self.kv_mgr.hetero_takes(self.bootstrap_addr, self.bootstrap_room)
        except HeteroError as error:
            self._give_up(str(error))
            return
        if self._hetero:
            self._measured = self.kv_mgr.hetero_perf.created(self.bootstrap_room)
        super().init(prefill_dp_rank)  # type: ignore[misc]

    def _setup_bootstrap_infos(self) -> None:
        if not self._hetero:
            super()._setup_bootstrap_infos()  # type: ignore[misc]
            return
        self.bootstrap_infos = []  # none of SGLang's own frames goes to these peers
        try:
            self._source_set = self.kv_mgr.hetero_sources(self.bootstrap_addr, self.prefill_dp_rank)
        except HeteroError as error:
            self._give_up(str(error))

    def send_metadata(  # noqa: PLR0917 (SGLang's signature)
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
        device_kv_indices: Any = None,
        **others: Any,
    ) -> None:
        if not self._hetero or self._source_set is None:
            if destination is not None:
                others["destination"] = destination
            super().send_metadata(  # type: ignore[misc]
                kv_indices,
                aux_index,
                state_indices,
                decode_prefix_len=decode_prefix_len,
                device_kv_indices=device_kv_indices,
                **others,
            )
            return
        try:
            if decode_prefix_len or device_kv_indices is not None:
                raise HeteroError(
                    f"{self.kv_mgr.hetero_rank.name}: decode's prefix cache and HiSparse are not served between "
                    "different TP sizes; start decode without them"
                )
            if self._newcomers():
                raise HeteroError(
                    f"{self.kv_mgr.hetero_rank.name}: prefill at {self.bootstrap_addr} was started again while the "
                    "request waited for memory here; send it again"
                )
            self._aux_index = aux_index
            slot = self.kv_mgr.hetero_slot(state_indices)
            self.kv_mgr.hetero_decode.open(
                self.bootstrap_room, self._source_set, np.asarray(kv_indices, dtype=np.int64), slot
            )
            self._opened = self._measured = True
        except HeteroError as error:
            self._give_up(str(error))

    def poll(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVPoll

        status = super().poll()  # type: ignore[misc]
        if not self._opened:
            return status
        try:
            if status == KVPoll.Failed:
                self.kv_mgr.hetero_decode.fail(self.bootstrap_room, self.kv_mgr.hetero_reason(self.bootstrap_room))
            if self.conclude_state is None:
                self._advance()
        except Exception as error:
            # SGLang's scheduler serves other requests, and would end with the exception.
            logger.exception("room %d", self.bootstrap_room)
            self._fail(f"{self.kv_mgr.hetero_rank.name}: {type(error).__name__}: {error}")
        return KVPoll.WaitingForInput if self.conclude_state is None else self.conclude_state

    def _advance(self) -> None:
        """Let what has arrived be merged; conclude the request if that was all, or if it has failed."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        side = self.kv_mgr.hetero_decode
        progress = side.poll(self.bootstrap_room)
        if progress is Progress.FAILED:
            self._fail(side.reason(self.bootstrap_room))
        elif progress is Progress.COMPLETE:
            try:
                assert self._aux_index is not None
                assert self._source_set is not None
                first, metadata = side.first(self.bootstrap_room), self.kv_mgr.hetero_rank.metadata
                write_row(metadata, self._aux_index, first.aux, self._source_set.plan.row)
            except HeteroError as error:
                self._fail(str(error))
                return
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
            self.conclude_state = KVPoll.Success

    def clear(self) -> None:
        self._settle()
        self._conclude()
        super().clear()  # type: ignore[misc]

    def failure_exception(self) -> None:
        self._explain()
        self._settle()
        self._end_figures()
        super().failure_exception()  # type: ignore[misc]

    def abort(self) -> None:
        reason = "the client gave the request up (decode)"
        if self._opened:
            self.kv_mgr.hetero_decode.fail(self.bootstrap_room, reason)
        elif self._hetero and self.conclude_state is None:
            self._tell_all(reason)
        elif self.prefill_dp_rank is None and self.conclude_state is None:
            # Its prefill server is not known yet. SGLang ends such a request, too, when it has asked often enough.
            problem = self.kv_mgr.hetero_problem(self.bootstrap_addr)
            self._give_up(f"the request was given up before it began: {problem}")
        super().abort()  # type: ignore[misc]

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """SGLang would hold the pages until prefill has drained. Ours are never written by a peer: they are free."""
        if not self._hetero:
            super().ensure_abort_notified(force_arm=force_arm)  # type: ignore[misc]

    def _settle(self) -> None:
        """Nothing of ours touches the request's pages after this; SGLang frees them next."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        if not self._opened:
            if self._hetero and self.conclude_state != KVPoll.Success:
                # Whoever has ended it, SGLang on a heartbeat say: prefill waits to be told where the request goes.
                self._tell_all(self.kv_mgr.hetero_reason(self.bootstrap_room))
            return
        self._opened = False
        self._told = True  # its sources were asked by decode's side, which tells them how it ends
        self.kv_mgr.hetero_decode.settle(self.bootstrap_room)
        if self.conclude_state == KVPoll.Failed and (others := self._newcomers()):
            # They may wait for it.
            self._give_up_at(others, self.kv_mgr.hetero_reason(self.bootstrap_room))

    def _newcomers(self) -> tuple[Addressee, ...]:
        """Ranks of its prefill server that were started since the request was given its sources, as far as is known."""
        assert self._source_set is not None
        now = self.kv_mgr.hetero_ranks(self.bootstrap_addr, self.prefill_dp_rank)
        return tuple(rank for rank in now if rank not in self._source_set.ranks)

    def _explain(self) -> None:
        """Another rank of this server may have failed the request, and SGLang tells its client what rank 0 knows."""
        if not self._hetero:
            return
        side, room = self.kv_mgr.hetero_decode, self.bootstrap_room
        known = side.reason(room) if self._opened else ""
        waits = side.waits_for(room) if self._opened else f"its turn to ask prefill at {self.bootstrap_addr}"
        here = f"{self.kv_mgr.hetero_rank.name} {f'waited for {waits}' if waits else 'has all of it'}"
        self.kv_mgr.hetero_explain(
            room, known or f"another rank of this decode server has failed it, whose log says why; {here}"
        )
        if self._opened:
            side.fail(room, self.kv_mgr.hetero_reason(room))

    def _conclude(self) -> None:
        """SGLang lets go of the request: after Success it has committed it, and decode's queue gets it next."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        if self._measured and self.conclude_state == KVPoll.Success:
            self._measured = False
            self.kv_mgr.hetero_perf.enqueued(self.bootstrap_room)
        self._end_figures()

    def _end_figures(self) -> None:
        """The request has failed, unless its figures have ended already."""
        if self._measured:
            self._measured = False
            reason = self.kv_mgr.hetero_reason(self.bootstrap_room)
            self.kv_mgr.hetero_perf.received_end(self.bootstrap_room, reason)

    def _give_up(self, reason: str) -> None:
        """Fail the request before prefill has been told where it goes, and tell prefill, which waits for that."""
        self._fail(reason)
        self._tell_all(reason)

    def _tell_all(self, reason: str) -> None:
        """Tell every prefill rank, once, that the request will not be bound; later, if nobody knows where they are."""
        if self._told:
            return
        self._told = True
        bound_for = () if self._source_set is None else self._source_set.ranks
        dp_rank = self.prefill_dp_rank
        now = () if dp_rank is None else self.kv_mgr.hetero_ranks(self.bootstrap_addr, dp_rank)
        if ranks := tuple(dict.fromkeys((*bound_for, *now))):
            self._give_up_at(ranks, reason)
        else:
            self.kv_mgr.hetero_owe(self.bootstrap_addr, self.bootstrap_room, reason)

    def _give_up_at(self, ranks: tuple[Addressee, ...], reason: str) -> None:
        ours = self._source_set is not None or self.kv_mgr.hetero_listens(self.bootstrap_addr)
        try:
            self.kv_mgr.hetero_give_up(self.bootstrap_room, ranks, reason, ours=ours)
        except Exception as error:  # SGLang's scheduler would end with it
            logger.warning("room %d: prefill at %s was not told: %s", self.bootstrap_room, self.bootstrap_addr, error)

    def _fail(self, reason: str) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
