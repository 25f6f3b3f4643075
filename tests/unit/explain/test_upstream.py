"""The figures for stock SGLang against SGLang's own functions."""

import numpy as np
import pytest
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks

from sglang_hetero.layout import Coordinates, Role, Segment, Sharding, Side
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.geometry import HeadAttention, LatentAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.reshard import plan
from sglang_hetero.reshard.upstream import upstream

K = 4
LAYERS = (0, 1)
QKV = [("q", 8, 4), ("k", 8, 4), ("v", 8, 8)]
XBC = [("x", 8, 4), ("B", 8, 2), ("C", 8, 2)]
FAMILIES = {
    "gdn-channels-first": (QKV, HeadAttention(8, 4, 4), ConvLayout.CHANNELS_FIRST),
    "gdn-window-first": (QKV, HeadAttention(8, 4, 4), ConvLayout.WINDOW_FIRST),
    "mamba2": (XBC, HeadAttention(8, 4, 4), ConvLayout.CHANNELS_FIRST),
    "kimi": (QKV, LatentAttention(8, 4), ConvLayout.WINDOW_FIRST),
}
WRONG = {"gdn-window-first": "the window is taken for the channels", "mamba2": "x, B and C are cut as one block"}


def manifests(family, tp, side):
    segments, attention, layout = FAMILIES[family]
    linear = LinearAttention(tuple(Segment(*part, Sharding.DIVIDED) for part in segments), K, 8, 4, 4)
    model = ModelGeometry(attention, (2,), linear, LAYERS)
    options = PoolOptions(page_size=4, pages=4, slots=2, conv_layout=layout)
    return [manifest(model, side, Coordinates(tp_rank=rank, tp_size=tp), options) for rank in range(tp)]


def sglang_blocks(family, source, destination, p, d):
    """(source offset, destination offset, bytes) of a conv slot, as SGLang's sender asks for them."""
    segments, _, layout = FAMILIES[family]
    mine, theirs = (rank.of(Role.CONV)[0] for rank in (source, destination))
    channels, rows = mine.axis(AxisName.CHANNEL).size, K - 1
    others = theirs.axis(AxisName.CHANNEL).size
    # SGLang's slice axis is the first of a slot but for Kimi, whatever lies there (memory_pool.py, conv_slice_axis).
    first_is_window = layout is ConvLayout.WINDOW_FIRST and family != "kimi"
    return compute_mamba_state_slice_byte_blocks(
        src_item_len=mine.item_span,
        dst_item_len=theirs.item_span,
        src_dim=rows if first_is_window else channels,
        dst_dim=rows if first_is_window else others,
        outer_count=rows if family == "kimi" else 1,
        src_attn_tp_size=p,
        dst_attn_tp_size=d,
        dst_tp_rank_in_group=destination.coordinates.tp_rank,
        local_tp_rank_in_group=source.coordinates.tp_rank,
        conv_shard_groups=None if family == "mamba2" else [heads * width for _, heads, width in segments],
    )


@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (4, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
@pytest.mark.parametrize("family", FAMILIES)
def test_state_descriptors_are_those_that_sglang_makes(family, tp):
    sources, (destination, *_) = manifests(family, tp[0], Side.PREFILL), manifests(family, tp[1], Side.DECODE)
    found = upstream(plan(sources, destination), np.array([1]), [range(1)])
    conv = sglang_blocks(family, sources[0], destination, *tp)
    assert found.state_descriptors == len(LAYERS) * (len(conv) + 1)
    assert any(WRONG.get(family, "nothing") in fault for fault in found.faults) == (family in WRONG)
    assert found.state_senders == max(1, tp[0] // tp[1])
    assert found.kv_senders == (1 if family == "kimi" else max(1, tp[0] // tp[1]))


def test_mamba2_blocks_of_sglang_are_in_the_wrong_places():
    """Why that fault is listed: rank 1's x would begin behind all of rank 0's x, B and C."""
    sources, (destination,) = manifests("mamba2", 2, Side.PREFILL), manifests("mamba2", 1, Side.DECODE)
    (block,) = sglang_blocks("mamba2", sources[1], destination, 2, 1)
    row = (K - 1) * 2
    x = next(part for part in plan(sources, destination).of(1) if part.role is Role.CONV).blocks[0]
    assert block[1] == 32 * row
    assert x.destination == 16


def test_a_draft_that_is_whole_on_every_rank_is_no_latent():
    """SGLang would cut its pages by token like those of any heads; only latent pages go over in one piece."""
    model = ModelGeometry(HeadAttention(8, 4, 4), (0,), None, (), (0,))
    found = []
    for whole in (False, True):
        options = PoolOptions(page_size=4, pages=4, whole_draft=whole)
        sources = [manifest(model, Side.PREFILL, Coordinates(tp_rank=rank, tp_size=2), options) for rank in range(2)]
        made = plan(sources, manifest(model, Side.DECODE, Coordinates(), options))
        found.append(upstream(made, np.array([1, 2]), [range(2)]).kv_descriptors)
    assert found == [4 * 8, 4 * 8]


def test_a_batch_is_a_chunk():
    """What is refused is a batch, not a prompt."""
    family = "gdn-channels-first"
    sources, (destination,) = manifests(family, 2, Side.PREFILL), manifests(family, 1, Side.DECODE)
    made, pages = plan(sources, destination), np.arange(1, 1025)
    whole = upstream(made, pages, [range(1024)])
    parts = upstream(made, pages, [range(start, start + 64) for start in range(0, 1024, 64)])
    assert whole.kv_descriptors == parts.kv_descriptors == 2 * 4 * 1024
    assert len(whole.faults) == 1
    assert not parts.faults
