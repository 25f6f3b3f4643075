"""The prompts of a matrix: seeded, from text of this repository, each of an exact number of tokens.

Like the seed's they are texts put together until they are long enough: sentences of the demo's three texts, in an
order of their own for each prompt, behind a beginning that no other prompt has, so that no two share more than a few
first tokens.
The demo's texts and not the documents, because those change, and the data set would with them.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from bench_serving.matrix_plan import Lengths
from sglang_hetero.errors import HeteroError

SEED = 18592
GENERATOR = 1
"""Goes up whenever the same seed would give other prompts."""
ATTEMPTS = 8
"""Texts that are tried for one prompt: a tokenizer may step over a length whatever is cut off a text."""
STEPS = 24
NEIGHBOURHOOD = 48
"""Characters around the best cut that are all tried: longer than most tokens."""

Count = Callable[[str], int]
"""Number of tokens of a text, as the server will count them."""


class DataError(HeteroError):
    """No prompt of the wanted length can be made."""


def texts() -> list[str]:
    folder = resources.files("sglang_hetero.demo").joinpath("prompts")
    return [file.read_text(encoding="utf-8") for file in sorted(folder.iterdir(), key=lambda file: file.name)]


def sentences(sources: Sequence[str]) -> list[str]:
    return [part for text in sources for part in re.split(r"(?<=[.!?])\s+|\n{2,}", text.strip()) if part.strip()]


def lengths(wanted: Lengths, seed: int = SEED) -> list[int]:
    """Tokens of each prompt: the least and the most occur, the total is exact, the rest is even chance between.

    Raises DataError where no such numbers exist.
    """
    inner = wanted.count - 2
    rest = wanted.total - wanted.least - wanted.most
    if inner < 0 or not inner * wanted.least <= rest <= inner * wanted.most:
        raise DataError(f"no {wanted.count} lengths of {wanted.least} to {wanted.most} tokens come to {wanted.total}")
    chance = random.Random(f"lengths {seed}")
    found = [chance.randint(wanted.least, wanted.most) for _ in range(inner)]
    missing = rest - sum(found)
    while missing:
        index = chance.randrange(inner)
        step = max(wanted.least - found[index], min(wanted.most - found[index], missing))
        # Not all at once, or a few prompts would end up at the very bounds.
        step = round(step / inner) or step
        found[index] += step
        missing -= step
    found += [wanted.least, wanted.most]
    chance.shuffle(found)
    return found


def exactly(text: str, tokens: int, count: Count) -> str | None:
    """The beginning of `text` that has so many tokens; None if no cut was found that gives them."""
    low, high = 0, len(text)
    cut = min(high, max(1, high * tokens // max(1, count(text))))
    for _ in range(STEPS):
        have = count(text[:cut])
        if have == tokens:
            return text[:cut]
        low, high = (cut, high) if have < tokens else (low, cut)
        if high - low <= 1:
            break
        # As far as the tokens that are missing have characters on average, but never out of what is left.
        cut = min(high - 1, max(low + 1, cut + round((tokens - have) * cut / max(1, have))))
    for other in range(max(1, cut - NEIGHBOURHOOD), min(len(text), cut + NEIGHBOURHOOD) + 1):
        if count(text[:other]) == tokens:
            return text[:other]
    return None


def _composed(parts: Sequence[str], first: str, tokens: int, count: Count, chance: random.Random) -> str:
    """`first`, then sentences in a chance order, of at least so many tokens."""
    found = [first]
    order: Iterator[str] = iter(())
    while True:
        # By doubling: the tokenizer sees each prompt a few times only.
        for _ in range(len(found)):
            sentence = next(order, None)
            if sentence is None:
                order = iter(chance.sample(parts, len(parts)))
                sentence = next(order)
            found.append(sentence)
        text = " ".join(found)
        if count(text) >= tokens:
            return text


def prompts(wanted: Sequence[int], count: Count, name: str, seed: int = SEED) -> list[str]:
    """A prompt for each length. name: tells data sets of the same seed apart, and stands at the head of each prompt.

    Raises DataError with the length for which there is none.
    """
    parts = sentences(texts())
    found = []
    for number, tokens in enumerate(wanted, 1):
        for attempt in range(ATTEMPTS):
            chance = random.Random(f"{name} {seed} {number} {attempt}")
            text = exactly(_composed(parts, f"{number}, {name} {attempt}:", tokens, count, chance), tokens, count)
            if text is not None:
                found.append(text)
                break
        else:
            raise DataError(f"prompt {number} of the {name} set: no text of exactly {tokens} tokens was found")
    return found


def identity(wanted: Lengths, seed: int = SEED) -> dict[str, Any]:
    """What the prompts depend on, besides the tokenizer."""
    digest = hashlib.sha256("\0".join(texts()).encode()).hexdigest()[:16]
    return {"seed": seed, "generator": GENERATOR, "texts": digest, **asdict(wanted)}


def write(path: Path, found: Sequence[str]) -> None:
    """As sglang.benchmark.serving's `custom` data set: conversations, of which the second turn is not used."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({"conversations": [{"content": text}, {"content": "-"}]}) + "\n" for text in found)
    )
