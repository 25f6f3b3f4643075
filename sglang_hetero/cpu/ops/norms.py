"""RMS norms of the gated attention and of the gated delta net."""
# ruff: noqa: PLR0917  the argument lists are upstream's, and it passes them by position

import torch
import torch.nn.functional as F


def rms_normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] -> fp32 [..., D] with root mean square 1 over the last axis."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gemma_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> dtype of x. Gemma's convention: the stored weight is an offset from 1."""
    return (rms_normalise(x, eps) * (1.0 + weight.float())).to(x.dtype)


def fused_rmsnorm_gated_cpu(input: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm(input) * weight * SiLU(gate). input, gate [N, D]; weight [D]; result in the dtype of input."""
    return (rms_normalise(input, eps) * weight.float() * F.silu(gate.float())).to(input.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each head of q [N, H*D] and k [N, Hk*D]; results [N*H, D] and [N*Hk, D]."""
    return (
        gemma_rmsnorm(q.reshape(-1, head_dim), q_weight, eps),
        gemma_rmsnorm(k.reshape(-1, head_dim), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As above for the packed projection of gated attention.

    q_gate [N, H*2*D] holds query and output gate per head, [q | gate]. Results q [N*H, D], k [N*Hk, D],
    gate [N*H, D]; the gate is copied, because an op may not return a view of its input.
    """
    per_head = q_gate.reshape(q_gate.shape[0], num_heads, 2 * head_dim)
    q, gate = torch.split(per_head, head_dim, dim=-1)
    return (
        gemma_rmsnorm(q.reshape(-1, head_dim), q_weight, eps),
        gemma_rmsnorm(k.reshape(-1, head_dim), k_weight, eps),
        gate.clone(memory_format=torch.contiguous_format).view(-1, head_dim),
    )
