"""One rank process: it takes the steps of a request in the order in which SGLang's event loops take them.

Each public method is a command that flow.py sends (serve.py runs them one after the other in the main thread, as a
scheduler does); what waits for a peer returns at once and is polled.
"""

import array
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hetero.transfer.engine.mooncake import refuses_connections

from . import expectation, scheduler
from .expectation import Placement
from .oracle import Bits, Component
from .sabotage import Rule, Saboteur
from .sides import Request, Shard, Side

STATE_COLUMN, SOCKET_COLUMN = 3, 9
CLOSE_WAIT = "08"
"""Of a line in /proc/net/tcp."""
NO_SLOT = -1
"""Of a model without linear state."""


@dataclass
class Live:
    """A request that a rank holds."""

    request: Request
    req: Any
    """SGLang's Req."""
    decode_request: Any = None
    deadline: float = 0.0
    """Of a failed request on decode: when its memory is free even if prefill has not drained."""
    written: int = 0
    """Prompt positions whose KV the prefill rank has filled in."""
    locations: Any = None
    """On prefill: where each token of the prompt has its KV, `[tokens]`."""


class Rank:
    """What prefill and decode have in common."""

    poison_byte: int

    def __init__(self, shard: Shard, side: Side) -> None:
        self.shard = shard
        self.side = side
        self.scheduler = scheduler.build(shard, side)
        self.scheduler.tree_cache.claim_kv_row = self._claim
        self.live: dict[int, Live] = {}
        self._saboteur: Saboteur | None = None

    @property
    def _hybrid(self) -> bool:
        return bool(self.shard.geometry.linear_layers)

    @property
    def pools(self) -> Any:
        return self.scheduler.pools

    @property
    def manager(self) -> Any:
        """SGLang's or our KV manager."""
        raise NotImplementedError

    def buffers(self) -> list[tuple[expectation.Buffer, Bits]]:
        from . import pools

        return pools.buffers(self.pools)

    def poison(self) -> None:
        """Fill every pool of this rank with the side's byte."""
        for buffer, view in self.buffers():
            view[...] = expectation.untouched(buffer, self.poison_byte)

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

    def free(self) -> dict[str, int]:
        """What nobody holds: pages, request rows, linear-state slots and aux rows."""
        pools = self.pools
        return {
            "pages": pools.allocator.available_size() // self.shard.geometry.page_size,
            "rows": len(pools.requests.free_slots),
            "slots": len(pools.requests.mamba_allocator.free_slots) if self._hybrid else len(pools.requests.free_slots),
            "aux rows": self.scheduler.req_to_metadata_buffer_idx_allocator.available_size(),
        }

    def threads(self) -> int:
        """Threads of this process, native ones included."""
        return len(os.listdir("/proc/self/task"))

    def thread_names(self) -> list[str]:
        """Of each thread of this process: Python's name, or the system's of one that Python does not know."""
        known = {thread.native_id: thread.name for thread in threading.enumerate()}
        found = []
        for number in os.listdir("/proc/self/task"):
            try:
                found.append(known.get(int(number)) or Path(f"/proc/self/task/{number}/comm").read_text().strip())
            except OSError:
                continue  # it has ended meanwhile
        return found

    def sockets(self) -> tuple[int, int]:
        """Open sockets of this process, native ones included, without and of the half-closed ones.

        A half-closed one (CLOSE_WAIT) is a connection whose other end has gone, which this end has not closed.
        """
        found = set()
        for entry in os.listdir("/proc/self/fd"):
            try:
                kind, _, number = os.readlink(f"/proc/self/fd/{entry}").partition(":")
            except OSError:
                continue  # the one with which the folder was read
            if kind == "socket":
                found.add(number.strip("[]"))
        tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()]
        half_closed = {row[SOCKET_COLUMN] for row in rows if row[STATE_COLUMN] == CLOSE_WAIT} & found
        return len(found - half_closed), len(half_closed)

    def resident_bytes(self) -> int:
        """Memory of this process."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def integrity(self) -> list[str]:
        """What a manager of ours finds wrong with its own books; empty if nothing is, and for SGLang's own."""
        if not hasattr(self.manager, "hetero_state"):
            return []
        return [str(problem) for problem in self.manager.hetero_integrity()]

    def doubts(self) -> list[str]:
        """Whom a decode rank of ours keeps units for, and which of that process's ports somebody listens on."""
        side = getattr(self.manager, "hetero_decode", None)
        if side is None:
            return []
        awaited = side.awaited()
        return [
            f"{doubt}; "
            + ", ".join(
                f"{port} of {writer.incarnation} {'refuses' if refuses_connections(port) else 'is open'}"
                for writer in doubt.writers
                if writer.incarnation in awaited
                for port in (awaited[writer.incarnation].session, str(awaited[writer.incarnation].endpoint))
            )
            for doubt in side.doubts()
        ]

    def endpoint(self) -> tuple[str, int]:
        """Where this rank takes messages of its peers."""
        return self.manager.local_ip, int(self.manager.rank_port)

    def sabotage(self, rules: Sequence[Rule]) -> None:
        """From now on these rules hold, and no earlier ones; what those held back goes on."""
        self.let_go()
        if self._saboteur is None:
            self._saboteur = Saboteur(self.manager)
        self._saboteur.take(rules)

    def struck(self) -> list[int]:
        """How often each rule has met something."""
        return [] if self._saboteur is None else self._saboteur.met()

    def let_go(self) -> None:
        """Nothing is sabotaged any more, and what was held back goes on."""
        if self._saboteur is not None:
            self._saboteur.let_go()

    def hetero(self, what: str) -> dict[str, Any]:
        """`hetero_state()` or `hetero_counters` of a manager of ours; empty for SGLang's own."""
        found = getattr(self.manager, what, {})
        return dict(found() if callable(found) else found)

    def _fits(self, request: Request) -> bool:
        free = self.free()
        wanted = -(-request.tokens // self.shard.geometry.page_size)
        return free["pages"] >= wanted and min(free["rows"], free["slots"], free["aux rows"]) > 0

    def _placement(self, live: Live) -> Placement:
        row = self._locations(live).numpy()
        return Placement(
            room=live.request.room,
            seed=live.request.seed,
            tokens=live.request.tokens,
            pages=tuple(int(page) for page in row[:: self.shard.geometry.page_size] // self.shard.geometry.page_size),
            slot=int(live.req.kv.mamba_pool_idx) if self._hybrid else NO_SLOT,
            aux_row=self._aux_row(live),
            drafted=live.request.drafted,
        )

    def _aux_row(self, live: Live) -> int:
        raise NotImplementedError

    def _locations(self, live: Live) -> Any:
        """Where each token of the prompt has its KV, `[tokens]`."""
        return self.pools.requests.req_to_token[live.req.kv.req_pool_idx, : live.request.tokens]

    def _new_req(self, request: Request) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        return Req(
            rid=str(request.room),
            origin_input_text="",
            origin_input_ids=array.array("q", range(request.tokens)),
            sampling_params=SamplingParams(),
            bootstrap_host=request.bootstrap_host,
            bootstrap_port=request.bootstrap_port,
            bootstrap_room=request.room,
        )

    def _release(self, live: Live) -> None:
        """Give pages, slot and row back, as release_kv_cache does without a prefix cache.

        What was in them is overwritten at once, as the next owner might, so that whoever still writes there shows.
        """
        pools, req = self.pools, live.req
        if not req.kv.holds_kv:
            return
        placement = self._placement(live)
        for buffer, view in self.buffers():
            if buffer.component is not Component.AUX:
                view[list(placement.items(buffer.component))] = expectation.untouched(buffer, self.poison_byte)
        page_size = self.shard.geometry.page_size
        tokens = self._locations(live)
        pools.allocator.free(tokens[::page_size].long() // page_size * page_size)
        if self._hybrid:
            pools.requests.free_mamba_cache(req)
        pools.requests.free(req)
        req.kv.mark_kv_released()

    def _claim(self, req: Any) -> bool:
        """SGLang asks this before it frees a request's memory: it is the harness that frees it."""
        self._release(self.live[req.bootstrap_room])
        return True

    def _poison_aux_row(self, row: int) -> None:
        for buffer, view in self.buffers():
            if buffer.component is Component.AUX:
                view[row] = expectation.untouched(buffer, self.poison_byte)


def failure(endpoint: Any) -> str:
    """Why a sender or receiver has failed."""
    try:
        endpoint.failure_exception()
    except Exception as error:
        return str(error)
    return "failed without a reason"
