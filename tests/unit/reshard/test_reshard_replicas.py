"""Who sends what: one writer per element, replicas that take turns, few blocks, and the figures of a real model."""

from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from sglang_hetero.layout import Role
from sglang_hetero.reshard import bind, plan
from sglang_hetero.reshard.bind import chunk_pages
from tests.reshard_oracle import model as m
from tests.reshard_oracle.handover import decode_rank, prefill_ranks
from tests.reshard_oracle.pair import SHAPE, decode, prefill
from tests.reshard_oracle.rank import Shape


@pytest.mark.parametrize(("heads", "p", "d"), [(1, 4, 1), (2, 4, 1), (2, 8, 2), (1, 6, 4), (2, 4, 8), (3, 6, 1)])
@pytest.mark.parametrize("layers", [1, 2, 5, 7])
def test_replicas_take_turns(heads, p, d, layers):
    """Per head and layer one writer; over the layers the replicas of a head differ by one at most; none is idle."""
    model = (m.heads_kv(Role.TARGET_KEY, heads, 1, tuple(range(layers))),)
    sources = [rank.manifest for rank in prefill_ranks(model, p, SHAPE)]
    replicas = p // heads
    for rank in range(d):
        to = decode_rank(model, d, rank, SHAPE).manifest
        writers = Counter()
        wanted = m.held_heads(model[0].segments[0], d, rank)
        for share in plan(sources, to).shares:
            for block in share.blocks:
                assert block.size == 1
                writers.update((wanted[block.destination], share.source, layer) for layer in share.layers)
        assert set(writers.values()) == {1}
        for head in wanted:
            per_layer = Counter(layer for one, _, layer in writers if one == head)
            assert per_layer == dict.fromkeys(range(layers), 1)
            load = [sum(1 for one, source, _ in writers if (one, source) == (head, s)) for s in range(p)]
            holders = range(head * replicas, (head + 1) * replicas)
            assert all(count == 0 for source, count in enumerate(load) if source not in holders)
            held = [load[source] for source in holders]
            assert max(held) - min(held) <= 1


def test_destinations_do_not_ask_the_same_replica():
    model = (m.heads_kv(Role.TARGET_KEY, 1, 1, (0,)),)
    sources = [rank.manifest for rank in prefill_ranks(model, 4, SHAPE)]
    writers = [plan(sources, decode_rank(model, 4, rank, SHAPE).manifest).shares[0].source for rank in range(4)]
    assert sorted(writers) == [0, 1, 2, 3]


def test_all_components_together_share_the_load():
    """K, V and the draft's single layer must not all begin with replica 0."""
    model = tuple(
        m.heads_kv(role, 1, 1, (0,)) for role in (Role.TARGET_KEY, Role.TARGET_VALUE, Role.DRAFT_KEY, Role.DRAFT_VALUE)
    )
    sources = [rank.manifest for rank in prefill_ranks(model, 2, SHAPE)]
    load = Counter(share.source for share in plan(sources, decode_rank(model, 1, 0, SHAPE).manifest).shares)
    assert load == {0: 2, 1: 2}


def test_a_share_is_as_few_blocks_as_possible():
    (share,) = plan(prefill(1), decode()).of(0)[2:3]
    assert share.role is Role.CONV and [(b.source, b.destination, b.size) for b in share.blocks] == [(0, 0, 32)]
    shares = [share for share in plan(prefill(2), decode()).shares if share.role is Role.CONV]
    assert [[(b.source, b.destination, b.size) for b in share.blocks] for share in shares] == [
        [(0, 0, 4), (4, 8, 4), (8, 16, 8)],
        [(0, 4, 4), (4, 12, 4), (8, 24, 8)],
    ]


def test_source_without_a_share_sends_nothing():
    whole = plan(prefill(2), decode(0, 2))
    assert whole.of(1) == ()
    assert bind(whole, 1, pages=[1, 2], slot=1, tokens=3).pieces == ()


# --- figures of Qwen3.5-2B: 6 full-attention layers and 1 draft layer, 2 KV heads of 256, pages of 128 tokens

TOKENS, CHUNK, PAGE = 18_592, 8_192, 128
PAGES = -(-TOKENS // PAGE)
FULL_LAYERS = tuple(range(3, 24, 4))
QWEN = tuple(
    m.heads_kv(role, 2, 256, layers)
    for role, layers in (
        (Role.TARGET_KEY, FULL_LAYERS),
        (Role.TARGET_VALUE, FULL_LAYERS),
        (Role.DRAFT_KEY, (0,)),
        (Role.DRAFT_VALUE, (0,)),
    )
)
SMALL = Shape(page_size=PAGE, pages=1)
"""Only the geometry counts: nothing is written, so the pools are described larger than they are."""


def qwen_plan():
    def large(rank):
        parts, address = [], 0
        for part in rank.manifest.components:
            apart = replace(part, items=PAGES * 2 + 1, addresses=tuple((n + 1) << 36 for n in range(len(part.layers))))
            parts.append(replace(apart, addresses=tuple(address + start for start in apart.addresses)))
            address += (len(part.layers) + 1) << 36
        return replace(rank.manifest, components=tuple(parts))

    return plan([large(rank) for rank in prefill_ranks(QWEN, 2, SMALL)], large(decode_rank(QWEN, 1, 0, SMALL)))


@pytest.mark.parametrize(
    ("pages", "descriptors"),
    [(np.arange(1, PAGES + 1), 42), (np.arange(1, 2 * PAGES, 2), 2044)],
    ids=["contiguous", "scattered"],
)
@pytest.mark.parametrize("source", [0, 1])
def test_figures_of_qwen35_2b(source, pages, descriptors):
    chunks = chunk_pages(TOKENS, CHUNK, PAGE)
    assert [len(chunk) for chunk in chunks] == [64, 64, 18]
    pieces = bind(qwen_plan(), source, pages=pages, slot=1, tokens=TOKENS, chunks=chunks).pieces
    assert len(pieces) == 3 * 2 * 7
    assert sum(len(piece.descriptors) for piece in pieces) == descriptors
    assert sum(piece.descriptors.nbytes for piece in pieces) == 2 * 7 * TOKENS * 1 * 256 * 2
    assert not any(piece.descriptors.packed for piece in pieces)
