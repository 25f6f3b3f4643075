"""Damaged manifests: bytes that a broken or hostile peer could send, from the same seed the same ones."""

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_hetero.layout import Manifest, wire

HEADER = len(wire.MAGIC) + 1
NESTING = 2000
"""Deeper than any decoder's recursion limit allows."""
TEXTS = (
    "",
    "x",
    "plain",
    "ssm",
    "target_key",
    "target_cross",
    "bfloat16",
    "float64",
    "page",
    "slot",
    "token",
    "prefill",
    "decode",
    "by_head",
    "replicated",
    "\x00",
    "\n",
    "é" * 5,
    "x" * 256,
    "x" * 257,
    "x" * 20_000,
)
NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    127,
    128,
    255,
    256,
    4095,
    4096,
    4097,
    65_535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**32 + 1,
    2**40,
    2**56,
    2**56 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -2,
    -(2**31),
    -(2**63),
)
ODD = (None, True, False, 0.0, 1.5, float("nan"), float("inf"), -0.0, b"", b"bytes", [], {}, [[]], {"a": 1}, {1: 2})

Path = tuple[Any, ...]


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    """One to eight bits anywhere, header included."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncate(rng: random.Random, data: bytes) -> bytes:
    """Any prefix."""
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes) -> bytes:
    """Cut out, repeat, move or invent a run of bytes."""
    at, size = rng.randrange(len(data)), rng.randint(1, 40)
    run = rng.choice(
        [b"", rng.randbytes(size), data[at : at + size] * rng.randint(2, 4), bytes([rng.randrange(256)]) * size]
    )
    to = rng.randrange(len(data))
    return data[:to] + run + data[to + rng.choice([0, size]) :]


def giant_length(rng: random.Random, data: bytes) -> bytes:
    """A header of a string, list, map, binary or extension that announces up to 4 G elements which do not follow."""
    code = rng.choice([b"\xdb", b"\xdd", b"\xdf", b"\xc6", b"\xc9"])
    at = rng.randrange(HEADER, len(data))
    return data[:at] + code + struct.pack(">I", rng.choice([2**32 - 1, 2**31, 2**24])) + data[at:]


def nest(rng: random.Random, data: bytes) -> bytes:
    """Lists in lists, or maps in maps, deeper than can be walked."""
    at = rng.randrange(HEADER, len(data))
    return data[:at] + rng.choice([b"\x91", b"\x81\xa1a"]) * NESTING + data[at:]


def _paths(node: Any, path: Path = ()) -> list[Path]:
    found = [path]
    if isinstance(node, dict):
        for key, value in node.items():
            found += _paths(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            found += _paths(value, (*path, index))
    return found


def _at(tree: Any, path: Path) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _anything(rng: random.Random) -> Any:
    return rng.choice(rng.choice([TEXTS, NUMBERS, ODD]))


def _of_the_same_kind(rng: random.Random, value: Any) -> Any:
    """Another value that a decoder of this field may well take."""
    if isinstance(value, bool) or value is None:
        return rng.choice([[0, 1], [1, 1], [0, 2], None])
    if isinstance(value, int):
        near = value + rng.choice([-2, -1, 1, 2]) if rng.random() < 0.5 else value * rng.choice([2, 3, 64, 1 << 20])
        return near if rng.random() < 0.7 else rng.choice(NUMBERS)
    if isinstance(value, str):
        return rng.choice(TEXTS)
    return value


def edit_tree(rng: random.Random, tree: Any, choose: Callable[[random.Random, Any], Any]) -> None:
    """Change, remove, repeat or swap one node of a decoded manifest, in place."""
    paths = _paths(tree)[1:]
    if not paths:
        return  # an earlier edit took everything away
    path = rng.choice(paths)
    parent, key = _at(tree, path[:-1]), path[-1]
    action = rng.random()
    if isinstance(parent, list) and action < 0.15:
        parent.insert(key, parent[key])
    elif isinstance(parent, list) and action < 0.25:
        other = rng.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif action < 0.3:
        del parent[key]
    elif isinstance(parent, dict) and action < 0.33:
        parent[rng.choice(TEXTS)] = _anything(rng)
    else:
        parent[key] = choose(rng, parent[key])


def wrong_types(rng: random.Random, tree: Any) -> bytes:
    """Well-formed msgpack with nodes that do not belong: other types, huge and negative numbers, NaN, keys missing."""
    for _ in range(rng.randint(1, 3)):
        edit_tree(rng, tree, lambda rng, _: _anything(rng))
    return _frame(msgspec.msgpack.encode(tree))


def duplicate_keys(rng: random.Random, tree: Any) -> bytes:
    """A map in which one key comes twice with two values."""
    marker = "dup" + "x" * 20
    maps = [path for path in _paths(tree) if isinstance(_at(tree, path), dict) and len(_at(tree, path)) < 15]
    node = _at(tree, rng.choice(maps))
    key = rng.choice(list(node))
    node[marker] = _of_the_same_kind(rng, node[key])
    wanted, found = msgspec.msgpack.encode(key), msgspec.msgpack.encode(marker)
    return _frame(msgspec.msgpack.encode(tree).replace(found, wanted))


def plausible(rng: random.Random, tree: Any) -> bytes | None:
    """Like `wrong_types`, but each value of its field's type, and with the fingerprint that a liar would compute.

    None where this is no manifest in itself.
    """
    for _ in range(rng.randint(1, 3)):
        edit_tree(rng, tree["manifest"], _of_the_same_kind)
    return lie(tree["manifest"])


def lie(tree: Any) -> bytes | None:
    """The bytes of a manifest given as plain Python, with its right fingerprint; None if it is none."""
    try:
        return wire.encode(msgspec.convert(tree, Manifest))
    except Exception as error:
        # What must never happen here is judged where these bytes, or those of the tree, are decoded.
        del error
        return None


def _frame(body: bytes) -> bytes:
    return wire.MAGIC + bytes([wire.VERSION]) + body


def framed(tree: Any) -> bytes:
    """The bytes of an envelope given as plain Python."""
    return _frame(msgspec.msgpack.encode(tree))


BYTE_LEVEL = (flip_bits, truncate, splice, giant_length, nest)
"""Functions of (rng, bytes)."""
TREE_LEVEL = (wrong_types, duplicate_keys)
"""Functions of (rng, a decoded envelope that they may change)."""
