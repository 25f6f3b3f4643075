"""Causal depthwise convolution over the q|k|v channels, with its window kept in the state pool."""
# ruff: noqa: PLR0917  the argument lists are upstream's, and it passes them by position

import torch
import torch.nn.functional as F

from sglang_hetero.cpu.layout import live_window
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.window import ConvLayout


def _convolve(
    full: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """full [..., dim, K-1+T] (window, then new inputs), weight [dim, K] -> fp32 [..., dim, T].

    K is 4 in every model here: K shifted multiplications are faster on a CPU than a grouped conv1d.
    """
    kernel = weight.shape[-1]
    steps = full.shape[-1] - (kernel - 1)
    taps = weight.float().unsqueeze(-1)  # [dim, K, 1]
    out = full[..., :steps] * taps[:, 0]
    for tap in range(1, kernel):
        out.addcmul_(full[..., tap : tap + steps], taps[:, tap].expand_as(out))
    if bias is not None:
        out += bias.float().unsqueeze(-1)
    if activation in ("silu", "swish"):
        return F.silu(out, inplace=True)
    if activation is None:
        return out
    raise HeteroError(f"causal conv1d: activation {activation!r} is not supported on CPU; use 'silu' or none")


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
    conv_states: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    seq_lens_cpu: list[int] | None = None,
    *,
    layout: ConvLayout = ConvLayout.CHANNELS_FIRST,
) -> torch.Tensor:
    """Convolve the new tokens of every request and leave the last K-1 inputs in its slot.

    x [dim, T], the requests one after the other; weight [dim, K]; bias [dim] or None; conv_states [slots, ...] by
    layout; has_initial_state bool [n]: whether the slot holds earlier inputs (otherwise zeros precede the first
    token); cache_indices int [n], -1 = padding (its output is zero and no slot is touched); query_start_loc
    int [n+1]. seq_lens_cpu repeats query_start_loc and is not needed. Returns [dim, T] in the dtype of x.
    """
    assert conv_states is not None and cache_indices is not None and query_start_loc is not None
    window = weight.shape[-1] - 1
    live = live_window(conv_states, window, layout)
    out = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()[: len(bounds) - 1]):
        lo, hi = bounds[request], bounds[request + 1]
        if slot < 0 or lo == hi:
            continue
        if has_initial_state is not None and bool(has_initial_state[request]):
            before = live[slot].float()
        else:
            before = torch.zeros(live.shape[1:], dtype=torch.float32)
        full = torch.cat([before, x[:, lo:hi].float()], dim=-1)
        out[:, lo:hi] = _convolve(full, weight, bias, activation).to(out.dtype)
        live[slot] = full[:, -window:].to(live.dtype)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    *,
    layout: ConvLayout = ConvLayout.CHANNELS_FIRST,
) -> torch.Tensor:
    """One decode step, or the D draft tokens of a verify.

    x [n, dim] or [n, dim, D]; conv_state_indices int [n], -1 = padding (output zero, nothing written). The output has
    the shape of x and lies in memory as [n, D, dim].
    Decode: the slot takes the new inputs. Verify (intermediate_conv_window given, [rows, D, dim, K-1]): the window
    after each draft token goes to row intermediate_state_indices[n] and the slot stays as it was; the commit
    (ops/commit.py) writes the window of the accepted token into it.
    retrieve_parent_token int [n, D] is filled for the delta rule, which reads it after this op: the parent of token t
    is t-1, and 0 for the first. Raises HeteroError if the drafts form a tree.
    """
    new = x.unsqueeze(-1) if x.dim() == 2 else x
    _fill_chain_parents(retrieve_next_sibling, retrieve_parent_token, new.shape[-1])
    window = weight.shape[-1] - 1
    live = live_window(conv_states, window, layout)
    # Tokens before channels in memory: the caller swaps the two axes and takes a flat view of all tokens.
    out = new.new_zeros(new.shape[0], new.shape[2], new.shape[1]).transpose(1, 2)
    rows = (conv_state_indices >= 0).nonzero().flatten()
    if rows.numel():
        slots = conv_state_indices[rows].long()
        full = torch.cat([live[slots].float(), new[rows].float()], dim=-1)
        out[rows] = _convolve(full, weight, bias, activation).to(out.dtype)
        if intermediate_conv_window is None:
            live[slots] = full[..., -window:].to(live.dtype)
        else:
            assert intermediate_state_indices is not None
            _store_windows(full, window, intermediate_conv_window, intermediate_state_indices[rows].long())
    return out.squeeze(-1) if x.dim() == 2 else out


def _store_windows(full: torch.Tensor, window: int, buffer: torch.Tensor, buffer_rows: torch.Tensor) -> None:
    """full [n, dim, K-1+D] -> buffer[row, t] = the window after draft token t; rows below 0 are left out."""
    after_each_token = full.unfold(-1, window, 1)[:, :, 1:].transpose(1, 2)  # [n, D, dim, K-1]
    kept = buffer_rows >= 0
    buffer[buffer_rows[kept], : after_each_token.shape[1]] = after_each_token[kept].to(buffer.dtype)


def _fill_chain_parents(siblings: torch.Tensor | None, parents: torch.Tensor | None, steps: int) -> None:
    if siblings is not None and bool((siblings != -1).any()):
        raise HeteroError(
            "the CPU reference platform verifies chains of drafts only, not trees; set --speculative-eagle-topk 1"
        )
    if parents is not None:
        parents[:, :steps] = (torch.arange(steps) - 1).clamp(min=0).to(parents.dtype)
