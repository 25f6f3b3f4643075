"""The servers that a router knows: followed, asked after, paired, and given to requests.

Everything here happens in one event loop. Who there is comes from `Members`, whose callbacks come from any thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from sglang_hetero.discovery.members import Members
from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.manifest import Side

from .ask import Asker, NoAnswer
from .fits import Avoid, Fits, Key, ServerBlock, cheapest
from .health import Health, Limits, State
from .pairing import Fit, Known, Pairing, Verdict
from .policy import LeastTokens, Load, Pairs, Policy, choice

logger = logging.getLogger(__name__)

DESCRIBE_SECONDS = 300.0
"""A server that is well is asked again after so long what its caches are: one that is given by URL may have been
restarted with other settings between two probes."""
MAX_REMEMBERED = 1024
"""Layouts by fingerprint, and texts that are not logged again; then it begins anew. Servers come and go for months."""
MAX_OF_ROLE = 256
"""Servers of one role that are followed; those that came first stay. Whoever can write to etcd decides how many there
are, and each of them is asked, shown and, with a layout of its own, judged with each of the other role."""
MAX_SHOWN = 4096
"""Pairs on /hetero/pairs."""
MAX_NAMED = 8
"""Servers that an error names."""
LOST, REFUSED, ENDED = "lost", "refused", "ended"
"""Kinds of failures that are counted: the connection broke; the server said so; a stream broke off."""
CHARGE_MOST, CHARGE_PREFILL, CHARGE_DECODE = 4, 2, 1
"""What keeps a retry away from a server: it broke the connection; or it may be to blame, prefill rather than decode."""

CHARGE_PAIR = 1
"""And from a pair that has been tried, while there is one of the same servers that has not."""


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
        """When it said last what its caches are; None if it has to be asked."""
        self.doubts = 0
        """How often there was cause to think that it is another process by now. What is known of it holds until it has
        been asked; without an answer it does not."""
        self.vouched = 0
        """`doubts` when what is known was found out."""

    @property
    def instance(self) -> Instance:
        """Its record, as complete as it is known."""
        return self.known.instance

    @property
    def label(self) -> str:
        """Role and URL."""
        return self.instance.label

    def doubt(self) -> None:
        """It may be another process: ask it again."""
        self.described_at = None
        self.doubts += 1

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
        self._fits = Fits()
        self._models: set[str] = set()
        self._too_many = ""
        self._changed = asyncio.Event()
        self._judge: asyncio.Task[None] | None = None
        # Not the loop's own, whose threads may all be waiting for names to be looked up.
        self._planner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetero-plan")
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
        self._planner.shutdown(wait=False, cancel_futures=True)

    # Who there is

    def _follow(self) -> None:
        """Take over what Members says now."""
        wanted = self._wanted()
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
                self._corrected(self._servers[key], instance)
                continue
            self._begin(key, instance, restarted=former is not None)
        self._know_more()

    def _wanted(self) -> dict[Key, Instance]:
        found: dict[Key, Instance] = {(str(one.role), one.url): one for one in self._members.snapshot()}
        wanted: dict[Key, Instance] = {}
        for role in Side:
            of_role = sorted((key for key in found if key[0] == role), key=lambda key: key not in self._servers)
            wanted |= {key: found[key] for key in of_role[:MAX_OF_ROLE]}
        left = len(found) - len(wanted)
        self._too_many = f"{left} servers more than the {MAX_OF_ROLE} of a role are left out" if left else ""
        if left:
            self._say_once(f"{self._too_many}; start a router of its own for each part of them")
        return wanted

    def _corrected(self, server: Server, instance: Instance) -> None:
        """The record of a server is another one, but it has not been restarted."""
        if any(
            (said := getattr(instance, name)) and said != getattr(server.instance, name)
            for name in Instance.__struct_fields__
        ):
            server.known = self._by_record(instance)
        server.doubt()
        server.health.next_probe = self._clock()
        server.look_again.set()

    def _by_record(self, instance: Instance) -> Known:
        """A record that is complete tells whose layout it has: then it is not waited for."""
        same = self._by_fingerprint.get((instance.role, instance.fingerprint)) if instance.fingerprint else None
        return replace(same, instance=instance) if same is not None else Known(instance)

    def _know_more(self) -> None:
        """Something is known of a server that was not known before."""
        self._fits.changed()
        self._models = {server.instance.model for server in self._servers.values()}
        self._changed.set()

    def _begin(self, key: Key, instance: Instance, *, restarted: bool) -> None:
        server = Server(instance, self._limits, self._clock)
        server.known = self._by_record(instance)
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
        try:
            await self._asker.healthy(server.instance)
        except HeteroError as error:
            before = server.health.state  # not what it was when the question was asked
            server.health.probe_failed(str(error))
            server.doubt()
            self._tell(server, before)
            return
        # It gets requests again only once it has said what it is now.
        if server.described_at is None or self._clock() - server.described_at > DESCRIBE_SECONDS:
            await self._describe(server)
        before = server.health.state
        server.health.probe_answered()
        self._tell(server, before)

    async def _describe(self, server: Server) -> None:
        found, doubts = self._found.get(server.key), server.doubts
        if found is None:
            return
        try:
            known = await self._asker.describe(found)
        except HeteroError as error:
            server.described_at = None
            self._say_once(f"{server.label}: {error}")
            # A record in etcd that names the layout goes with the process, so it vouches for what is known.
            named = found.fingerprint and found.fingerprint == server.instance.fingerprint
            otherwise = not (named or isinstance(error, NoAnswer))
            if not server.known.told or server.doubts != server.vouched or otherwise:
                self._forget(server, str(error))
            return
        if server.doubts != doubts or self._found.get(server.key) is not found:
            return  # it may have been the former process; described_at is None, so that it is asked again
        server.described_at = self._clock() if known.told else None
        server.vouched = doubts
        if known != server.known:
            server.known = known
            fingerprint = known.instance.fingerprint
            if fingerprint and known.told:
                if len(self._by_fingerprint) >= MAX_REMEMBERED:
                    self._by_fingerprint.clear()
                self._by_fingerprint[(known.instance.role, fingerprint)] = known
            if not known.ours:
                self._say_once(f"{server.label}: {known.why}")
            self._know_more()

    def _forget(self, server: Server, why: str) -> None:
        """What a server has told does not hold any more: it gets no requests until it has told anew."""
        server.known = Known(server.instance, why=why)
        self._know_more()

    def failed(self, server: Server, cause: str, kind: str, *, blame: bool = True) -> None:
        """A request failed at this server. kind: LOST, REFUSED or ENDED. blame: whether it says something about it."""
        server.failures[kind] += 1
        if blame:
            self.blame(server, cause, kind)

    def blame(self, server: Server, cause: str, kind: str) -> None:
        """A failure that has been counted is this server's own."""
        before = server.health.state
        server.health.request_failed(cause, lost=kind != REFUSED)
        if kind != REFUSED:
            server.doubt()
        server.look_again.set()
        self._tell(server, before)

    def excuse(self, server: Server) -> None:
        """A failure that this server was blamed for was the request's own."""
        before = server.health.state
        server.health.request_excused()
        self._tell(server, before)

    def succeeded(self, server: Server) -> None:
        """A server has done its part of a request."""
        before = server.health.state
        server.health.request_succeeded()
        self._tell(server, before)

    def _tell(self, server: Server, before: State) -> None:
        now = server.health.state
        if now is State.EVICTED and server.known.told:
            self._forget(server, f"it was taken out, and has to tell anew: {server.health.cause}")
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
            for prefill, decode in self._fits.unjudged(self._servers.values()):
                try:
                    verdict = await asyncio.get_running_loop().run_in_executor(
                        self._planner, self._pairing.by_layout, prefill, decode
                    )
                except Exception:
                    logger.exception("%s and %s cannot be judged", prefill.instance.label, decode.instance.label)
                    continue
                # Of these two layouts, whatever has become of these two servers meanwhile.
                self._fits.learn(prefill, decode, verdict)
                if verdict.fit is Fit.NO:
                    self._say_once(f"not a pair: {verdict.between(prefill, decode).reason}")

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
        return "; ".join(text for text in (self._members.trouble, self._too_many) if text)

    def of(self, side: Side) -> list[Server]:
        """Those of one role; the ones that may be used first."""
        return sorted(self._of_role(side), key=lambda server: 2 if server.health.tier is None else server.health.tier)

    def verdicts(self, most: int = MAX_SHOWN) -> list[tuple[Server, Server, Verdict]]:
        """Pairs and what is said of each, `most` of them."""
        prefills, decodes = self._of_role(Side.PREFILL), self._of_role(Side.DECODE)
        pairs = ((one, other) for one in prefills for other in decodes)
        return [(one, other, self._fits.verdict(one.known, other.known)) for one, other in islice(pairs, most)]

    def pair_count(self) -> int:
        """How many pairs there are."""
        return len(self._of_role(Side.PREFILL)) * len(self._of_role(Side.DECODE))

    def _of_role(self, side: Side) -> list[Server]:
        return [server for server in self.servers if server.instance.role is side]

    def ready(self) -> bool:
        """Whether a request would find a pair. One that has never answered does not count, a suspect one does."""
        asked = (State.HEALTHY, State.SUSPECT)
        return any(
            any(one.health.state in asked for one in left) and any(other.health.state in asked for other in right)
            for left, right in self._usable()
        )

    def _usable(self, model: object = None) -> list[ServerBlock]:
        """Servers that fit and may be used; of this model if any server has it."""
        named = isinstance(model, str) and model in self._models
        usable = {
            key
            for key, one in self._servers.items()
            if one.health.tier is not None and (not named or one.instance.model in (model, ""))
        }
        found = [
            ([one for one in left if one.key in usable], [one for one in right if one.key in usable])
            for left, right in self._fits.blocks(self._servers.values())
        ]
        return [(left, right) for left, right in found if left and right]

    def another(self, server: Server, model: object = None) -> bool:
        """Whether a request for this model might be given to another server of the same role."""
        sides = (left if server.instance.role is Side.PREFILL else right for left, right in self._usable(model))
        return any(one is not server for side in sides for one in side)

    def take(self, prompt: int, new: int, avoid: Avoid, model: object = None) -> Lease:
        """A pair for a request of so many prompt and new tokens. avoid: what speaks against servers that it was tried
        with. model: the name that it asks for; one that no server has (`default`, an adapter's) may mean any of them.
        Raises NoPair with the reason and the remedy. It looks at each server, never at each pair."""
        usable = self._usable(model)
        if not usable:
            raise NoPair(self.why_none(model))
        prefill, decode = self._chosen(cheapest(usable, avoid), prompt)
        lease = Lease(prefill, decode, _held(prefill, prompt), _held(decode, prompt + new))
        prefill.load.add(lease.prefill_tokens)
        decode.load.add(lease.decode_tokens)
        return lease

    def _chosen(self, pairs: Pairs, prompt: int) -> tuple[Server, Server]:
        try:
            chosen = choice(self._policy, pairs, prompt)
        except Exception:  # somebody else's code: requests go on without it
            if not self._policy_failed:
                logger.exception("the policy fails, least_tokens takes its place; further failures are not logged")
            self._policy_failed = True
            chosen = choice(self._fallback, pairs, prompt)
        return self._servers[(Side.PREFILL, chosen.prefill.url)], self._servers[(Side.DECODE, chosen.decode.url)]

    def why_not_ready(self) -> str:
        """Why `ready` says no."""
        if not self._usable():
            return self.why_none()
        waiting = [server for server in self._servers.values() if server.health.tier != 0]
        return "servers that fit each other have not said yet that they are well: " + _some(
            waiting, lambda one: one.health.cause
        )

    def why_none(self, model: object = None) -> str:
        """Why there is no pair that may be used, for the client and for whoever runs this."""
        servers = list(self._servers.values())
        for side, flag in ((Side.PREFILL, "--prefill"), (Side.DECODE, "--decode")):
            if not any(server.instance.role is side for server in servers):
                trouble = f" ({self.trouble})" if self.trouble else ""
                return f"the router knows no {side} server{trouble}; start one that registers in etcd, or give {flag}"
        if self._usable():
            return f"no pair of servers for model {model!r} is well, or fits; GET /hetero/pairs has the reasons"
        ill = [one for one in servers if one.health.tier is None]
        silent = [one for one in servers if not one.known.told and one.health.tier is not None]
        reasons = []
        if ill:
            said = _some(ill, lambda one: one.health.cause)
            reasons.append(f"not well: {said}; they are asked again, see their logs")
        if silent:
            reasons.append(f"have not told what their caches are: {_some(silent, lambda one: one.known.why)}")
        if not self._fits.blocks(servers) and (refusal := self._fits.refusal(servers)):
            reasons.append(f"do not fit: {refusal}")
        said = "; ".join(reasons) or "those that have come have not been looked at yet"
        return f"no pair of servers can be used: {said}; GET /hetero/pairs has all reasons"


def _held(server: Server, tokens: int) -> int:
    """What a request of so many tokens takes of a server: not more than it can hold at a time."""
    return min(tokens, server.instance.tokens or tokens)


def _some(servers: Sequence[Server], why: Callable[[Server], str]) -> str:
    """The first of them and why, and how many there are besides."""
    more = f"; and {len(servers) - MAX_NAMED} more" if len(servers) > MAX_NAMED else ""
    return "; ".join(f"{one.label}: {why(one)}" for one in servers[:MAX_NAMED]) + more
