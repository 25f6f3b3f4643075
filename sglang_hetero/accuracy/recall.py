"""The recall task: key-value pairs spread over a long text, one of them asked for at its end.

    ...bridge under the lamp
    QK=48210937
    over the grey stone wind...

    QK=

One format for the small model that was trained on it (model `recall`, a token per character) and for any other
language model that completes text. Every prompt's content comes from its seed alone and is the same on every
machine. Nothing here imports torch or SGLang.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hetero.errors import HeteroError

ANSWER_DIGITS = 8  # the first comes from the prompt's pass, the others need what decode was handed
KEY_LETTERS = 2
# One pair for so many characters: 5 in a prompt of 512.
CHARACTERS_PER_PAIR = 100
# More would not fit: the first two digits of a prompt's values all differ, and there are 100 of them.
MOST_PAIRS = 32

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = "0123456789"
# Lower case only: filler is never mistaken for a key or a value.
_WORDS = (
    "the a of and under over by near old grey small long river stone lamp bridge road window garden winter morning "
    "light rain wind house paper boat field was ran stood kept slowly again never always"
)
_FILLER = _WORDS.split()
# Of up to so many pairs, so many first digits differ place by place. With two more pairs the last one's first digits
# might be settled by the others, and be taken already.
_FEW, _DISTINCT = 8, 3
_ASKED = KEY_LETTERS + len("=")
_LINE = _ASKED + ANSWER_DIGITS + len("\n")


@dataclass(frozen=True)
class Pair:
    """One line of a prompt: two capital letters and ANSWER_DIGITS digits."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Question:
    """One prompt and what a model that remembers says next.

    depth: where the asked pair stands among the prompt's pairs, 0 = first, 1 = last. characters: length of the
    prompt; all ASCII.
    """

    prompt: str
    answer: str
    depth: float
    characters: int


def questions(characters: int, depths: Sequence[float], per_depth: int, seed: int) -> list[Question]:
    """`per_depth` questions of exactly `characters` characters for each depth, depth by depth.

    A question depends on (seed, characters, depth, its number) only, so a sweep may be extended. HeteroError if a
    depth lies outside 0..1 or the text is too short for two pairs.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise HeteroError(f"depth {depth} of a recall question: 0 is the first pair, 1 the last")
    return [
        _question(characters, depth, f"{seed}/{characters}/{depth:g}/{i}") for depth in depths for i in range(per_depth)
    ]


def score(answer_text: str, question: Question) -> bool:
    """Whether the text a model returned says the value: exactly its digits, after white space at most."""
    said = answer_text.lstrip()
    return said.startswith(question.answer) and not said[len(question.answer) :][:1].isdecimal()


def document(choose: random.Random, characters: int, count: int) -> tuple[str, list[Pair]]:
    """A text of exactly `characters` characters with `count` pairs at even distances, and the pairs in their order.

    It ends with a line break; a question follows it as `<key>=`. HeteroError if the pairs do not fit.
    """
    room = characters - count * _LINE
    if not 0 < count <= MOST_PAIRS or room < count + 1:
        raise HeteroError(
            f"a recall text of {characters} characters has no room for {count} pairs: "
            f"{_LINE + 1} characters each and 1 more are needed, and 1 to {MOST_PAIRS} pairs"
        )
    pairs = _pairs(choose, count)
    filler = _filler(choose, room)
    # `count + 1` pieces of filler whose lengths differ by 1 at most; each ends with a line break.
    ends = [room * (i + 1) // (count + 1) for i in range(count + 1)]
    parts = []
    for begin, end, pair in zip([0, *ends], ends, [*pairs, None], strict=False):
        parts.append(filler[begin : end - 1] + "\n")
        if pair:
            parts.append(f"{pair}\n")
    return "".join(parts), pairs


def pair_count(characters: int) -> int:
    """Pairs in a prompt of that many characters."""
    return max(2, min(MOST_PAIRS, characters // CHARACTERS_PER_PAIR))


def _question(characters: int, depth: float, seed: str) -> Question:
    choose = random.Random(seed)
    text, pairs = document(choose, characters - _ASKED, pair_count(characters))
    asked = pairs[round(depth * (len(pairs) - 1))]
    return Question(f"{text}{asked.key}=", asked.value, depth, characters)


def _pairs(choose: random.Random, count: int) -> list[Pair]:
    """Pairs in which every character of a value is determined by the three characters before it.

    And where there are few pairs, no two values have the same first, second or third digit. So what is
    measured is memory, not how well a model tells alike values apart.
    """
    seen: set[str] = set()
    pairs: list[Pair] = []
    while len(pairs) < count:
        pair = Pair(_draw(choose, _LETTERS, KEY_LETTERS), _draw(choose, _DIGITS, ANSWER_DIGITS))
        contexts = list(_contexts(pair))
        if count <= _FEW:
            contexts += [f"digit {place} is {pair.value[place]}" for place in range(_DISTINCT)]
        if len(set(contexts)) == len(contexts) and seen.isdisjoint(contexts):
            seen.update(contexts)
            pairs.append(pair)
    return pairs


def _contexts(pair: Pair) -> Iterator[str]:
    """The three characters before each character of the value, and its last three."""
    line = str(pair)
    return (line[end - 3 : end] for end in range(_ASKED, len(line) + 1))


def _filler(choose: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += _FILLER[choose.randrange(len(_FILLER))] + " "
    return text[:characters]


def _draw(choose: random.Random, alphabet: str, length: int) -> str:
    # randrange alone: the other methods of random have changed what they draw between Python versions.
    return "".join(alphabet[choose.randrange(len(alphabet))] for _ in range(length))
