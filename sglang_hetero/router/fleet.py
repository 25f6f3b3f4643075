"""The servers that a router knows: followed, asked after, paired, and given to requests.

Everything here happens in one event loop. Who there is comes from `Members`, whose callbacks come from any thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sglang_hetero.discovery.members import Members
from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.manifest import Side

from .ask import Asker
from .health import Health, Limits, State
from .pairing import Fit, Known, Pairing, Verdict
from .policy import Candidate, LeastTokens, Load, Policy

logger = logging.getLogger(__name__)

DESCRIBE_SECONDS = 300.0
"""A server that is well is asked again after so long what its caches are: one that is given by URL may have been
restarted with other settings between two probes."""
MAX_REMEMBERED = 1024
"""Layouts by fingerprint, and texts that are not logged again; then it begins anew. Servers come and go for months."""
LOST, REFUSED, ENDED = "lost", "refused", "ended"
"""Kinds of failures that are counted: the connection broke; the server said so; a stream broke off."""
CHARGE_MOST, CHARGE_PREFILL, CHARGE_DECODE = 4, 2, 1
"""What keeps a retry away from a server: it broke the connection; or it may be to blame, prefill rather than decode."""

CHARGE_PAIR = 1
"""And from a pair that has been tried, while there is one of the same servers that has not."""

Key = tuple[str, str]
"""Role and URL of a server."""
Avoid = dict[Key | tuple[Key, Key], int]
"""What speaks against servers, and pairs of them, by the sum of the charges above."""


class NoPair(HeteroError):
    """There is no pair of servers for a request now."""


class Server:
    """One server, as long as it is a member."""

    def __init__(self, instance: Instance, limits: Limits, clock: Callable[[], float]) -> None:
        self.known = Known(instance)
        self.health = Health(limits, clock)
        self.load = Load()
        self.failures: Counter[str] = Counter()
        self.look_again = asyncio.Event()
        """Set when the time of its next probe may have changed."""
        self.described_at: float | None = None
        """When it said last what its caches are; None if that may not hold any more."""

    @property
    def instance(self) -> Instance:
        """Its record, as complete as it is known."""
        return self.known.instance

    @property
    def label(self) -> str:
        """Role and URL."""
        return self.instance.label

    @property
    def key(self) -> Key:
        """What it is found by."""
        return (self.instance.role, self.instance.url)


@dataclass
class Lease:
    """A pair that a request has been given. Each side is given back once, however often it is said."""

    prefill: Server
    decode: Server
    prefill_tokens: int
    decode_tokens: int
    _held: set[str] = field(default_factory=lambda: {"prefill", "decode"})

    def prefill_done(self) -> None:
        """Prefill has nothing to do with it any more."""
        if "prefill" in self._held:
            self._held.remove("prefill")
            self.prefill.load.remove(self.prefill_tokens)

    def done(self) -> None:
        """The request is over."""
        self.prefill_done()
        if "decode" in self._held:
            self._held.remove("decode")
            self.decode.load.remove(self.decode_tokens)


class Fleet:
    """Knows who there is, who is well and who fits whom, and chooses."""

    def __init__(
        self,
        members: Members,
        asker: Asker,
        *,
        policy: Policy,
        pairing: Pairing,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._members, self._asker, self._policy, self._pairing = members, asker, policy, pairing
        self._limits, self._clock = limits, clock
        self._fallback = LeastTokens()
        self._servers: dict[Key, Server] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._found: dict[Key, Instance] = {}
        """The records as Members gives them."""
        self._by_fingerprint: dict[tuple[str, str], Known] = {}
        self._verdicts: dict[tuple[Key, Key], Verdict] = {}
        self._changed = asyncio.Event()
        self._judge: asyncio.Task[None] | None = None
        self._told: set[str] = set()
        self._policy_failed = False

    async def start(self) -> None:
        """Follow the members and begin to ask them."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            with suppress(RuntimeError):  # the loop has ended, and so has the router
                loop.call_soon_threadsafe(self._follow)

        self._judge = asyncio.create_task(self._keep_judging())
        self._members.subscribe(changed)
        self._follow()

    async def close(self) -> None:
        """Stop asking. Members are closed by who made them."""
        tasks = [*self._tasks.values(), *([self._judge] if self._judge else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Who there is

    def _follow(self) -> None:
        """Take over what Members says now."""
        wanted = {(str(one.role), one.url): one for one in self._members.snapshot()}
        for key in self._servers.keys() - wanted.keys():
            logger.info("%s is gone from the list", self._servers[key].label)
            self._tasks.pop(key).cancel()
            del self._servers[key], self._found[key]
        for key, instance in wanted.items():
            former = self._found.get(key)
            if former == instance:
                continue
            self._found[key] = instance
            if former is not None and former.incarnation == instance.incarnation:
                server = self._servers[key]
                server.described_at, server.health.next_probe = None, self._clock()
                server.look_again.set()
                continue
            self._begin(key, instance, restarted=former is not None)
        self._changed.set()

    def _begin(self, key: Key, instance: Instance, *, restarted: bool) -> None:
        server = Server(instance, self._limits, self._clock)
        # A record that is complete tells whose layout it has: then it is not waited for.
        same = self._by_fingerprint.get((instance.role, instance.fingerprint)) if instance.fingerprint else None
        if same is not None:
            server.known = replace(same, instance=instance)
        if restarted:
            self._tasks.pop(key).cancel()
        logger.info("%s is %s", server.label, "a new process" if restarted else "on the list")
        self._servers[key] = server
        self._tasks[key] = asyncio.create_task(self._look_after(server))

    # How they are

    async def _look_after(self, server: Server) -> None:
        """Probe one server for as long as it is a member."""
        while True:
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, server.health.next_probe - self._clock())):
                        await server.look_again.wait()
                server.look_again.clear()
                if self._clock() >= server.health.next_probe:
                    await self._probe(server)
            except Exception:  # nobody would notice that a server is not looked after any more
                logger.exception("%s cannot be looked after; it goes on", server.label)
                await asyncio.sleep(self._limits.backoff)

    async def _probe(self, server: Server) -> None:
        before = server.health.state
        try:
            await self._asker.healthy(server.instance)
        except HeteroError as error:
            server.health.probe_failed(str(error))
            server.described_at = None
            self._tell(server, before)
            return
        server.health.probe_answered()
        self._tell(server, before)
        if server.described_at is None or self._clock() - server.described_at > DESCRIBE_SECONDS:
            await self._describe(server)

    async def _describe(self, server: Server) -> None:
        found = self._found.get(server.key)
        if found is None:
            return
        try:
            known = await self._asker.describe(found)
        except HeteroError as error:
            if not server.known.told:
                self._say_once(f"{server.label}: {error}")
                server.known = replace(server.known, why=str(error))
                self._changed.set()
            return
        server.described_at = self._clock()
        if known != server.known:
            server.known = known
            fingerprint = known.instance.fingerprint
            if fingerprint and known.told:
                if len(self._by_fingerprint) >= MAX_REMEMBERED:
                    self._by_fingerprint.clear()
                self._by_fingerprint[(known.instance.role, fingerprint)] = known
            if not known.ours:
                self._say_once(f"{server.label}: {known.why}")
        if not known.told:
            server.described_at = None
        self._changed.set()

    def failed(self, server: Server, cause: str, kind: str, *, blame: bool = True) -> None:
        """A request failed at this server. kind: LOST, REFUSED or ENDED. blame: whether it says something about it."""
        server.failures[kind] += 1
        if not blame:
            return
        before = server.health.state
        server.health.request_failed(cause, lost=kind != REFUSED)
        if kind != REFUSED:
            server.described_at = None
        server.look_again.set()
        self._tell(server, before)

    def succeeded(self, server: Server) -> None:
        """A server has done its part of a request."""
        before = server.health.state
        server.health.request_succeeded()
        self._tell(server, before)

    def _tell(self, server: Server, before: State) -> None:
        now = server.health.state
        if now is not before:
            cause = f": {server.health.cause}" if server.health.cause and now is not State.PROBING else ""
            logger.log(
                logging.INFO if now in (State.HEALTHY, State.PROBING) else logging.WARNING,
                "%s was %s, is %s%s",
                server.label,
                before,
                now,
                cause,
            )

    # Who fits whom

    async def _keep_judging(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            known = {key: server.known for key, server in self._servers.items()}
            try:
                verdicts = await asyncio.to_thread(self._judge_all, known)
            except Exception:
                logger.exception("pairs cannot be judged; what was known before is kept")
                continue
            self._verdicts = verdicts
            for verdict in verdicts.values():
                if verdict.fit is Fit.NO:
                    self._say_once(f"not a pair: {verdict.reason}")

    def _judge_all(self, known: dict[Key, Known]) -> dict[tuple[Key, Key], Verdict]:
        return {
            (one, other): self._pairing.judge(known[one], known[other])
            for one in known
            for other in known
            if one[0] == Side.PREFILL and other[0] == Side.DECODE
        }

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            if len(self._told) >= MAX_REMEMBERED:
                self._told.clear()
            self._told.add(text)
            logger.warning("%s", text)

    # What requests get

    @property
    def servers(self) -> list[Server]:
        """All members, by role and URL."""
        return [self._servers[key] for key in sorted(self._servers)]

    @property
    def trouble(self) -> str:
        """Why the list of members may be old."""
        return self._members.trouble

    def of(self, side: Side) -> list[Server]:
        """Those of one role; the ones that may be used first."""
        found = [server for server in self.servers if server.instance.role is side]
        return sorted(found, key=lambda server: 2 if server.health.tier is None else server.health.tier)

    def verdicts(self) -> list[tuple[Server, Server, Verdict]]:
        """Every pair and what is said of it."""
        pending = Verdict(Fit.PENDING, "it has not been looked at yet")
        return [
            (one, other, self._verdicts.get((one.key, other.key), pending))
            for one in self.servers
            for other in self.servers
            if one.instance.role is Side.PREFILL and other.instance.role is Side.DECODE
        ]

    def ready(self) -> bool:
        """Whether there is a pair that fits of which both are healthy."""
        return any(tier == 0 for _, _, tier in self._usable())

    def _usable(self) -> list[tuple[Server, Server, int]]:
        """Pairs that fit and may be used, with the tiers of both added up: 0 if both are healthy."""
        found = []
        for (one, other), verdict in self._verdicts.items():
            if verdict.fit is not Fit.YES:
                continue
            prefill, decode = self._servers.get(one), self._servers.get(other)
            if prefill is None or decode is None:
                continue
            tiers = prefill.health.tier, decode.health.tier
            if tiers[0] is not None and tiers[1] is not None:
                found.append((prefill, decode, tiers[0] + tiers[1]))
        return found

    def take(self, prompt: int, new: int, avoid: Avoid, model: object = None) -> Lease:
        """A pair for a request of so many prompt and new tokens. avoid: what speaks against servers that it was tried
        with. model: the name that it asks for; one that no server has (`default`, an adapter's) may mean any of them.
        Raises NoPair with the reason and the remedy."""
        usable = self._usable()
        if any(server.instance.model == model for server in self._servers.values()):
            usable = [pair for pair in usable if pair[0].instance.model in (model, "")]
        if not usable:
            raise NoPair(self.why_none(model))
        ranked: dict[tuple[int, int], list[tuple[Server, Server]]] = {}
        for prefill, decode, tier in usable:
            keys = (prefill.key, decode.key, (prefill.key, decode.key))
            against = sum(avoid.get(key, 0) for key in keys)
            ranked.setdefault((against, tier), []).append((prefill, decode))
        prefill, decode = self._chosen(ranked[min(ranked)], prompt)
        lease = Lease(prefill, decode, prompt, prompt + new)
        prefill.load.add(lease.prefill_tokens)
        decode.load.add(lease.decode_tokens)
        return lease

    def _chosen(self, pairs: list[tuple[Server, Server]], prompt: int) -> tuple[Server, Server]:
        candidates = [Candidate(one.instance, other.instance, one.load, other.load) for one, other in pairs]
        try:
            return pairs[candidates.index(self._policy.choose(candidates, prompt))]
        except Exception:  # somebody else's code: requests go on without it
            if not self._policy_failed:
                logger.exception("the policy fails, least_tokens takes its place; further failures are not logged")
            self._policy_failed = True
            return pairs[candidates.index(self._fallback.choose(candidates, prompt))]

    def why_not_ready(self) -> str:
        """Why `ready` says no."""
        if not self._usable():
            return self.why_none()
        return "the servers that fit each other have not said yet that they are well, or not again: " + "; ".join(
            f"{server.label}: {server.health.cause}" for server in self.servers if server.health.tier != 0
        )

    def why_none(self, model: object = None) -> str:
        """Why there is no pair that may be used, for the client and for whoever runs this."""
        for side, flag in ((Side.PREFILL, "--prefill"), (Side.DECODE, "--decode")):
            if not self.of(side):
                trouble = f" ({self.trouble})" if self.trouble else ""
                return f"the router knows no {side} server{trouble}; start one that registers in etcd, or give {flag}"
        ill = [server for server in self.servers if server.health.tier is None]
        fitting = [verdict for _, _, verdict in self.verdicts() if verdict.fit is Fit.YES]
        if not fitting:
            reasons = [verdict.reason for _, _, verdict in self.verdicts()]
            return f"no prefill server fits a decode server: {reasons[0]}; GET /hetero/pairs has all reasons"
        if self._usable():
            return f"no pair of servers for model {model!r} is well, or fits; GET /hetero/pairs has the reasons"
        causes = "; ".join(f"{server.label}: {server.health.cause}" for server in ill)
        return f"no pair of servers is well: {causes}; they are asked again, see their logs"
