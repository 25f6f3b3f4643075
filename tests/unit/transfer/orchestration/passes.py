"""Forward passes of one request, each prefill rank at its own pace: layers are written, told, and handed over."""

import random

import numpy as np
import torch

from sglang_hetero.device import HostCopy
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.transfer.outbox import Chunk, Move, Placed
from sglang_hetero.transfer.pieces import COMPLETE, Mark, layer_done
from tests.reshard_oracle.handover import Place
from tests.reshard_oracle.rank import repeated_byte

from .nodes import PrefillNode
from .parts import Request
from .world import World

WRONG = 1 << 20
"""Added to the seed of what a chunk that is not the last leaves in the linear state."""
SOMEBODY_ELSES = 0xE5
"""In pages and slots that the request has left."""


class Pass:
    """The forward passes of a request at one rank. `step` goes on by one layer, draft run or send_kv_chunk.

    late: passes by which send_kv_chunk comes behind its own, as with SGLang's overlap schedule (1). tail: tokens of the
    next page that every chunk but the last computes as well. to: where a prefix cache moves the request, chunk by
    chunk, behind each pass: its pages and slot at the end; what it leaves is overwritten. lag: pages at the end of a
    chunk that it takes over with the next one only, when they have been handed over.
    """

    def __init__(
        self,
        world: World,
        node: PrefillNode,
        request: Request,
        *,
        late: int = 0,
        tail: int = 0,
        to: Place | None = None,
        lag: int = 0,
    ) -> None:
        self.world, self.node, self.request, self.late, self.tail, self.to = world, node, request, late, tail, to
        self.pages, self.slot = list(request.source.pages), request.source.slot
        self.lag, self.moved = lag, 0
        model_layers = {layer for role, layer in node.rank.buffers if not role.draft}
        self.layers = sorted(model_layers)
        self.steps = self._steps()
        self.ended = False
        self.told: set[Mark] = set()

    def step(self) -> None:
        """Go on, if there is anything left."""
        self.ended = next(self.steps, None) is None

    def _steps(self):
        count = len(self.request.ends)
        for number in range(count):
            chunk = self._begin(number)
            for layer in self.layers:
                self._write(number, lambda role, at, layer=layer: not role.draft and at <= layer)
                yield self._tell(chunk, layer_done(layer))
            self._write(number, lambda role, at: True)
            yield self._tell(chunk, COMPLETE)
            last = number == count - 1
            # SGLang sends the earlier chunk first. The other order must be right, too.
            for what in ("move", "send") if self.tail % 2 or not self.late else ("send", "move"):
                if what == "move" and self.to is not None and not (last and self.late):
                    self._move(number)
                if what == "send" and number >= self.late:
                    yield self._send(number - self.late)
        if self.to is not None and self.late:
            self._move(count - 1)
        for number in range(max(0, count - self.late), count):
            yield self._send(number)

    def _tokens(self, number: int) -> int:
        """Computed by the end of a pass."""
        request, page = self.request, self.world.shapes[0].page_size
        last = number == len(request.ends) - 1
        return request.tokens if last else min(request.ends[number] * page + self.tail, request.tokens - 1)

    def _begin(self, number: int) -> Chunk | None:
        request, page = self.request, self.world.shapes[0].page_size
        end, last = self._tokens(number), number == len(request.ends) - 1
        pages = -(-end // page) if last else end // page
        ids = HostCopy(torch.tensor(self.pages[:pages]))
        slot = HostCopy(torch.tensor(self.slot)) if last else None
        return self.node.side.begin(request.room, end=end, last=last, placed=Placed(ids, slot))

    def _write(self, number: int, there) -> None:
        """What the pass has left in the caches so far; the state of a chunk that is not the last is an earlier one."""
        request, last = self.request, number == len(self.request.ends) - 1
        page = self.world.shapes[0].page_size
        pages = self.pages[: -(-self._tokens(number) // page)]
        place = (pages, self.slot, self._tokens(number))
        paged = lambda role: role not in {Role.CONV, Role.SSM}  # noqa: E731
        self.node.rank.write(request.seed, *place, only=lambda role, at: paged(role) and there(role, at))
        seed = request.seed + (0 if last else WRONG)
        self.node.rank.write(seed, *place, only=lambda role, at: not paged(role) and there(role, at))

    def _tell(self, chunk: Chunk | None, mark: Mark) -> Mark:
        if chunk is not None:
            self.node.side.reached(self.request.room, chunk, mark)
        return mark

    def _send(self, number: int) -> int:
        # The last step of the last chunk's send: what follows on decode needs the caches, which hold everything now.
        begin, end = ((0, *self.request.ends)[number], self.request.ends[number])
        slot = self.slot if number == len(self.request.ends) - 1 else -1
        self.world.send_chunk_of(self.node, self.request, number, pages=np.array(self.pages[begin:end]), slot=slot)
        return number

    def _move(self, number: int) -> None:
        """Pages are other ones from now on, of this chunk and earlier ones, and behind the last chunk the slot is."""
        assert self.to is not None
        last = number == len(self.request.ends) - 1
        move = self.node.side.move(self.request.room)
        end = self.request.ends[number] - (0 if last else self.lag)
        for position in range(self.moved, end):
            self._carry(Item.PAGE, self.pages[position], self.to.pages[position])
            self.pages[position] = self.to.pages[position]
        self.moved = max(self.moved, end)
        if last:
            self._carry(Item.SLOT, self.slot, self.to.slot)
            self.slot = self.to.slot
        if move is not None:
            self.locate(move)

    def locate(self, move: Move) -> None:
        """Say where the request is."""
        placed = Placed(HostCopy(torch.tensor(self.pages[: move.pages])), HostCopy(torch.tensor(self.slot)))
        self.node.side.locate(self.request.room, move, placed)

    def _carry(self, kind: Item, old: int, new: int) -> None:
        for rank in (self.node.rank, self.node.twin):
            for buffer in rank.buffers.values():
                if buffer.tensor.item is kind:
                    buffer.items[new] = buffer.items[old]
                    buffer.items[old] = repeated_byte(SOMEBODY_ELSES, buffer.tensor.itemsize)


def run(world: World, passes: list[Pass], chance: random.Random, *, polls: bool = True) -> None:
    """Every rank goes on at random until all have ended; messages and decode's polls between."""
    while left := [one for one in passes if not one.ended]:
        chance.choice(left).step()
        if polls and chance.random() < 0.5:
            world.step(send=False)
