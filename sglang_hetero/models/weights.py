"""Seeded weights under the names that transformers and SGLang load.

Every tensor has a random stream of its own, keyed by seed and name, so a change of one layer leaves the others
as they are. Draws are uniform: PCG64 and IEEE products give the same bytes on every machine, while normal
draws go through a processor's own log and cosine.
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch

from sglang_hetero.models.specs import Experts, Family, ModelSpec

# Spread of the norms' weights around their neutral value: enough that a norm left out shows.
_NORM_SPREAD = 0.05
# One tap of the 4-tap convolution; the sum of the taps then has unit variance.
_CONV_SPREAD = 0.5
# log(A) in [log 0.05, log 0.95] and softplus(dt_bias) of 0.05 to 0.3: a state loses between 0.2 % and 26 % per
# token, so heads remember anything from a few tokens to several hundred.
_A_LOG_RANGE = (-3.0, -0.05)
_DT_BIAS_RANGE = (-3.0, -1.0)
# Gate times value is about half as large as either factor; outputs behind a gate are drawn larger by this.
_GATED = 2.0


def state_dict(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, bf16 except A_log (fp32), keyed by checkpoint name.

    Linear weights have shape [out, in]. The MTP head has no embedding and no lm_head of its own.
    """
    return dict(_Builder(spec).tensors())


class _Builder:
    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    # Random tensors.

    def _uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        key = hashlib.sha256(f"{self.spec.seed}/{name}".encode()).digest()
        draws = np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "little"))).random(shape)
        return torch.from_numpy((low + (high - low) * draws).astype(np.float32))

    def _spread(self, name: str, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        """Zero mean, the given standard deviation."""
        half_width = math.sqrt(3.0) * deviation  # of a uniform distribution
        return self._uniform(name, shape, -half_width, half_width)

    def _linear(self, name: str, out: int, inp: int, gain: float = 1.0) -> tuple[str, torch.Tensor]:
        """A projection that gives outputs of deviation `gain` on inputs of unit variance."""
        return f"{name}.weight", self._spread(name, (out, inp), gain / math.sqrt(inp)).bfloat16()

    def _norm(self, name: str, width: int) -> tuple[str, torch.Tensor]:
        """Weight of a norm: those of hybrid models multiply by 1 + weight, Qwen3's by the weight."""
        return self._norm_around(1.0 if self.spec.family is Family.QWEN3 else 0.0, name, width)

    def _norm_around(self, centre: float, name: str, width: int) -> tuple[str, torch.Tensor]:
        return f"{name}.weight", (centre + self._spread(name, (width,), _NORM_SPREAD)).bfloat16()

    # The model, from top to bottom.

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        spec = self.spec
        embedding = "model.embed_tokens"
        yield f"{embedding}.weight", self._spread(embedding, (spec.vocab_size, spec.hidden_size), 1.0).bfloat16()
        full = set(spec.full_attention_layers)
        for layer in range(spec.num_layers):
            yield from self._layer(f"model.layers.{layer}", layer in full, spec.scales.branch)
        yield self._norm("model.norm", spec.hidden_size)
        yield self._lm_head()
        if spec.mtp_layers:
            yield from self._mtp()

    def _lm_head(self) -> tuple[str, torch.Tensor]:
        spec = self.spec
        name, weight = self._linear("lm_head", spec.vocab_size, spec.hidden_size, spec.scales.logits)
        # Logits of exactly 0 where the largest of the others is about three deviations: greedy decoding
        # never ends early.
        weight[[spec.pad_token, spec.eos_token]] = 0.0
        return name, weight

    def _mtp(self) -> Iterator[tuple[str, torch.Tensor]]:
        scales, width = self.spec.scales, self.spec.hidden_size
        identity = torch.eye(width)
        noise = self._spread("mtp.fc", (width, 2 * width), scales.draft_noise / math.sqrt(width))
        yield "mtp.fc.weight", (torch.cat([identity, scales.draft_hidden * identity], 1) + noise).bfloat16()
        yield self._norm("mtp.pre_fc_norm_embedding", width)
        yield self._norm("mtp.pre_fc_norm_hidden", width)
        yield from self._layer("mtp.layers.0", full_attention=True, branch=scales.draft_branch)
        # The head's own last norm equals the target's: both feed the same lm_head.
        yield "mtp.norm.weight", self._norm("model.norm", width)[1]

    def _layer(self, prefix: str, full_attention: bool, branch: float) -> Iterator[tuple[str, torch.Tensor]]:
        yield self._norm(f"{prefix}.input_layernorm", self.spec.hidden_size)
        yield self._norm(f"{prefix}.post_attention_layernorm", self.spec.hidden_size)
        mixer = self._full_attention if full_attention else self._linear_attention
        yield from mixer(prefix, branch)
        if self.spec.experts is None:
            assert self.spec.intermediate_size is not None, "a dense model needs an intermediate size"
            yield from self._mlp(f"{prefix}.mlp", self.spec.intermediate_size, branch)
        else:
            yield from self._moe(f"{prefix}.mlp", self.spec.experts, branch)

    def _full_attention(self, prefix: str, branch: float) -> Iterator[tuple[str, torch.Tensor]]:
        spec, name = self.spec, f"{prefix}.self_attn"
        width, kv_width = spec.attention_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        gated = spec.family is not Family.QWEN3
        # With a gate, per head: query, then output gate.
        yield self._linear(f"{name}.q_proj", 2 * width if gated else width, spec.hidden_size)
        yield self._linear(f"{name}.k_proj", kv_width, spec.hidden_size)
        yield self._linear(f"{name}.v_proj", kv_width, spec.hidden_size)
        yield self._linear(f"{name}.o_proj", spec.hidden_size, width, _GATED * branch if gated else branch)
        yield self._norm(f"{name}.q_norm", spec.head_dim)
        yield self._norm(f"{name}.k_norm", spec.head_dim)

    def _linear_attention(self, prefix: str, branch: float) -> Iterator[tuple[str, torch.Tensor]]:
        spec, name = self.spec, f"{prefix}.linear_attn"
        heads, value_width = spec.linear_value_heads, spec.linear_value_width
        if spec.family is Family.QWEN3_NEXT:
            # One matrix each, rows grouped by key head: its q, k, v, z; its b, a.
            yield self._linear(f"{name}.in_proj_qkvz", spec.conv_channels + value_width, spec.hidden_size)
            yield self._linear(f"{name}.in_proj_ba", 2 * heads, spec.hidden_size)
        else:
            yield self._linear(f"{name}.in_proj_qkv", spec.conv_channels, spec.hidden_size)
            yield self._linear(f"{name}.in_proj_z", value_width, spec.hidden_size)
            yield self._linear(f"{name}.in_proj_b", heads, spec.hidden_size)
            yield self._linear(f"{name}.in_proj_a", heads, spec.hidden_size)
        taps = self._spread(f"{name}.conv1d", (spec.conv_channels, 1, spec.conv_kernel), _CONV_SPREAD)
        yield f"{name}.conv1d.weight", taps.bfloat16()
        yield f"{name}.A_log", self._uniform(f"{name}.A_log", (heads,), *_A_LOG_RANGE)
        yield f"{name}.dt_bias", self._uniform(f"{name}.dt_bias", (heads,), *_DT_BIAS_RANGE).bfloat16()
        yield self._norm_around(1.0, f"{name}.norm", spec.linear_value_dim)
        yield self._linear(f"{name}.out_proj", spec.hidden_size, value_width, branch)

    def _mlp(self, name: str, inner: int, branch: float) -> Iterator[tuple[str, torch.Tensor]]:
        yield self._linear(f"{name}.gate_proj", inner, self.spec.hidden_size)
        yield self._linear(f"{name}.up_proj", inner, self.spec.hidden_size)
        yield self._linear(f"{name}.down_proj", self.spec.hidden_size, inner, _GATED * branch)

    def _moe(self, name: str, experts: Experts, branch: float) -> Iterator[tuple[str, torch.Tensor]]:
        yield self._linear(f"{name}.gate", experts.count, self.spec.hidden_size)
        for expert in range(experts.count):
            yield from self._mlp(f"{name}.experts.{expert}", experts.intermediate_size, branch)
        yield from self._mlp(f"{name}.shared_expert", experts.shared_intermediate_size, branch)
        yield self._linear(f"{name}.shared_expert_gate", 1, self.spec.hidden_size)
