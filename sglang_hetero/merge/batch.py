"""A batch: all pieces that are ready, from one staging arena into one rank's caches, in one call.

What a layer's shares move is worked out once (merge/copies.py) and kept; a call looks at ids and addresses only. On a
CPU each piece is a few strided copies, on a device the whole batch is a table of tiles and a kernel launch for each
shape of tile (merge/triton_batch.py), or strided copies where kernels cannot be built (merge/kernels.py).
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_hetero.errors import MergeError
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.reshard.share import Share

from . import cpu
from .checks import INTEGER
from .copies import Rectangle, StridedCopy, fold, layer_copies, rectangle
from .kernels import KERNELS

Ids = npt.NDArray[np.int64]
Areas = tuple[int, ...]
"""Per share of a layer, bytes from the piece's first area to that of its source."""

_INTEGER = {size: np.dtype(f"i{size}") for size in INTEGER}


@dataclass(frozen=True)
class Staged:
    """One piece of one role that lies in the arena and may be merged.

    ids: int64 [n], in this rank's pool, in the host's memory: the pages, or the one slot. tokens: how many the pages
    hold; of no meaning to a slot. areas: per source number the byte of the arena at which its part begins, with room
    for whole items.
    """

    role: Role
    layer: int
    ids: Ids
    tokens: int
    areas: Mapping[int, int]


class Layer:
    """One layer of one role: its shares and the bytes of its buffer (uint8, one-dimensional, from its address on).

    What a batch asks of them is looked up once. tokens: of a page; 0 for slots. by_token: whether of a last page only
    the tokens in use are moved. sources: per share the source and its bytes in an item.
    """

    def __init__(self, shares: Sequence[Share], memory: torch.Tensor) -> None:
        first = shares[0]
        component = first.destination_component
        self.shares, self.memory, self.device = tuple(shares), memory, memory.device
        self.items, self.itemsize = component.items, component.itemsize
        self.tokens = component.axis(AxisName.TOKEN).size if first.item is Item.PAGE else 0
        self.by_token = bool(self.tokens) and first.moves_tail_alone
        self.sources = tuple((share.source, share.staged_bytes) for share in shares)
        self.recipes: dict[Areas, Recipe] = {}


@dataclass(frozen=True)
class Recipe:
    """What a layer's copies are for one position of the areas to each other.

    copies: one for each block. folded, and their targets as `arrays`: for the CPU, empty elsewhere. rectangles: for a
    device.
    """

    layer: Layer
    copies: tuple[StridedCopy, ...]
    folded: tuple[StridedCopy, ...]
    arrays: tuple[npt.NDArray[Any], ...]
    rectangles: tuple[Rectangle, ...]
    elementwise: tuple[StridedCopy, ...]
    """Copies that are no rectangles."""


@dataclass(frozen=True)
class Move:
    """A piece that has been checked. start: byte of the arena at its first area. rows: of all items, those to move.

    rows is None if that is all of them.
    """

    recipe: Recipe
    ids: Ids
    start: int
    rows: int | None


Launch = Callable[[torch.Tensor, Sequence[Move]], None]
"""Moves what has arrived in an arena."""


class Batches:
    """Merges batches into one rank's caches."""

    def __init__(self, layers: Mapping[tuple[Role, int], Layer]) -> None:
        self._layers = layers
        self._launcher: Launch | None = None
        if any(layer.device.type != "cpu" for layer in layers.values()):
            self._launcher = _launcher()

    def merge(self, arena: torch.Tensor, pieces: Sequence[Staged]) -> None:
        """See Assembler.merge_batch."""
        if not isinstance(arena, torch.Tensor) or arena.dtype is not torch.uint8 or not _is_row(arena):
            raise MergeError("the arena must be a row of uint8 without gaps")
        layers = [self._layer(piece) for piece in pieces]
        _check_ids(pieces, layers)
        end, address = arena.numel(), arena.data_ptr()
        moves = [_move(piece, layer, end, address) for piece, layer in zip(pieces, layers, strict=True)]
        if any(layer.device != arena.device for layer in layers):
            raise MergeError(f"the arena lies on {arena.device}, but not all caches do")
        if not moves:
            return
        if arena.device.type == "cpu":
            _on_cpu(arena, moves)
        elif self._launcher is None:
            copy_strided(arena, moves)
        else:
            by_kernels(self._launcher, arena, moves)

    def _layer(self, piece: Staged) -> Layer:
        try:
            return self._layers[piece.role, piece.layer]
        except KeyError:
            raise MergeError(
                f"layer {piece.layer} of {piece.role} is not in the plan, so there is nothing to merge"
            ) from None


def _move(piece: Staged, layer: Layer, end: int, address: int) -> Move:
    """Raises MergeError. end, address: of the arena, bytes and where it begins."""
    count, rows = len(piece.ids), None
    if layer.tokens:
        tokens = live_tokens(piece.tokens, count, layer.tokens)
        rows = tokens if layer.by_token else None
    elif count != 1:
        raise MergeError(f"{piece.role}: a request has one slot, {count} were given")
    begins = []
    for source, item_bytes in layer.sources:
        begin = piece.areas.get(source)
        if begin is None:
            raise MergeError(
                f"layer {piece.layer} of {piece.role}: nothing has arrived from source {source}; a piece is merged "
                "when all of its sources have written"
            )
        if begin < 0 or begin + count * item_bytes > end or (address + begin) % layer.itemsize:
            raise MergeError(
                f"{piece.role}: {count * item_bytes} bytes of source {source} at {begin} do not suit an arena of {end} "
                f"bytes and elements of {layer.itemsize}"
            )
        begins.append(begin)
    start = min(begins)
    areas = tuple(begin - start for begin in begins)
    recipe = layer.recipes.get(areas)
    if recipe is None:
        recipe = layer.recipes[areas] = _recipe(layer, areas)
    return Move(recipe, piece.ids, start, rows)


def _recipe(layer: Layer, areas: Areas) -> Recipe:
    starts = {source: area for (source, _), area in zip(layer.sources, areas, strict=True)}
    copies = layer_copies(layer.shares, starts)
    folded: tuple[StridedCopy, ...] = ()
    arrays: tuple[npt.NDArray[Any], ...] = ()
    if layer.device.type == "cpu":
        folded = tuple(fold(copies, 1 if layer.tokens else 0))
        memory = layer.memory.numpy()
        arrays = tuple(_array(memory, copy.target, layer.items, copy, target=True) for copy in folded)
    found = [(copy, rectangle(copy, by_token=layer.by_token)) for copy in copies]
    return Recipe(
        layer,
        tuple(copies),
        folded,
        arrays,
        tuple(shape for _, shape in found if shape is not None),
        tuple(copy for copy, shape in found if shape is None),
    )


def _launcher() -> Launch | None:
    try:
        from .triton_batch import Launcher
    except ImportError as error:  # no Triton
        KERNELS.give_up(error)
        return None
    return Launcher()


def by_kernels(launcher: Launch, arena: torch.Tensor, moves: Sequence[Move]) -> None:
    """A batch on a device."""
    KERNELS.attempt(partial(launcher, arena, moves), partial(copy_strided, arena, moves))


def copy_strided(arena: torch.Tensor, moves: Sequence[Move]) -> None:
    """A batch with torch's copies, on any device: one for each item and block."""
    for move in moves:
        copy_elements(arena, move, move.recipe.copies)


def copy_elements(arena: torch.Tensor, move: Move, copies: Sequence[StridedCopy]) -> None:
    """Some copies of a piece with torch, item by item."""
    count = len(move.ids)
    for copy in copies:
        staged = elements(arena, move.start + copy.source, count, copy, target=False)
        memory = move.recipe.layer.memory
        for number, item in enumerate(move.ids.tolist()):
            cache = elements(memory, copy.target + item * copy.target_item, 1, copy, target=True)[0]
            own = staged[number]
            if move.rows is not None and number == count - 1:
                live = move.rows - number * copy.shape[0]
                cache, own = cache[:live], own[:live]
            cache.copy_(own)


def _on_cpu(arena: torch.Tensor, moves: Sequence[Move]) -> None:
    memory = arena.numpy()
    for move in moves:
        pairs = [
            cpu.Pair(target, _array(memory, move.start + copy.source, len(move.ids), copy, target=False))
            for copy, target in zip(move.recipe.folded, move.recipe.arrays, strict=True)
        ]
        cpu.copy_items(pairs, move.ids, move.rows)


def _array(memory: npt.NDArray[Any], start: int, items: int, copy: StridedCopy, *, target: bool) -> npt.NDArray[Any]:
    """[items, *shape]: a copy's elements on one side, as integers, from byte `start` of the memory on."""
    item, steps = (copy.target_item, copy.target_steps) if target else (copy.source_item, copy.source_steps)
    return np.ndarray((items, *copy.shape), _INTEGER[copy.itemsize], memory, start, (item, *steps))


def elements(memory: torch.Tensor, start: int, items: int, copy: StridedCopy, *, target: bool) -> torch.Tensor:
    """[items, *shape]: a copy's elements on one side, as integers, from byte `start` of a row of uint8 on."""
    item, steps = (copy.target_item, copy.target_steps) if target else (copy.source_item, copy.source_steps)
    strides = [step // copy.itemsize for step in (item, *steps)]
    whole = memory[start : start + (memory.numel() - start) // copy.itemsize * copy.itemsize]
    integers = whole.view(INTEGER[copy.itemsize])
    return integers.as_strided((items, *copy.shape), strides, integers.storage_offset())


def live_tokens(tokens: int, pages: int, page_size: int) -> int:
    """`tokens`, if they end in the last of so many pages. Raises MergeError."""
    try:
        number = operator.index(tokens)
    except TypeError:
        raise MergeError(f"tokens must be an integer, not {tokens!r}") from None
    if not (pages - 1) * page_size < number <= pages * page_size:
        raise MergeError(f"{number} tokens do not end in the last of {pages} pages of {page_size}")
    return number


def _is_row(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and tensor.stride(0) == 1


def _check_ids(pieces: Sequence[Staged], layers: Sequence[Layer]) -> None:
    """Raise MergeError unless all ids are those of items, 0 being SGLang's padding, and no item is written twice.

    Who came last would be chance. layers: of each piece.
    """
    written: dict[Layer, list[Ids]] = {}
    for piece, layer in zip(pieces, layers, strict=True):
        ids = piece.ids
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1 or not len(ids):
            found = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise MergeError(f"ids of pages and slots must be a row of int64 on the host, they are {found}")
        written.setdefault(layer, []).append(ids)
    for layer, parts in written.items():
        ids, role = np.concatenate(parts), layer.shares[0].role
        ids.sort()
        low, high = ids[0], ids[-1]
        if low < 1:
            raise MergeError(f"{role}: item {low} is no request's: ids go from 1, 0 is padding")
        if high >= layer.items:
            raise MergeError(f"{role}: there is no item {high}; the pool has 0 to {layer.items - 1}")
        if len(ids) > 1 and (ids[1:] == ids[:-1]).any():
            twice = ids[:-1][ids[1:] == ids[:-1]][0]
            raise MergeError(f"{role}: item {twice} is written twice in one batch")
