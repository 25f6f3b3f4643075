"""Greedy decoding with MTP drafts: which drafts a verifier accepts, round by round.

Greedy verification never changes the tokens, so the target is run once, without drafts, and the rounds are
replayed on its tokens and hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from tests.reference.mtp import MtpHead, load_head
from tests.reference.target import continue_prompt, load, one_thread


@dataclass(frozen=True)
class Speculation:
    """Tokens and counters of one request, under the names of SGLang's `meta_info`.

    spec_correct_drafts_histogram[a]: rounds in which exactly a drafts were accepted; it ends with the largest a
    that occurred. spec_verify_ct: rounds. Without a round (n = 1) SGLang leaves all of these keys out.
    """

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]  # as in Continuation
    accepted_per_round: list[int]
    depth: int

    @property
    def spec_correct_drafts_histogram(self) -> list[int]:
        """See the class."""
        largest = max(self.accepted_per_round, default=-1)
        return [self.accepted_per_round.count(a) for a in range(largest + 1)]

    @property
    def spec_verify_ct(self) -> int:
        """Rounds of draft and verify."""
        return len(self.accepted_per_round)

    @property
    def spec_num_correct_drafts(self) -> int:
        """Drafts accepted in all rounds, those past the last returned token included."""
        return sum(self.accepted_per_round)

    @property
    def spec_num_proposed_drafts(self) -> int:
        """Drafts made in all rounds."""
        return self.spec_verify_ct * self.depth

    def meta_info(self) -> dict[str, Any]:
        """The counters as SGLang returns them."""
        if not self.accepted_per_round:
            return {}
        return {
            key: getattr(self, key)
            for key in (
                "spec_correct_drafts_histogram",
                "spec_verify_ct",
                "spec_num_correct_drafts",
                "spec_num_proposed_drafts",
            )
        }


@torch.inference_mode()
@one_thread()
def greedy_with_mtp(
    model_path: Path | str,
    prompt_ids: Sequence[int],
    n: int,
    depth: int,
    dtype: torch.dtype = torch.float32,
    *,
    prompt_drafted: bool = True,
) -> Speculation:
    """Decode n >= 1 tokens after the prompt with drafts of `depth` tokens (SGLang: NEXTN, --speculative-num-steps
    depth, topk 1, depth + 1 draft tokens); an end token does not stop it (ignore_eos).

    The first token comes from the prompt alone, every round then adds the accepted drafts and one token of the
    target. SGLang counts all accepted drafts of the last round, also those that max_new_tokens cuts off
    (managers/scheduler_components/batch_result_processor.py). prompt_drafted: False where prefill has no draft model,
    so that the head's cache of the prompt is 0 and the first draft is the first token again (docs/speculation.md).
    """
    target = load(model_path, dtype)
    prompt = list(prompt_ids)
    # The last round begins with at most n - 1 tokens and adds at most depth + 1.
    known = continue_prompt(target, prompt, n + depth)
    text = prompt + known.tokens
    drafter = Drafter(load_head(model_path, dtype), text, known.hidden, lost=0 if prompt_drafted else len(prompt))
    if not prompt_drafted:
        drafter.forget(len(prompt) - 1, text)

    accepted: list[int] = []
    confirmed = len(prompt) + 1
    while confirmed < len(prompt) + n:
        drafts = drafter.draft(confirmed, depth)
        accepted.append(common_prefix(drafts, text[confirmed:]))
        confirmed += accepted[-1] + 1
    return Speculation(known.tokens[:n], known.logprobs[:n], known.gaps[:n], accepted, depth)


class Drafter:
    """Drafts after any prefix of a text whose target hidden states are known.

    After each verification SGLang rewrites the head's cache entries of the accepted tokens with the target's
    hidden states (speculative/eagle_worker_v2.py, draft extend). So at the start of every round the cache holds
    the same entries as if the text had been fed at once: that is done here, and a round takes a prefix of it.
    """

    def __init__(self, head: MtpHead, text: list[int], hidden: torch.Tensor, lost: int = 0) -> None:
        """lost: the first entries whose keys and values are zeros for all that come after them, as if decode had not
        been handed them."""
        self._head = head
        cache = head.empty_cache()
        next_tokens = torch.tensor(text[1:])
        first = lost or len(next_tokens)
        passes = [head(next_tokens[:first], hidden[:first], 0, cache)]
        layer: Any = cache.layers[0]
        if lost:
            layer.keys.zero_()
            layer.values.zero_()
        for i in range(first, len(next_tokens)):
            passes.append(head(next_tokens[i : i + 1], hidden[i : i + 1], i, cache))
        self._states, self._guesses = (torch.cat(parts) for parts in zip(*passes, strict=True))
        self._keys, self._values = layer.keys, layer.values  # [1, kv_heads, entries, head_dim]

    def forget(self, entry: int, text: list[int]) -> None:
        """Nothing is known of what this entry would have drafted: its state is 0, its guess the token it has read."""
        self._states[entry] = 0
        self._guesses[entry] = text[entry + 1]

    def _first(self, entries: int) -> DynamicCache:
        cache = self._head.empty_cache()
        cache.update(self._keys[:, :, :entries], self._values[:, :, :entries], 0)
        return cache

    def draft(self, confirmed: int, depth: int) -> list[int]:
        """`depth` guesses after the first `confirmed` tokens of the text."""
        entries = confirmed - 1  # the last token has no hidden state yet
        cache = self._first(entries)
        state, guess = self._states[entries - 1 : entries], self._guesses[entries - 1 : entries]
        drafts = [int(guess)]
        while len(drafts) < depth:
            # Ahead of the target the head's own state stands in for the target's.
            state, guess = self._head(guess, state, entries, cache)
            entries += 1
            drafts.append(int(guess))
        return drafts


def common_prefix(drafts: list[int], truth: list[int]) -> int:
    """How many of the drafts are right, up to the first one that is not."""
    equal = 0
    while equal < len(drafts) and drafts[equal] == truth[equal]:
        equal += 1
    return equal
