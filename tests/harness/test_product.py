"""Our transfer inside SGLang, every byte of every decode pool: sizes x conv layouts x pages x MTP x state modes.

Layouts and MTP depths take turns over sizes and pages, so that each pair of values occurs; the state modes are decode
servers of their own, which share a prefill side.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Geometry, Handoff, Harness
from .product import (
    ALWAYS,
    PULL,
    PULL_IN_TURN,
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

TWO_HEADS = {"kv_heads": 2}
SIZES: list[tuple[int, int, dict[str, int]]] = [
    (2, 1, {}),
    (4, 1, {}),
    (4, 2, {}),
    (1, 2, {}),
    (1, 4, {}),
    (2, 4, {}),
    (2, 3, SIXES),
    (3, 2, SIXES),
    (2, 2, {}),
    (4, 1, TWO_HEADS),
    (1, 4, TWO_HEADS),
    (4, 2, TWO_HEADS),
]
"""Prefill TP, decode TP, and heads where the default ones would not do: 6 for sizes of which neither divides the other,
2 for ranks that hold replicas."""
PAGES = (1, 64, 128)
LAYOUTS_AND_DRAFTS = list(itertools.product(ConvLayout, (0, 3)))
WINDOWS = ("1", "2", "16")
"""Units per request: with one, each piece waits for the one before."""


@dataclass(frozen=True)
class Case:
    """One pair of sides."""

    prefill_tp: int
    decode_tp: int
    geometry: Geometry
    window: str
    verify: bool

    @property
    def id(self) -> str:
        shape = self.geometry
        heads = f"-{shape.kv_heads}heads" if shape.kv_heads != Geometry().kv_heads else ""
        return (
            f"P{self.prefill_tp}D{self.decode_tp}{heads}-page{shape.page_size}-{shape.conv_layout.value}"
            f"-MTP{shape.draft_tokens}-window{self.window}{'-verify' if self.verify else ''}"
        )


def cases() -> Iterator[Case]:
    turn = itertools.count()
    for (prefill_tp, decode_tp, heads), page in itertools.product(SIZES, PAGES):
        for _ in range(2):
            number = next(turn)
            # 4 layouts and depths go round once in two pages; the shift by size makes other pairs each time.
            layout, drafts = LAYOUTS_AND_DRAFTS[(number + number // 6) % len(LAYOUTS_AND_DRAFTS)]
            shape = geometry(page, conv_layout=layout, draft_tokens=drafts, **heads)
            yield Case(prefill_tp, decode_tp, shape, WINDOWS[number % len(WINDOWS)], verify=number % 5 == 0)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.id)
def test_every_byte_arrives_and_no_other_is_written(harness: Harness, case: Case) -> None:
    common = {"SGLANG_HETERO_WINDOW": case.window, **(VERIFY if case.verify else {})}
    equal = ALWAYS if case.prefill_tp == case.decode_tp else {}
    pull = PULL if case.geometry.page_size == 64 else PULL_IN_TURN
    modes = [{**common, **mode, **equal} for mode in (PUSH, pull)]
    page = case.geometry.page_size
    with harness.pair(
        case.geometry,
        prefill_tp=case.prefill_tp,
        decode_tp=case.decode_tp,
        prefill_env=equal,
        decode_env=modes,
        seed=page,
    ) as pair:
        for seed in range(2):
            pushed, pulled = around_pages(page, 10 * seed, 0)[seed::2], around_pages(page, 10 * seed, 1)[seed::2]
            check(pair, [*pushed, *pulled])
        check_ours(pair)
        check_all_is_back(pair)
        if case.verify:
            counters = pair.hetero("hetero_counters")
            assert sum(each.get("verified", 0) for each in counters) > 0
            assert not any(each.get("differences") for each in counters)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257])
def test_lengths_around_a_page(harness: Harness, tokens: int) -> None:
    with harness.pair(geometry(128), prefill_tp=2, decode_tp=1) as pair:
        check(pair, [Handoff(tokens, chunks, seed=tokens) for chunks in range(1, min(tokens, 3) + 1)])


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(geometry(64, linear_value_dim=8, linear_key_dim=4), id="value-wider-than-key"),
        pytest.param(geometry(64, kv_dtype="int8", conv_dtype="float32", ssm_dtype="bfloat16"), id="three-dtypes"),
        pytest.param(geometry(64, kv_heads=1), id="1-kv-head"),
        pytest.param(geometry(64, layers=7, full_attention_layers=(0, 2, 6)), id="attention-first"),
    ],
)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)], ids=lambda tp: f"{tp}")
def test_geometries(harness: Harness, shape: Geometry, prefill_tp: int, decode_tp: int) -> None:
    with harness.pair(shape, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_env=[PUSH, PULL]) as pair:
        check(pair, [*around_pages(64, 0, 0)[2:], *around_pages(64, 0, 1)[:2]])
        check_ours(pair)


def test_more_requests_than_slots_and_units_wait(harness: Harness) -> None:
    """Case 30: 17 requests at a time, 6 slots on prefill and staging for two of them on decode.

    Decode has a slot for each, since the harness keeps what has arrived for the comparison.
    """
    shape = geometry(64)
    many = replace(shape, slots=17, pages=64)
    with harness.pair(shape, prefill_tp=2, decode_tp=1, decode_geometry=many, decode_env=SCARCE) as pair:
        check(pair, [Handoff(1 + 17 * number, min(3, 1 + number), seed=number) for number in range(many.slots)])
        check_all_is_back(pair)


def test_case_35_long_prompts_in_a_row(harness: Harness) -> None:
    """Stock SGLang fails the first and then every one (test_handoff.py)."""
    with harness.pair(replace(geometry(64), pages=100), prefill_tp=2, decode_tp=1) as pair:
        for tokens in (1500, 3000, 6000, 300):
            check(pair, [Handoff(tokens, chunks=2, seed=tokens)])
        check_all_is_back(pair)


@pytest.mark.parametrize("mode", [PUSH, PULL], ids=["push", "pull"])
def test_two_prefill_sides_of_different_size_to_one_decode(harness: Harness, mode: dict[str, str]) -> None:
    with harness.pair(geometry(64), prefill_tp=[2, 4], decode_tp=1, decode_env=mode) as pair:
        for seed in range(2):
            check(pair, [replace(each, prefill=number % 2) for number, each in enumerate(around_pages(64, 10 * seed))])
        check_all_is_back(pair)


@pytest.mark.parametrize("prefill_tp", [2, 4])
def test_attention_dp_on_decode(harness: Harness, prefill_tp: int) -> None:
    """Two decode ranks of attention TP 1, each with requests of its own."""
    with harness.pair(geometry(64), prefill_tp=prefill_tp, decode_tp=1, decode_dp=2) as pair:
        check(pair, [*around_pages(64, 0, 0)[:3], *around_pages(64, 10, 1)[:3]])
        check_ours(pair)
        check_all_is_back(pair)
