"""What model `recall` still knows when state is lost after the prompt, by tests/reference alone: without SGLang.

`python -m tests.accuracy.damage` measures the table of docs/recall.md and writes it beside the weights.
"""

import argparse
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from transformers import DynamicCache

from sglang_hetero import models
from sglang_hetero.accuracy.recall import ANSWER_DIGITS, Question, questions
from sglang_hetero.models import store
from sglang_hetero.models.specs import ModelSpec
from tests.accuracy.sample import token
from tests.reference.mtp import MtpHead, load_head
from tests.reference.speculation import Drafter, common_prefix
from tests.reference.target import load as load_target
from tests.reference.target import one_thread

MODEL = "recall"
FIGURES = Path(models.__file__).parent / "trained" / f"{MODEL}.json"
CHARACTERS = 512
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PER_DEPTH = 40
SEED = 11  # not that of the table that servers answer, nor of the training
TOKENS = ANSWER_DIGITS + 1
"""The answer and the end of its line: the prompt's token and, at best, two rounds of four."""
DRAFTS = 3

Damage = Callable[[Any], None]
"""Changes the target's cache, as it is after the prompt."""


def damages(spec: ModelSpec) -> dict[str, Damage | None]:
    """All that is tried on the target, by name; None for nothing."""
    linear, full = spec.linear_attention_layers, spec.full_attention_layers
    heads = range(spec.linear_value_heads)
    found: dict[str, Damage | None] = {"nothing": None}
    found["convolution: k and v swapped, all layers"] = lambda cache: _swap(cache, spec, linear)
    for layer in linear:
        found[f"convolution: k and v swapped, layer {layer}"] = lambda cache, i=layer: _swap(cache, spec, [i])
    found["recurrent state zeroed, all layers"] = lambda cache: _lose(cache, linear, heads)
    for layer in linear:
        found[f"recurrent state zeroed, layer {layer}"] = lambda cache, i=layer: _lose(cache, [i], heads)
    for head in heads:
        found[f"head {head} zeroed, all layers"] = lambda cache, h=head: _lose(cache, linear, [h])
        for layer in linear:
            found[f"head {head} zeroed, layer {layer}"] = lambda cache, i=layer, h=head: _lose(cache, [i], [h])
    for layer in full:
        found[f"keys and values zeroed, layer {layer}"] = lambda cache, i=layer: _forget(cache, i)
    return found


@dataclass(frozen=True)
class Measured:
    """Of each question, in order. right: by damage, `1` for an exact answer. accepted: by draft, the drafts accepted in
    each round."""

    right: Mapping[str, str]
    accepted: Mapping[str, list[list[int]]]


@torch.inference_mode()
@one_thread()
def measure(
    asked: Sequence[Question], only: Sequence[str] | None = None, drafts: Sequence[str] | None = None
) -> Measured:
    """Ask all questions, of one length, with each damage and with each draft. only, drafts: names; default: all."""
    path, spec = models.path(MODEL), models.spec(MODEL)
    model = load_target(path)
    prompts, answers = ids(q.prompt for q in asked), ids(q.answer for q in asked)
    whole: Any = DynamicCache(config=model.config)
    hidden = model.model(input_ids=prompts, past_key_values=whole, use_cache=True).last_hidden_state
    known = _decode(model, whole, hidden, None)
    right = {}
    for name, damage in damages(spec).items():
        if only is None or name in only:
            said = known if damage is None else _decode(model, whole, hidden, damage)
            exact = (said.tokens[:, :ANSWER_DIGITS] == answers).all(1)
            right[name] = "".join("1" if value else "0" for value in exact)
    trained = load_head(path)
    heads = {
        "trained": (trained, False),
        "untrained": (_untrained(model, spec), False),
        "trained, keys and values zeroed": (trained, True),
    }
    accepted = {
        name: [
            _rounds(head, prompt.tolist() + said.tolist(), states, len(prompt), lost)
            for prompt, said, states in zip(prompts, known.tokens, known.hidden, strict=True)
        ]
        for name, (head, lost) in heads.items()
        if drafts is None or name in drafts
    }
    return Measured(right, accepted)


def ids(texts: Any) -> torch.Tensor:
    """Texts of one length as token ids."""
    return torch.tensor([[token(character) for character in text] for text in texts])


def accept_length(rounds: Sequence[Sequence[int]]) -> float:
    """Mean tokens per round over all questions."""
    flat = [accepted + 1 for question in rounds for accepted in question]
    return sum(flat) / len(flat)


@dataclass(frozen=True)
class _Said:
    """tokens: [questions, TOKENS + DRAFTS]. hidden: of every position that was fed."""

    tokens: torch.Tensor
    hidden: torch.Tensor


def _decode(model: Any, whole: Any, hidden: torch.Tensor, damage: Damage | None) -> _Said:
    """The first token comes from the prompt's pass, before the damage."""
    cache = copy.deepcopy(whole)
    if damage:
        damage(cache)
    states, tokens = [hidden], [model.lm_head(hidden[:, -1]).argmax(-1)]
    while len(tokens) < TOKENS + DRAFTS:
        states.append(
            model.model(input_ids=tokens[-1][:, None], past_key_values=cache, use_cache=True).last_hidden_state
        )
        tokens.append(model.lm_head(states[-1][:, -1]).argmax(-1))
    return _Said(torch.stack(tokens, 1), torch.cat(states, 1))


def _rounds(head: MtpHead, text: list[int], hidden: torch.Tensor, prompt: int, lost: bool) -> list[int]:
    """Drafts accepted in each round of one answer. lost: the draft's cache of the prompt is zeros at decode."""
    drafter = Drafter(head, text, hidden, lost=prompt - 1 if lost else 0)
    accepted, confirmed = [], prompt + 1
    while confirmed < prompt + TOKENS:
        accepted.append(common_prefix(drafter.draft(confirmed, DRAFTS), text[confirmed:]))
        confirmed += accepted[-1] + 1
    return accepted


def _untrained(model: Any, spec: ModelSpec) -> MtpHead:
    head = MtpHead(model)
    weights = {
        name.removeprefix("mtp."): weight
        for name, weight in load(store.seeded_weights(spec)).items()
        if name.startswith("mtp.")
    }
    head.load_state_dict(weights, strict=True)
    return head.eval()


def _swap(cache: Any, spec: ModelSpec, layers: Sequence[int]) -> None:
    """The window's segments as q | v | k; k and v are of one width here."""
    for layer in layers:
        window = cache.layers[layer].conv_states[0]
        q, k, v = window.split([spec.linear_key_width, spec.linear_key_width, spec.linear_value_width], 1)
        cache.layers[layer].conv_states[0] = torch.cat([q, v, k], 1)


def _lose(cache: Any, layers: Sequence[int], heads: Sequence[int]) -> None:
    for layer in layers:
        cache.layers[layer].recurrent_states[0][:, list(heads)] = 0


def _forget(cache: Any, layer: int) -> None:
    cache.layers[layer].keys.zero_()
    cache.layers[layer].values.zero_()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.damage", description=__doc__)
    parser.add_argument("--per-depth", type=int, default=PER_DEPTH, help=f"questions per depth (default: {PER_DEPTH})")
    arguments = parser.parse_args()
    asked = questions(CHARACTERS, DEPTHS, arguments.per_depth, SEED)
    found = measure(asked)
    about = {
        "weights": models.fingerprint(MODEL),
        "characters": CHARACTERS,
        "depths": DEPTHS,
        "per_depth": arguments.per_depth,
        "seed": SEED,
    }
    FIGURES.write_text(
        json.dumps({**about, "right": found.right, "accepted": found.accepted}, separators=(",", ":")) + "\n"
    )
    for line in table(json.loads(FIGURES.read_text())):
        print(line)


def table(figures: Mapping[str, Any]) -> list[str]:
    """The figures as lines of Markdown."""
    per_depth, depths = figures["per_depth"], figures["depths"]
    lines = ["| lost after the prompt | right | " + " | ".join(f"depth {d:g}" for d in depths) + " |"]
    lines.append("|---" * (2 + len(depths)) + "|")
    for name, right in figures["right"].items():
        parts = [right[i : i + per_depth].count("1") / per_depth for i in range(0, len(right), per_depth)]
        lines.append(
            f"| {name} | {right.count('1') / len(right):.3f} | " + " | ".join(f"{p:.2f}" for p in parts) + " |"
        )
    lines += ["", "| draft | accept length |", "|---|---|"]
    lines += [f"| {name} | {accept_length(rounds):.2f} |" for name, rounds in figures["accepted"].items()]
    return lines


if __name__ == "__main__":
    main()
