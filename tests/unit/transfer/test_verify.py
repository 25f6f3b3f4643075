"""Digests: equal for equal content whatever the layouts, different for a single bit, blind to what is dead."""

import random
import re

import numpy as np
import pytest

from sglang_hetero.errors import BindError, MergeError, MessageError
from sglang_hetero.layout import Item, Role
from sglang_hetero.transfer import verify
from sglang_hetero.transfer.pieces import Piece
from tests.reshard_oracle.handover import Request
from tests.reshard_oracle.model import Segment, conv, heads_kv, latent_kv, ssm
from tests.reshard_oracle.rank import Format, Shape
from tests.unit.transfer.pieces_handover import Staging, serve

MODEL = (
    heads_kv(Role.TARGET_KEY, 6, 3, (1,)),
    heads_kv(Role.TARGET_VALUE, 6, 2, (1,), "float8_e4m3fn"),
    latent_kv(Role.TARGET_LATENT, {"latent": 4, "rope": 2}, (1,)),
    conv((Segment("q", 6, 2), Segment("k", 6, 1), Segment("v", 12, 2)), 4, (0,)),
    ssm(12, 3, 2, (0,)),
    heads_kv(Role.DRAFT_KEY, 6, 3, (0,), "float32"),
)
PAGE_SIZE, TOKENS = 3, 8
SOURCE = Shape(
    page_size=PAGE_SIZE,
    pages=5,
    formats={
        Role.CONV: Format(dead_before=1, dead_after=1, item_gap=2),
        Role.SSM: Format(order=(2, 0, 1), interleaved=True),
        Role.TARGET_KEY: Format(order=(0, 2, 1), row_gap=1),
    },
)
DESTINATION = Shape(
    page_size=PAGE_SIZE,
    pages=4,
    formats={Role.CONV: Format(order=(1, 0), dead_before=2, row_gap=1), Role.TARGET_VALUE: Format(item_gap=3)},
)
PIECES = [
    Piece(Role.TARGET_KEY, 1, 0, 2, 6),
    Piece(Role.TARGET_KEY, 1, 1, 2, 5),
    Piece(Role.TARGET_VALUE, 1, 2, 1, 2),
    Piece(Role.TARGET_LATENT, 1, 0, 3, 8),
    Piece(Role.DRAFT_KEY, 0, 0, 3, 8),
    Piece(None, 0),
]
PAIRS = [(2, 1), (1, 2), (3, 2), (2, 3)]


@pytest.fixture(params=PAIRS, ids=lambda pair: "P{}D{}".format(*pair), scope="module")
def receivers(request):
    """A hand-over between layouts that have nothing in common; the digests of all its pieces have been compared."""
    return serve(MODEL, (request.param[0], SOURCE), (request.param[1], DESTINATION), Request(TOKENS), Staging())


def sent_of(receiver, piece):
    return {
        number: verify.source_digests(
            receiver.plan, number, piece, receiver.source_memory[number], place.pages, place.slot
        )
        for number, place in enumerate(receiver.held)
        if receiver.source_sides[number].parts(piece)
    }


def found_of(receiver, piece):
    into = receiver.into
    return verify.destination_digests(receiver.plan, piece, receiver.memory, into.pages, into.slot)


@pytest.mark.parametrize("piece", PIECES, ids=str)
def test_every_bit_of_the_destination_counts_and_nothing_else(receivers, piece):
    """Flip bits one by one, all over every buffer of the role: seen if and only if the piece has that element."""
    draw = random.Random(1)
    for receiver in receivers:
        sent = sent_of(receiver, piece)
        assert verify.compare(receiver.plan, piece, sent, found_of(receiver, piece)) is None
        for (role, layer), buffer in receiver.to.buffers.items():
            if layer != piece.layer or role not in ((Role.CONV, Role.SSM) if piece.role is None else (piece.role,)):
                continue
            live = live_elements(receiver, piece, buffer)
            raw = receiver.to.bytes_from(buffer.address)[: span(buffer)]
            seen = 0
            for at in draw.sample(range(len(raw)), min(len(raw), 150)):
                bit = np.uint8(1 << draw.randrange(8))
                before = buffer.items.copy()
                raw[at] ^= bit
                changed = (buffer.items != before)[live].any()
                difference = verify.compare(receiver.plan, piece, sent, found_of(receiver, piece))
                raw[at] ^= bit
                assert (difference is not None) == changed, f"{role}, byte {at}"
                seen += difference is not None
                assert difference is None or difference.startswith(f"{role}, layer {layer}, segment ")
            assert seen > 0


def live_elements(receiver, piece, buffer):
    """True for the elements that a piece brings."""
    mask = np.zeros(buffer.items.shape, dtype=bool)
    if buffer.tensor.item is Item.SLOT:
        mask[(receiver.into.slot, *buffer.live)] = True
        return mask
    for position in range(piece.first_page, piece.first_page + piece.pages):
        used = min(PAGE_SIZE, piece.tokens - (position - piece.first_page) * PAGE_SIZE)
        mask[receiver.into.pages[position], :used] = True
    return mask


def span(buffer):
    """Bytes from the first element of a buffer to its last."""
    sizes = zip(buffer.items.shape, buffer.items.strides, strict=True)
    return sum((size - 1) * stride for size, stride in sizes) + buffer.items.itemsize


@pytest.mark.parametrize("piece", PIECES, ids=str)
def test_one_bit_of_a_source(receivers, piece):
    receiver = receivers[-1]
    found, (number, encoded) = found_of(receiver, piece), next(iter(sent_of(receiver, piece).items()))
    key, digest = next(iter(verify.decode(encoded, piece).items()))
    wrong = encoded.replace(digest, bytes([digest[0] ^ 1]) + digest[1:], 1)
    text = verify.compare(receiver.plan, piece, {**sent_of(receiver, piece), number: wrong}, found)
    assert f"head {key.head}" in text and receiver.sources[number].manifest.label in text
    assert receiver.to.manifest.label in text and re.search(r"sent [0-9a-f]{16}, .* has [0-9a-f]{16}", text)


def test_what_is_not_sent_and_what_is_sent_twice():
    receiver = serve(MODEL, (2, SOURCE), (1, DESTINATION), Request(TOKENS), Staging())[0]
    piece = PIECES[0]
    sent, found = sent_of(receiver, piece), found_of(receiver, piece)
    text = verify.compare(receiver.plan, piece, {0: sent[0]}, found)
    assert text.startswith("target_key, layer 1, segment kv, head 3, page 0") and "no source sent it" in text
    text = verify.compare(receiver.plan, piece, {0: sent[0], 1: sent[0]}, found)
    assert "head 0" in text and "nobody or somebody else" in text
    assert "no source sent it" in verify.compare(receiver.plan, piece, {}, found)
    assert "source 7" in verify.compare(receiver.plan, piece, {**sent, 7: sent[0]}, found)


def test_keys_are_those_of_the_model():
    """Each source says which global heads it has; together they are what decode has, under the same names."""
    for receiver in serve(MODEL, (3, SOURCE), (2, DESTINATION), Request(TOKENS), Staging()):
        for piece in PIECES:
            parts = [verify.decode(encoded, piece) for encoded in sent_of(receiver, piece).values()]
            together = {key: digest for part in parts for key, digest in part.items()}
            assert together == found_of(receiver, piece) and sum(map(len, parts)) == len(together)
        pages = {key.page for key in found_of(receiver, PIECES[1])}
        heads = {key.head for key in found_of(receiver, PIECES[1])}
        rank = receiver.to.coordinates.tp_rank
        assert pages == {1, 2} and heads == set(range(3 * rank, 3 * rank + 3))
        states = {(key.role, key.segment) for key in found_of(receiver, PIECES[-1])}
        assert states == {(Role.CONV, 0), (Role.CONV, 1), (Role.CONV, 2), (Role.SSM, 0)}


def test_opaque_pages_count_whole():
    model = (latent_kv(Role.TARGET_LATENT, {"latent": 4}, (0,)),)
    shape = Shape(page_size=4, formats={Role.TARGET_LATENT: Format(encoding="packed-rows")})
    receiver = serve(model, (2, shape), (1, shape), Request(5), Staging())[0]
    piece = Piece(Role.TARGET_LATENT, 0, 0, 2, 5)
    sent = sent_of(receiver, piece)
    buffer = receiver.to.buffers[Role.TARGET_LATENT, 0]
    buffer.items[receiver.into.pages[-1], 3, 0] ^= 1
    assert "page 1" in verify.compare(receiver.plan, piece, sent, found_of(receiver, piece))


def test_whatever_a_peer_sends_is_an_answer():
    """Truncated at every byte, every byte changed, and noise: a difference in words or MessageError, nothing else."""
    receiver = serve(MODEL, (2, SOURCE), (1, DESTINATION), Request(TOKENS), Staging())[0]
    draw = random.Random(2)
    for piece in (PIECES[1], PIECES[-1]):
        sent, found = sent_of(receiver, piece), found_of(receiver, piece)
        good = sent[0]
        bad = [good[:end] for end in range(len(good))]
        bad += [good[:at] + bytes([good[at] ^ draw.randrange(1, 256)]) + good[at + 1 :] for at in range(len(good))]
        bad += [draw.randbytes(draw.randrange(1, 200)) for _ in range(300)]
        bad += [good + good, good + b"\0"]
        for encoded in bad:
            assert isinstance(verify.compare(receiver.plan, piece, {**sent, 0: encoded}, found), str)
        with pytest.raises(MessageError):
            verify.decode(good + b"\0", piece)


def test_memory_and_pages_that_do_not_fit():
    receiver = serve(MODEL, (2, SOURCE), (1, DESTINATION), Request(TOKENS), Staging())[0]
    with pytest.raises(MergeError, match="no memory"):
        verify.destination_digests(receiver.plan, PIECES[0], {}, receiver.into.pages, 1)
    with pytest.raises(BindError, match="only 1 pages"):
        verify.destination_digests(receiver.plan, PIECES[0], receiver.memory, receiver.into.pages[:1], 1)
    for slot in (-1, 0, 99):
        with pytest.raises(BindError, match="conv's slots"):
            verify.destination_digests(receiver.plan, PIECES[-1], receiver.memory, receiver.into.pages, slot)
    assert verify.destination_digests(receiver.plan, Piece(Role.TARGET_KEY, 0, 0, 1, 3), receiver.memory, (1,), 1) == {}
