"""Whole pairs of servers, drawn at random: model, dtypes, TP and PP sizes, pools, pages, chunks, policies."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from sglang_hetero.layout import AxisName, Item, Role
from sglang_hetero.reshard import STRICT, Policy

from .model import (
    ITEMSIZE,
    Model,
    Segment,
    Tensor,
    conv,
    heads_kv,
    latent_kv,
    legal,
    ssm,
    stage_of,
    with_whole_draft,
    without_draft,
)
from .rank import Format, Shape

TP_SIZES = (1, 2, 3, 4, 6, 8)
PAGE_SIZES = (1, 2, 3, 4, 5, 7, 8, 128)
MAX_STAGES = 3
HIGH_BASES = (1 << 33, (1 << 63) - 5000, (1 << 64) - (1 << 28))
"""Beyond 32 bits; across the sign bit of 64; near the end of the address space."""
DRAFT = {
    Role.TARGET_KEY: Role.DRAFT_KEY,
    Role.TARGET_VALUE: Role.DRAFT_VALUE,
    Role.TARGET_LATENT: Role.DRAFT_LATENT,
    Role.TARGET_ROPE: Role.DRAFT_ROPE,
}

WHOLE_DRAFT = {"prefill": (True, False), "decode": (False, True), "both": (True, True)}
"""Which sides may keep all of the draft's heads on every rank: prefill, decode."""


@dataclass(frozen=True)
class World:
    """Everything that `handover.serve` needs but the request."""

    model: Model
    decode_model: Model
    policy: Policy
    tp: tuple[int, int]
    stages: int
    dp: tuple[int, int]
    shapes: tuple[Shape, Shape]
    seed: int


@dataclass(frozen=True)
class Case:
    """A world and one request in it."""

    world: World
    tokens: int
    chunks: tuple[range, ...]

    def drafts(self) -> bool:
        """Whether a draft by head goes from several ranks to one or more, or from one to several."""
        moved = {tensor.role for tensor in self.world.model} & {tensor.role for tensor in self.world.decode_model}
        return Role.DRAFT_KEY in moved and max(self.world.tp) > 1

    def with_whole_draft(self, prefill: bool, decode: bool) -> "Case":
        """The same with all of the draft's heads on every rank of these sides."""
        world = self.world
        model = with_whole_draft(world.model) if prefill else world.model
        decode_model = with_whole_draft(world.decode_model) if decode else world.decode_model
        return replace(self, world=replace(world, model=model, decode_model=decode_model))


dtypes = st.sampled_from(sorted(ITEMSIZE))
small = st.integers(1, 4)


@st.composite
def _layers(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(attention layers, linear layers) of a model of at most six, mixed in any order; neither empty."""
    count = draw(st.integers(2, 6))
    linear = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
    return tuple(sorted(set(range(count)) - linear)), tuple(sorted(linear))


def _with_draft(target: list[Tensor], tensors: list[Tensor], layers: int) -> Model:
    drafts = [Tensor(DRAFT[t.role], t.dtype, tuple(range(layers)), t.cut, t.segments, t.axes) for t in target if layers]
    return (*target, *tensors, *drafts)


@st.composite
def gdn(draw: st.DrawFn) -> Model:
    """Gated delta net beside GQA, as in Qwen3.5: q and k by key head, v by value head."""
    attention, linear = draw(_layers())
    key_heads, groups = draw(st.sampled_from([2, 6, 12])), draw(st.sampled_from([1, 2]))
    heads, key, value = key_heads * groups, draw(small), draw(small)
    kv_heads, kv_dtype = draw(st.sampled_from([1, 2, 4, 6])), draw(dtypes)
    target = [
        heads_kv(Role.TARGET_KEY, kv_heads, draw(small), attention, kv_dtype),
        heads_kv(Role.TARGET_VALUE, kv_heads, draw(small), attention, kv_dtype),
    ]
    divided = draw(st.booleans())
    segments = (
        Segment("q", key_heads, key, divided=divided),
        Segment("k", key_heads, key, divided=divided),
        Segment("v", heads, value, divided=divided),
    )
    states = [
        conv(segments, draw(st.integers(2, 5)), linear, draw(dtypes)),
        ssm(heads, value, key, linear, draw(dtypes), divided=divided),
    ]
    return _with_draft(target, states, draw(st.integers(0, 2)))


@st.composite
def kda(draw: st.DrawFn) -> Model:
    """Kimi delta attention beside latent attention; the rotary part in the same buffer or in one of its own."""
    attention, linear = draw(_layers())
    heads, width, dtype = draw(st.sampled_from([2, 6, 12])), draw(small), draw(dtypes)
    latent, rope = draw(st.integers(1, 8)), draw(small)
    if draw(st.booleans()):
        target = [latent_kv(Role.TARGET_LATENT, {"latent": latent, "rope": rope}, attention, dtype)]
    else:
        target = [
            latent_kv(Role.TARGET_LATENT, {"latent": latent}, attention, dtype),
            latent_kv(Role.TARGET_ROPE, {"rope": rope}, attention, dtype),
        ]
    divided = draw(st.booleans())
    segments = tuple(Segment(name, heads, width, divided=divided) for name in "qkv")
    states = [
        conv(segments, draw(st.integers(2, 5)), linear, draw(dtypes)),
        ssm(heads, width, width, linear, draw(dtypes), divided=divided),
    ]
    return _with_draft(target, states, draw(st.integers(0, 1)))


@st.composite
def mamba2(draw: st.DrawFn) -> Model:
    """Mamba-2 beside GQA: x by head, B and C by group, replicated where there is one group only."""
    attention, linear = draw(_layers())
    groups, state = draw(st.sampled_from([1, 1, 2, 4, 6])), draw(small)
    heads, width = groups * draw(st.sampled_from([2, 6])), draw(small)
    kv_heads, kv_dtype = draw(st.sampled_from([1, 2, 6])), draw(dtypes)
    target = [
        heads_kv(Role.TARGET_KEY, kv_heads, draw(small), attention, kv_dtype),
        heads_kv(Role.TARGET_VALUE, kv_heads, draw(small), attention, kv_dtype),
    ]
    divided, replicated = draw(st.booleans()), groups == 1
    segments = (
        Segment("x", heads, width, divided=divided),
        Segment("B", groups, state, replicated, divided=divided and not replicated),
        Segment("C", groups, state, replicated, divided=divided and not replicated),
    )
    states = [
        conv(segments, draw(st.integers(2, 5)), linear, draw(dtypes)),
        ssm(heads, width, state, linear, draw(dtypes), divided=divided),
    ]
    return _with_draft(target, states, draw(st.integers(0, 1)))


@st.composite
def formats(draw: st.DrawFn, model: Model) -> dict[Role, Format]:
    """Any memory order (tokens stay outermost), gaps, neighbours of other layers, dead window rows."""
    chosen = {}
    for tensor in model:
        axes = list(range(len(tensor.axes)))
        fixed = axes[:1] if tensor.item is Item.PAGE else []
        order = (*fixed, *draw(st.permutations(axes[len(fixed) :])))
        window = any(name is AxisName.WINDOW for name, _ in tensor.axes)
        gap = st.sampled_from([0, 0, 1, 3])
        chosen[tensor.role] = Format(
            interleaved=draw(st.booleans()),
            order=order,
            item_gap=draw(gap),
            row_gap=draw(gap),
            dead_before=draw(st.integers(0, 3)) if window else 0,
            dead_after=draw(st.integers(0, 1)) if window else 0,
        )
    return chosen


@st.composite
def shapes(draw: st.DrawFn, model: Model, page_size: int, pages: int) -> Shape:
    """Pools that hold a request of `pages` pages, and a little more."""
    return Shape(
        page_size=page_size,
        pages=pages + draw(st.integers(0, 3)),
        slots=draw(st.integers(1, 4)),
        formats=draw(formats(model)),
        base=draw(st.sampled_from(HIGH_BASES)),
    )


@st.composite
def chunkings(draw: st.DrawFn, pages: int) -> tuple[range, ...]:
    """A request's pages in runs, one after another."""
    cuts = sorted(draw(st.sets(st.integers(1, pages - 1), max_size=3))) if pages > 1 else []
    ends = [*cuts, pages]
    return tuple(range(start, end) for start, end in zip([0, *cuts], ends, strict=True))


@st.composite
def tp_pairs(draw: st.DrawFn, model: Model) -> tuple[int, int]:
    """A legal (prefill, decode) pair; where neither size need divide the other, every third one is such a pair."""
    sizes = [tp for tp in TP_SIZES if legal(model, tp)]
    pairs = [(p, d) for p in sizes for d in sizes]
    odd = [(p, d) for p, d in pairs if p % d and d % p]
    return draw(st.sampled_from(odd if odd and draw(st.integers(0, 2)) == 0 else pairs))


@st.composite
def cases(draw: st.DrawFn, family: st.SearchStrategy[Model], page_sizes: tuple[int, ...] = PAGE_SIZES) -> Case:
    """A legal pair of servers of that family of models, and a request; page tails are as likely as full pages."""
    model = draw(family)
    tp = draw(tp_pairs(model))
    page_size = draw(st.sampled_from(page_sizes))
    pages = draw(st.integers(1, 4))
    tokens = (pages - 1) * page_size + draw(st.sampled_from(sorted({1, max(1, page_size - 1), page_size})))
    decode_model, policy = model, STRICT
    drafts = frozenset(tensor.role for tensor in model if tensor.role.draft)
    choice = draw(st.sampled_from(["both", "both", "prefill", "decode"]) if drafts else st.just("both"))
    if choice == "prefill":
        decode_model, policy = without_draft(model), Policy(drop=drafts)
    elif choice == "decode":
        model, policy = without_draft(model), Policy(start_empty=drafts)
    # With few layers a stage may hold none; such a server does not start.
    possible = [s for s in range(1, MAX_STAGES + 1) if all(stage_of(model, stage, s) for stage in range(s))]
    dp_size = draw(st.sampled_from([1, 1, 2]))
    world = World(
        model=model,
        decode_model=decode_model,
        policy=policy,
        tp=tp,
        stages=draw(st.sampled_from(possible)),
        dp=(draw(st.integers(0, dp_size - 1)), dp_size),
        shapes=(draw(shapes(model, page_size, pages)), draw(shapes(decode_model, page_size, pages))),
        seed=draw(st.integers(1, 1000)),
    )
    return Case(world, tokens, draw(chunkings(pages)))
