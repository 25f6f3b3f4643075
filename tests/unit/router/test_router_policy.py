"""Which pair a policy chooses."""

import sys
import types
from collections import Counter
from itertools import pairwise

import pytest

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import OptionError
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router.policy import Candidate, LeastTokens, Load, Random, RoundRobin, load


def pairs(
    prefills: int, decodes: int, *, capacity: tuple[int, int] = (0, 0), loads: dict[str, tuple[int, int]] | None = None
) -> list[Candidate]:
    """All pairs of p0, p1, ... and d0, d1, ...; loads: requests and tokens by name. capacity: of p0 and the others."""
    given = loads or {}

    def of(role: Side, number: int) -> tuple[Instance, Load]:
        name = f"{role.value[0]}{number}"
        tokens = capacity[0] if number == 0 else capacity[1]
        return Instance(role=role, url=f"http://{name}:1", tokens=tokens), Load(*given.get(name, (0, 0)))

    left = [of(Side.PREFILL, number) for number in range(prefills)]
    right = [of(Side.DECODE, number) for number in range(decodes)]
    return [Candidate(one[0], other[0], one[1], other[1]) for one in left for other in right]


def names(pair: Candidate) -> str:
    return f"{pair.prefill.host} {pair.decode.host}"


def test_random_takes_every_pair_about_as_often() -> None:
    policy, candidates = Random(seed=1), pairs(2, 2)
    counts = Counter(names(policy.choose(candidates, 1)) for _ in range(4000))
    assert len(counts) == 4 and all(800 < count < 1200 for count in counts.values())


def test_round_robin_goes_round_on_both_sides() -> None:
    policy, candidates = RoundRobin(), pairs(2, 3)
    chosen = [policy.choose(candidates, 1) for _ in range(12)]
    assert Counter(one.prefill.host for one in chosen) == {"p0": 6, "p1": 6}
    assert Counter(one.decode.host for one in chosen) == {"d0": 4, "d1": 4, "d2": 4}
    assert all(one.prefill != other.prefill for one, other in pairwise(chosen))


def test_round_robin_is_fair_where_not_all_fit() -> None:
    policy = RoundRobin()
    candidates = [pair for pair in pairs(2, 2) if names(pair) != "p0 d1"]
    chosen = Counter(names(policy.choose(candidates, 1)) for _ in range(8))
    assert chosen["p0 d0"] == 4 and chosen["p1 d0"] + chosen["p1 d1"] == 4


def test_round_robin_gives_a_new_server_its_turn_and_not_all_of_them() -> None:
    policy = RoundRobin()
    for _ in range(100):
        policy.choose(pairs(2, 1), 1)
    chosen = Counter(policy.choose(pairs(3, 1), 1).prefill.host for _ in range(9))
    assert chosen == {"p0": 3, "p1": 3, "p2": 3}


def test_least_tokens_takes_the_pair_with_the_fewest() -> None:
    loads = {"p0": (1, 100), "p1": (5, 50), "d0": (1, 500), "d1": (9, 400)}
    assert names(LeastTokens().choose(pairs(2, 2, loads=loads), 1)) == "p1 d1"


def test_least_tokens_counts_shares_of_what_a_server_holds() -> None:
    loads = {"p0": (4, 4000), "p1": (2, 2000), "d0": (4, 4000), "d1": (2, 2000)}
    assert names(LeastTokens().choose(pairs(2, 2, loads=loads, capacity=(40_000, 4_000)), 1)) == "p0 d0"
    # Where one does not say what it holds, tokens are compared.
    assert names(LeastTokens().choose(pairs(2, 2, loads=loads, capacity=(40_000, 0)), 1)) == "p1 d1"


def test_least_tokens_takes_idle_servers_in_turn() -> None:
    policy = LeastTokens()
    chosen = Counter(policy.choose(pairs(2, 2), 1).prefill.host for _ in range(6))
    assert chosen == {"p0": 3, "p1": 3}


def test_least_tokens_evens_out() -> None:
    policy, candidates = LeastTokens(), pairs(3, 2)
    tokens = [900, 100, 100, 100, 500, 300, 300, 100] * 10
    for count in tokens:
        pair = policy.choose(candidates, count)
        pair.prefill_load.add(count)
        pair.decode_load.add(count)
    # Candidates of one server share its load here only by URL: look at each server once.
    by_prefill = {pair.prefill.host: pair.prefill_load.tokens for pair in candidates}
    by_decode = {pair.decode.host: pair.decode_load.tokens for pair in candidates}
    assert sum(by_prefill.values()) == sum(by_decode.values()) == sum(tokens)
    assert max(by_prefill.values()) - min(by_prefill.values()) <= max(tokens)
    assert max(by_decode.values()) - min(by_decode.values()) <= 2 * max(tokens)


class Last:
    def choose(self, candidates, tokens):
        return candidates[-1]


def test_a_policy_of_ones_own_is_a_class_an_object_or_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_policies")
    module.Last, module.last, module.function = Last, Last(), lambda candidates, tokens: candidates[-1]
    monkeypatch.setitem(sys.modules, "own_policies", module)
    candidates = pairs(2, 2)
    for name in ("Last", "last", "function"):
        assert load(f"own_policies:{name}").choose(candidates, 1) is candidates[-1]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nearest", "must be random, round_robin, least_tokens"),
        (":", "must be"),
        ("no_such_module_here:x", "ModuleNotFoundError"),
        ("json:x", "AttributeError"),
        ("sys:maxsize", "neither a class"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        load(name)


def test_the_built_in_ones_are_found_by_name() -> None:
    assert [type(load(name)) for name in ("random", "round_robin", "least_tokens")] == [Random, RoundRobin, LeastTokens]
