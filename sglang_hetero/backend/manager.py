"""SGLang's transfer manager of one rank, with our path beside its own.

SGLang constructs it, and its constructor registers memory and starts threads; so everything of ours is made on the way:
caches described and staging allocated before SGLang's constructor, the sides when the engine is there
(`register_buffer_to_engine`), the connection to the control service at the end.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from sglang_hetero.errors import HeteroError, PeerAway, SealError, TransferRefused
from sglang_hetero.layout.manifest import Side
from sglang_hetero.layout.wire import encode as encode_manifest
from sglang_hetero.state import folder
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.counters import Counters
from sglang_hetero.transfer.decode import DecodeSide
from sglang_hetero.transfer.engine.base import Engine
from sglang_hetero.transfer.faults import Faults
from sglang_hetero.transfer.link import Addressee, Endpoint
from sglang_hetero.transfer.outbox import FirstToken
from sglang_hetero.transfer.prefill import PrefillSide
from sglang_hetero.transfer.seal import Purpose
from sglang_hetero.transfer.sources import SourceSet

from . import make
from .announcer import Announcer
from .capability import PrefillServer
from .doubts import DecodeRanks
from .first_token import read_row
from .guard import survives
from .layerwise import Layerwise
from .liveness import Liveness
from .metrics import observer, tell_report
from .options import Mode, read
from .pairing import Decision, Path, Registration, Route, decide, same_layouts
from .peers import Peers
from .posts import Posts, numeric
from .rank import Rank, current_rank
from .rank_report import receiver_fault, report_of
from .rank_told import RankTold
from .secret import seal_of
from .steps import perf_of
from .support import refuse_start, route_reasons, sglang_reader
from .watch import Watch

logger = logging.getLogger(__name__)


class ManagerMixin:
    """Put in front of a transfer backend's manager class. Names that SGLang does not know begin with `hetero_`."""

    hetero_mode: Mode
    hetero_rank: Rank
    hetero_prefill: PrefillSide | None = None
    hetero_decode: DecodeSide | None = None
    hetero_layerwise: Layerwise | None = None
    hetero_watch: Watch | None = None
    _hetero_receiver: threading.Thread | None = None
    """SGLang's thread that receives messages."""

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False, **others: Any
    ) -> None:
        self.hetero_options = read(os.environ)
        self.hetero_side = Side(disaggregation_mode.value)
        self.hetero_rank = current_rank(self.hetero_side, args)
        self.hetero_cuda = self.hetero_rank.device.type == "cuda"
        self.hetero_counts = Counters(observer(self.hetero_side))
        self.hetero_perf = perf_of(self.hetero_side, self.hetero_rank.name, self.hetero_options)
        self._hetero_state_types = list(args.state_types)
        self._hetero_engine: Engine | None = None
        self._hetero_seal = seal_of(self.hetero_options.token_file)
        self._hetero_posts = Posts()
        self._hetero_faults = Faults(self.hetero_rank.name, logger)
        self._hetero_peers = Peers(self, self._hetero_seal, owed_seconds=make.bootstrap_timeout())
        self._hetero_liveness: Liveness | DecodeRanks | None = None
        self._hetero_announcer: Announcer | None = None
        # Requests that were never bound have no epoch of the decode side, and are told under a name of their own.
        self._hetero_refuser, self._hetero_given_up = uuid.uuid4().hex, 0
        self._hetero_memory = None
        if self._hetero_able:
            self._hetero_memory = make.staging(self.hetero_rank, self.hetero_options, server_args)
        elif self.hetero_mode is not Mode.OFF:
            refuse_start(self.hetero_side, sglang_reader())
            logger.warning(
                "%s takes SGLang's own path only: %s", self.hetero_rank.name, self.hetero_rank.here.unsupported
            )
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend, **others)  # type: ignore[call-arg]
        if self.hetero_side is Side.PREFILL and self.hetero_mode is not Mode.OFF:
            self._hetero_announcer = self._hetero_announce()
        reports = folder.given(os.environ)
        if reports is None:
            return
        told = RankTold(self.hetero_rank, reports)
        if self.hetero_mode is Mode.OFF:
            told.insist()  # routers are to know what SGLang's path would do wrong; of health it says nothing
        else:
            self.hetero_watch = Watch(lambda: report_of(self), reports, tell=told.along(tell_report))

    @property
    def _hetero_able(self) -> bool:
        """Whether this rank can take our path at all."""
        return (
            self.hetero_mode is not Mode.OFF
            and self.hetero_rank.manifest is not None
            and not (self.hetero_rank.here.unsupported)
        )

    # The engine.

    def _registerable_regions(self) -> list[tuple[int, int]]:
        regions: list[tuple[int, int]] = super()._registerable_regions()  # type: ignore[misc]
        memory = self._hetero_memory
        return regions if memory is None else [*regions, (memory.data_ptr(), memory.numel())]

    def register_buffer_to_engine(self) -> None:
        """All regions in one batch, which MemFabric wants; and a refusal stops the server, which SGLang only logs."""
        if self._hetero_memory is None:
            super().register_buffer_to_engine()  # type: ignore[misc]
            return
        if self._hetero_engine is None:
            self._hetero_engine = make.engine(self.engine)  # type: ignore[attr-defined]
        self._hetero_engine.register(self._registerable_regions())
        if self.hetero_side is Side.PREFILL and self.hetero_prefill is None:
            self.hetero_prefill = make.prefill_side(
                self.hetero_rank,
                self.hetero_options,
                self._hetero_engine,
                self._hetero_memory,
                post=self._hetero_post,
                control=self._hetero_send_first,
                events=self,
                counters=self.hetero_counts,
                perf=self.hetero_perf,
                stall_seconds=self.hetero_options.stall_seconds(make.waiting_timeout()),
            )
            self._hetero_liveness = DecodeRanks(self.hetero_rank.name, self.hetero_prefill, self._hetero_engine)
            self.hetero_layerwise = make.layerwise(self.hetero_rank, self.hetero_options, self.hetero_prefill)
        elif self.hetero_side is Side.DECODE and self.hetero_decode is None:
            self.hetero_decode = make.decode_side(
                self.hetero_rank,
                self.hetero_options,
                self._hetero_engine,
                self._hetero_memory,
                post=self._hetero_post,
                counters=self.hetero_counts,
                perf=self.hetero_perf,
                endpoint=self._hetero_endpoint,
            )
            self._hetero_peers.side, self._hetero_peers.engine = self.hetero_decode, self._hetero_engine
            self._hetero_liveness = Liveness(self._hetero_peers, self.hetero_decode, self._hetero_engine, self)

    def _hetero_post(self, endpoint: Endpoint, payload: bytes) -> None:
        there = Purpose.TO_DECODE if self.hetero_side is Side.PREFILL else Purpose.TO_PREFILL
        self._hetero_posts.post(endpoint, self._hetero_seal.seal(payload, there, str(endpoint).encode()))

    # Messages.

    def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Callable[[], list[bytes] | None]:
        """SGLang's threads get what is theirs; ours is taken out before; and nothing that comes ends such a thread."""
        receive: Callable[[], list[bytes] | None] = super()._make_worker_recv(socket, timeout_ms)  # type: ignore[misc]

        def receive_theirs() -> list[bytes] | None:
            self._hetero_receiver = threading.current_thread()
            while True:
                frames = receive()
                payload = messages.find(frames) if frames else None
                if payload is None:
                    return frames
                self.hetero_receive(payload)

        return survives(
            receive_theirs,
            stopped=lambda: bool(self._stopped),  # type: ignore[attr-defined]
            dropped=lambda error: self._hetero_dropped(f"{type(error).__name__} of SGLang", error, traceback=True),
        )

    def hetero_receive(self, payload: bytes) -> None:
        """A message of ours, from whoever sent it."""
        side = self.hetero_prefill or self.hetero_decode
        try:
            if side is None:
                raise TransferRefused("this rank does not take part")
            here = Purpose.TO_PREFILL if self.hetero_side is Side.PREFILL else Purpose.TO_DECODE
            side.handle(messages.decode(self._hetero_seal.open(payload, here, str(self._hetero_endpoint).encode())))
        except SealError as error:
            self._hetero_dropped("unsealed", error)
        except HeteroError as error:
            self._hetero_dropped(type(error).__name__, error)
        except Exception as error:
            self._hetero_dropped(type(error).__name__, "an error of ours", traceback=True)

    def _hetero_dropped(self, kind: str, why: object, *, traceback: bool = False) -> None:
        self.hetero_counts.add("unsealed" if kind == "unsealed" else "dropped")
        self._hetero_faults.note(kind, f"dropped a message: {why}", traceback=traceback)

    @cached_property
    def _hetero_endpoint(self) -> Endpoint:
        """Where peers send this rank's messages, as they are told."""
        return Endpoint(numeric(self.local_ip), self.rank_port)  # type: ignore[attr-defined]

    # Prefill.

    def _hetero_announce(self) -> Announcer:
        """Tell the own server's control service who this rank is, or its bootstrap server why it cannot take part."""
        address, side = make.own_bootstrap(self), self.hetero_prefill
        if side is None:
            return Announcer(address, self._hetero_seal, refusal="; ".join(self.hetero_rank.here.unsupported))
        engine, manifest, endpoint = self._hetero_engine, self.hetero_rank.manifest, self._hetero_endpoint
        assert engine is not None and manifest is not None
        place = manifest.coordinates
        return Announcer(
            address,
            self._hetero_seal,
            hello=messages.Hello(
                incarnation=manifest.incarnation,
                manifest=encode_manifest(manifest),
                host=endpoint.host,
                port=endpoint.port,
                session=engine.session,
            ),
            dp_rank=place.dp_rank,
            identity=messages.control_identity("prefill", endpoint.host, str(place), manifest.incarnation),
            topology=side.topology,
        )

    def _hetero_send_first(self, message: messages.Message) -> None:
        """Send the first token's message. Raises HeteroError if there is no control service."""
        if self._hetero_announcer is None:
            raise TransferRefused(f"{self.hetero_rank.name} is still being started; try again")
        self._hetero_announcer.send_first(message)

    def add_transfer_request(  # noqa: PLR0917 (SGLang's signature)
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        **others: Any,
    ) -> None:
        """A chunk that SGLang's scheduler hands over."""
        side = self.hetero_prefill
        if side is None or not side.owns(bootstrap_room):
            super().add_transfer_request(  # type: ignore[misc]
                bootstrap_room,
                kv_indices,
                index_slice,
                is_last_chunk,
                aux_index,
                state_indices,
                num_kv_tokens,
                wait_event=wait_event,
                **others,
            )
            return
        first_page = index_slice.start or 0
        tokens = num_kv_tokens or 0
        first = None
        if is_last_chunk and self._hetero_speaks:
            assert aux_index is not None
            metadata = self.hetero_rank.metadata
            try:
                row = read_row(metadata, aux_index)
            except Exception as error:
                side.fail(bootstrap_room, f"{self.hetero_rank.name}: {type(error).__name__}: {error}")
                return
            length = first_page * self.hetero_rank.here.page_size + tokens
            first = FirstToken(int(metadata.output_ids[aux_index][0]), row, length)
        side.send(
            bootstrap_room,
            first_page=first_page,
            pages=np.asarray(kv_indices, dtype=np.int64),
            tokens=tokens,
            last=is_last_chunk,
            slot=self.hetero_slot(state_indices) if is_last_chunk else -1,
            first=first,
            **({} if wait_event is None else {"ready": wait_event.query}),
        )

    @property
    def _hetero_speaks(self) -> bool:
        """Whether this is the one rank of its replica that tells the first token."""
        manifest = self.hetero_rank.manifest
        assert manifest is not None
        place = manifest.coordinates
        return place.tp_rank == 0 and place.pp_rank == place.pp_size - 1

    def hetero_slot(self, state_indices: list[Any] | None) -> int:
        """The linear-state slot among the indices that SGLang gives, -1 without."""
        from sglang.srt.disaggregation.base.conn import StateType

        for kind, indices in zip(self._hetero_state_types, state_indices or (), strict=False):
            if kind == StateType.MAMBA and indices is not None:
                return int(np.asarray(indices).reshape(-1)[0])
        return -1

    def hetero_owns(self, room: int) -> bool:
        """Whether a request goes our way."""
        return self.hetero_prefill is not None and self.hetero_prefill.owns(room)

    def hetero_fail(self, room: int, reason: str) -> None:
        """Let SGLang see that a request has failed."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.record_failure(room, reason)  # type: ignore[attr-defined]
        self.update_status(room, KVPoll.Failed)  # type: ignore[attr-defined]

    def bound(self, room: int) -> None:
        """Every decode rank has told where the request goes: SGLang may compute it."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.update_status(room, KVPoll.WaitingForInput)  # type: ignore[attr-defined]

    def succeeded(self, room: int) -> None:
        """Every decode rank has everything."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.update_status(room, KVPoll.Success)  # type: ignore[attr-defined]

    def forgotten(self, room: int) -> None:
        """Decode had bound it, and nobody has asked prefill for it."""
        self.request_status.pop(room, None)  # type: ignore[attr-defined]

    def failed(self, room: int, reason: str) -> None:
        """It will not arrive. The sender asks for the reason, also one that is made later (SenderMixin.poll)."""

    def _publish_peer_registration(self, session: str, registration: Any) -> str | None:
        """A decode rank that takes SGLang's own path has registered: refuse it where that would be wrong."""
        found: str | None = super()._publish_peer_registration(session, registration)  # type: ignore[misc]
        try:
            decision = self._hetero_judge(registration)
        except Exception as error:
            # SGLang's thread for control messages would end with the exception.
            logger.exception("%s: a decode rank's registration", self.hetero_rank.name)
            decision = Decision(Path.REFUSED, f"its registration cannot be read: {type(error).__name__}: {error}")
        if decision.path is not Path.REFUSED:
            return found
        with self.session_lock:  # type: ignore[attr-defined]
            self.state_layout_rejections[session] = decision.reason  # type: ignore[attr-defined]
        return decision.reason

    def _hetero_judge(self, registration: Any) -> Decision:
        """Whether SGLang's own path serves this decode rank right."""
        peer = Registration(
            f"decode at {registration.endpoint}",
            registration.dst_attn_tp_size,
            len(registration.dst_kv_ptrs),
            registration.dst_kv_item_len,
            tuple(registration.dst_kv_item_lens),
            tuple(length for lengths in registration.dst_state_item_lens for length in lengths),
            tuple(dim for dims in registration.dst_state_dim_per_tensor for dim in dims),
        )
        # What takes SGLang's path was decided by decode, which knows our mode.
        mode = Mode.AUTO if self.hetero_mode is Mode.ALWAYS else self.hetero_mode
        return decide(mode, self.hetero_rank.here, peer, capable=False)

    # Decode.

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether it is known which path requests of this prefill server take. False: SGLang asks again, 15 times."""
        if not self._hetero_peers.ready(bootstrap_addr):
            return False
        if bootstrap_addr in self.prefill_info_table:  # type: ignore[attr-defined]
            return True
        self._hetero_peers.missed(bootstrap_addr)
        return False

    def hetero_decide(self, server: PrefillServer, sources: Mapping[int, SourceSet]) -> Decision:
        """The path of a server's requests. Raises HeteroError if the caches of the two sides do not go together."""
        info, offer, rank = server.info, server.capability, self.hetero_rank
        unsupported = route_reasons(info)
        if offer is not None and server.capable:
            unsupported += offer.unsupported
        side, mode = self.hetero_decode, self.hetero_mode
        same = None if side is None or not sources else same_layouts(sources[0].sources, side.manifest)
        if offer is not None and offer.mode == Mode.ALWAYS and mode is Mode.AUTO:
            mode = Mode.ALWAYS
        peer = Route(
            f"prefill at {server.address}",
            info.attn_tp_size,
            info.page_size,
            info.kv_cache_dtype,
            repaired=offer is not None,
            unsupported=tuple(unsupported),
        )
        return decide(mode, rank.here, peer, capable=server.capable, same_layout=same)

    def hetero_adopt(self, server: PrefillServer, decision: Decision) -> None:
        """Let SGLang begin requests of a server. It may ask the server itself, so not on its scheduler's thread."""
        address, info = server.address, server.info
        if decision.path is Path.UPSTREAM:
            try:
                if super().try_ensure_parallel_info(address):  # type: ignore[misc]
                    return
                self._hetero_peers.forget(address)
                raise PeerAway(f"prefill at {address} has answered once and then not; try again")
            except PeerAway:
                raise
            except Exception as error:
                # SGLang refuses pairs by exceptions that would end its own scheduler.
                reason = f"{self.hetero_rank.name} and prefill at {address}: {type(error).__name__}: {error}"
                logger.warning("%s", reason)
                self._hetero_peers.decide(address, Decision(Path.REFUSED, reason))
        info.target_tp_rank, info.target_tp_ranks = 0, list(range(info.attn_tp_size))
        info.target_cp_ranks, info.target_pp_ranks = [0], list(range(info.pp_size))
        info.required_dst_info_num = info.required_prefill_response_num = 1
        self.prefill_info_table[address] = info  # type: ignore[attr-defined]

    def hetero_drop(self, address: str) -> None:
        """SGLang begins no request of a server before it is found anew, and uses no address of its former ranks."""
        with self.connection_lock:  # type: ignore[attr-defined]
            self.prefill_info_table.pop(address, None)  # type: ignore[attr-defined]
            pool = self.connection_pool  # type: ignore[attr-defined]
            for key in [key for key in pool if key.startswith(f"{address}_")]:
                del pool[key]
            # SGLang keeps one for every address that there has ever been. Its set of rooms for each has to stay: a
            # receiver that is being made adds to it without this lock, and would be missed by `hetero_lost`.
            self.heartbeat_failures.pop(address, None)  # type: ignore[attr-defined]
        with self.session_pool_lock:  # type: ignore[attr-defined]
            self.session_pool.pop(address, None)  # type: ignore[attr-defined]

    def hetero_rooms(self, address: str) -> frozenset[int]:
        """The requests of a server that there are now, those included that have not begun."""
        with self.connection_lock:  # type: ignore[attr-defined]
            return frozenset(self.addr_to_rooms_tracker.get(address, ()))  # type: ignore[attr-defined]

    def hetero_lost(self, address: str, reason: str, rooms: frozenset[int] | None = None) -> None:
        """The server has ended: its requests fail, with this reason instead of SGLang's.

        rooms: those that there were when that was found out, since later ones may be for its successor; None: all.
        """
        tracker: dict[str, set[int]] = self.addr_to_rooms_tracker  # type: ignore[attr-defined]
        with self.connection_lock:  # type: ignore[attr-defined]
            # This set has to stay, see above; SGLang is given another one, which it drops.
            tracked = tracker.get(address, set())
            lost = set(tracked) if rooms is None else tracked & rooms
            tracked -= lost
            tracker[address] = set(lost)
        try:
            super()._handle_node_failure(address)  # type: ignore[misc]
        finally:
            with self.connection_lock:  # type: ignore[attr-defined]
                tracked |= tracker.get(address, set())
                tracker[address] = tracked
        with self.failure_lock:  # type: ignore[attr-defined]
            records = self.failure_records  # type: ignore[attr-defined]
            records.update({room: reason for room in lost if room in records})

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """SGLang's heartbeat has given a server up: it has not answered for ten seconds or so."""
        reason = f"prefill at {failed_bootstrap_addr} does not answer SGLang's heartbeat any more"
        for step in (self._hetero_peers.forget, partial(self.hetero_lost, reason=reason)):
            try:
                step(failed_bootstrap_addr)
            except Exception:  # SGLang's thread would end with it, and ask no server any more
                logger.exception("%s: %s", self.hetero_rank.name, reason)

    def hetero_takes(self, address: str, room: int) -> bool:
        """Whether a request that begins takes our path. Raises HeteroError if its server has to be asked first."""
        self._hetero_peers.begins(address, room)
        path = self._hetero_peers.path(address)
        if path is None:
            raise TransferRefused(self.hetero_problem(address))
        return path is Path.OURS

    def hetero_problem(self, address: str) -> str:
        """Why requests of a prefill server cannot begin."""
        return self._hetero_peers.problem(address) or f"prefill at {address} has to be asked first; try again"

    def hetero_refusal(self, address: str) -> str | None:
        """Why requests of this prefill server fail; it is asked anew for the next one, since servers are restarted."""
        return self._hetero_peers.refusal(address)

    def hetero_ranks(self, address: str, dp_rank: int) -> tuple[Addressee, ...]:
        """Where the ranks of a prefill replica take messages, as far as that is known."""
        return self._hetero_peers.ranks(address, dp_rank)

    def hetero_owe(self, address: str, room: int, reason: str) -> None:
        """Tell a prefill server of a request that is given up, as soon as it is known where its ranks are."""
        if self.hetero_mode is not Mode.OFF:
            self._hetero_peers.owe(address, room, reason)

    def hetero_give_up(self, room: int, ranks: Sequence[Addressee], reason: str, *, ours: bool) -> None:
        """Tell prefill ranks that a request that was never bound will not be: they would wait for their timeout.

        ours: whether they take our messages; else they are told in SGLang's language.
        """
        with self.failure_lock:  # type: ignore[attr-defined]
            self._hetero_given_up += 1
            epoch = self._hetero_given_up
        abort = messages.Abort(room=room, epoch=epoch, incarnation=self._hetero_refuser, reason=reason)
        for rank in ranks:
            try:
                if ours:
                    self._hetero_post(rank.endpoint, messages.encode(replace(abort, source=rank.incarnation)))
                else:
                    from sglang.srt.disaggregation.common.conn import AbortNotification

                    self._hetero_posts.post(rank.endpoint, *AbortNotification(room=room).to_zmq())
            except Exception as error:  # the others wait as well
                logger.warning("room %d: the prefill rank at %s was not told: %s", room, rank.endpoint, error)

    def hetero_listens(self, address: str) -> bool:
        """Whether the ranks of that prefill server take our messages."""
        return self._hetero_peers.listens(address)

    def hetero_sources(self, address: str, dp_rank: int) -> SourceSet:
        """The ranks of a prefill replica. Raises HeteroError if they are not known."""
        return self._hetero_peers.sources(address, dp_rank)

    def hetero_reason(self, room: int) -> str:
        """What SGLang has recorded as the cause of a request's failure."""
        with self.failure_lock:  # type: ignore[attr-defined]
            known = self.failure_records.get(room)  # type: ignore[attr-defined]
        return str(known or f"{self.hetero_rank.name}: SGLang has failed the request; its log may say why")

    def hetero_explain(self, room: int, reason: str) -> None:
        """Record a cause of a request's failure, unless this rank has one."""
        with self.failure_lock:  # type: ignore[attr-defined]
            self.failure_records.setdefault(room, reason)  # type: ignore[attr-defined]

    # For status pages and tests.

    def hetero_state(self) -> dict[str, int]:
        """What our path holds at the moment: requests, units of staging, writes in flight."""
        side = self.hetero_prefill or self.hetero_decode
        return {} if side is None else side.state

    def hetero_integrity(self) -> list[str]:
        """Where our books do not agree, and which threads have ended; empty if all is right. For the same."""
        side = self.hetero_prefill or self.hetero_decode
        followed = self.hetero_layerwise
        found = [] if side is None else side.check_integrity()
        found.append("" if followed is None else followed.follower.worker.fault)
        for worker in (self._hetero_announcer, self._hetero_liveness):
            found.append("" if worker is None else worker.worker.fault)
        found.append(receiver_fault(self._hetero_receiver, stopped=bool(getattr(self, "_stopped", False))))
        return [fault for fault in found if fault]

    @property
    def hetero_counters(self) -> dict[str, int]:
        """What our path has moved, refused and dropped."""
        return self.hetero_counts.snapshot()
