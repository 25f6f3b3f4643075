"""The questions of the table, and asking a fleet all of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sglang_hetero.accuracy.recall import ANSWER_DIGITS, Question, questions, score
from sglang_hetero.client import Client, Generation
from sglang_hetero.errors import HeteroError

from .record import Answer

CHARACTERS = 512
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PER_DEPTH = 20
SEED = 7
TOKENS = ANSWER_DIGITS + 1
"""The answer's, of which the model has one for each character, and the end of its line: with the first one from prefill
decode has two whole rounds of MTP depth 3 to do."""
TOGETHER = 4
"""Requests under way at a time: decode has batches, and two cores are not swamped."""


@dataclass(frozen=True)
class Sheet:
    """What is asked. Lengths in characters."""

    characters: int = CHARACTERS
    depths: tuple[float, ...] = DEPTHS
    per_depth: int = PER_DEPTH
    seed: int = SEED
    tokens: int = TOKENS

    def questions(self) -> list[Question]:
        return questions(self.characters, self.depths, self.per_depth, self.seed)


def ask(url: str, asked: Sequence[Question], tokens: int, done: Callable[[int], None] = lambda _: None) -> list[Answer]:
    """The answers, in order; `done` hears how many there are. Raises HeteroError when a request has failed."""
    client = Client(url)
    found: list[Answer] = []
    with ThreadPoolExecutor(TOGETHER) as pool:
        running = [pool.submit(client.generate, question.prompt, tokens) for question in asked]
        try:
            for question, generation in zip(asked, running, strict=True):
                found.append(_answer(generation.result(), question, tokens))
                done(len(found))
        except BaseException:
            for each in running:
                each.cancel()
            raise
    return found


def _answer(said: Generation, question: Question, tokens: int) -> Answer:
    if len(said.tokens) != tokens:
        raise HeteroError(f"{tokens} tokens were asked for, {len(said.tokens)} came")
    rounds = said.meta.get("spec_verify_ct", 0)
    return Answer(tuple(said.tokens), score(said.text, question), rounds, said.meta.get("spec_num_correct_drafts", 0))
