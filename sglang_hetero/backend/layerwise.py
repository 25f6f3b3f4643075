"""Follows a prefill rank's forward passes, so that caches go to decode layer by layer while the model still computes.

SGLang calls us at four places, all on its scheduler's thread: around `Scheduler.run_batch`; when the target model's
pool is given a layer's keys and values (the pool object itself is watched: the draft model's has the same class);
behind a linear layer's extend. What is seen is only noted (transfer/follower.py). Nothing of this decides what is sent:
SGLang's send_kv_chunk does, and what was not noted before goes with it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from sglang_hetero.device import ForwardLane, HostCopy
from sglang_hetero.layout.component import Item
from sglang_hetero.transfer.follower import Begun, Follower, Located, Note
from sglang_hetero.transfer.outbox import REPORT, Move, Placed, covered
from sglang_hetero.transfer.pieces import COMPLETE, layer_done
from sglang_hetero.transfer.prefill import PrefillSide

logger = logging.getLogger(__name__)

WRITERS = ("set_kv_buffer", "set_mla_kv_buffer")
"""Methods of a pool that take a layer and its keys and values, or latents."""
NO_LOAD = -1
"""SGLang's hicache_consumer_index of a batch that waits for nothing from its host cache."""
EXTEND = "EXTEND"
"""SGLang's forward mode of a plain prefill; others run layers in parts, twice, or of other requests too."""

_running: list[Forward] = []
"""The forward pass that runs at the moment: a process has one scheduler, and it runs one at a time."""


class Forward:
    """One forward pass with requests of ours in it."""

    def __init__(self, owner: Layerwise, tokens: int) -> None:
        self.owner = owner
        self.tokens = tokens
        """That the batch computes."""
        self.waiting: list[tuple[Any, int, int, bool, Placed]] = []
        """Sender, room, where the chunk ends, whether it is the last, where the request is kept."""
        self.begun: list[Begun] = []
        self.layer = -1

    def told(self, layer: int) -> None:
        """The model has enqueued this layer's caches."""
        if layer <= self.layer:
            return
        if self.layer < 0:
            self._begin()
        self.layer = layer
        if self.begun:
            # Of a layer with attention and linear state only one is there now; it is done with the next one.
            done = layer_done(layer - (layer in self.owner.double))
            self.owner.follower.put(Note(self.begun, done, self.owner.lane.done()))

    def _begin(self) -> None:
        # Not before the first layer: SGLang sends what the prefix cache holds of a request before it computes.
        for sender, room, end, last, placed in self.waiting:
            try:
                chunk = self.owner.side.begin(room, end=end, last=last, placed=placed)
            except Exception:
                logger.exception("room %d is not followed", room)
                sender.hetero_unseen = True
                continue
            if chunk is not None:
                self.begun.append(Begun(room, chunk))

    def end(self) -> None:
        """Model and draft model have run, as far as the host is concerned. Raises nothing."""
        try:
            self._end()
        except Exception:
            self.owner.report("a forward pass is not followed to its end")

    def _end(self) -> None:
        if self.layer < 0:
            self.owner.hidden()
            for sender, *_ in self.waiting:
                sender.hetero_unseen = True
        elif self.begun:
            if self.owner.end_lane.immediate:
                for each in self.begun:
                    self.owner.side.computed(each.room, last=each.chunk.last)
            self.owner.follower.put(Note(self.begun, COMPLETE, self.owner.end_lane.done()))


class Layerwise:
    """Of one prefill rank."""

    def __init__(
        self, scheduler: Any, side: PrefillSide, target_pool: Any, device: torch.device, *, early: bool = True
    ) -> None:
        """early: send layer by layer. Where a prefix cache moves requests to has to be known in any case."""
        self.side = side
        self._scheduler = scheduler
        # Inside a forward pass its stream is the current one; run_batch has left it when it returns.
        self.lane = ForwardLane(device)
        self.end_lane = ForwardLane(
            device, scheduler.forward_stream if getattr(scheduler, "enable_overlap", False) else None
        )
        self.follower = Follower(side.manifest.label, side, tells_end=not self.lane.immediate, device=device)
        attention, state = (
            {layer for part in side.manifest.components if part.item is item for layer in part.layers}
            for item in (Item.PAGE, Item.SLOT)
        )
        self.double = frozenset(attention & state)
        self._said_hidden = False
        self.failed = False
        """Whether an error of ours has been logged."""
        self._early = early
        for name in WRITERS if early else ():
            if hasattr(target_pool, name):
                setattr(target_pool, name, _watched(getattr(target_pool, name)))

    def begin(self, batch: Any) -> Forward | None:
        """The same, and no error of ours reaches SGLang."""
        try:
            return self.start(batch)
        except Exception:
            self.report("a forward pass is not followed")
            with suppress(Exception):
                _pass_over(batch)
            return None

    def report(self, what: str) -> None:
        """An error of ours: at full length once."""
        self.side.counters.add("hidden")
        logger.log(logging.DEBUG if self.failed else logging.ERROR, what, exc_info=True)
        self.failed = True

    def start(self, batch: Any) -> Forward | None:
        """A batch is about to run; None if there is nothing of ours in it."""
        if not self._early:
            return None
        # Pages that come back from a host cache are still on their way when a layer writes its own.
        loads = getattr(batch, "hicache_consumer_index", NO_LOAD) != NO_LOAD
        if batch.forward_mode.name != EXTEND or loads or self._two_batches():
            _pass_over(batch)
            return None
        forward = Forward(self, batch.extend_num_tokens)
        for request in batch.reqs:
            sender = request.disagg_kv_sender
            room = getattr(sender, "bootstrap_room", None)
            if room is None or getattr(sender, "hetero_unseen", True):
                continue
            if request.pending_bootstrap or request.host_hit_length > 0 or not self.side.follows(room):
                sender.hetero_unseen = True
                continue
            tokens = len(request.origin_input_ids)
            end, last = min(request.extend_end, tokens), request.extend_end >= tokens
            page_size = self._scheduler.token_to_kv_pool_allocator.page_size
            whole = min(end, covered(end, page_size, last=last) * page_size)
            forward.waiting.append((sender, room, end, last, self._place(request, whole, state=last)))
        return forward if forward.waiting else None

    def _two_batches(self) -> bool:
        """Whether SGLang runs a batch in two halves, layer by layer in turns."""
        from sglang.srt.layers.moe.utils import is_tbo_enabled

        return bool(is_tbo_enabled())

    def move(self, request: Any) -> Move | None:
        """SGLang is about to hand what a request has computed to its prefix cache, which may have some of it already.

        The request is in other pages then, and perhaps another slot, and its own are somebody else's. None: it stays.
        """
        room = getattr(request.disagg_kv_sender, "bootstrap_room", None)
        if room is None or not self._scheduler.tree_cache.supports_prefix_sharing():
            return None
        return self.side.move(room)

    def moved(self, request: Any, move: Move) -> None:
        """It has: say where all of the request is."""
        page_size = self._scheduler.token_to_kv_pool_allocator.page_size
        end = min(move.pages * page_size, request.extend_end, len(request.origin_input_ids))
        placed = self._place(request, end, state=True)
        if self.lane.immediate:
            self.side.locate(request.bootstrap_room, move, placed)
        else:
            self.follower.put(Located(request.bootstrap_room, move, placed))

    def _place(self, request: Any, end: int, *, state: bool) -> Placed:
        """Where the request is kept up to token `end`, and its slot, as SGLang's send_kv_chunk finds them."""
        scheduler = self._scheduler
        row = request.kv.req_pool_idx
        allocator, pool = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
        page_size = allocator.page_size
        places = allocator.translate_kv_indices_for_transfer(pool.req_to_token[row, :end])
        slot = None
        if state and hasattr(pool, "req_index_to_mamba_index_mapping"):
            slot = HostCopy(pool.translate_mamba_indices(pool.req_index_to_mamba_index_mapping[row]))
        return Placed(HostCopy(places[::page_size] // page_size), slot)

    def hidden(self) -> None:
        """A forward pass has told nothing of its layers."""
        self.side.counters.add("hidden")
        if not self._said_hidden:
            self._said_hidden = True
            logger.warning(
                "%s: a forward pass ran without telling its layers (a replayed graph?); what such passes compute goes "
                "at the end of each chunk",
                self.side.manifest.label,
            )

    def close(self) -> None:
        """Stop the thread."""
        self.follower.stop()


def _pass_over(batch: Any) -> None:
    """Chunks of a batch are not begun; nor are later ones of its requests, which would be handed over behind them."""
    for request in batch.reqs:
        sender = request.disagg_kv_sender
        if hasattr(sender, "hetero_unseen"):
            sender.hetero_unseen = True


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    """A pool's writer that tells the layer once it has been written."""

    @functools.wraps(original)
    def write(*args: Any, **others: Any) -> Any:
        result = original(*args, **others)
        if _running:
            _tell_written(*args, **others)
        return result

    return write


def _tell_written(layer: Any, places: Any, *values: Any, **others: Any) -> None:
    """A pool has been given a layer's values: keys first, or latents."""
    try:
        found = values[0] if values else others.get("cache_k", others.get("cache_k_nope"))
        # A layer that is written in parts is there with the next layer at the latest.
        if found is not None and len(found) >= _running[-1].tokens:
            _running[-1].told(layer.layer_id)
    except Exception:
        _not_followed()


def _tell_extended(backend: Any, layer: Any, forward_batch: Any, others: dict[str, Any]) -> None:
    """A linear layer has run."""
    try:
        number = others["layer_id"] if layer is None else layer.layer_id
        computed = getattr(forward_batch, "extend_num_tokens", None)
        if number not in backend.full_attn_layers and (computed is None or computed >= _running[-1].tokens):
            _running[-1].told(number)
    except Exception:
        _not_followed()


def _not_followed() -> None:
    """An error of ours must not reach the model: what is not told goes at the end of the chunk."""
    _running[-1].owner.report("a layer is not followed")


def around_run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **others: Any) -> Any:
    """SGLang's Scheduler.run_batch."""
    layerwise = _of(scheduler)
    forward = layerwise.begin(batch) if layerwise is not None else None
    if forward is None:
        return original(scheduler, batch, *args, **others)
    _running.append(forward)
    try:
        result = original(scheduler, batch, *args, **others)
    finally:
        _running.pop()
    forward.end()
    return result


def around_linear_extend(
    original: Callable[..., Any], backend: Any, layer: Any, forward_batch: Any, *args: Any, **others: Any
) -> Any:
    """SGLang's HybridLinearAttnBackend.forward_extend: of full attention layers the pool tells."""
    result = original(backend, layer, forward_batch, *args, **others)
    if _running:
        _tell_extended(backend, layer, forward_batch, others)
    return result


def around_checkpoint(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **others: Any) -> Any:
    """SGLang's checkpoint_disagg_prefill: before a chunk is handed over, or the next one runs."""
    layerwise = _of(scheduler)
    move = None
    try:
        move = layerwise.move(request) if layerwise is not None else None
    except Exception as error:
        _lost(layerwise, request, error)
    result = original(scheduler, request, *args, **others)
    if layerwise is not None and move is not None:
        try:
            layerwise.moved(request, move)
        except Exception as error:
            _lost(layerwise, request, error)
    return result


def _lost(layerwise: Layerwise | None, request: Any, error: Exception) -> None:
    """It is not known where a request is: nothing of it may be read any more."""
    if layerwise is not None:
        layerwise.report("a request is moved")
        reason = f"it is not known where SGLang's prefix cache has put it ({type(error).__name__}: {error}); {REPORT}"
        layerwise.side.fail(request.bootstrap_room, f"{layerwise.side.manifest.label}: {reason}")


def _of(scheduler: Any) -> Layerwise | None:
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    found: Layerwise | None = getattr(getattr(queue, "kv_manager", None), "hetero_layerwise", None)
    return found
