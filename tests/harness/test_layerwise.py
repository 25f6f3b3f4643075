"""Caches that go out while prefill's layers run: every byte of every decode pool, whatever the moment they leave at.

Prefill runs forward passes (replay.py). While a layer has not run its caches hold poison, or a wrong state, so that
what is sent too early shows. Sizes, pages, layouts and MTP depths take turns; the state modes are decode servers of
their own, whose requests share prefill's batches.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Abort, Forward, Geometry, Handoff, Harness, Leftovers, On, Pair, Result
from .flow import made_batch
from .product import (
    ALWAYS,
    AT_THE_END,
    OFF,
    PREPUSH,
    PULL,
    PUSH,
    SCARCE,
    SIXES,
    VERIFY,
    around_pages,
    check,
    check_all_is_back,
    check_ours,
    geometry,
)

SIZES: list[tuple[int, int, dict[str, int]]] = [(2, 1, {}), (4, 1, {}), (1, 2, {}), (3, 2, SIXES), (2, 2, {})]
"""Prefill TP, decode TP, heads."""
PAGES = (1, 64, 128)
LAYOUTS_AND_DRAFTS = list(itertools.product(ConvLayout, (0, 3)))
MODES = (PREPUSH, PUSH, PULL)
WINDOWS = ("1", "2", "16")
LAYER_SECONDS = 0.002
"""Long enough for a piece to leave before the next layer has run."""
SLOW = Forward(0.02)
"""Passes in which layers are so slow that pieces leave between them also on a busy machine."""
PROMPTS = 3
SHAPE = geometry(64)
SOON = 15.0
"""Seconds in which an abort must have reached both sides; SGLang's own limits are 40 s here."""
orders = pytest.mark.parametrize("overlap", [False, True], ids=["no-overlap", "overlap"])
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(*mode.values()))


@dataclass(frozen=True)
class Case:
    """One pair of sides."""

    prefill_tp: int
    decode_tp: int
    geometry: Geometry
    window: str
    overlap: bool
    layerwise: bool
    verify: bool

    @property
    def id(self) -> str:
        shape = self.geometry
        options = [
            name
            for name, on in (("overlap", self.overlap), ("at-the-end", not self.layerwise), ("verify", self.verify))
            if on
        ]
        return "-".join(
            [
                f"P{self.prefill_tp}D{self.decode_tp}",
                f"page{shape.page_size}",
                shape.conv_layout.value,
                f"MTP{shape.draft_tokens}",
                f"window{self.window}",
                *options,
            ]
        )


def cases() -> Iterator[Case]:
    turn = itertools.count()
    for (prefill_tp, decode_tp, heads), page, overlap in itertools.product(SIZES, PAGES, (False, True)):
        number = next(turn)
        layout, drafts = LAYOUTS_AND_DRAFTS[(number + number // 6) % len(LAYOUTS_AND_DRAFTS)]
        yield Case(
            prefill_tp,
            decode_tp,
            geometry(page, conv_layout=layout, draft_tokens=drafts, **heads),
            WINDOWS[number % len(WINDOWS)],
            overlap,
            layerwise=number % 7 != 3,
            verify=number % 5 == 0,
        )


def for_each_mode(handoffs: Sequence[Handoff]) -> list[Handoff]:
    """The decode servers take turns."""
    return [replace(each, decode=number % len(MODES)) for number, each in enumerate(handoffs)]


@pytest.mark.parametrize(
    "case",
    [
        case if (number + number // 2) % 2 else pytest.param(case, marks=pytest.mark.full)
        for number, case in enumerate(cases())
    ],
    ids=lambda case: case.id,
)
def test_every_byte_arrives_and_no_other_is_written(harness: Harness, case: Case) -> None:
    equal = ALWAYS if case.prefill_tp == case.decode_tp else {}
    common = {"SGLANG_HETERO_WINDOW": case.window, **equal, **(VERIFY if case.verify else {})}
    with harness.pair(
        case.geometry,
        prefill_tp=case.prefill_tp,
        decode_tp=case.decode_tp,
        prefill_env={**equal, **({} if case.layerwise else AT_THE_END)},
        decode_env=[{**common, **mode} for mode in MODES],
        seed=case.geometry.page_size,
    ) as pair:
        slow = Forward(LAYER_SECONDS, overlap=case.overlap)
        check(pair, for_each_mode(around_pages(case.geometry.page_size)), slow)
        check(pair, for_each_mode(around_pages(case.geometry.page_size, 10)[::-1]), replace(slow, layer_seconds=0.0))
        check_ours(pair)
        check_all_is_back(pair)
        counters = pair.hetero("hetero_counters")
        assert not any(each.get("differences") or each.get("hidden") for each in counters)
        if case.verify:
            assert sum(each.get("verified", 0) for each in counters) > 0


def early_bytes(pair: Pair, forward: Forward = SLOW) -> list[int]:
    """Bytes that left while the layers of prompts of one chunk ran, by state mode: of a longer prompt's chunk some may
    leave in the pass of its next one."""
    check(pair, for_each_mode([Handoff(10)] * len(MODES)))  # the sides know each other
    return [
        sum(check(pair, [Handoff(200, seed=seed, decode=number)], forward).early_bytes for seed in range(PROMPTS))
        for number in range(len(MODES))
    ]


def test_bytes_leave_while_the_layers_run(harness: Harness) -> None:
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env=list(MODES)) as pair:
        assert min(early_bytes(pair)) > 0
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, prefill_env=AT_THE_END, decode_env=list(MODES)) as pair:
        assert early_bytes(pair) == [0, 0, 0]
        check_ours(pair)


def test_linear_state_leaves_with_its_layer_in_prepush_only(harness: Harness) -> None:
    """The one attention layer is hidden: what is left are the linear layers before it."""
    shape = replace(SHAPE, full_attention_layers=(3,))
    with harness.pair(shape, prefill_tp=2, decode_tp=1, decode_env=list(MODES)) as pair:
        prepush, push, pull = early_bytes(pair, replace(SLOW, hidden=frozenset({3})))
    assert prepush > 0
    assert (push, pull) == (0, 0)


@orders
@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param(range(SHAPE.layers), id="all-layers"),
        pytest.param(SHAPE.linear_layers, id="linear-layers"),
        pytest.param(SHAPE.full_attention_layers, id="attention-layers"),
        pytest.param((SHAPE.layers - 1,), id="last-layer"),
        pytest.param(range(SHAPE.layers - 1), id="all-but-the-last-layer"),
    ],
)
def test_layers_that_nobody_hears_of(harness: Harness, hidden: Sequence[int], overlap: bool) -> None:
    """In every pass, and in every other one, so that chunks which were seen lie between others and vice versa."""
    unseen = Forward(LAYER_SECONDS, overlap=overlap, hidden=frozenset(hidden))
    seen = replace(unseen, hidden=frozenset())
    handoffs = [*around_pages(64), Handoff(301, 5, seed=20)]
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env=list(MODES)) as pair:
        for forward in (unseen, [unseen, seen], [seen, unseen], seen):
            check(pair, for_each_mode(handoffs), forward)
        hidden_passes = sum(counters.get("hidden", 0) for counters in pair.hetero("hetero_counters"))
        assert bool(hidden_passes) == (len(hidden) == SHAPE.layers)
        check_all_is_back(pair)


def test_a_prompt_nobody_hears_of_leaves_at_its_end(harness: Harness) -> None:
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env=list(MODES)) as pair:
        assert early_bytes(pair, replace(SLOW, hidden=frozenset(range(SHAPE.layers)))) == [0, 0, 0]
        check_ours(pair)


@orders
def test_a_layer_that_is_stored_in_parts(harness: Harness, overlap: bool) -> None:
    forward = Forward(LAYER_SECONDS, overlap=overlap, parts=3)
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env=list(MODES)) as pair:
        check(pair, for_each_mode(around_pages(64)), forward)
        check(pair, for_each_mode(around_pages(64, 10)), replace(forward, layer_seconds=0.0))
        check_all_is_back(pair)


@orders
@pytest.mark.parametrize(
    ("bound", "told"),
    [
        (1, 0),
        (1, 2),
        (0, 2),
        *(pytest.param(*late, marks=pytest.mark.full) for late in [(2, 0), (3, 0), (0, 1), (0, 3)]),
    ],
)
def test_a_request_that_is_bound_while_prefill_computes(harness: Harness, overlap: bool, bound: int, told: int) -> None:
    """SGLang's optimistic prefill: the handshake ends after some chunks, and its scheduler may learn of it later."""
    forward = Forward(LAYER_SECONDS, overlap=overlap)
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env=list(MODES)) as pair:
        late = [Handoff(300, 3, seed=seed, bound_after=bound, told_after=told) for seed in range(3)]
        for seed, handoff in enumerate(late):
            others = [Handoff(129, 2, seed=10 + seed), Handoff(70, seed=20 + seed)]
            check(pair, for_each_mode([*others[seed:], handoff, *others[:seed]]), forward)
        check_all_is_back(pair)


@orders
@pytest.mark.parametrize("prefill", [{}, AT_THE_END], ids=["layerwise", "at-the-end"])
def test_a_prefix_cache_puts_the_request_into_other_pages(
    harness: Harness, overlap: bool, prefill: dict[str, str]
) -> None:
    """After each chunk, before it is handed over; what the request has left is overwritten at once."""
    moves = Forward(LAYER_SECONDS, overlap=overlap, moves=True)
    decode = [{**VERIFY, "SGLANG_HETERO_WINDOW": window, **mode} for mode in MODES for window in ("2", "16")]
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, prefill_env=prefill, decode_env=decode) as pair:
        handoffs = [*around_pages(64), Handoff(301, 5, seed=20)]
        everywhere = [replace(each, decode=number) for number in range(len(decode)) for each in handoffs]
        for forward in (moves, replace(moves, layer_seconds=0.0)):
            check(pair, everywhere, forward)
        check_ours(pair)
        check_all_is_back(pair)


def hand_over(pair: Pair, handoffs: Sequence[Handoff], forward: Forward | Sequence[Forward]) -> Result:
    """Hand over, wait until nobody can write any more, and compare: where no request has arrived is poison."""
    result = pair.handoff_many(
        handoffs, Leftovers.UNTOUCHED, before_compare=lambda pair, _: pair.quiet(), forward=forward
    )
    assert not result.differences, [str(difference) for difference in result.differences]
    assert result.seconds < SOON
    return result


@orders
@modes
@pytest.mark.parametrize("on", list(On), ids=lambda on: on.value)
def test_an_abort_while_layers_run_ends_the_request_and_no_other(
    harness: Harness, on: On, mode: dict[str, str], overlap: bool
) -> None:
    forward = Forward(LAYER_SECONDS, overlap=overlap)
    decode = {**mode, "SGLANG_HETERO_WINDOW": "2"}
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env=decode) as pair:
        check(pair, [Handoff(10)], forward)
        for chunks in range(3):
            abort = Abort(on, chunks + (on is On.PREFILL), running=on is On.DECODE)
            gone = Handoff(250, 3, seed=1 + chunks, abort=abort)
            result = hand_over(pair, [gone, Handoff(129, 2, seed=9), replace(gone, seed=20 + chunks)], forward)
            first, other, third = result.outcomes
            assert other.succeeded, other.reasons
            for outcome in (first, third):
                assert outcome.prefill == outcome.decode or (outcome.decode and on is On.PREFILL), outcome
            if chunks < 2:
                assert not first.prefill and not first.decode
            check_all_is_back(pair)
        check(pair, [Handoff(250, 4, seed=4)], forward)


@orders
@modes
def test_random_prompts_and_ends_leave_nothing(harness: Harness, mode: dict[str, str], overlap: bool) -> None:
    """Chunks, aborts, late handshakes, slow and hidden layers at random, with units for two requests."""
    rng = random.Random(f"{mode} {overlap}")
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1, decode_env={**mode, **SCARCE}) as pair:
        check(pair, around_pages(64), Forward(overlap=overlap))
        ended = 0
        for _ in range(12):
            handoffs = [_random_handoff(rng) for _ in range(5)]
            forwards = [_random_forward(rng, overlap) for _ in range(3)]
            result = hand_over(pair, handoffs, forwards)
            for handoff, outcome in zip(handoffs, result.outcomes, strict=True):
                assert outcome.succeeded or handoff.abort is not None, outcome.reasons
                ended += not outcome.succeeded
        assert ended
        check_all_is_back(pair)
        check(pair, around_pages(64, seed=50), Forward(overlap=overlap))


def _random_handoff(rng: random.Random) -> Handoff:
    chunks = rng.randint(1, 4)
    abort = None
    if rng.random() < 0.4:
        on = rng.choice(list(On))
        running = on is On.DECODE and rng.random() < 0.7
        abort = Abort(on, rng.randint(0, chunks - running), rng.randint(0, 3), running)
    bound, told = (rng.randint(0, chunks) if rng.random() < 0.2 and abort is None else 0 for _ in range(2))
    seed, tokens = rng.randrange(1 << 20), rng.randint(chunks, 200)
    return Handoff(tokens, chunks, seed, abort=abort, bound_after=bound, told_after=told)


def _random_forward(rng: random.Random, overlap: bool) -> Forward:
    hidden = rng.choice([(), (), (), range(SHAPE.layers), SHAPE.linear_layers, SHAPE.full_attention_layers])
    return Forward(
        rng.choice([0.0, LAYER_SECONDS / 2, LAYER_SECONDS]),
        overlap,
        frozenset(hidden),
        rng.random() < 0.4,
        rng.choice([1, 1, 2]),
    )


def test_a_batch_has_the_prompt_that_was_begun_first_and_one_that_goes_on() -> None:
    one, new, begun, later = (
        SimpleNamespace(sent=sent, chunks=[*range(left)]) for sent, left in ((0, 1), (0, 2), (1, 3), (0, 2))
    )
    assert made_batch([one, new, begun, later]) == [begun, one]
    begun.chunks = [9]
    assert made_batch([one, new, begun, later]) == [begun, one, new]


@orders
def test_the_replay_itself_with_sglangs_own_path(harness: Harness, overlap: bool) -> None:
    """What the replay leaves in prefill's caches is what SGLang sends."""
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=2, prefill_env=OFF, decode_env=OFF) as pair:
        result = pair.handoff_many(around_pages(64), Leftovers.COPIED, forward=Forward(overlap=overlap))
        assert result.succeeded, result.outcomes
        assert not result.differences, [str(difference) for difference in result.differences]


def test_a_plain_transformer(harness: Harness) -> None:
    shape = geometry(64, layers=3, full_attention_layers=(0, 1, 2), draft_tokens=0)
    with harness.pair(shape, prefill_tp=2, decode_tp=1, decode_env=list(MODES)) as pair:
        check(pair, for_each_mode(around_pages(64)), Forward(LAYER_SECONDS))
        assert min(early_bytes(pair)) > 0
        check_all_is_back(pair)
