"""The value of every cache element, and what a rank's shard of it must be.

value = f(request, component, layer, GLOBAL head, position, channel). A shard is cut out of the global tensor by
SGLang's cache rules alone; nothing here knows of pages, slots or transfers, and no code is shared with any transfer
path. numpy only.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hetero.layout.window import ConvLayout

from .geometry import ITEMSIZE, Geometry

Bits = npt.NDArray[np.unsignedinteger]
"""Elements as unsigned integers of the dtype's size, so that NaN and -0.0 compare like any other bit pattern."""

Coordinate = npt.NDArray[np.int64] | int

DESTINATION_POISON = 0xFF
"""Byte in every decode pool before a transfer: NaN in any float dtype."""
SOURCE_POISON = 0xA5
"""Byte in every prefill pool where no request has written."""

CACHED_TOKEN_COUNTERS = 7
"""Columns of the aux row `cached_tokens` that SGLang fills: four cache tiers, three kinds of media."""
DRAFT_TOPK = 1
"""Candidates per draft step in the aux row: a linear draft chain has one."""

# Finaliser and increment of SplitMix64 (Steele, Lea, Flood 2014): neighbours give unrelated values.
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _SHIFT_1 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(30)
_MIX_2, _SHIFT_2 = np.uint64(0x94D049BB133111EB), np.uint64(27)
_SHIFT_3 = np.uint64(31)


class Component(IntEnum):
    """Kinds of cache; the number goes into the hash, so append only."""

    KEY = 1
    VALUE = 2
    DRAFT_KEY = 3
    DRAFT_VALUE = 4
    CONV = 5
    SSM = 6
    AUX = 7


def bits_dtype(itemsize: int) -> np.dtype[np.unsignedinteger]:
    """Unsigned integer dtype of `itemsize` bytes."""
    return np.dtype(f"u{itemsize}")


def repeated_byte(byte: int, itemsize: int) -> int:
    """The element whose every byte is `byte`."""
    return int.from_bytes(bytes([byte]) * itemsize, "little")


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> _SHIFT_1)) * _MIX_1
    state = (state ^ (state >> _SHIFT_2)) * _MIX_2
    return state ^ (state >> _SHIFT_3)


def values(
    seed: int,
    component: Component,
    layer: int,
    *,
    head: Coordinate = 0,
    position: Coordinate = 0,
    channel: Coordinate = 0,
    itemsize: int,
) -> Bits:
    """Elements at the broadcast coordinates, never equal to a poison (an unwritten element must show)."""
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (seed, int(component), layer, head, position, channel):
            state = _mix(state + _GOLDEN_GAMMA + np.asarray(part).astype(np.int64).astype(np.uint64))
    elements = np.array(state, ndmin=1).astype(bits_dtype(itemsize))
    for byte in (DESTINATION_POISON, SOURCE_POISON):
        elements[elements == repeated_byte(byte, itemsize)] ^= elements.dtype.type(1)
    return elements


def _axes(*axes: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    return list(np.meshgrid(*axes, indexing="ij", sparse=True))


def kv_shard(
    geometry: Geometry, seed: int, component: Component, layer: int, positions: range, *, tp: int, rank: int
) -> Bits:
    """K or V of a range of positions on one rank: `[positions, local heads, head_dim]`.

    Heads are contiguous by rank; with more ranks than heads, `tp // kv_heads` neighbouring ranks hold the same head
    (sglang/srt/layers/linear.py, QKVParallelLinear: shard id = rank // number of replicas).
    """
    position, head, channel = _axes(np.array(positions), np.arange(geometry.kv_heads), np.arange(geometry.head_dim))
    itemsize = ITEMSIZE[geometry.kv_dtype]
    everything = values(seed, component, layer, head=head, position=position, channel=channel, itemsize=itemsize)
    local = geometry.local_kv_heads(tp)
    replicas = max(1, tp // geometry.kv_heads)
    first = rank // replicas * local
    return everything[:, first : first + local]


def conv_shard(geometry: Geometry, seed: int, layer: int, *, tp: int, rank: int) -> Bits:
    """Conv state of one slot on one rank, in the geometry's axis order.

    Channels are [q | k | v] and each segment is sharded by head on its own. A live row has its position in the
    window, 0..K-2; the dead rows before it in a window-first slot count down from -1.
    """
    positions = np.arange(geometry.window) - (geometry.window - geometry.live_window)
    itemsize = ITEMSIZE[geometry.conv_dtype]
    parts = []
    for index, segment in enumerate(geometry.conv_segments):
        heads = np.arange(segment.heads) + index * max(geometry.linear_key_heads, geometry.linear_value_heads)
        head, channel, position = _axes(heads, np.arange(segment.head_width), positions)
        whole = values(seed, Component.CONV, layer, head=head, position=position, channel=channel, itemsize=itemsize)
        local = segment.heads // tp
        parts.append(whole[rank * local : (rank + 1) * local].reshape(local * segment.head_width, -1))
    channels_first = np.concatenate(parts)
    return channels_first if geometry.conv_layout is ConvLayout.CHANNELS_FIRST else channels_first.T


def ssm_shard(geometry: Geometry, seed: int, layer: int, *, tp: int, rank: int) -> Bits:
    """SSM state of one slot on one rank: `[local value heads, value dim, key dim]`, sharded by value head."""
    head, row, column = _axes(
        np.arange(geometry.linear_value_heads), np.arange(geometry.linear_value_dim), np.arange(geometry.linear_key_dim)
    )
    itemsize = ITEMSIZE[geometry.ssm_dtype]
    whole = values(seed, Component.SSM, layer, head=head, position=row, channel=column, itemsize=itemsize)
    local = geometry.linear_value_heads // tp
    return whole[rank * local : (rank + 1) * local]


def aux_fields(geometry: Geometry, seed: int, room: int) -> dict[str, Bits]:
    """First columns of each aux row that SGLang writes for a request (disaggregation/utils.py, set_buf).

    Keys are attribute names of SGLang's MetadataBuffers; columns that are not named here are not written.
    """
    fields: dict[str, Bits] = {
        "output_ids": np.array([first_token(seed)], dtype=np.uint32),
        "cached_tokens": np.zeros(CACHED_TOKEN_COUNTERS, dtype=np.uint32),
        "bootstrap_room": np.array([room], dtype=np.uint64),
    }
    if geometry.draft_tokens:
        topk, hidden = np.arange(DRAFT_TOPK), np.arange(geometry.hidden_size)
        hidden_itemsize = ITEMSIZE[geometry.hidden_dtype]
        fields["output_topk_p"] = values(seed, Component.AUX, 1, channel=topk, itemsize=4)
        fields["output_topk_index"] = values(seed, Component.AUX, 2, channel=topk, itemsize=8)
        fields["output_hidden_states"] = values(seed, Component.AUX, 3, channel=hidden, itemsize=hidden_itemsize)
    return fields


class Begun(NamedTuple):
    """Bits of a column of the aux row: of its first element, and of every other one."""

    first: int
    filling: int


def begun_drafts(seed: int) -> dict[str, Begun]:
    """What decode's drafts begin with where only one side drafts: the first token again, for certain, and no state."""
    token, one = first_token(seed), int(np.float32(1.0).view(np.uint32))
    return {
        "output_topk_p": Begun(one, 0),
        "output_topk_index": Begun(token, token),
        "output_hidden_states": Begun(0, 0),
    }


def first_token(seed: int) -> int:
    """Token that prefill hands over with the caches."""
    return int(values(seed, Component.AUX, 0, itemsize=2)[0])


def split(tokens: int, chunks: int) -> Sequence[int]:
    """Ends of `chunks` nearly equal parts of a prompt; not page aligned, as in chunked prefill."""
    return [tokens * (chunk + 1) // chunks for chunk in range(chunks)]
