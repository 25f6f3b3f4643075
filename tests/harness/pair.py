"""A prefill side and a decode side, and the way of a request through them.

The harness stands in for the all-reduce of SGLang's polls: a side has a state when all its ranks have it.
"""

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV
from sglang_hetero.launcher.ports import Ports

from . import oracle
from .compare import Difference
from .errors import HarnessError, HarnessTimeout
from .expectation import Leftovers, Placement
from .geometry import Geometry
from .processes import RankProcess, ZygoteProcess, call_all
from .sides import LOOPBACK, Request, Shard, Side

POLL_SECONDS = 0.002
NO_BOOTSTRAP = 1
"""Port in the configuration of a process that has no peer."""
PHASE_SECONDS = 60.0
"""Limit of each phase: building the ranks, bootstrap of the requests, transfer."""
FAILED, WAITING_FOR_INPUT, SUCCESS = 0, 2, 4
"""SGLang's KVPoll (disaggregation/base/conn.py), kept here so that a test process imports no SGLang."""


@dataclass(frozen=True)
class Handoff:
    """One prompt to hand over: `tokens` tokens in `chunks` chunks, contents made from `seed`."""

    tokens: int
    chunks: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """How one handoff ended; the reasons are SGLang's, one per rank that reported a failure."""

    succeeded: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a set of concurrent handoffs did to the decode side."""

    outcomes: tuple[Outcome, ...]
    differences: list[Difference]
    """Empty when every byte of every decode pool is as it must be."""
    prefill: tuple[Placement, ...]
    decode: tuple[Placement, ...]
    seconds: float
    """From the first request to the last Success, comparison not included."""

    @property
    def succeeded(self) -> bool:
        return all(outcome.succeeded for outcome in self.outcomes)


class Pair:
    """A bootstrap server, `prefill_tp` prefill ranks and `decode_tp` decode ranks."""

    def __init__(
        self,
        zygote: ZygoteProcess,
        geometry: Geometry,
        *,
        bootstrap_port: int,
        prefill_tp: int,
        decode_tp: int,
        backend: str = "mooncake",
        decode_geometry: Geometry | None = None,
        seed: int = 0,
    ) -> None:
        sides = ((geometry, prefill_tp), (decode_geometry or geometry, decode_tp))
        for side_geometry, tp in sides:
            side_geometry.check_tp(tp)
        started = time.monotonic()
        prefill = Side("prefill", backend, bootstrap_port, shuffle_seed=2 * seed)
        decode = Side("decode", backend, bootstrap_port, shuffle_seed=2 * seed + 1)
        self._rooms = itertools.count(1)
        layouts = [{CONV_LAYOUT_ENV: side_geometry.conv_layout.value} for side_geometry, _ in sides]
        self.bootstrap = zygote.spawn("bootstrap", {})
        self.prefill: list[RankProcess] = []
        self.decode: list[RankProcess] = []
        try:
            self.prefill += [zygote.spawn(f"prefill {rank} of {prefill_tp}", layouts[0]) for rank in range(prefill_tp)]
            self.decode += [zygote.spawn(f"decode {rank} of {decode_tp}", layouts[1]) for rank in range(decode_tp)]
            self._build(prefill, decode, sides)
        except BaseException:
            self.close()
            raise
        self.build_seconds = time.monotonic() - started

    @property
    def ranks(self) -> list[RankProcess]:
        return [*self.prefill, *self.decode]

    def handoff(self, tokens: int, chunks: int = 1, seed: int = 0, leftovers: Leftovers = Leftovers.COPIED) -> Result:
        """Hand one request over and compare the decode side."""
        return self.handoff_many([Handoff(tokens, chunks, seed)], leftovers=leftovers)

    def handoff_many(
        self,
        handoffs: Sequence[Handoff],
        leftovers: Leftovers = Leftovers.COPIED,
        before_compare: Callable[["Pair", Result], None] | None = None,
    ) -> Result:
        """Hand requests over at the same time, chunks interleaved, and compare the decode side.

        `before_compare` may touch the decode ranks between the transfer and the comparison; its Result has no outcomes
        yet. Raises HarnessTimeout when a request neither arrives nor fails, CommandFailed when a rank raises, RankDied
        when one ends; the pair is of no more use then.
        """
        rooms = [next(self._rooms) for _ in handoffs]
        requests = [Request(room, handoff.tokens, handoff.seed) for room, handoff in zip(rooms, handoffs, strict=True)]
        call_all(self.prefill, "poison", oracle.SOURCE_POISON)
        call_all(self.decode, "poison", oracle.DESTINATION_POISON)
        started = time.monotonic()
        call_all(self.prefill, "open", requests)
        call_all(self.decode, "open", requests)
        polls = self._await(self.prefill, rooms, {FAILED, WAITING_FOR_INPUT})
        ready = [room for room, poll in zip(rooms, polls, strict=True) if poll == WAITING_FOR_INPUT]
        call_all(self.prefill, "finalize", ready)
        for room, end in self._chunks(rooms, handoffs):
            if room in ready:
                call_all(self.prefill, "send_chunk", room, end)
        polls = self._await(self.ranks, rooms, {FAILED, SUCCESS})
        result = Result(
            outcomes=(),
            differences=[],
            prefill=_placements(self.prefill, rooms),
            decode=_placements(self.decode, rooms),
            seconds=time.monotonic() - started,
        )
        if before_compare is not None:
            before_compare(self, result)
        differences = [found for each in call_all(self.decode, "differences", rooms, leftovers) for found in each]
        reasons = zip(*call_all(self.ranks, "close", rooms), strict=True)
        outcomes = tuple(
            Outcome(poll == SUCCESS, tuple(filter(None, why))) for poll, why in zip(polls, reasons, strict=True)
        )
        return replace(result, outcomes=outcomes, differences=differences)

    def close(self) -> None:
        """End every process of the pair."""
        for process in [*self.ranks, self.bootstrap]:
            # A zygote that has ended has taken its ranks with it.
            with suppress(HarnessError):
                process.stop()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self, prefill: Side, decode: Side, sides: Sequence[tuple[Geometry, int]]) -> None:
        (prefill_geometry, prefill_tp), (decode_geometry, decode_tp) = sides
        self.bootstrap.call("start_bootstrap", Shard(prefill_geometry, 1, 0), prefill)
        _await_listener(prefill.bootstrap_port)
        shards = [
            (process, Shard(prefill_geometry, prefill_tp, rank), prefill) for rank, process in enumerate(self.prefill)
        ]
        shards += [
            (process, Shard(decode_geometry, decode_tp, rank), decode) for rank, process in enumerate(self.decode)
        ]
        for process, shard, side in shards:
            process.start("build", shard, side)
        deadline = time.monotonic() + PHASE_SECONDS
        for process, _, _ in shards:
            process.result("build", deadline)

    def _chunks(self, rooms: Sequence[int], handoffs: Sequence[Handoff]) -> Iterable[tuple[int, int]]:
        """(room, end position) of every chunk, the requests taking turns."""
        plans = [
            [(room, end) for end in oracle.split(handoff.tokens, handoff.chunks)]
            for room, handoff in zip(rooms, handoffs, strict=True)
        ]
        for turn in itertools.zip_longest(*plans):
            yield from filter(None, turn)

    def _await(self, ranks: Sequence[RankProcess], rooms: Sequence[int], ends: set[int]) -> list[int]:
        """Poll until every request has one of these states on all ranks, or FAILED on one."""
        deadline = time.monotonic() + PHASE_SECONDS
        while True:
            polls = [min(each) for each in zip(*call_all(ranks, "poll", rooms), strict=True)]
            if all(poll in ends for poll in polls):
                return polls
            if time.monotonic() > deadline:
                states = dict(zip(rooms, polls, strict=True))
                tails = "\n".join(rank.log_tail() for rank in ranks)
                raise HarnessTimeout(f"requests are still in {states} after {PHASE_SECONDS} s\n{tails}")
            time.sleep(POLL_SECONDS)


class Harness:
    """The zygote, and the pairs made from it. Use as a context manager."""

    def __init__(self) -> None:
        self._ports = Ports(LOOPBACK)
        self._zygote = ZygoteProcess()
        self._pairs: list[Pair] = []
        self._processes: list[RankProcess] = []

    @property
    def zygote_threads(self) -> int:
        return int(self._zygote.ready["threads"])

    def pair(
        self,
        geometry: Geometry,
        *,
        prefill_tp: int,
        decode_tp: int,
        backend: str = "mooncake",
        decode_geometry: Geometry | None = None,
        seed: int = 0,
    ) -> Pair:
        """Start a pair; `seed` decides which pages and slots its requests get."""
        pair = Pair(
            self._zygote,
            geometry,
            bootstrap_port=self._ports.free(),
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            backend=backend,
            decode_geometry=decode_geometry,
            seed=seed,
        )
        self._pairs.append(pair)
        return pair

    def core(self, geometry: Geometry, *, seed: int = 0) -> RankProcess:
        """A process for core.py, which moves requests between real pools with our core instead of SGLang's transfer."""
        process = self._zygote.spawn("core", {CONV_LAYOUT_ENV: geometry.conv_layout.value})
        self._processes.append(process)
        process.call("build", Shard(geometry, tp=1, rank=0), Side("core", "mooncake", NO_BOOTSTRAP, shuffle_seed=seed))
        return process

    def close(self) -> None:
        """End every process."""
        for pair in self._pairs:
            pair.close()
        for process in self._processes:
            process.stop()
        self._zygote.stop()

    def __enter__(self) -> "Harness":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _placements(ranks: Sequence[RankProcess], rooms: Sequence[int]) -> tuple[Placement, ...]:
    """Placements of one side; raises HarnessError when its ranks disagree, which SGLang rules out."""
    first, *others = call_all(ranks, "place", rooms)
    if any(other != first for other in others):
        raise HarnessError(f"the ranks of one side keep requests in different places: {[first, *others]}")
    return tuple(first)


def _await_listener(port: int) -> None:
    deadline = time.monotonic() + PHASE_SECONDS
    while True:
        try:
            socket.create_connection((LOOPBACK, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise HarnessTimeout("the bootstrap server does not listen") from error
            time.sleep(POLL_SECONDS)
