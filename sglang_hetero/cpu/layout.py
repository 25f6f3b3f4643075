"""How the conv window of a linear-attention layer lies in the pool: the one place that knows.

A slot keeps the last K-1 inputs of the causal convolution (kernel size K). Two layouts are in use:

* `channels_first`: [dim, K-1], as on CUDA;
* `window_first`: [W, dim] with W = (K-1) + (draft_tokens - 1); the live K-1 rows are the LAST ones, as on an NPU
  (sglang/srt/hardware_backend/npu/memory_pool_npu.py, `_init_npu_conv_state`, and
  npu/attention/ascend_gdn_backend.py). The rows before them are scratch of the NPU's verify and hold nothing that a
  reader may use. This module never touches them.

The environment variable SGLANG_HETERO_CPU_CONV_LAYOUT chooses; the default is `channels_first`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.window import ConvLayout

if TYPE_CHECKING:
    import torch

CONV_LAYOUT_ENV = "SGLANG_HETERO_CPU_CONV_LAYOUT"


def conv_layout_from_env() -> ConvLayout:
    """The layout that this process uses. Raises HeteroError for a value that is no layout."""
    value = os.environ.get(CONV_LAYOUT_ENV, ConvLayout.CHANNELS_FIRST.value)
    try:
        return ConvLayout(value)
    except ValueError:
        allowed = ", ".join(layout.value for layout in ConvLayout)
        raise HeteroError(f"{CONV_LAYOUT_ENV}={value!r} is not a conv layout; set it to one of: {allowed}") from None


def live_window(slots: torch.Tensor, window: int, layout: ConvLayout) -> torch.Tensor:
    """A view [..., dim, window] of the live window of conv slots, oldest input first.

    slots: one slot or any stack of slots, [..., dim, window] or [..., W, dim] by layout. window: K-1.
    Writing to the view writes to the slots.
    """
    if layout is ConvLayout.WINDOW_FIRST:
        return slots[..., -window:, :].transpose(-1, -2)
    return slots[..., -window:]


def pool_slot_shape(dim: int, window: int, draft_tokens: int | None, layout: ConvLayout) -> tuple[int, int]:
    """Shape of one conv slot in the pool; draft_tokens is None without speculation."""
    if layout is ConvLayout.CHANNELS_FIRST:
        return dim, window
    scratch = draft_tokens - 1 if draft_tokens else 0
    return window + scratch, dim
