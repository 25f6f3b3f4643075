"""The multi-token-prediction head, built from the target's own layer classes.

transformers ships no MTP model. The head's structure is that of SGLang 0.5.23, models/qwen3_5_mtp.py and
models/qwen3_next_mtp.py: the embedding of the next token and the current hidden state are normalised each,
concatenated in that order, projected back to the hidden size, and go through one full-attention layer and a
last norm; embedding and lm_head are the target's.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import DynamicCache

from tests.reference.target import load


class MtpHead(nn.Module):
    """One entry per position: position i takes (token i + 1, hidden state of i) and guesses token i + 2."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = 1
        config.layer_types = ["full_attention"]
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        norm = type(target.model.norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(width, eps=eps)
        self.layers = nn.ModuleList([type(target.model.layers[0])(config, layer_idx=0)])
        self.norm = norm(width, eps=eps)
        # Shared with the target: not registered as this module's own weights.
        self._shared = (target.model.embed_tokens, target.model.rotary_emb, target.lm_head)

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, first_position: int, cache: DynamicCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append entries to the cache.

        tokens: [t], int64. hidden: [t, hidden_size], the target's states or, when drafting ahead, the head's own;
        both after the last norm. first_position: entries already in the cache; must be 0 if t > 1.
        Returns the head's states [t, hidden_size] and the guessed tokens [t].
        """
        embed, rotary, lm_head = self._shared
        if first_position > 0 and len(tokens) > 1:
            raise ValueError("several entries at once would need a mask: only into an empty cache")
        pair = torch.cat([self.pre_fc_norm_embedding(embed(tokens)), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.fc(pair)[None]
        positions = first_position + torch.arange(len(tokens))[None]
        # Without a mask the attention is causal for t > 1 and sees the whole cache for t = 1.
        x = self.layers[0](
            x,
            position_embeddings=rotary(x, positions),
            attention_mask=None,
            position_ids=positions,
            past_key_values=cache,
        )
        state = self.norm(x)[0]
        return state, lm_head(state).argmax(-1)

    def empty_cache(self) -> DynamicCache:
        """A cache of no entries."""
        return DynamicCache(config=self.config)


def load_head(model_path: Path | str, dtype: torch.dtype = torch.float32) -> MtpHead:
    """The head of a checkpoint on top of load(model_path, dtype); raises if a weight is missing or left over."""
    return _load_head(str(model_path), dtype)


@functools.lru_cache(maxsize=2)
def _load_head(model_path: str, dtype: torch.dtype) -> MtpHead:
    weights = _stack_experts(_read(Path(model_path), "mtp."))
    head = MtpHead(load(model_path, dtype)).to(dtype)
    head.load_state_dict(weights, strict=True)
    return head.eval()


def _read(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open has no iterator
                if name.startswith(prefix):
                    weights[name.removeprefix(prefix)] = tensors.get_tensor(name)
    return weights


def _stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From one matrix per expert, as in checkpoints, to one tensor per layer, as in transformers' modules.

    gate_up_proj: [experts, 2 * inner, hidden], gate rows first. down_proj: [experts, hidden, inner].
    """
    prefix = "layers.0.mlp.experts"
    experts = len([name for name in weights if name.startswith(prefix) and name.endswith("gate_proj.weight")])
    if experts == 0:
        return weights

    def stack(projection: str) -> torch.Tensor:
        return torch.stack([weights.pop(f"{prefix}.{i}.{projection}.weight") for i in range(experts)])

    weights = dict(weights)
    weights[f"{prefix}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], dim=1)
    weights[f"{prefix}.down_proj"] = stack("down_proj")
    return weights
