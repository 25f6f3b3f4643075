"""The example of docs/core.md runs as it stands, and hands over every element of every cache."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_hetero.layout import Role

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "core.md"
TOKENS, PAGE = 150, 64


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


def items(names: dict[str, Any], rank: int | None, role: Role, layer: int) -> torch.Tensor:
    """[items, *axes] of a densely packed cache, by nothing but shapes."""
    described = names["destination"] if rank is None else names["sources"][rank]
    memory = names["decode"] if rank is None else names["prefill"][rank]
    (part,) = described.of(role)
    dtype = {2: torch.int16, 4: torch.int32}[part.itemsize]
    return memory[role, layer].view(dtype).view(part.items, *(axis.size for axis in part.axes))


@pytest.mark.parametrize("role", [Role.TARGET_KEY, Role.TARGET_VALUE, Role.DRAFT_KEY, Role.DRAFT_VALUE])
def test_pages(example: dict[str, Any], role: Role) -> None:
    for layer in example["destination"].of(role)[0].layers:
        whole = torch.cat([items(example, rank, role, layer)[[3, 1, 5]] for rank in (0, 1)], dim=2)
        arrived = items(example, None, role, layer)[[2, 4, 7]]
        assert torch.equal(arrived.flatten(0, 1)[:TOKENS], whole.flatten(0, 1)[:TOKENS])
        assert not torch.equal(arrived.flatten(0, 1)[TOKENS:], whole.flatten(0, 1)[TOKENS:])


def test_state(example: dict[str, Any]) -> None:
    for layer in example["destination"].of(Role.SSM)[0].layers:
        states = torch.cat([items(example, rank, Role.SSM, layer)[1] for rank in (0, 1)])
        assert torch.equal(items(example, None, Role.SSM, layer)[2], states)
        windows = [items(example, rank, Role.CONV, layer)[1] for rank in (0, 1)]
        key = example["model"].linear.conv_segments[0]
        half = key.heads * key.width // 2
        parts = [torch.cat([window[start:stop] for window in windows]) for start, stop in _segments(half, windows[0])]
        assert torch.equal(items(example, None, Role.CONV, layer)[2], torch.cat(parts))


def _segments(half: int, window: torch.Tensor) -> list[tuple[int, int]]:
    """q, k and v on a rank of two: half of each."""
    return [(0, half), (half, 2 * half), (2 * half, len(window))]
