"""Texts to train model `recall` with: a document, then every one of its pairs asked for and answered."""

import random
from dataclasses import dataclass

import torch
from tokenizers import pre_tokenizers

from sglang_hetero.accuracy.recall import ANSWER_DIGITS, KEY_LETTERS, document

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
END = 10  # the value of the end of a line; a digit's is its own
VALUES = END + 1
_LINE = KEY_LETTERS + 1 + ANSWER_DIGITS + 1  # characters of `KK=dddddddd` and its end


def _byte_names() -> dict[int, str]:
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {i: pre.pre_tokenize_str(chr(i))[0][0] for i in range(128)}


_IDS = {chr(i): _ALPHABET.index(name) for i, name in _byte_names().items()}


def token(character: str) -> int:
    """Id of one ASCII character (sglang_hetero/models/tokenizer.py)."""
    return _IDS[character]


@dataclass(frozen=True)
class Batch:
    """tokens: [sequences, positions]. asked: [sequences, positions], whether the position is in the questions.
    value: [sequences, positions], of this character: a digit's own, END for the end of a line, else -1. next_value: the
    same of the next character. next_digit: [positions], which character of an answer the next one is, 1 to 8 for the
    digits and 9 for the end of its line, or 0.
    """

    tokens: torch.Tensor
    asked: torch.Tensor
    next_digit: torch.Tensor
    next_value: torch.Tensor
    value: torch.Tensor

    def shifted(self) -> "Batch":
        """Without the first position of each."""
        return Batch(
            self.tokens[:, 1:], self.asked[:, 1:], self.next_digit[1:], self.next_value[:, 1:], self.value[:, 1:]
        )


def batch(choose: random.Random, sequences: int, characters: int, pairs: int) -> Batch:
    """`sequences` texts of a document with `characters` characters and the questions after it, in random order."""
    texts = []
    for _ in range(sequences):
        text, order = document(choose, characters, pairs)
        for i in range(pairs - 1, 0, -1):
            j = choose.randrange(i + 1)
            order[i], order[j] = order[j], order[i]
        texts.append(text + "".join(f"{pair}\n" for pair in order))
    tokens = torch.tensor([[token(character) for character in text] for text in texts])
    values = torch.full((max(_IDS.values()) + 1,), -1)
    for value, character in enumerate("0123456789\n"):
        values[token(character)] = value
    place = torch.arange(tokens.shape[1])
    next_digit = ((place - characters) % _LINE - KEY_LETTERS + 1).clamp(0, ANSWER_DIGITS + 2) % (ANSWER_DIGITS + 2)
    next_digit = torch.where(place >= characters, next_digit, 0)
    value = values[tokens]
    next_value = torch.cat([value[:, 1:], torch.full((sequences, 1), -1)], 1)
    return Batch(tokens, (place >= characters).expand(tokens.shape), next_digit, next_value, value)
