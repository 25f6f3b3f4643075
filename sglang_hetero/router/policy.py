"""Which of the pairs that fit gets a request. Pure.

A policy of one's own is `module:attribute`: a class without arguments, or a function, with the signature of
`Policy.choose`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import OptionError

MAX_OFFERED = 1024
"""Pairs that somebody else's policy is given; of more, as many drawn by lot. It looks at all, in the event loop."""
MAX_REMEMBERED = 4096
"""Servers of which it is known when their last turn was; then all begin anew. They come and go for months."""


@dataclass
class Load:
    """What one server has been given and has not finished. tokens: those that it holds or will hold, estimated."""

    requests: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """One more request of so many tokens."""
        self.requests += 1
        self.tokens += tokens

    def remove(self, tokens: int) -> None:
        """That request is over."""
        self.requests -= 1
        self.tokens -= tokens


@dataclass(frozen=True)
class Candidate:
    """A pair that fits and may be used now. It is for looking at only."""

    prefill: Instance
    decode: Instance
    prefill_load: Load
    decode_load: Load


class Member(Protocol):
    """One server, as a policy sees it."""

    @property
    def instance(self) -> Instance:
        """Its record."""
        ...

    @property
    def load(self) -> Load:
        """What it has to do."""
        ...


@dataclass(frozen=True)
class _End:
    """One side of a candidate that was given by itself."""

    instance: Instance
    load: Load


Block = tuple[Sequence[Member], Sequence[Member]]
"""Prefill and decode servers of which each fits each. A fleet of a hundred and a hundred equal ones is one block."""


class Pairs(Sequence[Candidate]):
    """The pairs of some blocks, each made when it is looked at: there may be ten thousand, and a request takes one."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = [block for block in blocks if block[0] and block[1]]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Pairs:
        """Candidates, however they are given."""
        if isinstance(candidates, Pairs):
            return candidates
        return cls(([_End(one.prefill, one.prefill_load)], [_End(one.decode, one.decode_load)]) for one in candidates)

    def __len__(self) -> int:
        return sum(len(prefills) * len(decodes) for prefills, decodes in self.blocks)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        rest = index if index >= 0 else index + len(self)
        for prefills, decodes in self.blocks:
            if 0 <= rest < len(prefills) * len(decodes):
                return candidate(prefills[rest // len(decodes)], decodes[rest % len(decodes)])
            rest -= len(prefills) * len(decodes)
        raise IndexError(index)

    def some(self, most: int) -> list[Candidate]:
        """All of them, or `most` drawn by lot."""
        count = len(self)
        return [self[one] for one in (range(count) if count <= most else random.sample(range(count), most))]


def candidate(prefill: Member, decode: Member) -> Candidate:
    """These two."""
    return Candidate(prefill.instance, decode.instance, prefill.load, decode.load)


class Policy(Protocol):
    """Chooses a pair."""

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """One of the candidates, of which there is at least one. tokens: length of the prompt, estimated.

        Called in the router's event loop, so it must not wait for anything.
        """
        ...


class BySide:
    """A policy that looks at each server of a block once, not at each pair, and so can be given all."""


def choice(policy: Policy, pairs: Pairs, tokens: int) -> Candidate:
    """What a policy takes of these. Raises what it raises, and ValueError for what is no candidate."""
    if isinstance(policy, BySide):
        return policy.choose(pairs, tokens)
    offered = pairs.some(MAX_OFFERED)
    return offered[offered.index(policy.choose(offered, tokens))]


class Random(BySide):
    """Every pair alike."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """Any of them."""
        return self._random.choice(candidates)


class _Turns:
    """When each server was last chosen, by URL and role."""

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[tuple[str, str], int] = {}

    def of(self, one: Member) -> int:
        return self._last.get((one.instance.role, one.instance.url), 0)

    def take(self, prefill: Member, decode: Member) -> Candidate:
        self._now += 1
        if len(self._last) >= MAX_REMEMBERED:
            self._last.clear()
        for one in (prefill, decode):
            self._last[(one.instance.role, one.instance.url)] = self._now
        return candidate(prefill, decode)


class RoundRobin(BySide):
    """The prefill server whose turn is the longest ago, and of those that fit it the decode server of which that holds.

    Servers come and go and do not fit all others, so that there is no circle to go round.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """The pair whose turn it is."""
        turn = self._turns.of
        best = [(min(prefills, key=turn), min(decodes, key=turn)) for prefills, decodes in Pairs.of(candidates).blocks]
        return self._turns.take(*min(best, key=lambda pair: (turn(pair[0]), turn(pair[1]))))


class LeastTokens(BySide):
    """The pair with the fewest outstanding tokens, both servers taken together; of equal ones, in turn.

    Where all candidates say how many tokens they can hold, it is the share of that which counts, so that a large server
    gets more than a small one.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """The least loaded pair."""
        blocks = Pairs.of(candidates).blocks
        # Both sides of one pair must be added up in one unit: tokens, or shares.
        shared = all(one.instance.tokens for block in blocks for side in block for one in side)

        def weight(one: Member) -> tuple[float, int, int]:
            held = one.load.tokens / one.instance.tokens if shared else one.load.tokens
            return held, one.load.requests, self._turns.of(one)

        def both(pair: tuple[Member, Member]) -> tuple[float, int, int, int]:
            (held, requests, turn), (held_too, requests_too, turn_too) = weight(pair[0]), weight(pair[1])
            return held + held_too, requests + requests_too, turn, turn_too

        # In a block the least of all sums is that of the least prefill and the least decode.
        best = [(min(prefills, key=weight), min(decodes, key=weight)) for prefills, decodes in blocks]
        return self._turns.take(*min(best, key=both))


class _Function:
    """A policy that is a plain function."""

    def __init__(self, choose: Callable[[Sequence[Candidate], int], Candidate]) -> None:
        self._choose = choose

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """What the function says."""
        return self._choose(candidates, tokens)


BUILT_IN: dict[str, Callable[[], Policy]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "least_tokens": LeastTokens,
}


def load(name: str) -> Policy:
    """The policy of this name, or of `module:attribute`. Raises OptionError."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise OptionError(f"--policy {name}: must be {', '.join(BUILT_IN)}, or module:attribute of your own")
    try:
        found = getattr(importlib.import_module(module), attribute)
        made = found() if isinstance(found, type) else found
    except Exception as error:
        raise OptionError(f"--policy {name}: {type(error).__name__}: {error}") from error
    if callable(getattr(made, "choose", None)):
        chosen: Policy = made
        return chosen
    if callable(made):
        return _Function(made)
    raise OptionError(f"--policy {name}: neither a class with a method choose(candidates, tokens) nor a function")
