"""Messages: what goes in comes out, and what cannot be is refused with a word about it."""

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from sglang_hetero.errors import MessageError
from sglang_hetero.layout import Role, limits
from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.pieces import StateMode

HEAD = {"room": 1 << 40, "epoch": 3, "incarnation": "a1"}
KEY = m.AnnouncedPiece(0, Role.TARGET_KEY, 3, 8, 4, 500)
STATE = m.AnnouncedPiece(2, None, 4)

REGISTER = m.Register(
    **HEAD,
    source="b2",
    manifest=b"m",
    session="10.0.0.2:1",
    host="10.0.0.2",
    port=9,
    arena=1 << 40,
    arena_bytes=1 << 30,
    control=b"d",
)
BIND = m.Bind(
    **HEAD,
    source="p",
    use="d 1",
    rank=1,
    ranks=2,
    tokens_max=900,
    pages=9,
    mode=StateMode.PULL,
    fingerprint="f",
    units=(0, 4096, 2048),
    area_offset=512,
    area_bytes=1024,
    pages_per_piece={Role.TARGET_KEY: 4, Role.DRAFT_VALUE: 1},
    verify=True,
)
READY = m.Ready(**HEAD, source=3, pieces=(KEY, STATE), total=3, digests=(b"12", b""))
FIRST = m.FirstGeneration(
    **HEAD,
    targets=(m.Target(b"d0", 1), m.Target(b"d1", 2)),
    token=7,
    topology="t",
    tokens=400,
    slot=5,
    pages=m.pack_ids([4, 2, 9]),
    chunks=(2, 2, 3),
    aux=(b"row", b""),
)
TOPOLOGY = m.Topology(
    **HEAD, ready=True, dp_rank=1, topology="t", ranks=(m.RankEntry(b"x", "h", 1, "s"), m.RankEntry(b"y", "h", 2, "t"))
)
ALL = [
    REGISTER,
    BIND,
    READY,
    FIRST,
    TOPOLOGY,
    m.Ready(**HEAD, source=1, total=0),
    m.Ready(**HEAD, source=1, pieces=(STATE,), digests=(b"12",), reads=True),
    m.Topology(**HEAD, reason="missing: PP0 TP1"),
    m.Ack(**HEAD, stage=1, upto=7),
    m.Finish(**HEAD),
    m.Abort(**HEAD, source="b2", reason="client went away"),
    m.Drained(**HEAD, source=2),
    m.Failed(**HEAD, source=2, reason="no memory"),
    m.Hello(**HEAD, manifest=b"m", host="10.0.0.1", port=65_535, session="10.0.0.1:7"),
    m.TopologyRequest(**HEAD, dp_rank=2),
    m.Pong(**HEAD, known=True, topologies=((0, "t"), (3, ""))),
    m.Ping(**HEAD),
]


def body(message):
    """The fields of a message as a dict, for damage."""
    return msgspec.msgpack.decode(m.encode(message)[len(m.MAGIC) + 1 :])


def framed(tree):
    return m.MAGIC + bytes([m.VERSION]) + msgspec.msgpack.encode(tree)


@pytest.mark.parametrize("message", ALL, ids=lambda each: type(each).__name__)
def test_what_goes_in_comes_out(message):
    data = m.encode(message)
    assert m.decode(data, limit=m.MAX_TOPOLOGY_BYTES) == message
    assert m.decode(memoryview(data)) == m.decode(bytearray(data)) == message


def test_the_largest_room():
    assert m.decode(m.encode(m.Ping(**HEAD | {"room": 2**63 - 1}))).room == 2**63 - 1


def test_a_field_that_must_be_there():
    """msgspec takes a default for a missing field without looking at its range."""
    for message, name in ((ALL[-1], "incarnation"), (REGISTER, "port"), (FIRST, "targets"), (BIND, "fingerprint")):
        tree = body(message)
        del tree[name]
        with pytest.raises(MessageError, match=f"{name} is missing"):
            m.decode(framed(tree))


def test_every_kind_is_here():
    assert {type(each) for each in ALL} == set(m.Message.__args__)


def test_all_fields_have_defaults():
    for kind in m.Message.__args__:
        assert kind().room == 0


def test_plain_tuples_and_lists_will_do():
    assert m.decode(m.encode(replace(READY, pieces=[tuple(KEY), tuple(STATE)], digests=[b"12", b""]))) == READY
    assert m.decode(m.encode(replace(FIRST, targets=((b"d0", 1), (b"d1", 2))))) == FIRST


def test_page_ids():
    assert FIRST.page_ids.tolist() == [4, 2, 9]
    assert m.pack_ids(np.array([4, 2, 9], np.uint64)) == FIRST.pages
    assert m.pack_ids([]) == b""
    for wrong in ([-1], [1 << 31], [[1]], np.array([2**63], np.uint64)):
        with pytest.raises(MessageError, match="no row of page ids"):
            m.pack_ids(wrong)


# --- version, magic, size


def test_another_version_is_named_with_ours():
    data = bytearray(m.encode(ALL[-1]))
    data[len(m.MAGIC)] = m.VERSION + 1
    with pytest.raises(MessageError, match=rf"version {m.VERSION + 1}, this build reads version {m.VERSION}.*install"):
        m.decode(data)
    with pytest.raises(MessageError, match="version missing"):
        m.decode(m.MAGIC)


def test_no_message_at_all():
    for data in (b"", b"SGH", b"SGHM\1\x80", b"KV_TRANSFER"):
        with pytest.raises(MessageError, match="no message: they do not begin with"):
            m.decode(data)
    with pytest.raises(MessageError, match="comes as bytes, not as str"):
        m.decode("SGHT")


def test_too_large_before_anything_else_is_done():
    with pytest.raises(MessageError, match=f"larger than {m.MAX_MESSAGE_BYTES}"):
        m.decode(bytes(m.MAX_MESSAGE_BYTES + 1))


def test_the_largest_of_each_fit():
    """The limit follows from what the fields may hold."""
    pages = m.MAX_PAGES
    first = replace(
        FIRST,
        tokens=pages,
        pages=m.pack_ids(range(pages)),
        chunks=(pages,) * m.MAX_CHUNKS,
        aux=(bytes(m.MAX_AUX_BYTES),),
        targets=tuple(m.Target(b"i" * m.MAX_IDENTITY, 2**63 - 1) for _ in range(m.MAX_TARGETS)),
    )
    assert m.MAX_MESSAGE_BYTES * 0.8 < len(m.encode(first)) <= m.MAX_MESSAGE_BYTES
    register = replace(REGISTER, manifest=bytes(limits.MAX_MANIFEST_BYTES))
    assert m.decode(m.encode(register)) == register


def test_a_large_topology_is_for_who_asks_for_it():
    entry = m.RankEntry(bytes(limits.MAX_MANIFEST_BYTES), "h", 1, "s")
    data = m.encode(replace(TOPOLOGY, ranks=(entry,) * 32))
    assert len(m.decode(data, limit=m.MAX_TOPOLOGY_BYTES).ranks) == 32
    with pytest.raises(MessageError, match="larger than"):
        m.decode(data)
    with pytest.raises(MessageError, match="larger than"):
        m.encode(replace(TOPOLOGY, ranks=(entry,) * 65))


# --- what cannot be

WRONG = {
    "no incarnation": (m.Ping(), "length >= 1"),
    "a replica twice": (m.Pong(**HEAD, topologies=((1, "t"), (1, "u"))), "ascending"),
    "unprintable incarnation": (m.Ping(incarnation="a\n"), "incarnation"),
    "negative room": (m.Ping(**HEAD | {"room": -1}), "room"),
    "huge room": (m.Ping(**HEAD | {"room": 2**63}), "room"),
    "float epoch": (m.Ping(**HEAD | {"epoch": 1.5}), "epoch"),
    "port 0": (replace(REGISTER, port=0), "port"),
    "port 65536": (replace(REGISTER, port=65_536), "port"),
    "registered with nobody": (replace(REGISTER, source=""), "source"),
    "no manifest": (replace(REGISTER, manifest=b""), "manifest"),
    "long manifest": (replace(REGISTER, manifest=bytes(limits.MAX_MANIFEST_BYTES + 1)), "manifest"),
    "arena at the end": (replace(REGISTER, arena=2**63 - 10, arena_bytes=100), "address space"),
    "identity of ZeroMQ's": (replace(REGISTER, control=b"\0abc"), "zero byte"),
    "long identity": (replace(REGISTER, control=b"i" * 256), "control"),
    "rank beyond": (replace(BIND, rank=2), "rank 2 of 2"),
    "unknown mode": (replace(BIND, mode="shove"), "shove"),
    "unit twice": (replace(BIND, units=(0, 0), area_bytes=0), "overlap"),
    "units overlap": (replace(BIND, units=(0, 2048, 3071)), "overlap"),
    "area beyond": (replace(BIND, units=(limits.MAX_BYTES,)), "beyond any arena"),
    "negative area": (replace(BIND, area_offset=-1), "area_offset"),
    "too many units": (replace(BIND, units=tuple(range(0, 2048 * 4097, 2048))), "units"),
    "piece of no page": (replace(BIND, pages_per_piece={Role.TARGET_KEY: 0}), "pages_per_piece"),
    "pages of conv": (replace(BIND, pages_per_piece={Role.CONV: 1}), "conv and SSM"),
    "unknown role": (replace(BIND, pages_per_piece={"target_kex": 1}), "target_kex"),
    "state with pages": (replace(READY, pieces=(STATE._replace(pages=1),), digests=()), "no pages or tokens"),
    "conv alone": (replace(READY, pieces=(KEY._replace(role=Role.CONV),), digests=()), "state travels whole"),
    "empty piece": (replace(READY, pieces=(KEY._replace(pages=0),), digests=()), "500 tokens in 0 pages"),
    "fewer tokens than pages": (replace(READY, pieces=(KEY._replace(tokens=3),), digests=()), "3 tokens in 4"),
    "page beyond": (replace(READY, pieces=(KEY._replace(first_page=m.MAX_PAGES),), digests=()), "beyond page"),
    "descending": (replace(READY, pieces=(STATE, KEY)), "ascending"),
    "twice": (replace(READY, pieces=(KEY, KEY)), "ascending"),
    "beyond the total": (replace(READY, total=2), "piece 2 of 2"),
    "one digest of two": (replace(READY, digests=(b"1",)), "digest"),
    "total -2": (replace(READY, total=-2), "total"),
    "for nobody": (replace(FIRST, targets=()), "targets"),
    "half a page id": (replace(FIRST, pages=bytes(13)), "13 bytes"),
    "negative page id": (replace(FIRST, pages=b"\xff" * 12), "negative"),
    "more pages than tokens": (replace(FIRST, tokens=2), "2 tokens in 3 pages"),
    "chunks out of order": (replace(FIRST, chunks=(3, 2, 3)), "out of order"),
    "chunks end early": (replace(FIRST, chunks=(1, 2)), "page 2 of 3"),
    "no chunk": (replace(FIRST, chunks=()), "chunks"),
    "rows": (replace(FIRST, aux=(bytes(m.MAX_AUX_BYTES), b"1")), "rows of more"),
    "negative token": (replace(FIRST, token=-1), "token"),
    "slot -2": (replace(FIRST, slot=-2), "slot"),
    "ready without ranks": (replace(TOPOLOGY, ranks=()), "ready"),
    "ranks though not ready": (replace(TOPOLOGY, ready=False, topology=""), "has no ranks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_on_both_sides(name):
    message, words = WRONG[name]
    data = m.MAGIC + bytes([m.VERSION]) + msgspec.msgpack.encode(message)
    with pytest.raises(MessageError, match=words) as error:
        m.decode(data)
    assert len(str(error.value)) < 2 * m.MAX_REASON
    with pytest.raises(MessageError, match=words):
        m.encode(message)


def test_fields_and_kinds_that_we_do_not_know():
    with pytest.raises(MessageError, match="unknown field `more`"):
        m.decode(framed({**body(ALL[-1]), "more": 1}))
    with pytest.raises(MessageError, match="Pang"):
        m.decode(framed({**body(ALL[-1]), "type": "Pang"}))
    for tree in (None, 1, [], {}, "Ping", {"room": 1}):
        with pytest.raises(MessageError):
            m.decode(framed(tree))


def test_errors_do_not_repeat_megabytes():
    for tree in ({"type": "x" * 1_000_000}, {**body(BIND), "mode": "y" * 1_000_000}, {"z" * 1_000_000: 1}):
        with pytest.raises(MessageError) as error:
            m.decode(framed(tree))
        assert len(str(error.value)) < 2 * m.MAX_REASON


def test_what_cannot_be_encoded():
    with pytest.raises(MessageError, match="Ack cannot be sent"):
        m.encode(m.Ack(**HEAD, upto=object()))
    with pytest.raises(MessageError, match="Ack cannot be sent"):
        m.encode(m.Ack(**HEAD, upto=1 << 70))


def test_a_failure_is_told_whatever_its_text():
    for kind in (m.Abort, m.Failed):
        sent = m.decode(m.encode(kind(**HEAD, reason="no room\n\x00é" + "x" * 10_000)))
        assert sent.reason.startswith("no room\\n\\x00\\xe9xxx")
        assert len(sent.reason) == m.MAX_REASON
    assert m.decode(m.encode(m.Abort(**HEAD))).reason == ""


# --- beside upstream's frames


def test_ours_is_found_at_the_end():
    ours = m.encode(ALL[-1])
    assert m.find([b"room", b"SGHT by accident", ours]) == ours
    assert m.find([b"room", ours, b"5"]) is None
    assert m.find([ours]) == ours
    assert m.find([]) is None
    assert m.find([b""]) is None
    # Of another version it is still ours, so that decoding says what is wrong.
    assert m.find([m.MAGIC + b"\xff"]) is not None


def test_identities():
    one = m.control_identity("decode", "10.0.0.2:30000", "TP1/2", "a1")
    assert one == b"a1 decode TP1/2 10.0.0.2:30000"
    assert m.control_identity("decode", "10.0.0.2:30000", "TP1/2", "a2") != one
    assert len(m.control_identity("decode", "h" * 300, "TP0/1", "b" * 100)) == m.MAX_IDENTITY
    assert m.decode(m.encode(replace(REGISTER, control=one))).control == one
