"""Commit of the accepted state after a verify.

A verify leaves, per draft token, the recurrent state and the conv window in scratch rows. The commit copies those of
the last accepted token into the slot of the request. Upstream's kernels for it reject CPU tensors
(sglang/kernels/ops/mamba/mamba_state_scatter_triton.py); the argument lists are theirs.
"""
# ruff: noqa: PLR0917  the argument lists are upstream's, and it passes them by position

from typing import Any

import torch

from sglang_hetero.cpu.layout import live_window
from sglang_hetero.layout.window import ConvLayout


def scatter_state_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """dst[:, dst_indices[i]] = src[:, src_indices[i], steps[i]] for every request i.

    dst [layers, slots, *shape], src [layers, rows, steps, *shape]; indices int [n]; src_indices None means i itself.
    A step or an index below 0, or beyond its axis, leaves the request out: such entries are padding.
    """
    steps = step_indices_raw.long()
    slots = dst_indices_raw[: steps.shape[0]].long()
    rows = torch.arange(steps.shape[0]) if src_indices_raw is None else src_indices_raw.long()
    kept = (steps >= 0) & (steps < src.shape[2]) & (slots >= 0) & (slots < dst.shape[1])
    kept &= (rows >= 0) & (rows < src.shape[1])
    if bool(kept.any()):
        dst[:, slots[kept]] = src[:, rows[kept], steps[kept]].to(dst.dtype)


def scatter_conv_window_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
    *,
    layout: ConvLayout = ConvLayout.CHANNELS_FIRST,
) -> None:
    """The same for conv slots: dst [layers, slots, ...] by layout, src [layers, rows, steps, dim, K-1]."""
    live = live_window(dst, src.shape[-1], layout)
    scatter_state_with_mask(live, src, dst_indices_raw, step_indices_raw, src_indices_raw)


def scatter_states_after_verify(
    mamba_caches: Any,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
    *,
    layout: ConvLayout = ConvLayout.CHANNELS_FIRST,
) -> None:
    """Commit every layer's recurrent state and conv windows; the track slots of the prefix cache likewise.

    mamba_caches: SGLang's MambaPool.SpeculativeState (temporal, conv, intermediate_ssm, intermediate_conv_window).
    """
    targets = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None:
        assert mamba_steps_to_track is not None
        targets.append((mamba_track_indices, mamba_steps_to_track))
    for slots, steps in targets:
        if mamba_caches.temporal.numel():
            scatter_state_with_mask(mamba_caches.temporal, mamba_caches.intermediate_ssm, slots, steps, src_indices_raw)
        for conv, windows in zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True):
            scatter_conv_window_with_mask(conv, windows, slots, steps, src_indices_raw, layout=layout)
