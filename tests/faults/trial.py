"""One case on one pair: bring the fault about, and look at everything that it must have left as it was."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

from tests.harness import Handoff, HarnessError, HarnessTimeout, Leftovers, On, Outcome, Pair, Result
from tests.harness.flow import until
from tests.harness.processes import RankProcess, call_all

from .cases import Case, End
from .result import FaultResult, Kind
from .steps import Ambush
from .topologies import GRACE_SECONDS

HOME_SECONDS = 15.0
"""Within which everything must be back: units of a process that is gone come home when that has been found out."""
ROUNDS = 2
"""How often every server hands over to every other one afterwards. What a server that was started again has after that
is its start value, so that it must have met them all."""
ERROR_LENGTH = 200
"""Of a reason in a result; the rest is cut off."""
EXTRA_SOCKETS = 8
"""By which a rank may exceed its start value: Mooncake keeps several connections to a peer open, as many as there were
calls at the same time."""
HALF_CLOSED = 16
"""Per rank that was started again: Mooncake (TCP, 0.3.13.post1) never closes its connections to a process that has
ended, and has no call to do so. 4 were seen with writes, and 4 more with reads."""
POOLS = ("hetero-reader", "hetero-liveness-ask", "hetero-gone", "hetero-ask")
"""Threads that are started when they are first needed, and stay for the next time or end when there is none; there is a
limit to each kind."""


class Baseline:
    """What each rank of a pair had when it had served some requests."""

    def __init__(self, pair: Pair) -> None:
        self._threads: dict[str, Counter[str]] = {}
        self._sockets: dict[str, int] = {}
        self._restarts = 0
        self._note(pair.ranks)

    def started_again(self, ranks: Sequence[RankProcess]) -> None:
        """These are other processes now: what they have is their start value."""
        self._restarts += len(ranks)
        self._note(ranks)

    def _note(self, ranks: Sequence[RankProcess]) -> None:
        for rank in ranks:
            self._threads[rank.name] = _threads(rank)
            self._sockets[rank.name], _ = rank.call("sockets")

    def exceeded(self, ranks: Sequence[RankProcess]) -> list[str]:
        """Threads and sockets beyond it."""
        found = []
        for rank in ranks:
            threads, before = _threads(rank), self._threads[rank.name]
            sockets, half_closed = rank.call("sockets")
            if threads.total() > before.total():
                more = ", ".join(sorted((threads - before).elements()))
                found.append(f"{rank.name}: {threads.total()} threads, {before.total()} at the start: {more}")
            if sockets > self._sockets[rank.name] + EXTRA_SOCKETS:
                found.append(f"{rank.name}: {sockets} sockets, {self._sockets[rank.name]} at the start")
            if half_closed > HALF_CLOSED * self._restarts:
                found.append(f"{rank.name}: {half_closed} half-closed sockets after {self._restarts} restarts")
        return found


def _threads(rank: RankProcess) -> Counter[str]:
    return Counter(name for name in rank.call("thread_names") if not name.startswith(POOLS))


class Trial:
    """Runs one case; `result` says what was found."""

    def __init__(self, case: Case, pair: Pair, baseline: Baseline) -> None:
        self._case, self.pair, self._baseline = case, pair, baseline
        self.wrong: list[str] = []
        self._leaked: list[str] = []
        self._hung = ""
        self.error = ""
        self.seconds: float | None = None
        self._recovered: float | None = None

    def run(self) -> FaultResult:
        """Never raises: what goes wrong is in the result."""
        try:
            if self._case.prelude is not None:
                self._case.prelude(self.pair)
            if self._case.script is not None:
                self._case.script(self)
            else:
                self._strike()
            if not self._hung:
                self._come_home(final=not (self._case.restart or self._case.restarted))
                self._restart()
                self._hand_over_afresh()
                self._come_home(final=True)
        except HarnessTimeout as error:
            self._hung = brief(error)
        except HarnessError as error:
            self.wrong.append(brief(error))
        except Exception as error:
            traceback.print_exc()
            self.wrong.append(f"the test itself has failed: {type(error).__name__}: {error}")
        case = self._case
        return FaultResult(
            case.fault,
            case.step,
            case.topology.name,
            Kind.HARNESS,
            case.expectation,
            seconds=self.seconds,
            error=self.error[:ERROR_LENGTH],
            recovered=self._recovered,
            wrong=tuple(self.wrong),
            leaked=tuple(self._leaked),
            hung=self._hung,
        )

    def hand_over(self, handoffs: Sequence[Handoff]) -> Result:
        """Hand requests over and compare every byte, when nobody writes any more."""
        left = (list) if self._case.quarantined else self._busy_elsewhere
        result = self.pair.handoff_many(handoffs, Leftovers.UNTOUCHED, lambda *_: self._settle(left, HOME_SECONDS))
        self.wrong += [f"bytes: {difference}" for difference in result.differences]
        return result

    def _strike(self) -> None:
        """Hand the request and others over while the fault is brought about, and compare every byte."""
        case, pair = self._case, self.pair
        room = pair.next_room
        ambush = Ambush(pair, case.rules(room))
        strikes = case.strikes(pair, room, ambush)
        started = time.monotonic()
        met: list[int] = []

        def before_compare(pair: Pair, _: Result) -> None:
            met.extend(ambush.met())
            call_all(pair.running, "let_go")
            if not case.quarantined:
                self._settle(self._busy_elsewhere, HOME_SECONDS)

        servers = case.topology.servers
        prompts = [case.prompt, *(each for each in case.others if max(each.prefill, each.decode) < servers)]
        result = pair.handoff_many(prompts, Leftovers.UNTOUCHED, before_compare, strikes=strikes)
        affected, *others = result.outcomes
        struck = [strike.struck for strike in strikes]
        if not all(struck):
            self.wrong.append("the fault was never brought about: the request had ended before")
        if case.meets and not all(met):
            self.wrong.append(f"the fault was never brought about: its rules met {met} messages or calls")
        self.wrong += [f"bytes: {difference}" for difference in result.differences]
        self.wrong += [f"another request failed: {each.reasons}" for each in others if not each.succeeded]
        self._judge(affected, started, struck)

    def _judge(self, outcome: Outcome, started: float, struck: Sequence[float]) -> None:
        """Whether the request that was met has ended as it must, and in time."""
        first, last = (struck[0], struck[-1]) if struck else (started, started)
        for on, arrived, reasons in (
            (On.PREFILL, outcome.prefill, outcome.prefill_reasons),
            (On.DECODE, outcome.decode, outcome.decode_reasons),
        ):
            wanted = self._case.ends[on]
            if wanted is End.DIES:
                continue
            if arrived and wanted is End.FAILS:
                self.wrong.append(f"{on.value}: the request arrived")
            elif not arrived and wanted is End.ARRIVES:
                self.wrong.append(f"{on.value}: the request failed: {'; '.join(reasons)}")
            words = self._case.words.get(on, ())
            if not arrived and words and not any(word in reason for word in words for reason in reasons):
                self.wrong.append(f"{on.value}: no reason has any of {words}: {reasons}")
            if not arrived and reasons and (not self.error or on is On.DECODE):
                telling = [each for each in reasons if any(word in each for word in words)]
                self.error = _without_room((telling or reasons)[0])
            # A side that was paused can only end when it goes on, with the last strike.
            took = outcome.ended[on] - (last if on is self._case.paused else first)
            self.seconds = max(took, self.seconds or 0.0)
            if took > self._case.within:
                self._hung = f"{on.value}: the request ended after {took:.1f} s, the limit is {self._case.within} s"

    def _restart(self) -> None:
        pair = self.pair
        if self._case.restart is None:
            return
        if self._case.quarantined and not any(state.get("units_quarantined") for state in pair.hetero()):
            self.wrong.append("no unit is quarantined although a writer is in doubt")
        if self._case.restart is On.PREFILL:
            pair.restart_prefill(0)
        else:
            pair.restart_decode(0)

    def _hand_over_afresh(self) -> None:
        """New requests must arrive at once, with every byte right."""
        pair = self.pair
        prompts = [self._case.prompt, *self._case.others]
        servers = range(self._case.topology.servers)
        fresh = []
        for number, (_, prefill, decode) in enumerate(product(range(ROUNDS), servers, servers)):
            prompt = prompts[number % len(prompts)]
            fresh.append(Handoff(prompt.tokens, prompt.chunks, 10 + number, prefill=prefill, decode=decode))
        started = time.monotonic()
        result = pair.handoff_many(fresh, Leftovers.UNTOUCHED)
        self._recovered = time.monotonic() - started
        self.wrong += [f"afterwards: bytes: {difference}" for difference in result.differences]
        self.wrong += [
            f"afterwards: a request failed: {each.reasons}" for each in result.outcomes if not each.succeeded
        ]
        self._baseline.started_again(self._restarted)

    def _come_home(self, *, final: bool) -> None:
        """Everything is back at its start value, on every rank that lives on."""
        pair, case = self.pair, self._case
        if not final and case.quarantined:
            return
        ranks = [rank for rank in pair.running if final or rank not in self._damaged]
        self._settle(pair.busy if final else self._busy_elsewhere, HOME_SECONDS)
        if final:
            self._leaked += pair.leaks()
            self._settle(lambda: self._baseline.exceeded(pair.running), GRACE_SECONDS)
        for rank, problems in zip(ranks, call_all(ranks, "integrity"), strict=True):
            self._leaked += [f"{rank.name}: integrity: {problem}" for problem in problems]

    @property
    def _restarted(self) -> list[RankProcess]:
        """The ranks that are other processes than before."""
        side = self._case.restart or self._case.restarted
        if side is None:
            return []
        return (self.pair.prefills if side is On.PREFILL else self.pair.decodes)[0].ranks

    @property
    def _damaged(self) -> list[RankProcess]:
        """The ranks that will be started again: what they hold goes with them."""
        return [] if self._case.restart is None else self._restarted

    def _busy_elsewhere(self) -> list[str]:
        names = {rank.name for rank in self._damaged}
        return [each for each in self.pair.busy() if each.partition(":")[0] not in names]

    def _settle(self, left: Callable[[], list[str]], seconds: float) -> None:
        """Wait until nothing is left; what is has leaked. Once something has, nobody waits any more."""
        try:
            until(lambda: not left(), lambda: "", 0.0 if self._leaked else seconds)
        except HarnessTimeout:
            self._leaked += [f"{each} (after {seconds:.0f} s)" for each in left()]
            for rank, doubts in zip(self.pair.running, call_all(self.pair.running, "doubts"), strict=True):
                self._leaked += [f"{rank.name} keeps {doubt}" for doubt in doubts]


def brief(error: Exception) -> str:
    """What an error of the harness says, with the last line of a rank's traceback, and without its log."""
    said, _, more = str(error).partition("\n")
    lines = more.partition("--- last lines")[0].strip().splitlines()
    return f"{said}: {lines[-1]}" if lines else said


def _without_room(reason: str) -> str:
    """SGLang's exception puts the room in front of a reason."""
    return reason.partition("): ")[2] if reason.startswith("KVTransferError(") else reason
