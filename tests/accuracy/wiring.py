"""Where the training of model `recall` begins: weights in which every part of the state carries a part of the answer.

From random weights a small model learns to spread what it remembers over all heads, and to leave everything to
attention where it can, so that nothing small is ever missed. So the wiring is laid before training, which then only has
to make it good:

    character of the answer   remembered by
    1, 7, 8, line's end       the full-attention layer's keys and values, kv heads 0 to 2
    2                         lower two bits: the first linear layer's recurrent state; the rest: attention's kv head 3
    3                         the first linear layer's recurrent state
    4, 5, 6                   the second linear layer's recurrent state

A linear layer's value heads each hold one part of a digit, and no other head holds that part: `FIRST`, `SECOND`. A
head's key is nothing at all unless a `=` stands at its one distance, so it neither writes nor reads at other places.
Key head 3 of both layers is the exception: it carries the last characters along, through the convolution window, and
what was in its state does not matter. Attention's kv head 3 finds its place by what the second layer has carried.

All projections are least-squares fits of wanted activations on sampled texts; what is random comes from the seed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hetero.accuracy.recall import ANSWER_DIGITS
from sglang_hetero.models.specs import ModelSpec
from tests.accuracy.sample import END, VALUES, Batch, token

# Places in the residual stream.
CONSTANT = 0
CODE = 10  # numbers for a character; they add up to 0, but for a `=`, where all are 1
TAPS = [slice(1 + CODE * n, 1 + CODE * (n + 1)) for n in range(3)]  # codes of this character and the two before it
EQUALS = 31  # whether a `=` is three characters back
ACTIVE = (32, 33)  # the second layer's heads for digits 5 and 6 are reading
ANSWER = slice(41, 41 + VALUES)  # for each value whether it is the next one
# Codes of the characters 2, 3 and 4 back, that the second layer has carried; the MTP head has but the second of them.
LATE = {back: slice(54 + CODE * i, 54 + CODE * (i + 1)) for i, back in enumerate((2, 3, 4))}
FREE = slice(LATE[4].stop, None)  # training's own

SILENT = 40.0  # before the SiLU, so that a key that is not meant comes to nothing at all
HASH, THRESHOLD = 3.0, 2.5  # deviation and mean, below zero, of a key's channels before the SiLU, where it is meant
NEAR, FAR = 0.6, 0.4  # weights of the two characters that a key of the first layer is made of, in turns
GAIN = 3.0  # of what is written into the residual stream
OFF = -1.3  # where the SiLU is least
OPEN, SHUT = 4.0, -8.0  # of the attention's gate
SHARP = 1.2  # 1 + this, twice, is what a matching key's logit is multiplied by
RIDGE = 1e-6  # of the fits: what is not in the texts stays small
LINEAR = 6.0  # around it the SiLU is as good as linear
LOCAL = 3  # the key head of each linear layer that carries characters along
SPECIAL = 3  # attention's kv head for the rest of digit 2
SPECIAL_DIGIT = 2
BITS = [[(digit >> bit) & 1 for digit in range(10)] for bit in range(4)]
REST, QUOTIENT = [digit % 5 for digit in range(10)], [digit // 5 for digit in range(10)]


@dataclass(frozen=True)
class Reader:
    """A key head. digit: of the answer, that it remembers. equals_at: characters from a `=` to the one of the place
    that it is found by. shift: positions between that place and the one that reads. parts: classes of the digits that
    its two value heads tell apart."""

    digit: int
    parts: tuple[list[int], list[int]]
    equals_at: int = 0
    shift: int = 0


FIRST = [
    Reader(2, (BITS[0], BITS[1])),
    Reader(3, (BITS[0], BITS[1])),
    Reader(3, (BITS[2], BITS[3])),
]
# All of them are found by the first three digits.
SECOND = [Reader(4 + shift, (REST, QUOTIENT), equals_at=3, shift=shift) for shift in range(3)]
HIGH = [digit // 4 for digit in range(10)]  # what attention's kv head 3 holds
BY_STATE = {reader.digit for reader in (*FIRST, *SECOND)}


def codes(generator: torch.Generator, vocabulary: int) -> torch.Tensor:
    """[vocabulary, CODE]: the digits' are as far from each other as can be, capital letters' random, others' zero.

    All that are not have one length and the same sum, so that the norm of a head that carries them is the same.
    """
    found = torch.zeros(vocabulary, CODE)
    for digit in range(10):
        found[token(str(digit)), digit] = 1.0
    for letter in range(26):
        found[token(chr(ord("A") + letter))] = torch.randn(CODE, generator=generator)
    found -= found.mean(1, keepdim=True)
    lengths = found.norm(dim=1, keepdim=True)
    found *= torch.where(lengths > 0, GAIN / lengths, 0)
    found[token("=")] = 1.0
    return found


class Wiring:
    """Lays the weights of one model and its head, from the embedding to the last layer, on one batch of text."""

    def __init__(self, spec: ModelSpec, model: Any, head: Any, batch: Batch, seed: int) -> None:
        self.spec, self.model, self.head, self.batch = spec, model, head, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.code = codes(self.generator, spec.vocab_size)
        # [sequences, positions, CODE] for 0 to 4 characters back.
        now = self.code[batch.tokens]
        self._forward: Callable[[], object] = lambda: model.model(input_ids=batch.tokens, use_cache=False)
        self.back = [torch.nn.functional.pad(now, (0, 0, n, 0))[:, : now.shape[1]] for n in range(5)]

    @torch.no_grad()
    def lay(self) -> None:
        """Set every weight."""
        for module in (self.model, self.head):
            for name, weight in module.named_parameters():
                if weight.dim() == 2:
                    weight.copy_(self._random(*weight.shape) * 0.3 / weight.shape[1] ** 0.5)
                elif name.endswith(("norm.weight", "layernorm.weight")) and "linear_attn" not in name:
                    weight.zero_()
        embedding = self.model.model.embed_tokens.weight
        embedding.copy_(self._random(*embedding.shape) * 0.5)
        # Filler is all the same: what is left of the width then tells all other characters apart, in every fit.
        for letter in range(ord("a"), ord("z") + 1):
            embedding[token(chr(letter))] = embedding[token(" ")]
        embedding[:, : FREE.start] = 0
        embedding[:, CONSTANT] = GAIN
        embedding[:, TAPS[0]] = self.code
        first, second, last = self.model.model.layers
        self._first(first)
        self._second(second)
        last.self_attn.o_proj.weight.zero_()
        self._attention(last, special=True)
        own = self.spec.head_dim * self.spec.attention_heads // self.spec.kv_heads * SPECIAL
        self._write_answer(last.self_attn.o_proj, {1, 7, 8, ANSWER_DIGITS + 1}, slice(own))
        self._write_answer(last.self_attn.o_proj, {SPECIAL_DIGIT}, slice(own, None))
        self.model.lm_head.weight.mul_(0.1)
        for value, character in enumerate("0123456789\n"):
            self.model.lm_head.weight[token(character), ANSWER.start + value] += GAIN
        self._head()

    # The linear layers.

    def _first(self, layer: Any) -> None:
        mixer, inputs = layer.linear_attn, self._run(layer.linear_attn)
        key, value = self.spec.linear_key_dim, self.spec.linear_value_dim
        equals, code = self._equals(0), self._letters(0)
        taps = self._blank(mixer)
        for i, reader in enumerate(FIRST):
            hashed = code @ (self._random(CODE, key) * HASH / (GAIN * (NEAR**2 + FAR**2) ** 0.5))
            # A `=` makes up for what the two other characters take away, where it counts in full.
            self._set_key(
                mixer, i, fit(inputs, torch.where(equals, SILENT * (NEAR + FAR) - THRESHOLD, hashed - SILENT))
            )
            turns = [torch.tensor(pair).repeat(key // 2) for pair in ((NEAR, FAR), (FAR, NEAR))]
            for tap in range(1, 4):
                weight = torch.ones(key) if tap == reader.digit else turns.pop()
                taps["k"][i * key : (i + 1) * key, 3 - tap] = weight
                taps["q"][i * key : (i + 1) * key, 3 - (tap - 1)] = weight
        self._set_values(mixer, inputs, FIRST)
        # Each value head carries one character, the first one also whether there is a `=` three back.
        outputs = self._carry(
            mixer,
            inputs,
            taps,
            [[(1, self.back[0]), (3, GAIN * equals.float())], [(2, self.back[0])]],
        )
        for n in (1, 2):
            self._write(mixer, TAPS[n], outputs, self.back[n])
        self._write(mixer, slice(EQUALS, EQUALS + 1), outputs, GAIN * self._equals(3).float(), self._found_by())
        self._write_answer(mixer.out_proj, {2, 3}, slice(2 * LOCAL * value))

    def _second(self, layer: Any) -> None:
        mixer, inputs = layer.linear_attn, self._run(layer.linear_attn)
        key = self.spec.linear_key_dim
        taps = self._blank(mixer)
        found_by, here = torch.cat([self._letters(n) for n in range(3)], -1), self._equals(3)
        for i, reader in enumerate(SECOND):
            hashed = found_by @ (self._random(3 * CODE, key) * HASH / (GAIN * 3**0.5))
            wanted = hashed - torch.where(here, THRESHOLD, SILENT)
            self._set_key(mixer, i, fit(inputs, wanted, past=5, weight=self._found_by()))
            taps["q"][i * key : (i + 1) * key, 3 - reader.shift] = 1.0
            taps["k"][i * key : (i + 1) * key, 3 - reader.shift - 1] = 1.0
        self._set_values(mixer, inputs, SECOND)
        channels = [[(1, self.back[1]), (1, self.back[2][..., :6])], [(1, self.back[2][..., 6:]), (2, self.back[2])]]
        outputs = self._carry(mixer, inputs, taps, channels)
        for back, place in LATE.items():
            self._write(mixer, place, outputs, self.back[back])
        asked = self.batch.asked
        for place, digit in zip(ACTIVE, (5, 6), strict=True):
            wanted = GAIN * (self.batch.next_digit == digit).float().expand(asked.shape)[..., None]
            mixer.out_proj.weight[place] = fit(outputs, wanted, asked)[0]
        self._write_answer(mixer.out_proj, {4, 5, 6}, slice(2 * LOCAL * self.spec.linear_value_dim))

    def _equals(self, back: int) -> torch.Tensor:
        """[sequences, positions, 1], whether a `=` is that many characters back."""
        return (self.back[back] == 1).all(-1, keepdim=True)

    def _letters(self, back: int) -> torch.Tensor:
        """Codes of the characters that many back, zero for a `=`."""
        return self.back[back].masked_fill(self._equals(back), 0)

    def _found_by(self) -> torch.Tensor:
        """Weights of positions: those where a key of the second layer is made have to be right to the last bit."""
        return torch.where(self._equals(3) & (self.batch.value >= 0)[..., None], 1e4, 1.0)

    def _carry(
        self,
        mixer: Any,
        inputs: torch.Tensor,
        taps: dict[str, torch.Tensor],
        channels: list[list[tuple[int, torch.Tensor]]],
    ) -> torch.Tensor:
        """Set the local head and the taps; returns what the output's projection then gets, and clears that.

        channels: per value head, a tap of the convolution and what some channels hold of the position that it reaches.
        """
        key, size = self.spec.linear_key_dim, self.spec.linear_value_dim
        self._set_key(mixer, LOCAL, fit(inputs, torch.ones_like(inputs[..., :1]) * self._random(key).abs()))
        for role in "qk":
            taps[role][LOCAL * key :, 3] = 1.0
        for which, parts in enumerate(channels):
            first = (2 * LOCAL + which) * size
            rows = self._values(LOCAL, 1, which)
            mixer.in_proj_qkv.weight[rows] = fit(inputs, torch.full_like(inputs[..., :size], LINEAR), past=5)
            for tap, held in parts:
                width = held.shape[-1]
                mixer.in_proj_qkv.weight[rows.start : rows.start + width] = fit(inputs, LINEAR + held, past=5)
                taps["v"][first : first + width] = torch.eye(4)[3 - tap]
                rows, first = slice(rows.start + width, rows.stop), first + width
        mixer.conv1d.weight.copy_(torch.cat([taps[role] for role in "qkv"])[:, None])
        outputs = self._run(mixer.out_proj)
        mixer.out_proj.weight.zero_()
        return outputs

    def _write(
        self, mixer: Any, place: slice, outputs: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor | None = None
    ) -> None:
        """From the local head to a place in the residual stream."""
        own = slice(2 * LOCAL * self.spec.linear_value_dim, None)
        mixer.out_proj.weight[place, own] = fit(outputs[..., own], wanted, past=5, weight=weight)

    def _blank(self, mixer: Any) -> dict[str, torch.Tensor]:
        """Constants of a linear layer, and the taps of its convolution by segment, [channels, 4], the latest last."""
        mixer.A_log.fill_(-3.0)
        mixer.dt_bias.fill_(-6.0)  # a state loses 1e-4 per character
        mixer.norm.weight.fill_(1.0)
        inputs = self._run(mixer)
        ones = torch.ones_like(inputs[..., :1])
        mixer.in_proj_b.weight.copy_(fit(inputs, 5 * ones).expand_as(mixer.in_proj_b.weight))
        mixer.in_proj_a.weight.zero_()
        mixer.in_proj_z.weight.copy_(fit(inputs, 2 * ones).expand_as(mixer.in_proj_z.weight))
        width = self.spec.linear_key_width
        taps = {
            "q": torch.zeros(width, 4),
            "k": torch.zeros(width, 4),
            "v": torch.zeros(self.spec.linear_value_width, 4),
        }
        taps["v"][:, 3] = 1.0
        return taps

    def _set_key(self, mixer: Any, head: int, weight: torch.Tensor) -> None:
        """The same projection for q and k: that they meet is a matter of the taps."""
        size, width = self.spec.linear_key_dim, self.spec.linear_key_width
        for begin in (head * size, width + head * size):
            mixer.in_proj_qkv.weight[begin : begin + size] = weight

    def _set_values(self, mixer: Any, inputs: torch.Tensor, readers: list[Reader]) -> None:
        digit = self.batch.value
        is_digit = (digit >= 0) & (digit != END)
        for i, reader in enumerate(readers):
            for j, part in enumerate(reader.parts):
                # Each class has channels of its own, the last channel says that something was found.
                size, classes = self.spec.linear_value_dim, max(part) + 1
                own = torch.arange(size) % classes == torch.tensor(part)[:, None]
                patterns = torch.where(own, GAIN, OFF)
                patterns[:, -1] = 1.0
                wanted = patterns[digit.clamp(0, 9)]
                mixer.in_proj_qkv.weight[self._values(i, 1, j)] = fit(inputs, wanted, is_digit)

    def _values(self, key_head: int, count: int, which: int = 0) -> slice:
        """Rows of in_proj_qkv for value heads of a key head."""
        size = self.spec.linear_value_dim
        begin = 2 * self.spec.linear_key_width + (2 * key_head + which) * size
        return slice(begin, begin + count * size)

    # Attention, of the target and of the MTP head.

    def _attention(self, layer: Any, special: bool) -> None:
        """What stands after the same three characters: keys hold the codes of the three before, queries of the last."""
        attention, inputs, value = layer.self_attn, self._run(layer.self_attn), self.batch.value
        size, shared = self.spec.head_dim, self.spec.attention_heads // self.spec.kv_heads
        turned = size // 4  # the channels that are rotated by position: nothing is in them
        attention.q_norm.weight.fill_(SHARP)
        attention.k_norm.weight.fill_(SHARP)
        for head in range(self.spec.kv_heads):
            is_special = special and head == SPECIAL
            # The key's two letters, as the second layer has carried them, or three characters.
            asks, has = ((2, 3), (3, 4)) if is_special else ((0, 1, 2), (1, 2, 3))
            width = CODE * len(asks)
            mix = torch.nn.functional.pad(self._random(width, size - turned) / len(asks), (turned, 0))
            features = (torch.cat([self._letters(n) for n in which], -1) @ mix for which in (asks, has))
            seen_by = self._late_only(inputs) if is_special else inputs
            query, key = (fit(seen_by, wanted, past=5) for wanted in features)
            attention.k_proj.weight[head * size : (head + 1) * size] = key
            patterns = self._random(VALUES, size).sign()
            if is_special:
                patterns = torch.cat([patterns[torch.tensor(HIGH)], patterns[-1:]])
            attention.v_proj.weight[head * size : (head + 1) * size] = fit(
                inputs, patterns[value.clamp(min=0)], value >= 0
            )
            gate = torch.where(shut(self.batch, is_special) if special else torch.tensor(False), SHUT, OPEN)
            opening = fit(inputs, gate.expand(value.shape)[..., None], self.batch.asked if special else None)
            for i in range(shared * head, shared * (head + 1)):
                begin = 2 * i * size
                attention.q_proj.weight[begin : begin + size] = query
                attention.q_proj.weight[begin + size : begin + 2 * size] = opening.expand(size, -1)

    @staticmethod
    def _late_only(inputs: torch.Tensor) -> torch.Tensor:
        """Inputs without all that the second layer has not carried; the constant stays."""
        seen = torch.zeros_like(inputs)
        for place in (slice(CONSTANT, CONSTANT + 1), *LATE.values()):
            seen[..., place] = inputs[..., place]
        return seen

    def _write_answer(self, projection: Any, digits: set[int], channels: slice = slice(None)) -> None:
        """What a layer has found goes to ANSWER. channels: of the projection's input, that take part."""
        outputs = self._run(projection)[..., channels]
        here = self.batch.asked & torch.isin(self.batch.next_digit, torch.tensor(sorted(digits)))
        wanted = torch.nn.functional.one_hot(self.batch.next_value.clamp(min=0), VALUES) - 1 / VALUES
        projection.weight[ANSWER, channels] = fit(outputs, GAIN * wanted, here)

    # The MTP head.

    def _head(self) -> None:
        """It sees the next character and the target's state: what it takes from both is one character on."""
        tokens = self.batch.tokens
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        self.batch, self.back = self.batch.shifted(), [codes[:, 1:] for codes in self.back]
        self._forward = lambda: head_states(self.head, tokens[:, 1:], hidden)
        inputs = self._run(self.head.fc)
        wanted = torch.zeros(*inputs.shape[:2], self.spec.hidden_size)
        wanted[..., CONSTANT] = GAIN
        for n, place in (*enumerate(TAPS), (3, LATE[3])):
            wanted[..., place] = self.back[n]
        self.head.fc.weight.copy_(fit(inputs, wanted, past=4))
        (layer,) = self.head.layers
        layer.self_attn.o_proj.weight.zero_()
        self._attention(layer, special=False)
        self._write_answer(layer.self_attn.o_proj, set(range(1, ANSWER_DIGITS + 2)))

    # Helpers.

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _run(self, module: Any) -> torch.Tensor:
        """The input of a module, of the target or then of the head, while the batch is read."""
        with captured(module) as found:
            self._forward()
        return found[0]


def shut(texts: Batch, special: bool) -> torch.Tensor:
    """[positions], where the target's attention should add nothing: its kv head SPECIAL, or the others."""
    digit = texts.next_digit
    if special:
        return digit != SPECIAL_DIGIT
    return torch.isin(digit, torch.tensor(sorted(BY_STATE)))


def head_states(head: Any, next_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """tests.reference.mtp's head on whole texts: next_tokens [sequences, entries], hidden and the result
    [sequences, entries, hidden_size]; each entry sees those before it."""
    embed, rotary, _ = head._shared
    pair = torch.cat([head.pre_fc_norm_embedding(embed(next_tokens)), head.pre_fc_norm_hidden(hidden)], -1)
    x = head.fc(pair)
    positions = torch.arange(x.shape[1])[None]
    x = head.layers[0](
        x,
        position_embeddings=rotary(x, positions),
        attention_mask=None,
        position_ids=positions,
        past_key_values=None,
    )
    return head.norm(x)


def fit(
    inputs: torch.Tensor,
    wanted: torch.Tensor,
    select: torch.Tensor | None = None,
    past: int = 0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weights [outputs, inputs] of the least-squares fit over the selected positions, or those from `past` on.

    weight: [sequences, positions, 1], how much a position counts.
    """
    if weight is not None:
        inputs, wanted = inputs * weight.sqrt(), wanted * weight.sqrt()
    if select is None:
        inputs, wanted = inputs[:, past:].flatten(0, 1), wanted[:, past:].flatten(0, 1)
    else:
        inputs, wanted = inputs[select], wanted[select]
    x, y = inputs.double(), wanted.double()
    ridge = RIDGE * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.float()


@contextmanager
def captured(module: Any) -> Iterator[list[torch.Tensor]]:
    """First input of each call of a module."""
    found: list[torch.Tensor] = []

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
