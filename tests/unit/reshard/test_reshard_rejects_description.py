"""One test per rule that a description must keep: what is refused, and that the message names the thing."""

import msgspec
import pytest
from msgspec.structs import replace

from sglang_hetero.errors import ManifestError, TopologyError
from sglang_hetero.layout import Axis, AxisName, Coordinates, Item, Role, Segment, Sharding, limits, wire
from sglang_hetero.layout.row import Column
from tests.reshard_oracle import model as m
from tests.reshard_oracle.pair import changed_axes, component, manifest, with_segment

LONG = "x" * (limits.MAX_NAME + 1)
KV = (Segment("kv", 4, 1),)
ROW = (Column("output_ids", "int32", limits.MAX_ROW_BYTES),)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Segment("", 1, 1), ["segment's name has 0 characters"]),
        (lambda: Segment(LONG, 1, 1), ["segment's name has 257 characters", "256"]),
        (lambda: Segment("q", 0, 1), ["segment q", "heads is 0"]),
        (lambda: Segment("q", 2**32 + 1, 1), ["segment q", "heads is 4294967297"]),
        (lambda: Segment("q", 1, 0), ["segment q", "width is 0"]),
        (lambda: Segment("q", 1, 2**32 + 1), ["segment q", "width is 4294967297"]),
        (lambda: Axis(AxisName.HEAD, 0, 1), ["axis head", "size is 0"]),
        (lambda: Axis(AxisName.HEAD, 2**32 + 1, 1), ["axis head", "size is 4294967297"]),
        (lambda: Axis(AxisName.HEAD, 1, 0), ["axis head", "stride is 0"]),
        (lambda: Axis(AxisName.HEAD, 1, 2**56 + 1), ["axis head", f"stride is {2**56 + 1}"]),
        (lambda: Axis(AxisName.HEAD, 17, 1, KV * 17), ["axis head", "number of segments is 17"]),
        (lambda: Axis(AxisName.WINDOW, 3, 1, live=(1, 3)), ["axis window", "live rows 1 to 3", "its 3"]),
        (lambda: Axis(AxisName.WINDOW, 3, 1, live=(-1, 2)), ["axis window", "live rows -1"]),
        (lambda: Axis(AxisName.WINDOW, 3, 1, live=(0, 0)), ["axis window", "live rows"]),
        (lambda: Axis(AxisName.HEAD, 4, 1, KV, live=(0, 2)), ["axis head", "cut axis has no live rows"]),
    ],
)
def test_rejects_segment_or_axis(make, words):
    with pytest.raises(ManifestError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def spaced(whole):
    """The axes with twice the strides."""
    return tuple(replace(axis, stride=2 * axis.stride) for axis in whole.axes)


def key(**changes):
    return component(Role.TARGET_KEY, **changes)


def key_axis(name, **changes):
    return key(axes=changed_axes(key(), name, **changes))


def token_inside():
    """A page with heads outside of tokens in memory."""
    token, head, channel = key().axes
    return key(axes=(replace(token, stride=head.stride), replace(head, stride=head.stride * token.size), channel))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: key(dtype="float64"), ["dtype 'float64'", "bfloat16"]),
        (lambda: key(encoding=""), ["encoding has 0 characters"]),
        (lambda: key(encoding=LONG), ["encoding has 257 characters"]),
        (lambda: key(encoding="packed", axes=spaced(key())), ["items in encoding packed must have no gaps"]),
        (lambda: key(layers=(), addresses=()), ["number of layers is 0"]),
        (lambda: key(layers=tuple(range(4097)), addresses=(0,) * 4097), ["number of layers is 4097", "4096"]),
        (lambda: key(layers=(3, 1)), ["layer ids must increase", "3, 1"]),
        (lambda: key(layers=(1, 1)), ["layer ids must increase", "1, 1"]),
        (lambda: key(layers=(-1, 1)), ["layer ids must increase", "-1, 1"]),
        (lambda: key(layers=(1, 2**32 + 1)), ["layer ids must increase", "4294967297"]),
        (lambda: key(addresses=(0,)), ["1 addresses for 2 layers"]),
        (lambda: key(items=0), ["items is 0"]),
        (lambda: key(items=2**32 + 1), ["items is 4294967297"]),
        (lambda: key(item_stride=0), ["item_stride is 0"]),
        (lambda: key(item_stride=2**56 + 1), [f"item_stride is {2**56 + 1}"]),
        (lambda: key(addresses=(0, -1)), ["leaves the address space"]),
        (lambda: key(addresses=(0, 2**64 - 1)), ["0xffffffffffffffff", "leaves the address space"]),
        (lambda: key(items=2**32, item_stride=2**40), [f"of {(2**32 - 1) * 2**40 + 48} bytes", "address space"]),
        (lambda: key(axes=()), ["number of axes is 0"]),
        (lambda: key(axes=key().axes * 3), ["number of axes is 9", "8"]),
        (
            lambda: key(axes=(*key().axes, key().axes[0])),
            ["its axes are token, head, channel, token", "must be channel, head, token"],
        ),
        (lambda: key_axis(AxisName.HEAD, segments=()), ["axis head, and no other, must have segments"]),
        (lambda: key_axis(AxisName.CHANNEL, segments=KV), ["axis head, and no other, must have segments"]),
        (lambda: component(Role.SSM, item=Item.PAGE), ["a request is given it by slot, not by page"]),
        (token_inside, ["tokens must be the outermost axis"]),
        (lambda: key_axis(AxisName.HEAD, stride=4), ["axis head has a stride of 4 bytes", "takes 6"]),
        (lambda: key_axis(AxisName.CHANNEL, stride=1), ["axis channel has a stride of 1 bytes", "an element takes 2"]),
        (lambda: key(axes=key().axes[:2]), ["its axes are token, head, must be channel, head, token"]),
        (lambda: key(addresses=(64, 64)), ["the buffers of two layers, at 0x40 and 0x40, overlap"]),
        (lambda: key(addresses=(64, 65)), ["address 0x41 suits no bfloat16"]),
        (lambda: key(item_stride=49), ["the stride of items, 49 bytes, suits no bfloat16"]),
        (
            lambda: key(item_stride=98, axes=changed_axes(key(), AxisName.TOKEN, stride=25)),
            ["the stride of axis token, 25 bytes, suits no bfloat16"],
        ),
        (lambda: key(item_stride=47), ["items are 47 bytes apart, but one takes 48"]),
    ],
)
def test_rejects_component(make, words):
    with pytest.raises(ManifestError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_gaps_and_single_items_are_no_overlap():
    """What the rules above must let pass: items of one count and axes of one element have strides of no meaning."""
    key(items=1, item_stride=2)
    one_head = manifest(tp=4).of(Role.TARGET_KEY)[0]
    assert one_head.axis(AxisName.HEAD).size == 1
    replace(one_head, axes=changed_axes(one_head, AxisName.HEAD, stride=4))


@pytest.mark.parametrize("dimension", ["tp", "pp", "dp"])
@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), (0, 4097)])
def test_rejects_coordinates(dimension, rank, size):
    with pytest.raises(ManifestError, match=f"{dimension}_rank {rank} of {dimension}_size {size}"):
        Coordinates(**{f"{dimension}_rank": rank, f"{dimension}_size": size})


@pytest.mark.parametrize("field", ["host", "model", "incarnation"])
@pytest.mark.parametrize("value", ["", LONG], ids=["empty", "long"])
def test_rejects_manifest_name(field, value):
    with pytest.raises(ManifestError, match=rf"{field} has (0|257) characters, must have 1 to 256"):
        replace(manifest(), **{field: value})


@pytest.mark.parametrize("text", ["a\nERROR b", "\x1b[2J", "\u202e"], ids=["newline", "escape", "bidi"])
@pytest.mark.parametrize(
    "make",
    [
        *(lambda text, name=name: replace(manifest(), **{name: text}) for name in ("host", "model", "incarnation")),
        lambda text: Segment(text, 1, 1),
        lambda text: component(Role.SSM, encoding=text),
        lambda text: component(Role.SSM, dtype=text),
    ],
    ids=["host", "model", "incarnation", "segment", "encoding", "dtype"],
)
def test_rejects_text_that_would_forge_log_lines(make, text):
    with pytest.raises(ManifestError, match="characters that cannot be printed") as error:
        make(text)
    assert str(error.value).isprintable()


PREFILL = r"prefill TP0/1 \(prefill-host\)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, f"{PREFILL}: page_size is 0"),
        ({"page_size": 2**32 + 1}, f"{PREFILL}: page_size is 4294967297"),
        ({"page_size": 64}, f"{PREFILL}: target_key: its pages hold 2 tokens, page_size is 64"),
        ({"components": ()}, f"{PREFILL}: 0 components"),
        ({"components": manifest().components * 50}, f"{PREFILL}: 300 components, must be 1 to 256"),
        ({"components": manifest().components[:1] * 2}, f"{PREFILL}: layer 1 of target_key is described twice"),
        ({"row": (ROW[0], ROW[0])}, f"{PREFILL}: 2 columns of metadata, must be at most 64, none twice"),
        ({"row": tuple(replace(ROW[0], name=f"{n}") for n in range(65))}, f"{PREFILL}: 65 columns of metadata"),
        ({"row": (ROW[0], replace(ROW[0], name="more", nbytes=1))}, f"{PREFILL}: 2097153 bytes of metadata"),
    ],
)
def test_rejects_manifest(changes, message):
    with pytest.raises(ManifestError, match=message):
        replace(manifest(), **changes)


def test_rejects_size_that_segments_do_not_give():
    words = r"prefill TP0/2 .*conv: axis channel has 32 elements.*rank 0 of TP 2 16: q 4 x 2 by head, k 4 x 2"
    with pytest.raises(ManifestError, match=words):
        replace(manifest(), coordinates=Coordinates(tp_size=2), components=(component(Role.CONV),))


@pytest.mark.parametrize(("heads", "tp"), [(4, 3), (4, 6)])
def test_rejects_heads_that_cannot_be_sharded(heads, tp):
    words = (
        rf"prefill TP0/{tp} .*target_key, segment kv: {heads} heads cannot be sharded over TP {tp}.*choose a TP size"
    )
    with pytest.raises(TopologyError, match=words):
        replace(manifest(), coordinates=Coordinates(tp_size=tp))


@pytest.mark.parametrize(("heads", "tp"), [(4, 8), (4, 3), (6, 4)])
def test_rejects_linear_heads_that_cannot_be_divided(heads, tp):
    """Fewer heads than ranks would do for attention; SGLang never replicates those of linear layers."""
    state = (m.ssm(heads, 2, 3, (0,), divided=True),)
    whole = manifest(model=state)
    words = (
        rf"prefill TP0/{tp} .*ssm, segment ssm: {heads} heads cannot be divided among TP {tp}; choose a TP size that"
    )
    with pytest.raises(TopologyError, match=words):
        replace(whole, coordinates=Coordinates(tp_size=tp))


@pytest.mark.parametrize("width", [1, 3])
def test_rejects_segment_of_another_width(width):
    with pytest.raises(ManifestError, match="axis channel has 32 elements"):
        with_segment(manifest(), Role.CONV, 0, width=width)


def test_rejects_replicated_segment_of_sharded_size():
    with pytest.raises(ManifestError, match="q 4 x 2 replicated"):
        with_segment(manifest(tp=2), Role.CONV, 0, sharding=Sharding.REPLICATED)


def test_rejects_manifest_too_large_to_send(monkeypatch):
    monkeypatch.setattr(limits, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(ManifestError, match=r"a manifest of \d{4} bytes is larger than 1000"):
        wire.encode(manifest())


def raw(data):
    """The body of an encoded manifest, as Python objects."""
    return msgspec.msgpack.decode(data[5:])


def packed(body):
    return wire.MAGIC + bytes([wire.VERSION]) + msgspec.msgpack.encode(body)


def edited(*path, value):
    """An encoded manifest with one field of its body changed."""
    body = raw(wire.encode(manifest()))
    node = body
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return packed(body)


GOOD = wire.encode(manifest())
OTHER = wire.MAGIC + bytes([wire.VERSION + 1]) + GOOD[5:]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are no manifest"),
        (b"HGHM" + GOOD[4:], "are no manifest: they do not begin with b'SGHM'"),
        (b"SGHM", f"version missing, this build reads version {wire.VERSION}; install the same version"),
        (OTHER, f"version {wire.VERSION + 1}, this build reads version {wire.VERSION}; install the same version"),
        (GOOD[:-1], "cannot be read"),
        (GOOD + b"\x00", "cannot be read"),
        (GOOD[:5] + b"\xc1", "cannot be read"),
        (GOOD + bytes(limits.MAX_MANIFEST_BYTES), f"is larger than {limits.MAX_MANIFEST_BYTES}"),
        (
            edited("layout", value="0" * 32),
            "prefill TP0/1 .*it calls its layout '0{32}', this build computes .*install",
        ),
        (edited("layout", value=7), r"cannot be read: .*layout"),
        (edited("extra", value=1), "cannot be read: .*unknown field `extra`"),
        (edited("manifest", "extra", value=1), "cannot be read: .*unknown field `extra`"),
        (edited("manifest", "components", 0, "axes", 0, "extra", value=1), "unknown field `extra`"),
        (edited("manifest", "components", 0, "role", value="target_cross"), "cannot be read: .*target_cross"),
        (edited("manifest", "side", value="both"), "cannot be read: .*both"),
        (edited("manifest", "page_size", value="2"), "cannot be read: .*page_size"),
        (edited("manifest", "page_size", value=2.0), "cannot be read: .*page_size"),
        (edited("manifest", "page_size", value=True), "cannot be read: .*page_size"),
        (edited("manifest", "components", 0, "items", value=0), "items is 0"),
        (edited("manifest", "coordinates", "tp_size", value=0), "tp_size 0"),
    ],
)
def test_rejects_bytes(data, message):
    with pytest.raises(ManifestError, match=message):
        wire.decode(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name of a column has 0 characters"),
        ({"name": "a\nb"}, "cannot be printed"),
        ({"dtype": LONG}, "column output_ids: dtype has 257 characters"),
        ({"nbytes": 0}, "column output_ids: bytes is 0"),
        ({"nbytes": limits.MAX_ROW_BYTES + 1}, f"column output_ids: bytes is {limits.MAX_ROW_BYTES + 1}"),
    ],
)
def test_rejects_column(changes, words):
    with pytest.raises(ManifestError, match=words):
        replace(ROW[0], **changes)


def test_a_row_is_part_of_the_layout_and_comes_back():
    whole = replace(manifest(), row=ROW)
    assert wire.decode(wire.encode(whole)) == whole
    assert whole.fingerprint != manifest().fingerprint


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_good_bytes_come_back(kind):
    assert wire.decode(kind(GOOD)) == manifest()


@pytest.mark.parametrize("field", ["host", "model", "incarnation", "page_size", "components", "coordinates", "side"])
def test_rejects_missing_field(field):
    body = raw(GOOD)
    del body["manifest"][field]
    with pytest.raises(ManifestError, match=f"missing required field `{field}`"):
        wire.decode(packed(body))
