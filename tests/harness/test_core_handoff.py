"""Describe, plan, bind and merge on SGLang's real pools: every byte of every decode pool.

The pairs are those for which stock SGLang is right and those for which it is wrong (docs/upstream_faults.md), and
sizes of which neither divides the other.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Geometry, Harness
from .sides import Request

SMALL = Geometry(pages=20)
SIXES = Geometry(pages=20, kv_heads=6, linear_key_heads=6, linear_value_heads=12)
CHUNK = 100
REQUESTS = [Request(1, tokens=129, seed=1), Request(2, tokens=64, seed=2), Request(3, tokens=63, seed=3)]
"""A partial, a full and a single partial last page, of 64-token pages; the first in two chunks."""


def differences(
    harness: Harness, geometry: Geometry, prefill_tp: int, decode_tp: int, requests: Sequence[Request] = REQUESTS
) -> list[str]:
    process = harness.core(geometry)
    return [str(found) for found in process.call("run", prefill_tp, decode_tp, requests, CHUNK)]


@pytest.mark.parametrize("layout", ConvLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (4, 2), (2, 4)], ids=lambda tp: f"{tp}"
)
def test_every_byte_arrives_and_no_other_is_written(
    harness: Harness, layout: ConvLayout, prefill_tp: int, decode_tp: int
) -> None:
    assert not differences(harness, replace(SMALL, conv_layout=layout), prefill_tp, decode_tp)


@pytest.mark.parametrize("layout", ConvLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 3), (3, 2)], ids=lambda tp: f"{tp}")
def test_neither_size_divides_the_other(harness: Harness, layout: ConvLayout, prefill_tp: int, decode_tp: int) -> None:
    assert not differences(harness, replace(SIXES, conv_layout=layout), prefill_tp, decode_tp)


@pytest.mark.parametrize(
    ("geometry", "prefill_tp", "decode_tp"),
    [
        pytest.param(replace(SMALL, kv_heads=2), 4, 1, id="P4D1-2-kv-heads-replicated-on-prefill"),
        pytest.param(replace(SMALL, kv_heads=2), 1, 4, id="P1D4-2-kv-heads-replicated-on-decode"),
        pytest.param(replace(SMALL, kv_heads=1), 2, 4, id="P2D4-1-kv-head-replicated-on-both"),
        pytest.param(replace(SMALL, page_size=1, pages=400), 2, 1, id="P2D1-page-1"),
        pytest.param(replace(SMALL, page_size=1, pages=400), 1, 2, id="P1D2-page-1"),
        pytest.param(replace(SMALL, page_size=128), 2, 1, id="P2D1-page-128"),
        pytest.param(replace(SMALL, draft_tokens=0), 2, 1, id="P2D1-without-MTP"),
        pytest.param(replace(SMALL, linear_value_dim=8, linear_key_dim=4), 2, 1, id="P2D1-value-wider-than-key"),
        pytest.param(
            replace(SMALL, kv_dtype="int8", conv_dtype="float32", ssm_dtype="bfloat16"), 2, 1, id="P2D1-three-dtypes"
        ),
    ],
)
def test_geometries(harness: Harness, geometry: Geometry, prefill_tp: int, decode_tp: int) -> None:
    assert not differences(harness, geometry, prefill_tp, decode_tp)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257])
def test_lengths_around_a_page(harness: Harness, tokens: int) -> None:
    geometry = replace(SMALL, page_size=128)
    assert not differences(harness, geometry, 2, 1, [Request(1, tokens=tokens, seed=tokens)])
