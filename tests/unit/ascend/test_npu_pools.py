"""SGLang's pools for NPUs, built on CPU tensors: from description to merge, every byte of every pool.

Page layout and FIA views, conv windows in front of the channels with rows for draft tokens, a draft's pool, latent
pages. What arrives goes through units of staging and is merged in batches, as the transfer does it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from npu_ranks import Kind, Npu

from sglang_hetero.errors import LayoutMismatch
from sglang_hetero.layout import Role, Side
from sglang_hetero.layout.wire import decode, encode
from sglang_hetero.merge.batch import Staged
from sglang_hetero.transfer.merger import Place as Byte
from tests.harness.oracle import SOURCE_POISON
from tests.reshard_oracle.handover import Place, Request
from tests.unit.layout.described import GDN, KIMI, divided
from tests.unit.transfer.pieces_handover import Receiver, Staging

SIXES = replace(
    GDN,
    attention=replace(GDN.attention, kv_heads=6),
    linear=replace(
        GDN.linear,
        conv_segments=tuple(
            divided(part.name, heads, part.width)
            for part, heads in zip(GDN.linear.conv_segments, (6, 6, 12), strict=True)
        ),
        ssm_heads=12,
    ),
)
POISON = 0xD7
FROM, TO = (Place((2, 3), 1), Place((3, 1), 2))
"""Pools of three pages and two slots, beside the padding: one of each is a neighbour's, and pages are not in order."""
TOKENS = 200
PAIRS = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (4, 2), (2, 4)]


class InBatches(Receiver):
    """Merges as the transfer does: a piece's roles at once, from the arena."""

    def _merge(self, piece, unit):
        arena = torch.from_numpy(self.arena)
        ids = [self.into.slot] if piece.role is None else self.into.pages[piece.first_page :][: piece.pages]
        staged = [
            Staged(
                role,
                piece.layer,
                np.array(ids, dtype=np.int64),
                piece.tokens,
                {source: place.byte for source, place in areas.items()},
            )
            for role, areas in self.side.areas(piece, Byte(unit))
        ]
        self.assembler.merge_batch(arena, staged)
        self.coverage.add(piece)


def hand_over(model, prefill, decode_side, *, tokens=TOKENS, tail=False):
    """prefill, decode_side: TP size and kind. tail: the last page moves whole."""
    count = -(-tokens // prefill[1].page_size)
    held, into = (Place(place.pages[:count], place.slot) for place in (FROM, TO))
    sources = [
        Npu(model, prefill[0], rank, prefill[1], side=Side.PREFILL, poison=SOURCE_POISON) for rank in range(prefill[0])
    ]
    for source in sources:
        source.write(7, held, tokens)
        assert decode(encode(source.manifest)) == source.manifest
    for rank in range(decode_side[0]):
        to, expected = (
            Npu(model, decode_side[0], rank, decode_side[1], side=Side.DECODE, poison=POISON) for _ in range(2)
        )
        receiver = InBatches(
            sources, [held] * len(sources), to, into, request=Request(tokens), staging=Staging(window=2), seed=rank
        )
        receiver.run()
        expected.write(7, into, tokens)
        if tail:
            _poison_tail(expected, tokens)
        for number, (found, wanted) in enumerate(zip(to.storages(), expected.storages(), strict=True)):
            wrong = (found != wanted).nonzero().flatten()
            assert not len(wrong), (
                f"decode {rank}: {len(wrong)} bytes of allocation {number}, the first {int(wrong[0])}"
            )


def _poison_tail(rank, tokens):
    """Rows behind the last token, as prefill has them."""
    page, used = divmod(tokens, rank.kind.page_size)
    for pool, layers in ((rank.pools.target, KIMI.attention_layers), (rank.pools.draft, KIMI.draft_layers)):
        for layer in layers:
            for view in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                rows = view.view(torch.int16)[TO.pages[page], used:]
                rows.copy_(torch.full((1,), SOURCE_POISON, dtype=torch.uint8).expand(2).contiguous().view(torch.int16))


@pytest.mark.parametrize("name", ["npu", "npu-fia"])
@pytest.mark.parametrize("tp", PAIRS, ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_a_hybrid_models_pools(name, tp):
    """With TP 4 each of the two KV heads is on two ranks."""
    kind = Kind(name)
    hand_over(GDN, (tp[0], kind), (tp[1], kind))


@pytest.mark.parametrize("tp", [(2, 3), (3, 2), (6, 2), (2, 6)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_sizes_that_do_not_divide_each_other(tp):
    hand_over(SIXES, (tp[0], Kind()), (tp[1], Kind()))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256])
def test_lengths_around_a_page_of_128(tokens):
    hand_over(GDN, (2, Kind()), (1, Kind("npu-fia")), tokens=tokens)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_other_page_sizes(page_size):
    kind = Kind(page_size=page_size)
    hand_over(GDN, (2, kind), (1, kind), tokens=2 * page_size)


@pytest.mark.parametrize(("prefill", "decoding"), [(None, 4), (2, 6), (6, 2), (1, 4), (None, None)], ids=str)
def test_windows_with_rows_for_other_numbers_of_draft_tokens(prefill, decoding):
    """Only live rows travel, so that the two sides may keep different windows; the others keep their bytes."""
    hand_over(GDN, (2, Kind(draft_tokens=prefill)), (1, Kind(draft_tokens=decoding)))


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_states_in_bf16(tp):
    """As launch/ascend starts all servers."""
    kind = Kind(ssm=torch.bfloat16)
    hand_over(GDN, (tp[0], kind), (tp[1], kind))


def test_states_of_two_dtypes_are_refused():
    with pytest.raises(LayoutMismatch, match=r"ssm: .*dtype bfloat16, .* float32; .*--mamba-ssm-dtype"):
        hand_over(GDN, (2, Kind(ssm=torch.bfloat16)), (1, Kind()))


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2), (4, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
@pytest.mark.parametrize("nz", [False, True], ids=["plain", "FIA-NZ"])
def test_latent_pages(tp, nz):
    """Latent and rope have a buffer each; in NZ order pages move whole, with what is behind the last token."""
    kind = Kind(nz=nz)
    hand_over(KIMI, (tp[0], kind), (tp[1], kind), tail=nz)


def test_the_oracle_sees_a_wrong_byte():
    """One byte of a neighbour's page, and one of a row for draft tokens."""
    for change in (
        lambda rank: rank.pools.target.get_value_buffer(3)[2, 5, 0].view(torch.uint8).fill_(1),
        lambda rank: rank.pools.mamba.mamba_cache.conv[0][1, 2, 0, 3:4].view(torch.uint8).fill_(1),
    ):
        one, other = (Npu(GDN, 1, 0, Kind(), side=Side.DECODE, poison=POISON) for _ in range(2))
        change(one)
        assert any(not torch.equal(a, b) for a, b in zip(one.storages(), other.storages(), strict=True))


def test_a_window_of_an_npu_has_rows_for_draft_tokens_in_front():
    pools = Npu(GDN, 2, 0, Kind(draft_tokens=4), side=Side.DECODE, poison=POISON)
    (window,) = (axis for axis in pools.manifest.of(Role.CONV)[0].axes if axis.live is not None)
    assert window.live == (3, 3)
