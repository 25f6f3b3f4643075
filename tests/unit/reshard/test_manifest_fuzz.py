"""A hundred thousand damaged manifests: whatever a peer sends ends in one of our errors, soon and in little memory."""

import random
import resource
import time
import tracemalloc
from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from sglang_hetero.errors import HeteroError
from sglang_hetero.layout import Item, Role, Side, limits, wire
from sglang_hetero.layout.row import Column
from sglang_hetero.reshard import Policy, bind, plan
from tests.reshard_oracle import model as m
from tests.reshard_oracle import mutate
from tests.reshard_oracle.pair import MODEL, decode, manifest, prefill
from tests.reshard_oracle.rank import WINDOW_FIRST, Format, Shape

SEED = 20_240_607
SLOWEST = 2.0
"""Seconds that one message may take, on a busy machine."""
MEMORY = 1 << 30
"""Bytes of address space that all of them together may add."""
HOLD = 128 << 20
"""Bytes that one hostile manifest may make a peer allocate."""

KIMI = (
    m.latent_kv(Role.TARGET_LATENT, {"latent": 4, "rope": 2}, (1,)),
    m.conv((m.Segment("x", 4, 2), m.Segment("B", 1, 2, True)), 3, (0, 2), "float16"),
    m.ssm(4, 2, 2, (0, 2)),
)
SHAPES = (Shape(), Shape(formats={Role.CONV: WINDOW_FIRST, Role.SSM: Format(interleaved=True)}))
ROW = (Column("output_ids", "int32", 64), Column("output_hidden_states", "bfloat16", 96, draft=True))


def with_rows(sources, destination):
    """A pair whose ranks say what their metadata is, too."""
    return [replace(source, row=ROW) for source in sources], replace(destination, row=ROW)


PAIRS = [
    (prefill(2, shape=SHAPES[0]), decode(shape=SHAPES[1])),
    (prefill(1, shape=SHAPES[1]), decode(1, 2)),
    (prefill(2, model=KIMI, shape=SHAPES[1]), decode(model=KIMI)),
    (prefill(1, model=m.without_draft(MODEL)), decode(model=m.without_draft(MODEL))),
    with_rows(prefill(2), decode()),
    with_rows(prefill(1, model=m.without_draft(MODEL)), decode()),
]
REQUEST = {"pages": [1, 2], "slot": 1, "tokens": 3}
POLICY = Policy(drop=frozenset(r for r in Role if r.draft), start_empty=frozenset(r for r in Role if r.draft))


@pytest.fixture
def bounded_memory():
    """Address space for what is there and MEMORY more: too much is a MemoryError, not the kernel's kill."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def body(data):
    """The envelope of an encoded manifest as plain Python."""
    return msgspec.msgpack.decode(data[mutate.HEADER :])


class Peer:
    """What a server does with bytes that claim to be a manifest of the side `side` of pair number `pair`."""

    def __init__(self):
        self.outcomes, self.slowest = Counter(), (0.0, b"")

    def receive(self, data, sources, destination, number):
        """Decode, plan against good peers, bind every source. number: of the source that `data` replaces, or None."""
        began = time.perf_counter()
        try:
            self.outcomes[self._handle(data, sources, destination, number)] += 1
        except HeteroError as error:
            assert str(error), "an error without a word"
            self.outcomes[type(error).__name__] += 1
        except BaseException as error:
            error.add_note(f"manifest: {data[:2000].hex()}")
            raise
        self.slowest = max(self.slowest, (time.perf_counter() - began, data))

    def _handle(self, data, sources, destination, number):
        found = wire.decode(data)
        self.outcomes["decoded"] += 1
        if number is None:
            destination = found
        else:
            sources = [*sources[:number], found, *sources[number + 1 :]]
        the_plan = plan(sources, destination, POLICY)
        self.outcomes["planned"] += 1
        assert the_plan.fingerprint
        for source in range(len(sources)):
            bind(the_plan, source, **REQUEST)
        return "bound"


def targets():
    """Encoded manifest, the pair, and which of its ranks it is."""
    found = []
    for sources, destination in PAIRS:
        for number, whole in [*enumerate(sources), (None, destination)]:
            data = wire.encode(whole)
            found.append((data, (sources, destination, number)))
    return found


def test_the_pairs_are_good_before_they_are_damaged():
    peer = Peer()
    for data, place in targets():
        peer.receive(data, *place)
    assert peer.outcomes["bound"] == len(targets()) == peer.outcomes["decoded"]


BYTES, TREES, PLAUSIBLE = 65_000, 20_000, 20_000


@pytest.mark.usefixtures("bounded_memory")
def test_a_hundred_thousand_damaged_manifests():
    rng, peer, known = random.Random(SEED), Peer(), targets()
    for kind, count in (("bytes", BYTES), ("trees", TREES), ("plausible", PLAUSIBLE)):
        for _ in range(count):
            data, place = rng.choice(known)
            if kind == "bytes":
                damaged = rng.choice(mutate.BYTE_LEVEL)(rng, data)
            elif kind == "trees":
                damaged = rng.choice(mutate.TREE_LEVEL)(rng, body(data))
            else:
                changed = body(data)
                # A description that contradicts itself goes over as it is, with a fingerprint that cannot be right.
                damaged = mutate.plausible(rng, changed) or mutate.framed(changed)
            peer.receive(damaged, *place)
    tried = sum(peer.outcomes.values()) - peer.outcomes["decoded"] - peer.outcomes["planned"]
    print(f"{tried} manifests, slowest {peer.slowest[0]:.3f} s: {dict(peer.outcomes)}")
    assert tried == BYTES + TREES + PLAUSIBLE >= 100_000
    assert peer.slowest[0] < SLOWEST, peer.slowest[1].hex()
    # The deeper the damaged get the more is tested; these are far below what the seed gives.
    assert peer.outcomes["decoded"] > 5_000
    assert peer.outcomes["planned"] > 1_000
    assert all(peer.outcomes[name] for name in ("TopologyError", "LayoutMismatch", "CoverageError", "ManifestError"))


# --- hostile ones, by hand: the largest claims that the limits allow


def refused(data, sources, destination, number):
    """Handle one manifest; returns seconds and the most bytes that it made us hold."""
    peer = Peer()
    tracemalloc.start()
    peer.receive(data, sources, destination, number)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began = time.perf_counter()
    peer.receive(data, sources, destination, number)
    return time.perf_counter() - began, peak


def crowd(ranks):
    """A rank that says it is the first of `ranks` x `ranks`."""
    tiny = (m.heads_kv(Role.TARGET_KEY, 1, 1, (0,)),)
    return manifest(tp=ranks, pp_size=ranks, model=tiny), decode(model=tiny)


def test_a_rank_that_claims_millions_of_others():
    # 256 x 256, so that a test that fails does so in this life; the limit allows 4096 x 4096.
    source, to = crowd(256)
    seconds, peak = refused(wire.encode(source), [source], to, 0)
    assert seconds < 0.1
    assert peak < 1 << 20


def huge_heads(side, heads=1 << 32):
    """One page component with 2**32 heads in one item."""
    whole = manifest(side, model=MODEL[:1])
    token, head, channel = whole.components[0].axes
    axes = (
        replace(token, stride=heads),
        replace(head, size=heads, stride=1, segments=(replace(head.segments[0], heads=heads),)),
        replace(channel, size=1, stride=1),
    )
    part = replace(
        whole.components[0], dtype="int8", axes=axes, items=2, item_stride=1 << 40, layers=(1,), addresses=(0,)
    )
    return replace(whole, components=(part,))


@pytest.mark.parametrize("number", [0, None], ids=["source", "destination"])
@pytest.mark.usefixtures("bounded_memory")
def test_a_rank_with_four_billion_heads(number):
    to, source = decode(model=MODEL[:1]), manifest(model=MODEL[:1])
    data = wire.encode(huge_heads(Side.DECODE if number is None else Side.PREFILL))
    seconds, peak = refused(data, [source], to, number)
    assert seconds < 0.1
    assert peak < HOLD


def many_layers(parts_of_a_role):
    """Of every role of a model so many components, each with as many layers as one may have; all buffers apart."""
    parts, address = [], 0
    for part in manifest().components:
        small = replace(part, items=1, addresses=tuple(range(0, len(part.layers) << 20, 1 << 20)))
        step = -(-small.buffer_span // small.itemsize) * small.itemsize
        for first in range(0, parts_of_a_role * limits.MAX_LAYERS, limits.MAX_LAYERS):
            layers = tuple(range(first, first + limits.MAX_LAYERS))
            stop = address + len(layers) * step
            parts.append(replace(small, layers=layers, addresses=tuple(range(address, stop, step))))
            address = -(-stop // 4) * 4
    return replace(manifest(), components=tuple(parts))


def test_a_rank_with_a_third_of_a_million_layers_is_too_long():
    with pytest.raises(HeteroError, match="is larger than"):
        wire.encode(many_layers(16))


def test_a_rank_with_as_many_layers_as_fit():
    data = wire.encode(many_layers(2))
    assert len(data) > limits.MAX_MANIFEST_BYTES / 2
    seconds, peak = refused(data, prefill(1), decode(), 0)
    assert seconds < SLOWEST
    assert peak < HOLD


def test_strides_that_make_every_element_a_run():
    """Gaps between all elements of a state of the size that decode expects: one descriptor per element, no more."""
    source = manifest(model=MODEL[3:4])
    part = source.components[0]
    axes = tuple(replace(axis, stride=axis.stride * 2) for axis in part.axes)
    apart = replace(source, components=(replace(part, axes=axes, item_stride=1 << 20),))
    bound = bind(plan([apart], decode(model=MODEL[3:4])), 0, pages=[1], slot=1, tokens=1)
    assert [len(piece.descriptors) for piece in bound.of(Item.SLOT)] == [8 * 2 * 3] * 2


def test_messages_stay_short():
    """A log line must not carry four megabytes because a peer's dtype did."""
    for field in ("dtype", "role", "encoding"):
        changed = body(wire.encode(manifest()))
        changed["manifest"]["components"][0][field] = "x" * 1_000_000
        with pytest.raises(HeteroError) as error:
            wire.decode(mutate.framed(changed))
        assert len(str(error.value)) < 2000, field
