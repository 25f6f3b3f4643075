"""How decidable and how lively a model's greedy decoding is, over slices of English text.

`python -m tests.reference.tuning MODEL...` prints the figures of docs/models.md.
"""

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from sglang_hetero import models
from tests.reference.speculation import Speculation, greedy_with_mtp
from tests.reference.target import Continuation, greedy

_TEXT = Path(__file__).parents[2] / "LICENSE"  # any few thousand characters of ASCII would do
_DEPTH = 3


@dataclass(frozen=True)
class Tuning:
    """Figures over all prompts of one model.

    histogram[a]: rounds with a accepted drafts, empty without drafts. smallest_gap: logit of the chosen token minus the
    runner-up's. distinct: number of different tokens in each continuation.
    """

    histogram: list[int]
    smallest_gap: float
    distinct: list[int]

    @property
    def accept_length(self) -> float:
        """Mean tokens per round: the accepted drafts and the target's own."""
        if not self.histogram:
            return 1.0
        return sum((a + 1) * rounds for a, rounds in enumerate(self.histogram)) / sum(self.histogram)


def text_prompts(model_path: Path, count: int = 40, longest: int = 300) -> list[list[int]]:
    """`count` slices of text, 1 to `longest` tokens, short ones more often; the same in every run."""
    text = _TEXT.read_text()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    choose = random.Random(0)
    prompts = []
    for i in range(count):
        length = 1 + int((i / (count - 1)) ** 2 * (longest - 1))
        start = choose.randrange(len(text) - length)
        prompts.append(tokenizer(text[start : start + length]).input_ids)
    return prompts


def measure(model_path: Path, prompts: Sequence[Sequence[int]], n: int = 32, depth: int = _DEPTH) -> Tuning:
    """Decode n tokens after each prompt with drafts of `depth`; 0 for a model without an MTP head."""
    histogram = [0] * (depth + 1) if depth else []
    gaps: list[float] = []
    distinct = []
    for prompt in prompts:
        result: Continuation | Speculation
        if depth:
            result = greedy_with_mtp(model_path, prompt, n, depth)
            for accepted in result.accepted_per_round:
                histogram[accepted] += 1
        else:
            (result,) = greedy(model_path, [prompt], n)
        gaps += result.gaps
        distinct.append(len(set(result.tokens)))
    return Tuning(histogram, min(gaps), distinct)


def main(names: Sequence[str]) -> None:
    """Print one line per model."""
    for name in names or [name for name in models.names() if not models.spec(name).trained]:
        path = models.path(name)
        tuning = measure(path, text_prompts(path), depth=_DEPTH if models.spec(name).mtp_layers else 0)
        print(
            f"{name}: accepted drafts {tuning.histogram}, accept length {tuning.accept_length:.2f}, "
            f"smallest gap {tuning.smallest_gap:.1e}, distinct tokens of 32: at least {min(tuning.distinct)}, "
            f"{statistics.mean(tuning.distinct):.0f} on average"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
