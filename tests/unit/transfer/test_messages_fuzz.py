"""A hundred thousand damaged messages: nothing but MessageError, and what is taken keeps its ranges."""

import copy
import random
import time
from collections import Counter

import msgspec
import pytest

from sglang_hetero.errors import MessageError
from sglang_hetero.transfer import messages as m
from tests.reshard_oracle import mutate
from tests.unit.transfer.test_messages import ALL, body, framed

SEED = 20_250_711
BYTES, TREES, PLAUSIBLE = 60_000, 20_000, 20_000
MSGPACK_INTS = range(-(1 << 63), 1 << 64)
SLOWEST = 2.0
"""Seconds that one message may take, on a busy machine."""


def of_the_same_kind(rng, value):
    """A value that the field's type may well allow."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = value + rng.choice([-2, -1, 1, 2])
        return near if rng.random() < 0.5 and near in MSGPACK_INTS else rng.choice(mutate.NUMBERS)
    if isinstance(value, str):
        return rng.choice(mutate.TEXTS)
    if isinstance(value, bytes):
        return rng.randbytes(rng.choice([0, 1, 4, 12, 255, 256]))
    return value


def anything(rng, _):
    return rng.choice(rng.choice([mutate.TEXTS, mutate.NUMBERS, mutate.ODD]))


def damaged(rng, kind, message):
    if kind == "bytes":
        return rng.choice(mutate.BYTE_LEVEL)(rng, m.encode(message))
    tree = body(message)
    if kind == "trees" and rng.random() < 0.2:
        # That one is framed as a manifest.
        return framed(None)[:-1] + mutate.duplicate_keys(rng, tree)[mutate.HEADER :]
    for _ in range(rng.randint(1, 2)):
        mutate.edit_tree(rng, tree, anything if kind == "trees" else of_the_same_kind)
        tree = copy.deepcopy(tree)  # or the next edit would change the lists that values are taken from
    return framed(tree)


def ranges_hold(message):
    """Written apart from the types: what a reader relies on."""
    assert 0 <= message.room < 2**63
    assert 0 <= message.epoch < 2**63
    assert message.incarnation.isprintable()
    assert message.incarnation
    match message:
        case m.Bind():
            assert message.rank < message.ranks
            assert all(unit >= 0 for unit in message.units)
            assert min([message.pages, message.area_offset, message.area_bytes, *message.pages_per_piece.values()]) >= 0
        case m.Ready():
            for piece in message.pieces:
                assert 0 <= piece.seq < (2**63 if message.total < 0 else message.total)
                assert min(piece.layer, piece.first_page, piece.pages) >= 0
                assert piece.tokens >= piece.pages
        case m.Ack():
            assert min(message.stage, message.upto) >= 0
        case m.FirstGeneration():
            assert all(page >= 0 for page in message.page_ids)
            assert message.chunks[-1] == len(message.page_ids) <= message.tokens
            assert all(identity for identity, _ in message.targets)
        case m.Register() | m.Hello():
            assert message.manifest
            assert 1 <= message.port < 1 << 16
        case m.Abort() | m.Failed():
            assert len(message.reason) <= m.MAX_REASON


def test_a_hundred_thousand_damaged_messages():
    rng, outcomes, accepted, slowest = random.Random(SEED), Counter(), Counter(), 0.0
    for kind, count in (("bytes", BYTES), ("trees", TREES), ("plausible", PLAUSIBLE)):
        for _ in range(count):
            data = damaged(rng, kind, rng.choice(ALL))
            began = time.perf_counter()
            try:
                message = m.decode(data)
            except MessageError as error:
                outcomes[kind, "refused"] += 1
                assert 0 < len(str(error)) < 2 * m.MAX_REASON
            except BaseException as error:
                error.add_note(f"message: {data[:2000].hex()}")
                raise
            else:
                outcomes[kind, "accepted"] += 1
                accepted[type(message)] += 1
                ranges_hold(message)
                assert m.decode(m.encode(message)) == message
            slowest = max(slowest, time.perf_counter() - began)
    print(f"slowest {slowest:.3f} s: {dict(outcomes)}")
    assert sum(outcomes.values()) == BYTES + TREES + PLAUSIBLE >= 100_000
    assert slowest < SLOWEST
    # So that the checks behind the types are reached; far below what the seed gives.
    assert outcomes["plausible", "accepted"] > 2_000
    assert set(accepted) == set(m.Message.__args__)


@pytest.mark.parametrize("size", [1 << 20, (1 << 32) - 1])
def test_lists_that_announce_more_than_comes(size):
    start = framed(None)[:-1] + b"\x82" + b"".join(map(msgspec.msgpack.encode, ("type", "Ready", "pieces")))
    with pytest.raises(MessageError):
        m.decode(start + b"\xdd" + size.to_bytes(4, "big"))


def test_a_message_full_of_the_smallest_elements():
    """The most elements that fit: the number is looked at before they are."""
    many = [0] * (m.MAX_MESSAGE_BYTES - 100)
    data = framed({"type": "FirstGeneration", "chunks": many})
    began = time.perf_counter()
    with pytest.raises(MessageError, match="chunks"):
        m.decode(data)
    assert time.perf_counter() - began < SLOWEST
