"""How a unit is divided among sources, and that the default unit is enough for every prefill that may come."""

from dataclasses import replace
from functools import cache

import pytest

from sglang_hetero.errors import StagingError, TopologyError
from sglang_hetero.layout import Coordinates, Role, Side
from sglang_hetero.layout.axes import Segment, Sharding
from sglang_hetero.layout.geometry import HeadAttention, LatentAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.reshard import Policy, plan
from sglang_hetero.transfer.pieces import (
    ALIGN,
    LARGEST_PREFILL_TP,
    UNIT_TARGET,
    DestinationSide,
    SourceSide,
    unit_bytes_for,
    window,
    window_for,
)

SIZES = range(1, LARGEST_PREFILL_TP + 1)
OPTIONS = PoolOptions(page_size=4, pages=4, slots=2, ssm_dtype="bfloat16")  # so that any width suits any address
DRAFT = Policy(start_empty=frozenset({Role.DRAFT_KEY, Role.DRAFT_VALUE, Role.DRAFT_LATENT}))


def linear(heads, *, one_group):
    """heads value heads; B and C of a single group, on every rank, or q and k by head."""
    if one_group:
        small = tuple(Segment(name, 1, 5, Sharding.REPLICATED) for name in "BC")
        segments = (Segment("x", heads, 3, Sharding.DIVIDED), *small)
    else:
        segments = tuple(Segment(name, heads, 3, Sharding.DIVIDED) for name in "qkv")
    return LinearAttention(segments, 4, heads, 2, 3)


def model(attention, state=None, *, draft=True):
    layers = (1, 3, 5, 7, *range(8, 20))  # enough that each of 16 replicas has its turn
    return ModelGeometry(attention, layers, state, (0, 2, 4, 6) if state else (), (0,) if draft else ())


MODELS = {
    **{f"{heads}_heads": model(HeadAttention(heads, 6, 2)) for heads in SIZES},
    "latent": model(LatentAttention(6, 2)),
    "two_heads_gdn": model(HeadAttention(2, 6, 2), linear(48, one_group=False)),
    "eight_heads_one_group": model(HeadAttention(8, 3, 3), linear(48, one_group=True)),
    "one_head_one_group": model(HeadAttention(1, 3, 3), linear(16, one_group=True)),
    "latent_kda": model(LatentAttention(6, 2), linear(48, one_group=False)),
}


@cache
def ranks(geometry, side, tp, pp=1, *, draft=True, whole=False):
    places = [
        Coordinates(tp_rank=rank, tp_size=tp, pp_rank=stage, pp_size=pp) for stage in range(pp) for rank in range(tp)
    ]
    options = replace(OPTIONS, whole_draft=whole)
    return [manifest(geometry, side, place, options, draft=draft) for place in places]


def legal(geometry, tp):
    try:
        ranks(geometry, Side.PREFILL, tp)
    except TopologyError:
        return False
    return True


@pytest.fixture
def tight(monkeypatch):
    """Without the lower bound and rounding, so that a need that was forgotten is not hidden behind them."""
    monkeypatch.setattr(window, "UNIT_TARGET", 1)
    monkeypatch.setattr(window, "UNIT_ALIGN", 1)


@pytest.mark.parametrize("name", MODELS)
def test_default_unit_is_enough_for_every_prefill(name, tight):
    """All legal pairs up to 16; all stages; the draft there or not, since that moves the turns of replicas."""
    geometry = MODELS[name]
    sizes = [tp for tp in SIZES if legal(geometry, tp)]
    least = []
    for decode in sizes if len(sizes) < 6 else (*sizes[:4], sizes[-1]):
        destinations = ranks(geometry, Side.DECODE, decode)
        for rank in {0, decode - 1}:
            unit = unit_bytes_for(destinations[rank])
            for prefill in sizes:
                for stages, draft in ((1, True), (2, False)):
                    sources = ranks(geometry, Side.PREFILL, prefill, stages, draft=draft)
                    made = plan(sources, destinations[rank], Policy() if draft else DRAFT)
                    check_window(made, window_for(made, unit, 2))
                    least.append((needed(made), unit))
    assert len(sizes) > 1
    # Not far too much either: some prefill comes near it.
    assert max(need / unit for need, unit in least) > 0.6


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("width", [6, 32, 200])
@pytest.mark.parametrize("whole", [(True, False), (False, True), (True, True)], ids=["prefill", "decode", "both"])
@pytest.mark.parametrize("heads", [1, 2, 6, 16])
def test_default_unit_is_enough_for_a_whole_draft(heads, whole, width, layers, tight):
    """Each entry of it may come from a rank that has nothing else to send."""
    geometry = replace(model(HeadAttention(heads, width, 2)), attention_layers=(1,), draft_layers=tuple(range(layers)))
    sizes = [tp for tp in SIZES if legal(geometry, tp)]
    for decode in sizes:
        for rank in {0, decode - 1}:
            destination = ranks(geometry, Side.DECODE, decode, whole=whole[1])[rank]
            unit = unit_bytes_for(destination)
            for prefill in sizes:
                made = plan(ranks(geometry, Side.PREFILL, prefill, whole=whole[0]), destination)
                check_window(made, window_for(made, unit, 2))


def needed(made):
    sides = [SourceSide(made, number) for number in range(len(made.sources))]
    return sum(side.area_bytes(dict.fromkeys(side.page_bytes, 1)) for side in sides if side.entries)


def check_window(made, found):
    """Areas are aligned, apart within their stage, inside the unit, and as large as the plan wants."""
    DestinationSide(made, found)
    assert set(found.pages_per_piece) == {
        share.role for share in made.shares if share.role not in (Role.CONV, Role.SSM)
    }
    assert min(found.pages_per_piece.values()) >= 1
    ends = {}
    for number, (source, (offset, nbytes)) in enumerate(zip(made.sources, found.areas, strict=True)):
        stage = source.coordinates.pp_rank
        assert offset % ALIGN == 0 and nbytes % ALIGN == 0
        if not made.of(number):
            assert (offset, nbytes) == (0, 0)
            continue
        assert offset == ends.get(stage, 0) and nbytes > 0
        ends[stage] = offset + nbytes
        assert nbytes <= found.unit_bytes
    assert max(ends.values()) <= found.unit_bytes


@pytest.mark.parametrize(
    "pair", [(2, 1), (1, 2), (3, 2), (2, 3), (6, 3), (12, 1)], ids=lambda pair: "P{}D{}".format(*pair)
)
def test_pieces_are_as_large_as_the_unit_allows(pair):
    geometry = model(HeadAttention(6, 8, 4))
    made = plan(ranks(geometry, Side.PREFILL, pair[0]), ranks(geometry, Side.DECODE, pair[1])[0])
    for unit in (needed(made), 4096, 5000, 1 << 16):
        if unit < needed(made):
            continue
        found = window_for(made, unit, 2)
        check_window(made, found)
        sides = [SourceSide(made, number) for number in range(len(made.sources))]
        # A page more of every role would not fit.
        more = {role: pages + 1 for role, pages in found.pages_per_piece.items()}
        assert sum(side.area_bytes(more) for side in sides) > unit
        # Values have half the width of keys, so about twice the pages.
        assert found.pages_per_piece[Role.TARGET_VALUE] >= found.pages_per_piece[Role.TARGET_KEY]


def test_a_unit_that_is_too_small_is_refused_with_what_to_set():
    geometry = MODELS["two_heads_gdn"]
    made = plan(ranks(geometry, Side.PREFILL, 4), ranks(geometry, Side.DECODE, 1)[0])
    need = needed(made)
    window_for(made, need, 1)
    with pytest.raises(StagingError, match=r"linear state.*SGLANG_HETERO_UNIT_KB=4 or more") as refused:
        window_for(made, need - 1, 1)
    assert f"{need - 1} bytes" in str(refused.value) and "4 TP ranks" in str(refused.value)
    pages = plan(ranks(MODELS["latent"], Side.PREFILL, 4), ranks(MODELS["latent"], Side.DECODE, 1)[0])
    with pytest.raises(StagingError, match="page of target_latent"):
        window_for(pages, ALIGN, 1)
    with pytest.raises(StagingError, match="0 units"):
        window_for(made, need, 0)


def test_areas_that_are_too_small_are_refused():
    geometry = MODELS["2_heads"]
    made = plan(ranks(geometry, Side.PREFILL, 2), ranks(geometry, Side.DECODE, 1)[0])
    good = window_for(made, UNIT_TARGET, 2)
    (_, first), (offset, second) = good.areas
    for areas in (((0, first - 1), (offset, second)), ((0, first), (good.unit_bytes - second + 1, second))):
        with pytest.raises(StagingError, match="needs"):
            DestinationSide(made, replace(good, areas=areas))


def test_default_unit_of_real_models():
    """What docs/ quotes: 2 MiB where a layer's state is smaller, else the state."""
    segments = [("q", 16), ("k", 16), ("v", 32)]
    state = LinearAttention(tuple(Segment(n, h, 128, Sharding.DIVIDED) for n, h in segments), 4, 32, 128, 128)
    geometry = ModelGeometry(HeadAttention(2, 256, 256), (3,), state, (0, 1, 2), (0,))
    options = PoolOptions(page_size=128)
    units = [unit_bytes_for(manifest(geometry, Side.DECODE, Coordinates(tp_size=tp), options)) for tp in (1, 2)]
    conv_and_ssm = (16 + 16 + 32) * 128 * 3 * 2 + 32 * 128 * 128 * 4
    assert units[1] == UNIT_TARGET < conv_and_ssm <= units[0] < conv_and_ssm + 8192
