"""Whether an answer's token is a matter of rounding: asked of transformers, and only where two answers differ."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_hetero.accuracy.recall import Question


def tie_of(model_path: Path, asked: Sequence[Question], tokens: int) -> Callable[[int, int], bool]:
    """For `verdict.compare`: whether the two best tokens at a position of a question's answer are as good as equal.

    That is so where their logits are nearer to each other than a hundred times the noise of fp32, up to the first
    token that is; what follows another token has no reference.
    """

    @functools.cache
    def gaps(number: int) -> list[float]:
        from tokenizers import Tokenizer

        from tests.reference import greedy

        tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        prompt = tokenizer.encode(asked[number].prompt).ids
        return greedy(model_path, [prompt], tokens)[0].gaps

    def tie(number: int, position: int) -> bool:
        from tests.serving.fleets import SMALLEST_GAP

        return gaps(number)[position] < SMALLEST_GAP

    return tie
