"""The figures of real handoffs: one line per rank, with the bytes that the geometry says, and a trace of the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_hetero.perf import parts, perfetto
from sglang_hetero.perf.parts import Parts
from sglang_hetero.perf.records import PREFIX
from sglang_hetero.perf.spans import Track

from . import Geometry, Handoff, Harness, Leftovers, Pair, Result, flow
from .flow import Abort, On
from .geometry import ITEMSIZE
from .processes import RankProcess
from .product import PULL, geometry

TOKENS = 150
"""Two pages of 64 and a part of one."""
WRITE_SECONDS = 20.0
"""A trace is written every half second."""


def expected(shape: Geometry, decode_tp: int, tokens: int) -> dict[str, int]:
    """Bytes of a request's caches at one decode rank, by hand: of the tokens in use, and of both linear states."""
    row = 2 * shape.local_kv_heads(decode_tp) * shape.head_dim * ITEMSIZE[shape.kv_dtype]  # key and value
    channels = sum(segment.heads * segment.head_width for segment in shape.conv_segments) // decode_tp
    conv = channels * shape.window * ITEMSIZE[shape.conv_dtype]
    heads = shape.linear_value_heads // decode_tp
    ssm = heads * shape.linear_key_dim * shape.linear_value_dim * ITEMSIZE[shape.ssm_dtype]
    return {
        "kv": tokens * row * len(shape.full_attention_layers),
        "state": (conv + ssm) * len(shape.linear_layers),
        "draft": tokens * row * len(shape.draft_layers),
    }


def lines(rank: RankProcess) -> list[dict[str, Any]]:
    """What a rank has logged."""
    text = rank.log.read_text()
    return [json.loads(line.split(PREFIX, 1)[1]) for line in text.splitlines() if PREFIX in line]


def traced(folder: Path, writes: int, responses: int) -> Parts:
    """The trace of one request, when every rank has written the end of it."""

    def complete() -> bool:
        events = parts.read(folder).events
        written = [event for event in events if event.track is Track.LINK]
        return len(written) >= writes and [event.name for event in events].count("first response") >= responses

    flow.until(complete, lambda: f"only {len(parts.read(folder).events)} spans are written", WRITE_SECONDS)
    return parts.read(folder)


def handed_over(pair: Pair, handoffs: Sequence[Handoff]) -> Result:
    result = pair.handoff_many(handoffs, leftovers=Leftovers.UNTOUCHED)
    assert result.succeeded, [outcome.reasons for outcome in result.outcomes]
    assert not result.differences
    pair.quiet()
    return result


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2)], ids=["p2d1", "p1d2", "p4d2"])
@pytest.mark.parametrize("mode", [{}, PULL], ids=["prepush", "pull"])
def test_a_line_per_rank_and_the_same_in_the_trace(
    harness: Harness, tmp_path: Path, prefill_tp: int, decode_tp: int, mode: dict[str, str]
) -> None:
    shape = geometry(64)
    trace = {"SGLANG_HETERO_TRACE": str(tmp_path / "trace")}
    with harness.pair(
        shape, prefill_tp=prefill_tp, decode_tp=decode_tp, prefill_env=trace, decode_env={**mode, **trace}
    ) as pair:
        result = handed_over(pair, [Handoff(TOKENS, 2, seed=1)])
        room = result.decode[0].room
        sent = [each for rank in pair.prefill for each in lines(rank)]
        received = [each for rank in pair.decode for each in lines(rank)]
        found = traced(tmp_path / "trace", sum(each["writes"] for each in sent), decode_tp)
    assert [(each["side"], each["room"], each["outcome"]) for each in sent] == [("prefill", room, "ok")] * prefill_tp
    assert [(each["side"], each["room"], each["outcome"]) for each in received] == [("decode", room, "ok")] * decode_tp
    assert len({each["rank"] for each in sent + received}) == prefill_tp + decode_tp

    whole = expected(shape, decode_tp, TOKENS)
    for each in received:
        # Whole pages are read in mode pull.
        assert each["merged_bytes"]["kv"] == whole["kv"]
        assert each["merged_bytes"]["state"] == whole["state"]
        assert each["pages"] == 3
        for name in ("allocation_wait_ms", "window_wait_ms", "merge_ms", "first_generation_to_enqueue_ms"):
            assert each[name] >= 0, name
        assert each["enqueue_to_first_response_ms"] >= 0
        assert (each["reads"] > 0) == bool(mode)

    # Pages that are cut by head (P < D) are never read; those of attention KV are always pushed.
    names = {"kv"} if mode and prefill_tp > decode_tp else {"kv", "draft"} if mode else set(whole)
    pushed = {name: whole[name] * decode_tp for name in names}
    written = {name: sum(each["bytes"].get(name, 0) for each in sent) for name in pushed}
    assert written == pushed
    assert {name for each in sent for name in each["bytes"]} == set(pushed)
    for each in sent:
        assert set(each["descriptors"]) == set(each["bytes"])
        assert 0 <= each["early_share"] <= 1
        assert each["transfer_ms"] > 0

    assert not found.bad
    (figures,) = perfetto.rooms(found)
    assert (figures.room, figures.nbytes) == (room, pushed)
    drawn = [entry["name"] for entry in perfetto.chrome(found)["traceEvents"]]
    for name in ("allocation wait", "window wait", "merge kv", "merge state", "FirstGeneration", "enqueue"):
        assert drawn.count(name) >= decode_tp, name


def test_several_requests_have_lines_of_their_own(harness: Harness) -> None:
    shape = geometry(64)
    with harness.pair(shape, prefill_tp=2, decode_tp=1) as pair:
        result = handed_over(pair, [Handoff(tokens, 1, seed=tokens) for tokens in (65, 130, 200)])
        tokens = {placement.room: placement.tokens for placement in result.decode}
        found = {each["room"]: each["merged_bytes"] for each in lines(pair.decode[0])}
    assert found == {room: expected(shape, 1, number) for room, number in tokens.items()}


def test_a_request_that_is_given_up_says_why_on_every_rank(harness: Harness) -> None:
    with harness.pair(geometry(64), prefill_tp=2, decode_tp=1) as pair:
        result = pair.handoff_many([Handoff(250, 3, seed=1, abort=Abort(On.DECODE, 1, 0))])
        assert not result.outcomes[0].decode
        pair.quiet()
        found = [lines(rank) for rank in pair.ranks]
    assert [len(each) for each in found] == [1, 1, 1]
    outcomes = [each["outcome"] for rank in found for each in rank]
    assert all("gave the request up" in outcome for outcome in outcomes[:2])
    assert outcomes[2] == "Aborted by AbortReq."  # SGLang's own word, at the rank that it told
    (received,) = found[-1]
    assert received["window_wait_ms"] is not None
    assert received["enqueue_to_first_response_ms"] is None
