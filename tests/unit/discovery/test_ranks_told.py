"""From what ranks say to what their server is."""

import pytest
from msgspec.structs import replace

from sglang_hetero.discovery.ranks import Told, decode_told, describe, encode_told
from sglang_hetero.discovery.record import Instance, decode_description, encode_description
from sglang_hetero.errors import RecordError
from sglang_hetero.layout import wire
from sglang_hetero.layout.manifest import Coordinates, Side
from tests.unit.discovery.servers import manifests

SERVER = Instance(role=Side.DECODE, url="http://a:1", model="m")


def told(tp=2, **fields):
    """What the ranks of one replica say."""
    return [
        Told(
            pid=100 + rank,
            place=one.coordinates,
            manifest=wire.encode(one),
            **{"requests": 8, "tokens": 100 + rank, **fields},
        )
        for rank, one in enumerate(manifests(Side.DECODE, tp))
    ]


def placed(dp_rank, tp_rank, **fields):
    place = Coordinates(tp_rank=tp_rank, tp_size=2, dp_rank=dp_rank, dp_size=2)
    return Told(pid=1, place=place, **fields)


def test_what_is_told_comes_back():
    one = replace(told()[1], parents=(5, 1), unsupported=("HiSparse",))
    assert decode_told(encode_told(one)) == one


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", encode_told(told()[0])[:-1]])
def test_what_is_no_rank_is_refused(data):
    with pytest.raises(RecordError):
        decode_told(data)


def test_a_place_that_cannot_be_is_refused():
    data = encode_told(told(1)[0]).replace(b"\xa7tp_rank\x00", b"\xa7tp_rank\x05")
    with pytest.raises(RecordError, match="tp_rank 5 of tp_size 1"):
        decode_told(data)


def test_a_server_is_all_its_ranks():
    found, whole = describe(SERVER, "auto", "mooncake", reversed(told()))
    assert whole
    assert found.notes == () and found.unsupported == ()
    one = found.instance
    assert (one.tp_size, one.pp_size, one.dp_size, one.requests, one.tokens) == (2, 1, 1, 8, 100)
    assert found.ranks() == manifests(Side.DECODE, 2)
    assert len(one.fingerprint) == 32
    again, _ = describe(replace(SERVER, url="http://b:2", incarnation="x"), "auto", "mooncake", told(requests=9))
    assert again.instance.fingerprint == one.fingerprint
    other, _ = describe(SERVER, "off", "mooncake", told())
    assert other.instance.fingerprint != one.fingerprint


def test_of_a_server_on_several_nodes_no_more_is_waited_for_than_the_first_one_knows():
    here = told(4)[:2]
    for ranks, nodes, final in ((here, 2, True), (here[:1], 2, False), (here, 1, False), (told(4), 1, True)):
        found, whole = describe(SERVER, "auto", "mooncake", ranks, nodes=nodes)
        assert (found.final, whole, bool(found.manifests)) == (final, len(ranks) == 4, len(ranks) == 4)
    assert not describe(SERVER, "auto", "mooncake", [], nodes=2)[0].final


def test_replicas_add_up_and_ranks_of_one_do_not():
    ranks = [placed(dp, tp, requests=3 + dp, tokens=10 * (1 + tp)) for dp in range(2) for tp in range(2)]
    found, whole = describe(SERVER, "auto", "mooncake", ranks)
    assert whole and (found.instance.requests, found.instance.tokens, found.instance.dp_size) == (7, 20, 2)


@pytest.mark.parametrize("which", ["one is missing", "one has no manifest"])
def test_a_part_of_the_manifests_is_none(which):
    ranks = told()
    if which == "one is missing":
        del ranks[1]
    else:
        ranks[1] = replace(ranks[1], manifest=b"", unsupported=("its caches cannot be described",))
    found, whole = describe(SERVER, "auto", "mooncake", ranks)
    assert found.manifests == () and found.instance.fingerprint == ""
    assert found.instance.tp_size == 2
    assert whole == (which == "one has no manifest")
    if whole:
        assert found.unsupported == ("its caches cannot be described",)
    else:
        assert "1 of 2 ranks have not told what they are (TP1/2, ...)" in found.notes[0]


def test_nobody_has_told_anything():
    found, whole = describe(SERVER, "off", "nixl", [], ["a.rank cannot be read"])
    assert not whole and found.instance == SERVER
    assert found.notes[0] == "a.rank cannot be read" and "no rank has told what it is" in found.notes[1]


@pytest.mark.parametrize(
    "ranks",
    [
        [*told(1), *told(2)],
        [Told(pid=1, place=Coordinates(tp_rank=0, tp_size=4096, dp_rank=0, dp_size=4096))],
    ],
    ids=["of two servers", "more than there can be"],
)
def test_ranks_that_do_not_agree(ranks):
    found, whole = describe(SERVER, "auto", "mooncake", ranks)
    assert not whole and found.instance == SERVER and found.notes == ("ranks do not agree how many they are",)


def test_whatever_is_told_can_be_read_by_others():
    """Texts of any kind and number, from errors of any kind."""
    ranks = told(unsupported=tuple(f"{number}\n\u202e" + "x" * 2000 for number in range(200)))
    found, _ = describe(SERVER, "auto", "mooncake", ranks, ["note\0"] * 200)
    assert decode_description(encode_description(found)) == found
