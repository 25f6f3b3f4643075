"""A pair is found by looking at each server, not at each pair, with the same result."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hetero.discovery.record import Instance
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router.fits import Fits, cheapest
from sglang_hetero.router.fleet import Fleet, NoPair, Server
from sglang_hetero.router.health import Limits
from sglang_hetero.router.pairing import Fit, Pairing, Verdict, stock
from sglang_hetero.router.policy import MAX_OFFERED, LeastTokens, Pairs, RoundRobin, choice
from tests.unit.discovery.servers import manifests
from tests.unit.router.fakes import Changing, run, until


def server(role: Side, number: int, tier: int | None = 0, tokens: int = 0, capacity: int = 0) -> Server:
    made = Server(Instance(role=role, url=f"http://{role[0]}{number}:1", tokens=capacity), Limits(), lambda: 0.0)
    made.known = stock(made.instance)
    if tier == 0:
        made.health.probe_answered()
    elif tier is None:
        made.health.probe_failed("gone")
    made.load.add(tokens)
    return made


TIERS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4)


@given(st.data(), TIERS, TIERS)
def test_the_cheapest_pairs_are_those_of_looking_at_each(
    data: st.DataObject, left: list[int], right: list[int]
) -> None:
    prefills = [server(Side.PREFILL, number, tier) for number, tier in enumerate(left)]
    decodes = [server(Side.DECODE, number, tier) for number, tier in enumerate(right)]
    keys = [one.key for one in (*prefills, *decodes)]
    keys += [(one.key, other.key) for one in prefills for other in decodes]
    avoid = data.draw(st.dictionaries(st.sampled_from(keys), st.integers(1, 4)))

    def cost(pair: tuple[Server, Server]) -> tuple[int, int]:
        one, other = pair
        against = (avoid.get(key, 0) for key in (one.key, other.key, (one.key, other.key)))
        return sum(against), one.health.tier + other.health.tier

    pairs = list(itertools.product(prefills, decodes))
    least = min(map(cost, pairs))
    found = [(one.prefill.url, one.decode.url) for one in cheapest([(prefills, decodes)], avoid)]
    assert sorted(found) == sorted(
        (one.instance.url, other.instance.url) for one, other in pairs if cost((one, other)) == least
    )


@given(st.data(), st.booleans())
def test_the_least_loaded_pair_is_that_of_looking_at_each(data: st.DataObject, sized: bool) -> None:
    sizes = st.integers(1, 8) if sized else st.just(0)
    ends = st.tuples(st.integers(0, 100), sizes)
    blocks = [
        tuple(
            [server(role, 10 * block + number, 0, tokens, capacity) for number, (tokens, capacity) in enumerate(drawn)]
            for role, drawn in ((role, data.draw(st.lists(ends, min_size=1, max_size=4))) for role in Side)
        )
        for block in range(data.draw(st.integers(1, 3)))
    ]
    pairs = Pairs(blocks)

    def weight(one) -> float:
        share = (one.prefill.tokens, one.decode.tokens) if sized else (1, 1)
        return one.prefill_load.tokens / share[0] + one.decode_load.tokens / share[1]

    assert weight(choice(LeastTokens(), pairs, 1)) == min(map(weight, pairs))


def test_pairs_are_a_sequence() -> None:
    a, b = ([server(role, number) for number in range(3)] for role in Side)
    pairs = Pairs([(a, b), ([], b), (a[:1], b[:2])])
    assert len(pairs) == 11 and pairs[-1] == pairs[10] and pairs[2:4] == [pairs[2], pairs[3]]
    assert [(one.prefill.host, one.decode.host) for one in pairs][3:] == [
        *(("p1", f"d{number}") for number in range(3)),
        *(("p2", f"d{number}") for number in range(3)),
        *(("p0", "d0"), ("p0", "d1")),
    ]
    for index in (11, -12):
        with pytest.raises(IndexError):
            pairs[index]


def test_a_policy_of_ones_own_is_offered_no_more_than_it_can_look_at() -> None:
    class Last:
        def choose(self, candidates, tokens):
            self.offered = len(candidates)
            return candidates[-1]

    policy = Last()
    choice(policy, Pairs([tuple([server(role, number) for number in range(100)] for role in Side)]), 1)
    assert policy.offered == MAX_OFFERED
    with pytest.raises(ValueError):
        choice(type("Other", (), {"choose": lambda *_: None})(), Pairs([([server(Side.PREFILL, 1)],) * 2]), 1)


def test_pairs_of_few_ranks_are_judged_first() -> None:
    """So that nobody's large ones keep the others waiting."""
    ranks = manifests(Side.PREFILL, 4), manifests(Side.DECODE, 4)
    large, small = ([server(side, number) for side in Side] for number in (1, 2))
    for one, all_ranks in zip(large, ranks, strict=True):
        one.known = replace(one.known, ranks=all_ranks)
    for one, all_ranks in zip(small, ranks, strict=True):
        one.known = replace(one.known, ranks=all_ranks[:1])
    found = Fits().unjudged([*large, *small])
    assert [len(left.ranks) * len(right.ranks) for left, right in found] == [1, 4, 4, 16]


def test_verdicts_on_layouts_that_nobody_has_any_more_are_dropped() -> None:
    fits, one, other = Fits(), server(Side.PREFILL, 1), server(Side.DECODE, 1)
    assert fits.verdict(one.known, other.known).fit is Fit.PENDING and not fits.blocks([one, other])
    ((left, right),) = fits.unjudged([one, other])
    fits.learn(left, right, Verdict(Fit.YES, "they fit"))
    assert fits.blocks([one, other]) == [([one], [other])] and not fits.unjudged([one, other])
    assert fits.verdict(one.known, other.known).fit is Fit.YES
    other.known = replace(other.known, mode="off")
    fits.changed()
    assert not fits.blocks([one, other]) and len(fits.unjudged([one, other])) == 1
    assert fits.verdict(left, right).fit is Fit.PENDING


class Telling:
    async def healthy(self, instance):
        pass

    async def describe(self, instance):
        return stock(instance)


def test_a_request_looks_at_servers_and_not_at_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        count = 40
        members = Changing(
            *(Instance(role=role, url=f"http://{role[0]}{number}:1") for role in Side for number in range(count))
        )
        fleet = Fleet(
            members,
            Telling(),
            policy=RoundRobin(),
            pairing=Pairing(),
            limits=Limits(interval=1000.0),
            clock=asyncio.get_running_loop().time,
        )
        await fleet.start()
        try:
            await until(lambda: all(one.health.tier == 0 and one.known.told for one in fleet.servers) and fleet.ready())
            looked = 0
            of = Server.instance.fget

            def counted(self):
                nonlocal looked
                looked += 1
                return of(self)

            monkeypatch.setattr(Server, "instance", property(counted))
            fleet.take(1, 1, {}).done()
            assert 0 < looked < 12 * 2 * count < count * count
            for one in fleet.servers:
                for _ in range(3):
                    one.health.probe_failed("gone")
            looked = 0
            with pytest.raises(NoPair) as none:
                fleet.take(1, 1, {})
            assert (
                looked < 12 * 2 * count and len(str(none.value)) < 2000 and f"{2 * count - 8} more" in str(none.value)
            )
        finally:
            await fleet.close()

    run(test)
