"""Gates and the split of the fused projections."""
# ruff: noqa: PLR0917  the argument lists are upstream's, and it passes them by position

import torch
import torch.nn.functional as F

# softplus(x) is x itself above this value; the constant of the GPU kernels (and of torch).
SOFTPLUS_THRESHOLD = 20.0


def log_decay(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = SOFTPLUS_THRESHOLD,
) -> torch.Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), never positive. a [N, HV]; A_log, dt_bias [HV]; result fp32 [N, HV]."""
    dt = F.softplus(a.float() + dt_bias.float(), beta=beta, threshold=threshold)
    return -A_log.float().exp() * dt


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates of an extend. a, b [N, HV] -> g, beta, both fp32 [1, N, HV].

    sigmoid(b) is rounded to the dtype of b first, as the GPU kernel of the prefill path does
    (sglang/kernels/ops/attention/linear/fused_gdn_gating.py); the decode kernel does not round.
    """
    beta = torch.sigmoid(b.float()).to(b.dtype).float()
    return log_decay(A_log, a, dt_bias).unsqueeze(0), beta.unsqueeze(0)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """x *= sigmoid(gate), in place. gate has as many elements as x and may be strided."""
    x.copy_((x.float() * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype))


def gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """final_hidden_states += sigmoid(hidden_states . gate_weight) * shared_output, in place.

    The gate of the shared expert of Qwen MoE layers. gate_weight [D], the others [N, D].
    """
    logit = hidden_states.float() @ gate_weight.float()
    final_hidden_states += (torch.sigmoid(logit).unsqueeze(-1) * shared_output.float()).to(final_hidden_states.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split Qwen3.5's projections, which are stored as [q | k | v | z] and [b | a].

    mixed_qkvz [N, 2*num_heads_qk*head_qk + 2*num_heads_v*head_v], mixed_ba [N, 2*num_heads_v].
    Results: qkv [N, ...], z [N, num_heads_v, head_v], b and a [N, num_heads_v], all copies.
    """
    z_dim = num_heads_v * head_v
    qkv, z = torch.split(mixed_qkvz, [2 * num_heads_qk * head_qk + z_dim, z_dim], dim=-1)
    b, a = torch.split(mixed_ba, num_heads_v, dim=-1)
    qkv, z, b, a = (part.clone(memory_format=torch.contiguous_format) for part in (qkv, z, b, a))
    return qkv, z.view(-1, num_heads_v, head_v), b, a
