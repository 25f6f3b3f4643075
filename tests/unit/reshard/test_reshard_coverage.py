"""The proof of coverage, from hand-made copies: it must find every gap and every second writer by itself."""

import pytest
from msgspec.structs import replace

from sglang_hetero.errors import CoverageError
from sglang_hetero.layout import (
    Axis,
    AxisName,
    Component,
    Coordinates,
    Item,
    Manifest,
    Role,
    Segment,
    Sharding,
    Side,
)
from sglang_hetero.layout.component import PLAIN
from sglang_hetero.reshard import Block, Share, plan
from sglang_hetero.reshard.coverage import prove
from tests.reshard_oracle import model as m
from tests.reshard_oracle.pair import decode, manifest, prefill
from tests.reshard_oracle.rank import Shape

D0 = r"decode TP0/1 \(decode-host\)"


def shares(*blocks, layers=(0, 2), source=0):
    """Shares of the conv state of an undivided rank."""
    theirs = manifest().of(Role.CONV)[0]
    return [
        Share(source, Role.CONV, layers, tuple(Block(*block) for block in blocks), theirs, conv_only().components[0])
    ]


def conv_only():
    """A decode rank with a conv state alone: 32 channels on layers 0 and 2."""
    return replace(decode(), components=decode().of(Role.CONV))


SOURCES = [manifest(), manifest()]


def test_coverage_accepts_a_tiling_in_any_order():
    prove(SOURCES, conv_only(), shares((16, 16, 16), (0, 0, 16)), frozenset())
    prove(SOURCES, conv_only(), shares((16, 16, 16)) + shares((0, 0, 16), source=1), frozenset())
    prove(SOURCES, conv_only(), [], frozenset({Role.CONV}))


READS, WRITES = r"the source would read elements", r"it would write elements"


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (shares((0, 0, 8), (16, 16, 16)), "layer 0 of conv on .*: elements 8 to 15 of axis channel have no writer"),
        (shares((8, 8, 24)), "elements 0 to 7 of axis channel have no writer"),
        (shares((0, 0, 24)), "elements 24 to 31 of axis channel have no writer"),
        (shares((0, 0, 16)) + shares((12, 12, 20), source=1), "elements 12 to 15 .* have two writers, .* source [01]"),
        (shares((0, 0, 32)) + shares((0, 0, 32), source=1), "elements 0 to 31 .* have two writers"),
        (shares((0, 0, 32)) + shares((5, 5, 1), source=1), "elements 5 to 5 .* have two writers"),
        (shares((0, 0, 16), (0, 16, 32)), f"{WRITES} 16 to 47 of axis channel, which has 32"),
        (shares((0, 0, 16), (17, 16, 16)), f"{READS} 17 to 32 of axis channel, which has 32"),
        (shares((0, 0, 33)), f"{READS} 0 to 32"),
        (shares((-1, 0, 32)), f"{READS} -1 to 30"),
        (shares((0, -1, 32)), f"{WRITES} -1 to 30"),
        (shares((0, 0, 32), (3, 3, 0)), f"{READS} 3 to 2"),
        (
            shares((16, 0, 16), (0, 16, 16)),
            "elements 16 to 31 of the source are not elements 0 to 15 of the destination",
        ),
        (shares((0, 0, 8), (16, 8, 8), (8, 16, 8), (24, 24, 8)), "elements 16 to 23 of the source are not elements 8"),
        (shares((0, 0, 32), layers=(0,)), "layer 2 of conv on .*: elements 0 to 31 of axis channel have no writer"),
        (
            shares((0, 0, 32), layers=(0, 2, 4)),
            r"the share has layers that prefill TP0/1 \(prefill-host\) does not have",
        ),
        ([], "layer 0 of conv on .*: elements 0 to 31 of axis channel have no writer"),
    ],
)
def test_coverage_rejects(copies, message):
    with pytest.raises(CoverageError, match=message) as error:
        prove(SOURCES, conv_only(), copies, frozenset())
    assert "decode TP0/1 (decode-host)" in str(error.value)


def test_coverage_rejects_what_the_destination_does_not_have():
    theirs = manifest().of(Role.SSM)[0]
    stray = [Share(0, Role.SSM, (0,), (Block(0, 0, 8),), theirs, theirs)]
    with pytest.raises(CoverageError, match=f"the share is of a component that {D0} does not have"):
        prove(SOURCES, conv_only(), shares((0, 0, 32)) + stray, frozenset())


def test_coverage_rejects_what_the_source_does_not_have():
    with pytest.raises(CoverageError, match=r"the share is of a component that prefill TP0/2 .* does not have"):
        prove(prefill(2), conv_only(), shares((0, 0, 32)), frozenset())


def test_coverage_rejects_a_share_of_what_should_be_missing():
    with pytest.raises(CoverageError, match=f"{D0} has no layer 0 of conv, but a source would send it"):
        prove(SOURCES, conv_only(), shares((0, 0, 32)), frozenset({Role.CONV}))


def test_coverage_rejects_millions_of_runs():
    """A state of the right shape whose elements all have gaps between them."""
    sizes = {AxisName.HEAD: 8, AxisName.STATE_ROW: 512, AxisName.STATE_COLUMN: 512}
    model = (m.ssm(8, 512, 512, (0,)),)
    to = decode(model=model, shape=Shape(slots=1))
    part, stride, axes = to.components[0], 8, []
    for name in reversed(sizes):
        axes.append(replace(part.axis(name), stride=stride))
        stride *= sizes[name]
    gappy = replace(part, axes=tuple(reversed(axes)), item_stride=stride, items=1)
    source = replace(manifest(model=(m.ssm(8, 2, 3, (0,)),)), components=(gappy,))
    with pytest.raises(CoverageError, match="of all layers would be moved in 2097152 runs of bytes, at most 1048576"):
        plan([source], to)


@pytest.mark.parametrize("encoding", ["plain", "packed"])
def test_opaque_items_of_one_shape_are_not_taken_apart(encoding):
    """Two ranks hold one head, four the common channels: by layer 2 their turns no longer fall on the same rank."""
    segments = (Segment("own", 2, 4), Segment("common", 1, 4, Sharding.REPLICATED))

    def rank(side, number, tp):
        axes = (Axis(AxisName.TOKEN, 4, 16), Axis(AxisName.CHANNEL, 8, 2, segments))
        latent = Component(
            Role.TARGET_LATENT, Item.PAGE, "bfloat16", (0, 1, 2), axes, 8, 64, (0, 4096, 8192), encoding=encoding
        )
        return Manifest(
            side=side,
            host="a-host",
            coordinates=Coordinates(tp_rank=number, tp_size=tp),
            page_size=4,
            model="m",
            incarnation="1",
            sglang="0.5.23",
            components=(latent,),
        )

    sources = [rank(Side.PREFILL, number, 4) for number in range(4)]
    if encoding == PLAIN:
        assert [share.source for share in plan(sources, rank(Side.DECODE, 0, 2)).shares] == [0, 0, 1, 2]
        return
    with pytest.raises(CoverageError, match=r"encoding packed can only be moved whole.*same TP size"):
        plan(sources, rank(Side.DECODE, 0, 2))
