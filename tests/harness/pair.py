"""A prefill side and a decode side, and what became of the requests that were handed over."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV

from . import flow
from .compare import Difference
from .errors import HarnessError
from .expectation import Leftovers, Placement
from .flow import Flow, Handoff, On, Outcome, Step, Strike
from .geometry import Geometry
from .processes import Condition, RankProcess, ZygoteProcess, call_all
from .sides import LOOPBACK, Forward, Request, Shard, Side

STATE, COUNTERS = "hetero_state", "hetero_counters"
"""What a manager of this package tells of itself: what it holds, and what it has sent."""
HELD = ("rooms", "inboxes", "in_flight", "waiting", "units_held", "units_quarantined")
"""Names in STATE that are 0 when nothing is under way."""
SETTLE_SECONDS = 10.0
Environment = Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """What a set of concurrent handoffs did to the decode side."""

    outcomes: tuple[Outcome, ...]
    differences: list[Difference]
    """Empty when every byte of every decode pool is as it must be."""
    prefill: tuple[Placement, ...]
    decode: tuple[Placement, ...]
    """Where the requests were that arrived."""
    seconds: float
    """From the first request to the last end, comparison not included."""
    early_bytes: int = 0
    """Those that left prefill while a forward pass ran."""

    @property
    def succeeded(self) -> bool:
        return all(outcome.succeeded for outcome in self.outcomes)


@dataclass
class Group:
    """The ranks that keep the same requests, in the same places."""

    ranks: list[RankProcess]
    shards: list[Shard]
    side: Side
    environment: dict[str, str]
    """Of its processes, beside what all have."""

    def build(self) -> None:
        """Start building; `built` waits."""
        for process, shard in zip(self.ranks, self.shards, strict=True):
            process.start("build", shard, self.side)

    def built(self, deadline: float) -> None:
        """Wait until every rank has its pools and its manager."""
        for process in self.ranks:
            process.result("build", deadline)


class Pair:
    """Prefill sides, each with its bootstrap server, and decode sides; a Handoff says which it takes.

    prefill_tp: TP size of each prefill side. decode_dp: attention-DP ranks of decode, each of TP `decode_tp` and a
    decode side of its own here. decode_env: of all decode sides, or several for as many decode servers. forward:
    prefill runs forward passes in this way, instead of filling its caches in at once. hosts: addresses of the prefill
    and the decode sides; where they are in network namespaces of their own the environments say which (hosts.py).
    """

    def __init__(
        self,
        zygote: ZygoteProcess,
        geometry: Geometry,
        *,
        bootstrap_ports: Sequence[int],
        prefill_tp: Sequence[int],
        decode_tp: int,
        decode_dp: int = 1,
        backend: str = "mooncake",
        decode_geometry: Geometry | None = None,
        seed: int = 0,
        prefill_env: Environment | None = None,
        decode_env: Environment | Sequence[Environment] | None = None,
        forward: Forward | None = None,
        hosts: tuple[str, str] = (LOOPBACK, LOOPBACK),
    ) -> None:
        decode_geometry = decode_geometry or geometry
        for tp in prefill_tp:
            geometry.check_tp(tp)
        decode_geometry.check_tp(decode_tp)
        started = time.monotonic()
        self.forwards = [forward] if forward else []
        self.next_room = 1
        """Room number of the next request."""
        self._zygote = zygote
        self.bootstraps: list[RankProcess] = []
        self.prefills: list[Group] = []
        self.decodes: list[Group] = []
        servers = [decode_env or {}] if isinstance(decode_env, Mapping | None) else decode_env
        seeds = itertools.count(2 * seed)
        try:
            for port, tp in zip(bootstrap_ports, prefill_tp, strict=True):
                environment = _environment(geometry, prefill_env or {})
                self.bootstraps.append(zygote.spawn("bootstrap", environment))
                side = Side("prefill", backend, port, shuffle_seed=next(seeds), host=hosts[0])
                self.prefills.append(self._group(geometry, tp, side, environment))
            for (number, server), rank in itertools.product(enumerate(servers, 1), range(decode_dp)):
                side = Side(
                    "decode",
                    backend,
                    bootstrap_ports[0],
                    next(seeds),
                    dp_size=decode_dp,
                    dp_rank=rank,
                    http_port=number,
                    host=hosts[1],
                )
                environment = _environment(decode_geometry, server)
                self.decodes.append(self._group(decode_geometry, decode_tp, side, environment))
            self._build()
        except BaseException:
            self.close()
            raise
        self.build_seconds = time.monotonic() - started
        self._all_free: dict[str, dict[str, int]] = {}
        """By a rank's name: what it had free when it was built."""
        self._note_free(self.ranks)

    @property
    def prefill(self) -> list[RankProcess]:
        return [rank for group in self.prefills for rank in group.ranks]

    @property
    def decode(self) -> list[RankProcess]:
        return [rank for group in self.decodes for rank in group.ranks]

    @property
    def ranks(self) -> list[RankProcess]:
        return [*self.prefill, *self.decode]

    @property
    def running(self) -> list[RankProcess]:
        """Those that the test has neither killed nor paused."""
        return [rank for rank in self.ranks if rank.condition is Condition.RUNNING]

    def handoff(self, tokens: int, chunks: int = 1, seed: int = 0, leftovers: Leftovers = Leftovers.COPIED) -> Result:
        """Hand one request over and compare the decode side."""
        return self.handoff_many([Handoff(tokens, chunks, seed)], leftovers=leftovers)

    def handoff_many(
        self,
        handoffs: Sequence[Handoff],
        leftovers: Leftovers = Leftovers.COPIED,
        before_compare: Callable[["Pair", Result], None] | None = None,
        forward: Forward | Sequence[Forward] = (),
        strikes: Sequence[Strike] = (),
    ) -> Result:
        """Hand requests over at the same time, chunks in turns, and compare the decode side.

        strikes: faults that the test brings about meanwhile. What a killed or paused rank has is not compared.

        With `forward` prefill runs its forward passes in that way, or in those in turn; else in the pair's own way.

        Memory of a request that failed is overwritten when it is released, so that whoever writes there later shows.
        `before_compare` may touch the decode ranks between the transfer and the comparison; its Result has no outcomes
        yet. Raises HarnessTimeout when a request neither arrives nor fails, CommandFailed when a rank raises, RankDied
        when one ends; the pair is of no more use then.
        """
        call_all(self.running if strikes else self.ranks, "poison")
        before = [list(group.ranks) for group in self.decodes]
        started = time.monotonic()
        journeys = [self.journey(handoff) for handoff in handoffs]
        way = Flow(journeys, [forward] if isinstance(forward, Forward) else (forward or self.forwards), strikes)
        way.run()
        arrived = [each for each in journeys if each.decode is Step.SUCCEEDED]
        result = Result(
            outcomes=(),
            differences=[],
            prefill=tuple(each.placed[On.PREFILL] for each in arrived),
            decode=tuple(each.placed[On.DECODE] for each in arrived),
            seconds=time.monotonic() - started,
            early_bytes=sum(turn.early_bytes for turns in way.turns for turn in turns),
        )
        if before_compare is not None:
            before_compare(self, result)
        differences = []
        for group, ranks in zip(self.decodes, before, strict=True):
            # What arrived before a restart has gone with the process; the new one must hold nothing.
            same = group.ranks == ranks
            rooms = [each.room for each in arrived if each.decode_ranks is group.ranks and same]
            if strikes and flow.condition(group.ranks) is not Condition.RUNNING:
                continue
            for found in call_all(group.ranks, "differences", rooms, leftovers):
                differences += found
            call_all(group.ranks, "close", rooms)
        return replace(result, outcomes=tuple(each.outcome() for each in journeys), differences=differences)

    def hetero(self, what: str = STATE) -> list[dict[str, Any]]:
        """What each running rank's manager tells of itself, if it is one of this package: STATE or COUNTERS."""
        return call_all(self.running, "hetero", what)

    def quiet(self, seconds: float = SETTLE_SECONDS) -> None:
        """Wait until our managers hold nothing any more. Raises HarnessTimeout with what they still do."""
        flow.until(lambda: not self.busy(), lambda: f"after {seconds} s: {self.busy()}", seconds)

    def busy(self) -> list[str]:
        """What our managers still hold (rooms, units, writes in flight), and what is wrong there; by running rank."""
        wrong = [
            f"{rank.name}: {problem}"
            for rank, problems in zip(self.running, call_all(self.running, "integrity"), strict=True)
            for problem in problems
        ]
        return wrong + [
            f"{rank.name}: {state}"
            for rank, state in zip(self.running, self.hetero(), strict=True)
            if any(state.get(name) for name in HELD) or state.get("units_free") != state.get("units")
        ]

    def leaks(self) -> list[str]:
        """Pages, rows, slots and aux rows that are missing since the ranks were built, by running rank."""
        return [
            f"{rank.name}: {now[name]} of {before} {name} are free"
            for rank, now in zip(self.running, call_all(self.running, "free"), strict=True)
            for name, before in self._all_free[rank.name].items()
            if now[name] != before
        ]

    def kill_prefill(self, number: int) -> None:
        """kill -9 of a whole prefill server: its ranks, and the process with its bootstrap server."""
        for process in [*self.prefills[number].ranks, self.bootstraps[number]]:
            process.kill()

    def kill_decode(self, number: int) -> None:
        """kill -9 of all ranks of a decode side."""
        for process in self.decodes[number].ranks:
            process.kill()

    def restart_prefill(self, number: int) -> None:
        """A prefill server's next start, on the same ports; what still runs of it is killed. The others live on."""
        self.kill_prefill(number)
        group = self.prefills[number]
        self.bootstraps[number] = self._zygote.spawn("bootstrap", group.environment)
        self._start_bootstrap(self.bootstraps[number], group)
        self._restart(group)

    def restart_decode(self, number: int) -> None:
        """The same of a decode side."""
        self.kill_decode(number)
        self._restart(self.decodes[number])

    def _restart(self, group: Group) -> None:
        for process in group.ranks:
            process.stop()
        # In place: requests of before know their side by this list.
        group.ranks[:] = [self._zygote.spawn(rank.name, group.environment) for rank in group.ranks]
        group.build()
        group.built(time.monotonic() + flow.PHASE_SECONDS)
        self._note_free(group.ranks)
        call_all(group.ranks, "poison")

    def _note_free(self, ranks: Sequence[RankProcess]) -> None:
        for rank, free in zip(ranks, call_all(ranks, "free"), strict=True):
            self._all_free[rank.name] = free

    def close(self) -> None:
        """End every process of the pair."""
        for process in [*self.ranks, *self.bootstraps]:
            # A zygote that has ended has taken its ranks with it.
            with suppress(HarnessError):
                process.stop()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _group(self, geometry: Geometry, tp: int, side: Side, environment: dict[str, str]) -> Group:
        group = Group([], [Shard(geometry, tp, rank) for rank in range(tp)], side, environment)
        earlier = self.prefills if side.mode == "prefill" else self.decodes
        which = f", {side.mode} {len(earlier) + 1}" if earlier else ""
        try:
            for rank in range(tp):
                group.ranks.append(self._zygote.spawn(f"{side.mode} {rank} of {tp}{which}", environment))
        except BaseException:
            for process in group.ranks:
                process.stop()
            raise
        return group

    def _build(self) -> None:
        for process, group in zip(self.bootstraps, self.prefills, strict=True):
            self._start_bootstrap(process, group)
        groups = [*self.prefills, *self.decodes]
        for group in groups:
            group.build()
        deadline = time.monotonic() + flow.PHASE_SECONDS
        for group in groups:
            group.built(deadline)

    def _start_bootstrap(self, process: RankProcess, group: Group) -> None:
        process.call("start_bootstrap", replace(group.shards[0], tp=1), group.side)

    def journey(self, handoff: Handoff) -> flow.Journey:
        """A request for `handoff` at its start; a Flow takes it on."""
        prefill, decode = self.prefills[handoff.prefill], self.decodes[handoff.decode]
        side = prefill.side
        drafted = bool(prefill.shards[0].geometry.draft_tokens)
        request = Request(self.next_room, handoff.tokens, handoff.seed, side.bootstrap_port, side.host, drafted)
        self.next_room += 1
        return flow.journey(request, handoff, prefill.ranks, decode.ranks)


def _environment(geometry: Geometry, own: Environment) -> dict[str, str]:
    return {CONV_LAYOUT_ENV: geometry.conv_layout.value, **own}
