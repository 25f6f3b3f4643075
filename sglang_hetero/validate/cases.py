"""Cases of the stage `kernels`: their sizes, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

POISON = 0xA5
SHARDS = 2
PAGE, HEADS, DIM = 128, 2, 256
"""Attention of Qwen3.5-2B, with pages as on an NPU."""
CHANNELS, WINDOW, ROWS = 2048, 3, 6
"""Of each of q, k and v; K-1; rows of a window-first slot with drafts of depth 3."""
SSM_HEADS, SSM_DIM = 16, 128


@dataclass(frozen=True)
class Case:
    """tensors: all that the operation is called with, on the host. target: which of them is written. run: with a module
    of operations (ops or naive) and the tensors. nbytes: that it writes."""

    tensors: tuple[torch.Tensor, ...]
    target: int
    run: Callable[[object, Sequence[torch.Tensor]], None]
    nbytes: int


def bits(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern, NaNs included: nothing may be read as a number."""
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Nothing but POISON."""
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * width), POISON, dtype=torch.uint8).view(dtype)


def ids_of(count: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct and scattered ones of a pool of twice as many and one, of which the first is left out."""
    return torch.randperm(2 * count, generator=generator)[:count] + 1
