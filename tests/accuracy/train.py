"""Trains model `recall`: `python -m tests.accuracy.train` (docs/recall.md).

Everything comes from the model's seed: the weights that training begins with (wiring.py) and the texts. Every
SAVE_EVERY steps the state of the run is written to the folder of `--out`; the same command goes on from there. At the
end the weights are in `recall.safetensors` there, bf16, under the names of a checkpoint; `--install` puts them into the
package.
"""

import argparse
import json
import math
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, softplus

from sglang_hetero import models
from sglang_hetero.models.config import model_config
from sglang_hetero.models.specs import ModelSpec
from tests.accuracy.sample import Batch, batch
from tests.accuracy.wiring import ANSWER, LATE, LOCAL, SHUT, SPECIAL, Wiring, head_states, shut
from tests.reference.mtp import MtpHead

MODEL = "recall"
OUT = Path("out/recall")
PACKAGE = Path(models.__file__).parent / "trained"
STEPS = 120
WARM_UP = 15
RATE = 5e-4
KEYS_PART = 2.0  # of RATE, for the linear layers' keys
LEAST_RATE = 0.02  # of RATE, at the end
CLIP = 1.0
# Characters of a document: short ones are cheap, long ones show what the state loses over time.
CHARACTERS = (140, 200, 200, 330, 510, 640)
PAIRS = (4, 8)  # from, below
BATCH_TOKENS = 4800
DRAFTS = 3  # deep; the head is trained on its own states as on the target's
DRAFT_WEIGHT = 0.3
SAVE_EVERY = 20
SAY_EVERY = 5
WIRED_ON = (32, 200, 8)  # sequences, characters, pairs
SHUT_WEIGHT = 1.0
QUIET = 0.1  # the gradient takes no output of a linear layer for smaller than this before its norm


def build(spec: ModelSpec) -> tuple[Any, MtpHead]:
    """The target and its head, in fp32 and with whatever weights transformers begins with."""
    config = model_config(spec)
    for name in ("architectures", "model_type", "dtype"):
        del config[name]
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config))
    head = MtpHead(model)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.norm.register_full_backward_hook(_bounded)
    return model, head


class Division:
    """Keeps the division of labour that the wiring has laid: training would leave all to attention, which learns first.

    While a text is read, attention's heads add nothing where a recurrent state has the digit, and `pressure()` says how
    far their gates are from being shut there by themselves. `keep()` takes the gradient from what value heads hold.
    """

    def __init__(self, spec: ModelSpec, model: Any) -> None:
        self.spec, self.layers = spec, model.model.layers
        self.attention, self.embedding = self.layers[-1].self_attn, model.model.embed_tokens
        self._open = self._gates = torch.empty(0)
        self.attention.o_proj.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * self._open,))
        self.attention.q_proj.register_forward_hook(self._look)

    def divide(self, texts: Batch) -> None:
        """Before a text is read."""
        share = self.spec.attention_heads // self.spec.kv_heads
        closed = [shut(texts, kv_head == SPECIAL) for kv_head in range(self.spec.kv_heads) for _ in range(share)]
        self._open = (~torch.stack(closed, 1)).float().repeat_interleave(self.spec.head_dim, 1)

    def pressure(self) -> torch.Tensor:
        """Zero where the gates are half as far shut as the wiring wants them."""
        return (softplus(self._gates - SHUT / 2) * (1 - self._open)).sum() / (1 - self._open).sum() / len(self._gates)

    def keep(self) -> None:
        """After backward(): no gradient for what is not to change."""
        width, size = 2 * self.spec.linear_key_width, 2 * self.spec.linear_value_dim
        for layer in self.spec.linear_attention_layers:
            mixer = self.layers[layer].linear_attn
            mixer.in_proj_qkv.weight.grad[width : width + LOCAL * size] = 0
            mixer.conv1d.weight.grad = None
        # What the second layer makes its keys of stays: great numbers cancel each other there (wiring.SILENT).
        first, second = (self.layers[layer] for layer in self.spec.linear_attention_layers)
        rows = first.linear_attn.out_proj.weight.grad
        rows[: ANSWER.start] = 0
        rows[ANSWER.stop :] = 0
        fixed = [first.input_layernorm, first.post_attention_layernorm, first.mlp, second.input_layernorm]
        fixed += [first.linear_attn.norm, first.linear_attn.in_proj_z, first.linear_attn.in_proj_b, self.embedding]
        for module in fixed:
            for weight in module.parameters():
                weight.grad = None
        self._keep_special()

    def _keep_special(self) -> None:
        """That kv head goes on finding its place by what the second layer has carried, and on holding what it held."""
        size, share = self.spec.head_dim, self.spec.attention_heads // self.spec.kv_heads
        self.attention.v_proj.weight.grad[SPECIAL * size : (SPECIAL + 1) * size] = 0
        others = torch.ones(self.spec.hidden_size, dtype=torch.bool)
        for place in LATE.values():
            others[place] = False
        self.attention.k_proj.weight.grad[SPECIAL * size : (SPECIAL + 1) * size, others] = 0
        for head in range(SPECIAL * share, (SPECIAL + 1) * share):
            # Per head, a query and then a gate.
            self.attention.q_proj.weight.grad[2 * head * size : (2 * head + 1) * size, others] = 0

    def _look(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        """The projection gives, per head, a query and a gate."""
        both = output.unflatten(-1, (self.spec.attention_heads, 2, self.spec.head_dim))
        self._gates = both[..., 1, :].flatten(-2)


def losses(model: Any, head: MtpHead, texts: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy per character of the answers, of the target and of its drafts, and which ones the target has right
    [sequences, answers' characters]."""
    here = texts.next_digit > 0
    following = texts.tokens.roll(-1, 1)
    hidden = model.model(input_ids=texts.tokens, use_cache=False).last_hidden_state
    logits, wanted = model.lm_head(hidden[:, here]), following[:, here]
    loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
    drafts = torch.zeros(())
    state = hidden.detach()  # the target is trained for its own answers only
    for ahead in range(1, DRAFTS + 1):
        state = head_states(head, texts.tokens[:, ahead:], state[:, :-1])
        guesses = model.lm_head(state[:, here[ahead:]])
        drafts = drafts + cross_entropy(guesses.flatten(0, 1), following[:, ahead:][:, here[ahead:]].flatten()) / DRAFTS
    return loss, drafts, logits.argmax(-1) == wanted


class Run:
    """One training run, which can be saved and taken up again."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.spec, self.folder, self.steps = models.spec(MODEL), folder, steps
        self.model, self.head = build(self.spec)
        self.parameters = [*self.model.parameters(), *self.head.parameters()]
        self.choose = random.Random(self.spec.seed)
        layers = self.model.model.layers
        keys = [layers[layer].linear_attn.in_proj_qkv.weight for layer in self.spec.linear_attention_layers]
        others = [weight for weight in self.parameters if all(weight is not key for key in keys)]
        groups = [{"params": keys, "part": KEYS_PART}, {"params": others, "part": 1.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
        self.step, self.seconds = 0, 0.0

    def begin(self) -> None:
        """Go on from what is saved, or lay the wiring."""
        if self._state.exists():
            saved = torch.load(self._state, weights_only=False)
            if saved["steps"] != self.steps:
                raise SystemExit(f"{self._state} is of a run with {saved['steps']} steps: take that many, or delete it")
            self.model.load_state_dict(saved["model"])
            self.head.load_state_dict(saved["head"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.choose.setstate(saved["choose"])
            self.step, self.seconds = saved["step"], saved["seconds"]
            print(f"going on from step {self.step}", flush=True)
            return
        started = time.monotonic()
        texts = batch(random.Random(self.spec.seed), *WIRED_ON)
        Wiring(self.spec, self.model, self.head, texts, self.spec.seed).lay()
        self.seconds = time.monotonic() - started
        print(f"wiring laid in {self.seconds:.0f} s", flush=True)

    def train(self) -> None:
        """All steps that are left."""
        self.division = Division(self.spec, self.model)
        started, first = time.monotonic() - self.seconds, (self.seconds, self.step)
        while self.step < self.steps:
            texts = self._texts()
            for group in self.optimizer.param_groups:
                group["lr"] = RATE * group["part"] * self._rate()
            self.division.divide(texts)
            loss, drafts, right = losses(self.model, self.head, texts)
            ajar = self.division.pressure()
            self.optimizer.zero_grad()
            (loss + DRAFT_WEIGHT * drafts + SHUT_WEIGHT * ajar).backward()
            self.division.keep()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
            self.step += 1
            self.seconds = time.monotonic() - started
            if self.step % SAY_EVERY == 0 or self.step == self.steps:
                left = (self.seconds - first[0]) / (self.step - first[1]) * (self.steps - self.step)
                print(
                    f"step {self.step}/{self.steps}, {self.seconds:.0f} s, {left:.0f} s left: {texts.tokens.shape[1]} "
                    f"characters, loss {loss.item():.4f}, drafts {drafts.item():.4f}, "
                    f"gates ajar {ajar.item():.3f}, gradient {norm.item():.2f}, "
                    f""
                    f"characters right {right.float().mean().item():.3f}",
                    flush=True,
                )
            if self.step % SAVE_EVERY == 0 or self.step == self.steps:
                self._save()

    def export(self) -> Path:
        """Write the checkpoint's weights; returns the file."""
        file = self.folder / f"{MODEL}.safetensors"
        weights = {**self.model.state_dict(), **{f"mtp.{name}": w for name, w in self.head.state_dict().items()}}
        save_file(
            {
                name: weight.clone() if name.endswith("A_log") else weight.bfloat16()
                for name, weight in sorted(weights.items())
            },
            file,
            metadata={"format": "pt"},
        )
        facts = {"steps": self.steps, "seconds": round(self.seconds), "torch": torch.__version__}
        (self.folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
        return file

    @property
    def _state(self) -> Path:
        return self.folder / "state.pt"

    def _rate(self) -> float:
        """Part of RATE: linear warm-up, then half a cosine."""
        cosine = (1 + math.cos(math.pi * self.step / self.steps)) / 2
        return min(1.0, (self.step + 1) / WARM_UP) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)

    def _texts(self) -> Batch:
        characters = CHARACTERS[self.choose.randrange(len(CHARACTERS))]
        pairs = self.choose.randrange(*PAIRS)
        sequences = max(4, BATCH_TOKENS // (characters + 12 * pairs))
        return batch(self.choose, sequences, characters, pairs)

    def _save(self) -> None:
        """Beside its place first, so that an interruption leaves the former one whole."""
        new = self._state.with_suffix(".new")
        state = {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "choose": self.choose.getstate(),
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
        }
        torch.save(state, new)
        os.replace(new, self._state)


def _bounded(_norm: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> Any:
    """Where a head reads nothing, its norm divides by almost nothing, and so would the gradient."""
    into, out = inputs[0], outputs[0]
    most = out.norm(dim=-1, keepdim=True) / QUIET
    return (into * (most / into.norm(dim=-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0), *inputs[1:])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the run (default: {OUT})")
    parser.add_argument("--install", action="store_true", help="put the weights into the package")
    arguments = parser.parse_args()
    # On a busy machine two threads wait for each other more than they help.
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.out, arguments.steps)
    torch.manual_seed(run.spec.seed)
    run.begin()
    run.train()
    file = run.export()
    print(f"weights: {file}, {file.stat().st_size / 1e6:.2f} MB, after {run.seconds:.0f} s")
    if arguments.install:
        PACKAGE.mkdir(exist_ok=True)
        shutil.copyfile(file, PACKAGE / file.name)


if __name__ == "__main__":
    main()
