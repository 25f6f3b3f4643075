"""Which of the pairs that fit gets a request. Pure.

A policy of one's own is `module:attribute`: a class without arguments, or a function, with the signature of
`Policy.choose`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import OptionError

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


class Policy(Protocol):
    """Chooses a pair."""

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """One of the candidates, of which there is at least one. tokens: length of the prompt, estimated.

        Called in the router's event loop, so it must not wait for anything.
        """
        ...


class Random:
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

    def of(self, one: Instance) -> int:
        return self._last.get((one.role, one.url), 0)

    def take(self, pair: Candidate) -> Candidate:
        self._now += 1
        if len(self._last) >= MAX_REMEMBERED:
            self._last.clear()
        for one in (pair.prefill, pair.decode):
            self._last[(one.role, one.url)] = self._now
        return pair


class RoundRobin:
    """The prefill server whose turn is the longest ago, and of those that fit it the decode server of which that holds.

    Servers come and go and do not fit all others, so that there is no circle to go round.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """The pair whose turn it is."""
        return self._turns.take(
            min(candidates, key=lambda pair: (self._turns.of(pair.prefill), self._turns.of(pair.decode)))
        )


class LeastTokens:
    """The pair with the fewest outstanding tokens, both servers taken together; of equal ones, in turn.

    Where all candidates of a role say how many tokens they can hold, it is the share of that which counts, so that a
    large server gets more than a small one.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, candidates: Sequence[Candidate], tokens: int) -> Candidate:
        """The least loaded pair."""
        prefill_by_share = all(pair.prefill.tokens for pair in candidates)
        decode_by_share = all(pair.decode.tokens for pair in candidates)

        def weight(pair: Candidate) -> tuple[float, int, int, int]:
            # Both sides of one pair must be added up in one unit: tokens, or shares.
            shared = prefill_by_share and decode_by_share
            prefill = pair.prefill_load.tokens / (pair.prefill.tokens if shared else 1)
            decode = pair.decode_load.tokens / (pair.decode.tokens if shared else 1)
            requests = pair.prefill_load.requests + pair.decode_load.requests
            return prefill + decode, requests, self._turns.of(pair.prefill), self._turns.of(pair.decode)

        return self._turns.take(min(candidates, key=weight))


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
