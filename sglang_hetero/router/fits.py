"""Which of the servers that there are fit each other, by what is known of each one now. Pure.

Verdicts are kept by the layouts of both sides, never by server: what a server says of itself is looked up at the moment
of use, so that one that has been restarted, or has to tell anew, cannot be given requests for what it was before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_hetero.layout.manifest import Side

from .pairing import Fit, Known, Verdict, pending
from .policy import Block, Pairs

if TYPE_CHECKING:
    from .fleet import Server

Key = tuple[str, str]
"""Role and URL of a server."""
Avoid = dict[Key | tuple[Key, Key], int]
"""What speaks against servers, and pairs of them: the sum of the charges in fleet.py."""
ServerBlock = tuple[list["Server"], list["Server"]]
NOT_YET = Verdict(Fit.PENDING, "it has not been looked at yet")
Cost = tuple[int, int]
"""Of a pair: what speaks against it, and its servers' tiers added up."""


class Fits:
    """Verdicts by layouts, and the blocks of servers that they make."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._blocks: list[ServerBlock] | None = None

    def changed(self) -> None:
        """Something else is known of a server, or there are others."""
        self._blocks = None

    def verdict(self, prefill: Known, decode: Known) -> Verdict:
        """What is said of these two."""
        if (waiting := pending(prefill, decode)) is not None:
            return waiting
        return self._verdicts.get((prefill.layout, decode.layout), NOT_YET).between(prefill, decode)

    def learn(self, prefill: Known, decode: Known, verdict: Verdict) -> None:
        """What was found out about their layouts."""
        self._verdicts[(prefill.layout, decode.layout)] = verdict
        self.changed()

    def unjudged(self, servers: Iterable[Server]) -> list[tuple[Known, Known]]:
        """One pair of each two layouts of which nothing is said yet, those of few ranks first: a large one may take a
        while. Verdicts on layouts that no server has any more are dropped."""
        prefills, decodes = _by_layout(servers)
        self._verdicts = {
            key: verdict for key, verdict in self._verdicts.items() if key[0] in prefills and key[1] in decodes
        }
        found = [
            (some[0].known, others[0].known)
            for left, some in prefills.items()
            for right, others in decodes.items()
            if (left, right) not in self._verdicts
        ]
        return sorted(found, key=lambda pair: len(pair[0].ranks) * len(pair[1].ranks))

    def blocks(self, servers: Iterable[Server]) -> list[ServerBlock]:
        """Servers that fit: prefills of one layout, and all decodes that fit it."""
        if self._blocks is None:
            prefills, decodes = _by_layout(servers)
            found = []
            for left, some in prefills.items():
                fitting = [
                    one
                    for right, others in decodes.items()
                    if self._verdicts.get((left, right), NOT_YET).fit is Fit.YES
                    for one in others
                ]
                if fitting:
                    found.append((some, fitting))
            self._blocks = found
        return self._blocks

    def refusal(self, servers: Iterable[Server]) -> str:
        """One refusal of a pair that does not fit; empty if there is none."""
        prefills, decodes = _by_layout(servers)
        for left, some in prefills.items():
            for right, others in decodes.items():
                verdict = self._verdicts.get((left, right), NOT_YET)
                if verdict.fit is Fit.NO:
                    return verdict.between(some[0].known, others[0].known).reason
        return ""


def _by_layout(servers: Iterable[Server]) -> tuple[dict[str, list[Server]], dict[str, list[Server]]]:
    """Servers that have told, of either role."""
    prefills: dict[str, list[Server]] = {}
    decodes: dict[str, list[Server]] = {}
    for one in servers:
        if one.known.told:
            found = prefills if one.instance.role is Side.PREFILL else decodes
            found.setdefault(one.known.layout, []).append(one)
    return prefills, decodes


def cheapest(blocks: Iterable[ServerBlock], avoid: Avoid) -> Pairs:
    """Of pairs that may all be used, those against which the least speaks; of equal ones, the healthiest.

    Costs of a pair are those of its servers added up, so that servers of equal cost are looked at together. Only a pair
    that this request was given before has a charge of its own.
    """
    best: Cost | None = None
    found: list[Block] = []
    for prefills, decodes in blocks:
        for left_cost, left in _levels(prefills, avoid).items():
            for right_cost, right in _levels(decodes, avoid).items():
                base = (left_cost[0] + right_cost[0], left_cost[1] + right_cost[1])
                for cost, block in _cut(base, left, right, avoid):
                    if best is None or cost < best:
                        best, found = cost, []
                    if cost == best:
                        found.append(block)
    return Pairs(found)


def _levels(servers: Iterable[Server], avoid: Avoid) -> dict[Cost, list[Server]]:
    found: dict[Cost, list[Server]] = {}
    for one in servers:
        found.setdefault((avoid.get(one.key, 0) if avoid else 0, one.health.tier or 0), []).append(one)
    return found


def _cut(base: Cost, left: list[Server], right: list[Server], avoid: Avoid) -> Iterable[tuple[Cost, ServerBlock]]:
    """A block of servers without, and each by itself, the pairs that have been tried."""
    if not avoid:
        yield base, (left, right)
        return
    prefills, decodes = {one.key: one for one in left}, {one.key: one for one in right}
    tried = {
        key: charge
        for key, charge in avoid.items()
        if isinstance(key[0], tuple) and key[0] in prefills and key[1] in decodes
    }
    for key, charge in tried.items():
        yield (base[0] + charge, base[1]), ([prefills[key[0]]], [decodes[key[1]]])
    used = {key[0] for key in tried}
    for one in used:
        fresh = [server for key, server in decodes.items() if (one, key) not in tried]
        if fresh:
            yield base, ([prefills[one]], fresh)
    rest = [server for key, server in prefills.items() if key not in used]
    if rest:
        yield base, (rest, right)
