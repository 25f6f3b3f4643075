"""Every legal number of KV heads and pair of TP sizes up to 16, by bytes on every decode rank; the illegal refused."""

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from sglang_hetero.errors import TopologyError
from sglang_hetero.layout import Role, Side
from tests.reshard_oracle.handover import Request, check, decode_rank, places, prefill_ranks, serve
from tests.reshard_oracle.model import Segment, conv, heads_kv, legal, ssm
from tests.reshard_oracle.rank import Rank, Shape

LARGEST = 16
SIZES = range(1, LARGEST + 1)
LEGAL_TRIPLES = 610
"""Of heads, prefill TP and decode TP in 1..16, those where one of heads and TP divides the other on both sides."""
ILLEGAL_PAIRS = 172
SHAPE = Shape(page_size=2, pages=3, slots=1)
REQUEST = Request(tokens=3)


def model(heads):
    """Two layers, so that replicas take turns; four bytes an element, so that no two values are equal by chance."""
    return (heads_kv(Role.TARGET_KEY, heads, 1, (0, 1), "float32"),)


@cache
def legal_sizes(heads):
    return [tp for tp in SIZES if legal(model(heads), tp)]


@pytest.mark.parametrize("heads", SIZES)
def test_every_legal_pair_of_tp_sizes(heads):
    random = np.random.default_rng(heads)
    for prefill in legal_sizes(heads):
        sources = prefill_ranks(model(heads), prefill, SHAPE)
        held = places(random, prefill, SHAPE, REQUEST.tokens)
        for source, place in zip(sources, held, strict=True):
            source.write(REQUEST.seed, place.pages, place.slot, REQUEST.tokens)
        for decode in legal_sizes(heads):
            for rank in range(decode):
                to = decode_rank(model(heads), decode, rank, SHAPE)
                into = places(random, 1, SHAPE, REQUEST.tokens)[0]
                check(sources, held, to=to, into=into, request=REQUEST)


def test_the_sweep_is_complete():
    assert sum(len(legal_sizes(heads)) ** 2 for heads in SIZES) == LEGAL_TRIPLES
    pairs = {(p, d) for heads in SIZES for p in legal_sizes(heads) for d in legal_sizes(heads)}
    # One head can be on any number of ranks, so every pair of sizes is in the sweep.
    assert pairs == {(p, d) for p in SIZES for d in SIZES}


@pytest.mark.parametrize("side", Side)
def test_sizes_that_divide_in_neither_direction_are_refused(side):
    refused = []
    for heads in SIZES:
        for tp in SIZES:
            if tp in legal_sizes(heads):
                continue
            refused.append((heads, tp))
            with pytest.raises(TopologyError, match=rf"{heads} heads cannot be sharded over TP {tp}\b") as error:
                unshardable(heads, tp, side)
            assert side in str(error.value) and "choose a TP size" in str(error.value)
    assert len(refused) == ILLEGAL_PAIRS
    assert (6, 4) in refused and (4, 6) in refused  # more heads than ranks, more ranks than heads


def unshardable(heads, tp, side):
    """A rank's manifest that claims one local head of `heads` over `tp`."""
    rank = Rank(model(1), side, prefill_ranks(model(1), tp, SHAPE)[0].coordinates, SHAPE)
    component = rank.manifest.components[0]
    axes = tuple(
        replace(axis, segments=(replace(axis.segments[0], heads=heads),)) if axis.segments else axis
        for axis in component.axes
    )
    return replace(rank.manifest, components=(replace(component, axes=axes),))


@pytest.mark.parametrize("prefill", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("decode", [1, 2, 3, 4, 6, 12])
def test_linear_state_for_every_pair_of_divisors(prefill, decode):
    segments = (Segment("q", 12, 2), Segment("k", 12, 2), Segment("v", 24, 3))
    linear = (conv(segments, 4, (0, 1), "float32"), ssm(24, 2, 3, (0, 1)))
    shape = Shape(pages=1, slots=2)
    serve(linear, (prefill, shape), (decode, shape), Request(tokens=1))
