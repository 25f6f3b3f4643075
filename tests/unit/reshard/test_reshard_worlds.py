"""Random pairs of servers, every byte of every decode rank against the oracle. The draws are the same in every run."""

import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, given, settings

from sglang_hetero.layout import AxisName, Item, Role
from tests.reshard_oracle import worlds
from tests.reshard_oracle.handover import Request, serve
from tests.reshard_oracle.model import Segment, conv, heads_kv, latent_kv, ssm
from tests.reshard_oracle.rank import Format, Shape

FAMILIES = {"gdn": worlds.gdn(), "kda_mla": worlds.kda(), "mamba2": worlds.mamba2()}
EXAMPLES = 120
"""Per family; some ten seconds each."""
FIXED = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def run(case):
    world = case.world
    prefill, decode = zip(world.tp, world.shapes, strict=True)
    moved = serve(
        world.model,
        prefill,
        decode,
        Request(case.tokens, case.chunks, world.seed),
        stages=world.stages,
        dp=world.dp,
        policy=world.policy,
        decode_model=world.decode_model,
        rng=world.seed,
    )
    assert len(moved) == world.tp[1]
    for one in moved:
        assert not {role for _, role in one.nbytes} & (world.policy.drop | world.policy.start_empty)


def traits(case):
    """What a case exercises; a sweep that never draws what it is for would pass whatever the code does."""
    world, page_size = case.world, case.world.shapes[0].page_size
    p, d = world.tp
    yield "tp", "P>D" if p > d else "P<D" if p < d else "P=D"
    yield "one size divides the other", max(p, d) % min(p, d) == 0
    yield "stages", world.stages
    yield "attention DP", world.dp[1]
    yield "draft", "dropped" if world.policy.drop else "starts empty" if world.policy.start_empty else "same"
    yield "full last page", case.tokens % page_size == 0
    yield "page of 128", page_size == 128
    yield "chunks", len(case.chunks) > 1
    source, destination = (shape.formats[Role.CONV] for shape in world.shapes)
    yield "outer window axes", (source.order[0], destination.order[0])
    yield "dead rows differ", source.dead_before != destination.dead_before
    yield "layers interleaved", (source.interleaved, destination.interleaved)
    for tensor in world.model:
        yield tensor.item, tensor.itemsize
        for segment in tensor.segments:
            yield "divided heads", segment.divided
            if not segment.replicated:
                yield "replicas on prefill", p > segment.heads
                yield "replicas on decode", d > segment.heads


BOTH = (False, True)
WANTED = {
    "tp": ("P>D", "P<D", "P=D"),
    "stages": (1, 2, 3),
    "attention DP": (1, 2),
    "draft": ("same", "dropped", "starts empty"),
    "outer window axes": tuple(itertools.product((0, 1), (0, 1))),
    "layers interleaved": tuple(itertools.product(BOTH, BOTH)),
    Item.PAGE: (1, 2, 4),
    Item.SLOT: (1, 2, 4),
} | dict.fromkeys(
    ("one size divides the other", "full last page", "page of 128", "chunks", "dead rows differ", "divided heads"), BOTH
)
REPLICAS = dict.fromkeys(("replicas on prefill", "replicas on decode"), BOTH)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_world(family):
    seen = set()

    @FIXED
    @given(worlds.cases(FAMILIES[family]))
    def sweep(case):
        run(case)
        seen.update(traits(case))

    sweep()
    wanted = {(trait, value) for trait, values in (WANTED | REPLICAS).items() for value in values}
    assert not wanted - seen


@pytest.mark.parametrize("whole", worlds.WHOLE_DRAFT)
@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_any_world_with_a_whole_draft(family, whole):
    seen = set()

    @settings(FIXED, max_examples=30)
    @given(worlds.cases(FAMILIES[family]).filter(worlds.Case.drafts))
    def sweep(case):
        run(case.with_whole_draft(*worlds.WHOLE_DRAFT[whole]))
        seen.update(traits(case))

    sweep()
    wanted = {"tp": WANTED["tp"], "one size divides the other": BOTH, "chunks": BOTH, "replicas on prefill": BOTH}
    assert not {(trait, value) for trait, values in wanted.items() for value in values} - seen


@pytest.mark.parametrize("tp", [(4, 1), (1, 4), (4, 4), (2, 3), (6, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
@pytest.mark.parametrize("interleaved", [False, True])
def test_replicated_latent_rows_have_one_writer(tp, interleaved):
    model = (latent_kv(Role.TARGET_LATENT, {"latent": 4, "rope": 2}, (0, 1, 2)),)
    shape = Shape(page_size=3, formats={Role.TARGET_LATENT: Format(interleaved=interleaved)})
    serve(model, (tp[0], shape), (tp[1], shape), Request(7, chunks=(range(2), range(2, 3))))


@pytest.mark.parametrize("tp", [(4, 1), (1, 4), (2, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_opaque_pages_move_whole(tp):
    """What lies behind the last token travels too: only a kernel knows which bytes belong to a token."""
    model = (latent_kv(Role.TARGET_LATENT, {"latent": 4}, (0, 1)),)
    shape = Shape(page_size=4, formats={Role.TARGET_LATENT: Format(encoding="packed-rows")})
    serve(model, (tp[0], shape), (tp[1], shape), Request(5))


@pytest.mark.parametrize("base", worlds.HIGH_BASES, ids=hex)
def test_addresses_up_to_the_end_of_64_bits(base):
    model = (heads_kv(Role.TARGET_KEY, 4, 2, (0, 1)),)
    for tp in ((2, 1), (1, 2), (2, 2)):
        serve(model, (tp[0], Shape(base=base)), (tp[1], Shape(base=base)), Request(3))


def listed(tensor, *order):
    """The same tensor with its axes described in another order, on both sides alike."""
    return dataclasses.replace(tensor, axes=tuple(tensor.axes[index] for index in order))


CONV = conv((Segment("q", 2), Segment("v", 4)), 7, (0, 1))
SSM, KEY = ssm(4, 3, 2, (0, 1)), heads_kv(Role.TARGET_KEY, 4, 3, (0, 1))
LATENT = latent_kv(Role.TARGET_LATENT, {"latent": 4}, (0, 1))
LISTINGS = [
    listed(CONV, 1, 0),
    *(listed(SSM, *order) for order in itertools.permutations(range(3))),
    listed(KEY, 0, 2, 1),
    listed(KEY, 1, 0, 2),
    listed(KEY, 2, 1, 0),
    listed(LATENT, 1, 0),
]


@pytest.mark.parametrize("tensor", LISTINGS, ids=lambda tensor: "_".join(name for name, _ in tensor.axes))
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["P2D1", "P1D2"])
def test_axes_may_be_described_in_any_order(tensor, tp):
    """What an axis is follows from its name. Tokens stay the outermost in memory."""
    names = [name for name, _ in tensor.axes]
    order = None
    if AxisName.TOKEN in names:
        token = names.index(AxisName.TOKEN)
        order = (token, *(index for index in range(len(names)) if index != token))
    shape = Shape(page_size=4, formats={tensor.role: Format(order=order)})
    serve((tensor,), (tp[0], shape), (tp[1], shape), Request(7))
