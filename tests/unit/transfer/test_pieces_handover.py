"""Pieces through units of staging into a decode rank, every byte compared with the oracle of the core's tests."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hetero.layout import Item, Role
from sglang_hetero.transfer.pieces import StateMode, unit_bytes_for
from tests.reshard_oracle import worlds
from tests.reshard_oracle.handover import Request
from tests.reshard_oracle.model import Segment, conv, heads_kv, latent_kv, ssm, with_whole_draft
from tests.reshard_oracle.rank import CHANNELS_FIRST, WINDOW_FIRST, Format, Shape
from tests.unit.transfer.pieces_handover import Staging, serve

FAMILIES = {"gdn": worlds.gdn(), "kda_mla": worlds.kda(), "mamba2": worlds.mamba2()}
EXAMPLES = 60
"""Per family, some three seconds each."""
FIXED = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
PAGE_SIZES = (128, 64, 128, 64, 1, 3)
"""Large ones twice: with pages as small as the made-up states a unit holds all of a request."""
stagings = st.builds(
    Staging,
    window=st.integers(1, 4),
    times_least=st.sampled_from([1.0, 1.0, 1.5, 2.0, 3.0]),
    mode=st.sampled_from(StateMode),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_world(family):
    seen = set()

    @FIXED
    @given(worlds.cases(FAMILIES[family], PAGE_SIZES), stagings)
    def sweep(case, staging):
        world = case.world
        receivers = serve(
            world.model,
            (world.tp[0], world.shapes[0]),
            (world.tp[1], world.shapes[1]),
            Request(case.tokens, case.chunks, world.seed),
            staging,
            stages=world.stages,
            dp=world.dp,
            policy=world.policy,
            decode_model=world.decode_model,
            seed=world.seed,
        )
        for receiver in receivers:
            seen.add(("reused", receiver.merged > 2 * staging.window))
            seen.add(("page size", world.shapes[0].page_size))
            seen.add(("stages", world.stages))
            seen.add(("mode", staging.mode))
            longest, least = max(map(len, case.chunks)), min(receiver.window.pages_per_piece.values())
            seen.add(("runs", least < longest))
            seen.update(("packed", share.packed, share.role.draft) for share in receiver.plan.shares)

    sweep()
    wanted = {("reused", True), ("runs", True), ("runs", False), ("packed", True, False), ("packed", False, True)}
    wanted |= {("page size", size) for size in (1, 64, 128)} | {("stages", count) for count in (1, 2)}
    assert wanted | {("mode", mode) for mode in StateMode} <= seen


ATTENTION, LINEAR = (1, 3), (0, 2, 4)
SIX = (
    heads_kv(Role.TARGET_KEY, 6, 4, ATTENTION),
    heads_kv(Role.TARGET_VALUE, 6, 2, ATTENTION),
    conv((Segment("q", 6, 2), Segment("k", 6, 2), Segment("v", 12, 3)), 4, LINEAR),
    ssm(12, 3, 2, LINEAR),
    heads_kv(Role.DRAFT_KEY, 6, 4, (0,)),
    heads_kv(Role.DRAFT_VALUE, 6, 2, (0,)),
)
FOUR = (
    heads_kv(Role.TARGET_KEY, 4, 4, ATTENTION),
    heads_kv(Role.TARGET_VALUE, 4, 4, ATTENTION, "int8"),
    conv((Segment("q", 4, 2), Segment("k", 4, 2), Segment("v", 8, 3)), 4, LINEAR),
    ssm(8, 3, 2, LINEAR),
    heads_kv(Role.DRAFT_KEY, 4, 4, (0,)),
    heads_kv(Role.DRAFT_VALUE, 4, 4, (0,)),
)
TWO = (
    heads_kv(Role.TARGET_KEY, 2, 4, ATTENTION),
    heads_kv(Role.TARGET_VALUE, 2, 4, ATTENTION),
    conv((Segment("x", 8, 2), Segment("B", 1, 3, True), Segment("C", 1, 3, True)), 4, LINEAR),
    ssm(8, 3, 2, LINEAR),
)
PLAIN_GQA = (heads_kv(Role.TARGET_KEY, 2, 4, (0, 1, 2)), heads_kv(Role.TARGET_VALUE, 2, 4, (0, 1, 2)))
MLA = (
    latent_kv(Role.TARGET_LATENT, {"latent": 6}, ATTENTION),
    latent_kv(Role.TARGET_ROPE, {"rope": 2}, ATTENTION),
    conv(tuple(Segment(name, 4, 2) for name in "qkv"), 4, LINEAR),
    ssm(4, 2, 2, LINEAR),
)
MODELS = {"four_heads": FOUR, "two_heads": TWO, "plain_gqa": PLAIN_GQA, "mla": MLA}
PAIRS = [(p, d) for p in (1, 2, 4) for d in (1, 2, 4)]
THREE_PAGES = {1: Request(3, (range(2), range(2, 3))), 64: Request(130), 128: Request(257, (range(2), range(2, 3)))}


@pytest.mark.parametrize("page_size", THREE_PAGES)
@pytest.mark.parametrize("tp", PAIRS, ids=lambda tp: f"P{tp[0]}D{tp[1]}")
@pytest.mark.parametrize("model", MODELS)
def test_pairs(model, tp, page_size):
    shape = Shape(page_size=page_size)
    serve(MODELS[model], (tp[0], shape), (tp[1], shape), THREE_PAGES[page_size], Staging(window=2, times_least=1.0))


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("tp", [(2, 3), (3, 2), (6, 2), (1, 3), (12, 3)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_sizes_of_which_neither_divides_the_other(tp, stages, mode):
    shape, request = Shape(page_size=2), Request(9, (range(1), range(1, 4), range(4, 5)))
    serve(SIX, (tp[0], shape), (tp[1], shape), request, Staging(mode=mode), stages=stages)


@pytest.mark.parametrize("layouts", list(itertools.product([CHANNELS_FIRST, WINDOW_FIRST], repeat=2)))
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (3, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_conv_layouts(tp, layouts):
    shapes = [Shape(page_size=2, formats={Role.CONV: layout}) for layout in layouts]
    serve(SIX, (tp[0], shapes[0]), (tp[1], shapes[1]), Request(3), Staging(window=1))


@pytest.mark.parametrize("tp", [(8, 1), (16, 1), (8, 2), (8, 4)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_replicas(tp):
    shape = Shape(page_size=4)
    for receiver in serve(PLAIN_GQA, (tp[0], shape), (tp[1], shape), Request(9), Staging(times_least=1.0)):
        assert len({share.source for share in receiver.plan.shares}) > 2 // tp[1]


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("whole", worlds.WHOLE_DRAFT)
@pytest.mark.parametrize("tp", [(2, 1), (4, 2), (2, 2), (1, 2), (3, 2), (2, 3)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_draft_with_all_heads_on_every_rank(tp, whole, page_size, mode):
    """Six heads where three ranks have to share them, with a draft of two layers in units that are used again."""
    heads = 6 if 3 in tp else 4
    target = SIX[:4] if heads == 6 else FOUR[:4]
    draft = tuple(heads_kv(role, heads, width, (0, 1)) for role, width in ((Role.DRAFT_KEY, 4), (Role.DRAFT_VALUE, 2)))
    models = [(*target, *(with_whole_draft(draft) if side else draft)) for side in worlds.WHOLE_DRAFT[whole]]
    shape = Shape(page_size=page_size)
    request = Request(6 if page_size == 1 else 9, (range(1), range(1, 6 if page_size == 1 else 3)))
    staging = Staging(window=2, times_least=1.0, mode=mode)
    receivers = serve(models[0], (tp[0], shape), (tp[1], shape), request, staging, decode_model=models[1])
    for receiver in receivers:
        shares = [share for share in receiver.plan.shares if share.role.draft]
        if worlds.WHOLE_DRAFT[whole][0]:
            writers = {(share.role, layer): 0 for share in shares for layer in share.layers}
            assert sum(len(share.layers) for share in shares) == len(writers) == 4
        program = receiver.programs(0)[1]
        read = any(piece.role is not None for piece in program.reads(request.tokens))
        # What lies in whole pages can be read; what has to be gathered is written.
        assert read == (mode is StateMode.PULL and not all(share.packed for share in shares))


@pytest.mark.parametrize("whole", worlds.WHOLE_DRAFT)
def test_any_world_with_a_whole_draft(whole):
    @settings(FIXED, max_examples=20)
    @given(worlds.cases(FAMILIES["gdn"], PAGE_SIZES).filter(worlds.Case.drafts), stagings)
    def sweep(case, staging):
        world = case.with_whole_draft(*worlds.WHOLE_DRAFT[whole]).world
        serve(
            world.model,
            (world.tp[0], world.shapes[0]),
            (world.tp[1], world.shapes[1]),
            Request(case.tokens, case.chunks, world.seed),
            staging,
            stages=world.stages,
            dp=world.dp,
            decode_model=world.decode_model,
            seed=world.seed,
        )

    sweep()


@pytest.mark.parametrize("mode", StateMode)
def test_a_draft_that_must_be_gathered_is_written_in_every_mode(mode):
    shape = Shape(page_size=2)
    for receiver in serve(FOUR, (1, shape), (2, shape), Request(5), Staging(mode=mode)):
        program = receiver.programs(0)[1]
        pushed = program.whole([3], 5)
        assert any(piece.role is Role.DRAFT_KEY for piece in pushed)
        assert all(piece.role is None for piece in program.reads(5))
        assert bool(program.reads(5)) == (mode is StateMode.PULL) != any(piece.role is None for piece in pushed)


def test_opaque_pages_move_whole():
    model = (latent_kv(Role.TARGET_LATENT, {"latent": 4}, (0, 1)),)
    shape = Shape(page_size=4, formats={Role.TARGET_LATENT: Format(encoding="packed-rows")})
    for tp in ((4, 1), (1, 4), (2, 2)):
        serve(model, (tp[0], shape), (tp[1], shape), Request(5), Staging(times_least=1.0))


@pytest.mark.parametrize("tp", [(2, 1), (4, 1), (1, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_default_unit(tp):
    """The unit that a decode rank chooses before it knows prefill; many pages go in one piece then."""
    shape = Shape(page_size=1, pages=70)
    for receiver in serve(FOUR, (tp[0], shape), (tp[1], shape), Request(70), Staging(unit=1 << 21)):
        assert unit_bytes_for(receiver.to.manifest) == receiver.window.unit_bytes
        paged = {share.role for share in receiver.plan.shares if share.item is Item.PAGE}
        layers = sum(len(c.layers) for c in receiver.to.manifest.components if c.role in paged)
        assert receiver.merged == layers + len(LINEAR)


@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (3, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_layers_of_one_role_that_differ(tp):
    """A layer with wider heads than the others, the first one and the last one: areas are for the widest."""
    for widths in ((8, 2), (2, 8)):
        model = tuple(heads_kv(Role.TARGET_KEY, 6, width, (layer,)) for layer, width in enumerate(widths))
        shape = Shape(page_size=8)
        serve(model, (tp[0], shape), (tp[1], shape), Request(37), Staging(times_least=1.0))
