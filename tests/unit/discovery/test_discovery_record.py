"""Records and answers of /hetero/instance: what goes in comes out, and strangers' bytes raise RecordError only."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hetero.discovery import record
from sglang_hetero.discovery.etcd import Held
from sglang_hetero.discovery.members import StaticMembers, entered, in_order, key_of
from sglang_hetero.discovery.record import (
    MAX_RECORD_BYTES,
    Description,
    Instance,
    clean_url,
    decode,
    decode_description,
    encode,
    encode_description,
    fingerprint_of,
)
from sglang_hetero.errors import RecordError
from sglang_hetero.layout import limits, wire
from sglang_hetero.layout.manifest import Side
from tests.unit.discovery.servers import decode_server, manifests, prefill_server


def test_a_record_comes_back_as_it_was():
    one = prefill_server()
    assert decode(encode(one)) == one
    assert all(getattr(one, field) for field in one.__struct_fields__), "every field must be tried"


def test_the_longest_record_fits():
    text = "\U0001f600" * limits.MAX_NAME
    one = Instance(
        role=Side.PREFILL,
        url="http://" + "a" * (record.MAX_URL - 7),
        bootstrap_port=65535,
        **dict.fromkeys(("model", "fingerprint", "incarnation", "release"), text),
        **dict.fromkeys(("tp_size", "dp_size", "pp_size"), limits.MAX_RANKS),
        **dict.fromkeys(("requests", "tokens", "messages"), 2**63 - 1),
        lease=3600,
    )
    assert len(json.dumps(json.loads(encode(one)))) <= MAX_RECORD_BYTES  # ASCII with escapes, the longest way
    assert decode(encode(one)) == one


def test_fields_that_are_not_known_are_skipped():
    told = json.loads(encode(decode_server()))
    told["instance"]["colour"] = "blue"
    told["signed"] = "yes"
    assert decode(json.dumps(told).encode()) == decode_server()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"role": "both"}, "Invalid enum value"),
        ({"url": "ftp://10.0.0.7:30000"}, "must be like http://"),
        ({"url": "http://10.0.0.7:30000/"}, "must be written 'http://10.0.0.7:30000'"),
        ({"url": "http://user:word@10.0.0.7"}, "no user"),
        ({"url": "http://10.0.0.7?x"}, "no question"),
        ({"url": "http://"}, "no URL"),
        ({"url": "http://a b"}, "no URL"),
        ({"url": "http://a:99999"}, "no URL"),
        ({"url": "http://[::1"}, "no URL"),
        ({"url": "http://a\u202e"}, "no URL"),
        ({"url": "http://" + "a" * 600}, "characters"),
        ({"bootstrap_port": 65536}, "bootstrap_port"),
        ({"bootstrap_port": -1}, "bootstrap_port"),
        ({"role": "decode"}, "no bootstrap port"),
        ({"tp_size": 4097}, "tp_size"),
        ({"tokens": 2**63}, "tokens"),
        ({"tokens": 10**400}, "tokens"),
        ({"lease": 3601}, "lease"),
        ({"model": "a" * 257}, "257 characters"),
        ({"model": "a\nb"}, "cannot be printed"),
        ({"model": 5}, "Expected `str`"),
        ({"incarnation": "\u202e"}, "cannot be printed"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    told = json.loads(encode(prefill_server()))
    told["instance"].update(change)
    with pytest.raises(RecordError, match=says.replace("[", r"\[")) as error:
        decode(json.dumps(told).encode())
    assert len(str(error.value)) < 700 and str(error.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"\xff", b'{"version":2}', b'{"version":1}', b"[" * 10_000, b" " * (MAX_RECORD_BYTES + 1)],
)
def test_what_is_no_record_is_refused(data):
    with pytest.raises(RecordError):
        decode(data)


def test_a_sound_record_that_is_too_long_is_refused_unread():
    whole = encode(prefill_server())
    assert decode(whole.ljust(MAX_RECORD_BYTES)) == prefill_server()
    with pytest.raises(RecordError, match=f"is larger than {MAX_RECORD_BYTES}"):
        decode(whole.ljust(MAX_RECORD_BYTES + 1))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_records_raise_nothing_else(data):
    whole = bytearray(encode(prefill_server()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(whole))
    except RecordError:
        return
    assert decode(encode(found)) == found


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("HTTP://Host.Example:80/", "http://host.example:80"),
        ("https://host", "https://host"),
        ("http://[2001:DB8::1]:30000", "http://[2001:db8::1]:30000"),
        ("http://host:1/a/b/", "http://host:1/a/b"),
    ],
)
def test_a_url_has_one_form(text, clean):
    assert clean_url(text) == clean == clean_url(clean)


def test_a_newer_version_is_said_to_be_one():
    with pytest.raises(RecordError, match="version 7, this release reads version 1; install the same"):
        decode(b'{"version":7,"instance":{}}')


def test_a_description_brings_the_manifests_of_its_ranks():
    ranks = manifests(Side.DECODE, 2)
    told = Description(
        instance=decode_server(),
        mode="auto",
        backend="mooncake",
        manifests=tuple(wire.encode(one) for one in reversed(ranks)),
        unsupported=("HiSparse",),
        notes=("one of two",),
    )
    found = decode_description(encode_description(told))
    assert found == told
    assert found.ranks() == ranks


def test_manifests_of_another_role_and_what_is_none_are_refused():
    ranks = manifests(Side.PREFILL, 1)
    told = Description(instance=decode_server(), manifests=(wire.encode(ranks[0]),))
    with pytest.raises(RecordError, match="of another role"):
        told.ranks()
    with pytest.raises(RecordError, match=r"decode http://10.0.0.8:30000: these 3 bytes are no manifest"):
        Description(instance=decode_server(), manifests=(b"abc",)).ranks()


@pytest.mark.parametrize(
    "fields",
    [
        {"manifests": (b"a",) * 1025},
        {"notes": ("a\nb",)},
        {"notes": ("a" * 1001,)},
        {"unsupported": ("a",) * 65},
        {"mode": "a\0"},
        {"backend": "a" * 257},
    ],
)
def test_a_description_is_bounded(fields):
    told = msgspec.json.encode({"version": 1, "description": {"instance": decode_server(), **fields}})
    with pytest.raises(RecordError):
        decode_description(told)


def test_the_fingerprint_is_of_what_pairing_depends_on():
    def of(role=Side.DECODE, mode="auto", backend="mooncake", ranks=None, unsupported=()):
        return fingerprint_of(role, mode, backend, manifests(Side.DECODE, 2) if ranks is None else ranks, unsupported)

    elsewhere = manifests(Side.DECODE, 2, host="10.9.9.9:1", incarnation="later", shift=1 << 20, pages=99)
    assert of(ranks=elsewhere) == of() == of(ranks=tuple(reversed(elsewhere)))
    others = [
        of(role=Side.PREFILL),
        of(mode="off"),
        of(backend="ascend"),
        of(unsupported=("HiSparse",)),
        of(ranks=manifests(Side.DECODE, 1)),
        of(ranks=manifests(Side.DECODE, 2)[:1]),
        of(ranks=manifests(Side.DECODE, 2, model="another")),
    ]
    assert len({of(), *others}) == 1 + len(others)


def test_static_members_are_known_by_url_only():
    found = StaticMembers([("http://B:1/", 8998), ("http://a:1", None)], ["http://c:1"])
    assert found.snapshot() == (
        Instance(role=Side.DECODE, url="http://c:1"),
        Instance(role=Side.PREFILL, url="http://a:1"),
        Instance(role=Side.PREFILL, url="http://b:1", bootstrap_port=8998),
    )
    with pytest.raises(RecordError):
        StaticMembers([("b:1", None)], [])


def test_a_record_belongs_under_its_own_key():
    one = prefill_server()
    key = key_of("/fleet", one)
    assert key == "/fleet/prefill/10.0.0.7:30000"
    assert entered("/fleet", key, Held(encode(one), 1)) == one
    for wrong in ("/fleet/decode/10.0.0.7:30000", "/fleet/prefill/10.0.0.8:30000", "/other/prefill/10.0.0.7:30000"):
        with pytest.raises(RecordError, match=r"belongs under /fleet/prefill/10\.0\.0\.7:30000"):
            entered("/fleet", wrong, Held(encode(one), 1))
    with pytest.raises(RecordError, match="has no lease"):
        entered("/fleet", key, Held(encode(one), 0))


def test_of_two_with_one_url_one_counts():
    assert in_order([prefill_server(incarnation="a"), decode_server(), prefill_server(incarnation="b")]) == (
        decode_server(),
        prefill_server(incarnation="b"),
    )
