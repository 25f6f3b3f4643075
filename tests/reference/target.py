"""Greedy decoding with transformers' own model."""

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True)
class Continuation:
    """What greedy decoding says after one prompt of p tokens.

    tokens: n ids. logprobs: natural logarithm of each one's probability. gaps: its logit minus the runner-up's;
    a gap near the arithmetic's error means that another implementation may rightly say another token.
    hidden: [p + n - 1, hidden_size], the target's state after its last norm at every position that was fed.
    """

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    hidden: torch.Tensor


def greedy(
    model_path: Path | str, prompts_ids: Sequence[Sequence[int]], n: int, dtype: torch.dtype = torch.float32
) -> list[Continuation]:
    """Decode n tokens after each prompt, one prompt at a time; an end token does not stop it (ignore_eos)."""
    model = load(model_path, dtype)
    return [continue_prompt(model, list(prompt), n) for prompt in prompts_ids]


@functools.lru_cache(maxsize=2)
def _load(model_path: str, dtype: torch.dtype) -> Any:
    architecture = json.loads((Path(model_path) / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, architecture).from_pretrained(
        model_path, dtype=dtype, output_loading_info=True
    )
    # A missing weight would be filled at random and the reference would be wrong in silence. Left over may
    # only be the MTP head, which transformers has no model for.
    leftover = [name for name in report["unexpected_keys"] if not name.startswith("mtp.")]
    if report["missing_keys"] or leftover:
        raise ValueError(f"{model_path}: missing weights {report['missing_keys']}, unknown weights {leftover}")
    return model.eval()


def load(model_path: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of that folder with all its weights; the last two are kept."""
    return _load(str(model_path), dtype)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """These models are too small to share out: on a busy machine more threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@one_thread()
def continue_prompt(model: Any, prompt: list[int], n: int) -> Continuation:
    """Feed the prompt at once, then the chosen tokens one by one, with a cache."""
    tokens: list[int] = []
    logprobs: list[float] = []
    gaps: list[float] = []
    hidden: list[torch.Tensor] = []
    cache = None
    step = torch.tensor([prompt])
    for _ in range(n):
        out = model.model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        hidden.append(out.last_hidden_state[0])
        logits = model.lm_head(hidden[-1][-1]).float()
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
        gaps.append(float(best.values[0] - best.values[1]))
        step = torch.tensor([[tokens[-1]]])
    return Continuation(tokens, logprobs, gaps, torch.cat(hidden) if hidden else torch.empty(0))
