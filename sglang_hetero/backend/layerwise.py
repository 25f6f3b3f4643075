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
from typing import Any

import torch

from sglang_hetero.layout.component import Item
from sglang_hetero.transfer.device import ForwardLane, HostCopy
from sglang_hetero.transfer.follower import Begun, Follower, Note
from sglang_hetero.transfer.outbox import Placed
from sglang_hetero.transfer.pieces import COMPLETE, layer_done
from sglang_hetero.transfer.prefill import PrefillSide

logger = logging.getLogger(__name__)

WRITERS = ("set_kv_buffer", "set_mla_kv_buffer")
"""Methods of a pool that take a layer and its keys and values, or latents."""
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

    def ended(self) -> None:
        """Model and draft model have run, as far as the host is concerned."""
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

    def __init__(self, scheduler: Any, side: PrefillSide, target_pool: Any, device: torch.device) -> None:
        self.side = side
        self._scheduler = scheduler
        # Inside a forward pass its stream is the current one; run_batch has left it when it returns.
        self.lane = ForwardLane(device)
        self.end_lane = ForwardLane(
            device, scheduler.forward_stream if getattr(scheduler, "enable_overlap", False) else None
        )
        self.follower = Follower(side.manifest.label, side, tells_end=not self.lane.immediate)
        attention, state = (
            {layer for part in side.manifest.components if part.item is item for layer in part.layers}
            for item in (Item.PAGE, Item.SLOT)
        )
        self.double = frozenset(attention & state)
        self._said_hidden = False
        for name in WRITERS:
            if hasattr(target_pool, name):
                setattr(target_pool, name, _watched(getattr(target_pool, name)))

    def start(self, batch: Any) -> Forward | None:
        """A batch is about to run; None if there is nothing of ours in it."""
        if batch.forward_mode.name != EXTEND:
            _pass_over(batch)
            return None
        forward = Forward(self, batch.extend_num_tokens)
        for request in batch.reqs:
            sender = request.disagg_kv_sender
            room = getattr(sender, "bootstrap_room", None)
            if room is None or getattr(sender, "hetero_unseen", True):
                continue
            if request.pending_bootstrap or not self.side.follows(room):
                sender.hetero_unseen = True
                continue
            tokens = len(request.origin_input_ids)
            end, last = min(request.extend_end, tokens), request.extend_end >= tokens
            forward.waiting.append((sender, room, end, last, self._placed(request, end, last=last)))
        return forward if forward.waiting else None

    def _placed(self, request: Any, end: int, *, last: bool) -> Placed:
        """Where the request is kept, as SGLang's send_kv_chunk finds it."""
        scheduler = self._scheduler
        row = request.kv.req_pool_idx
        allocator, pool = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
        page_size = allocator.page_size
        whole = end if last else end // page_size * page_size
        places = allocator.translate_kv_indices_for_transfer(pool.req_to_token[row, :whole])
        slot = None
        if last and hasattr(pool, "req_index_to_mamba_index_mapping"):
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
    def write(layer: Any, places: Any, values: torch.Tensor, *args: Any, **others: Any) -> Any:
        result = original(layer, places, values, *args, **others)
        # A layer that is written in parts is there with the next layer at the latest.
        if _running and len(values) >= _running[-1].tokens:
            _tell(layer.layer_id)
        return result

    return write


def around_run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **others: Any) -> Any:
    """SGLang's Scheduler.run_batch."""
    forward = None
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    layerwise: Layerwise | None = getattr(getattr(queue, "kv_manager", None), "hetero_layerwise", None)
    if layerwise is not None:
        try:
            forward = layerwise.start(batch)
        except Exception:
            logger.exception("a forward pass is not followed")
            _pass_over(batch)
    if forward is None:
        return original(scheduler, batch, *args, **others)
    _running.append(forward)
    try:
        result = original(scheduler, batch, *args, **others)
    finally:
        _running.pop()
    try:
        forward.ended()
    except Exception:
        logger.exception("a forward pass is not followed to its end")
    return result


def around_linear_extend(
    original: Callable[..., Any], backend: Any, layer: Any, forward_batch: Any, *args: Any, **others: Any
) -> Any:
    """SGLang's HybridLinearAttnBackend.forward_extend: of full attention layers the pool tells."""
    result = original(backend, layer, forward_batch, *args, **others)
    if _running:
        number = others["layer_id"] if layer is None else layer.layer_id
        computed = getattr(forward_batch, "extend_num_tokens", None)
        if number not in backend.full_attn_layers and (computed is None or computed >= _running[-1].tokens):
            _tell(number)
    return result


def _tell(layer: int) -> None:
    """Never raises into the model: what is not told goes at the end of the chunk."""
    try:
        _running[-1].told(layer)
    except Exception:
        logger.exception("layer %d is not followed", layer)
