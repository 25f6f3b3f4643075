"""Faults of the network between a prefill host and a decode host: cut, unplugged, slow, narrow.

Real managers, pools and queues as in the rest of the matrix, but the ranks of each side run in a network namespace of
their own with a wire between (tests/harness/hosts.py). Every byte of every decode pool is compared.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.harness import Geometry, Handoff, Harness, HarnessError, HarnessTimeout, Leftovers, On, Pair
from tests.harness.flow import Flow, Strike, until
from tests.harness.hosts import Wire, obstacle
from tests.harness.processes import call_all
from tests.harness.product import geometry

from .result import FaultResult, Kind
from .topologies import LIMITS
from .trial import ERROR_LENGTH, Baseline

NAME = "P2D1 hosts"
STALL_SECONDS = 4.0
"""How long a transfer may stand still: longer than a round trip of the slow wire by far."""
GRACE_SECONDS = 8.0
"""On top of it: looks in turns, on a machine that is shared."""
OUTAGE_SECONDS = 15.0
"""How long a wire stays cut: longer than the limits, and than SGLang's heartbeat waits (2 looks, 5 s each)."""
LONG_OUTAGE_SECONDS = 40.0
"""Longer than Mooncake waits for a write (30 s): then the write has failed, and may still be under way."""
HICCUP_SECONDS = 1.0
"""An outage that is over before any limit; TCP repeats what was lost."""
HOME_SECONDS = 60.0
"""Within which everything is back when the wire is whole again: TCP's repeats of a longer outage come seldom."""
FAR_SECONDS = 0.1
"""One way: 200 ms there and back."""
FAR_STALL_SECONDS = 20.0
"""For far hosts: Mooncake's TCP makes a connection for each part of a write, so one write takes many round trips."""
NARROW = 100e6
"""Bits per second."""
MIDWAY_BYTES = 400_000
"""When so much of the wide prompt has gone over the wire, it is in the middle of its transfer."""

WIDE = replace(geometry(64), head_dim=64, linear_key_dim=64, linear_value_dim=64)
"""Pools whose prompts of some hundred tokens are a megabyte and more."""
PROMPTS = (Handoff(700, 4, seed=1), Handoff(129, 2, seed=2))


@dataclass(frozen=True)
class Case:
    """One fault of the network. play: makes it happen; what it finds goes into the Trial."""

    fault: str
    step: str
    expectation: str
    play: "Callable[[Trial], None]"
    stall: float = STALL_SECONDS


class Trial:
    """One case on a wire and a pair of its own."""

    def __init__(self, case: Case, wire: Wire, pair: Pair) -> None:
        self.case, self.wire, self.pair = case, wire, pair
        self.wrong: list[str] = []
        self.leaked: list[str] = []
        self.hung = ""
        self.error = ""
        self.seconds: float | None = None
        self.recovered: float | None = None
        self.outage = OUTAGE_SECONDS
        self._baseline = Baseline(pair)

    def arrive(self, what: str, prompts: Sequence[Handoff] = PROMPTS, strikes: Sequence[Strike] = ()) -> float:
        """Hand over; every request arrives, every byte is right. Returns the seconds that it took."""
        result = self.pair.handoff_many(prompts, Leftovers.UNTOUCHED, strikes=strikes)
        self.wrong += [f"{what}: bytes: {difference}" for difference in result.differences]
        self.wrong += [f"{what}: failed: {each.reasons}" for each in result.outcomes if not each.succeeded]
        return result.seconds

    def fail(self, strike: Strike, words: dict[On, str]) -> None:
        """The long prompt fails on both sides within the limit, and each says `words`; nothing is written wrong."""
        result = self.pair.handoff_many(PROMPTS[:1], Leftovers.UNTOUCHED, strikes=[strike])
        self.wrong += [f"bytes: {difference}" for difference in result.differences]
        (outcome,) = result.outcomes
        for on, arrived, reasons in (
            (On.PREFILL, outcome.prefill, outcome.prefill_reasons),
            (On.DECODE, outcome.decode, outcome.decode_reasons),
        ):
            if arrived:
                self.wrong.append(f"{on.value}: the request arrived over a wire that is cut")
                continue
            took = outcome.ended[on] - strike.struck
            self.seconds = max(took, self.seconds or 0.0)
            if took > self.case.stall + GRACE_SECONDS:
                self.wrong.append(f"{on.value} took {took:.1f} s, the limit is {self.case.stall} s")
            if not any(words[on] in reason for reason in reasons):
                self.wrong.append(f"{on.value}: no reason has {words[on]!r}: {reasons}")
        self.error = next(iter((*outcome.decode_reasons, *outcome.prefill_reasons)), "")

    def midway(self) -> Callable[[Flow], bool]:
        """Whether the middle of the transfer that begins now has been reached."""
        start = self.wire.ways[0].carried
        return lambda _flow: self.wire.ways[0].carried - start >= MIDWAY_BYTES

    def whole_again(self) -> None:
        """The wire is whole: requests arrive again as soon as TCP has noticed. Says how soon the first one has."""
        mended = time.monotonic()
        while True:
            result = self.pair.handoff_many(PROMPTS, Leftovers.UNTOUCHED)
            self.recovered = time.monotonic() - mended
            self.wrong += [f"afterwards: bytes: {difference}" for difference in result.differences]
            if result.succeeded:
                return
            # TCP notices it with its next repeat, and doubles the time between them.
            if self.recovered > self.outage + self.case.stall + GRACE_SECONDS:
                self.wrong += [
                    f"still failing {self.recovered:.0f} s later: {each.reasons}" for each in result.outcomes
                ]
                return

    def run(self) -> FaultResult:
        """Never raises for what a fault does."""
        try:
            self.arrive("before the fault")
            self._baseline = Baseline(self.pair)
            self.case.play(self)
            self._home()
            self.arrive("at last", [Handoff(300, 3, seed=3)])
        except HarnessTimeout as error:
            self.hung = _first_line(error)
        except HarnessError as error:
            self.wrong.append(_first_line(error))
        if self.wire.failure:
            self.wrong.append(f"the wire itself has failed: {self.wire.failure}")
        case = self.case
        return FaultResult(
            case.fault,
            case.step,
            NAME,
            Kind.HARNESS,
            case.expectation,
            seconds=self.seconds,
            error=self.error[:ERROR_LENGTH],
            recovered=self.recovered,
            wrong=tuple(self.wrong),
            leaked=tuple(self.leaked),
            hung=self.hung,
        )

    def _home(self) -> None:
        """Everything is back at its start value: in quarantine nothing, now that the wire is whole."""

        def left() -> list[str]:
            return [*self.pair.busy(), *self.pair.leaks(), *self._baseline.exceeded(self.pair.running)]

        try:
            until(lambda: not left(), lambda: "", HOME_SECONDS)
        except HarnessTimeout:
            self.leaked += [f"after {HOME_SECONDS:.0f} s {each}" for each in left()]
        for rank, problems in zip(self.pair.running, call_all(self.pair.running, "integrity"), strict=True):
            self.leaked += [f"{rank.name}: integrity: {problem}" for problem in problems]


def _outage(trial: Trial, begin: Callable[[], None], end: Callable[[], None]) -> None:
    strike = Strike(trial.midway(), lambda _flow: begin())
    with trial.wire.slow(rate=NARROW):  # so that the middle of a transfer is some time
        trial.fail(strike, {On.PREFILL: "decode TP0/1", On.DECODE: "prefill"})
    time.sleep(max(0.0, strike.struck + trial.outage - time.monotonic()))
    end()
    trial.whole_again()


def cut(trial: Trial) -> None:
    """Packets vanish, and neither side is told."""
    _outage(trial, trial.wire.cut, trial.wire.mend)


def cut_for_long(trial: Trial) -> None:
    """Until the engine itself has given its write up."""
    trial.outage = LONG_OUTAGE_SECONDS
    cut(trial)


def unplugged(trial: Trial) -> None:
    """Decode's interface is down: to decode, prefill is unreachable at once; prefill is not told."""
    host = trial.wire.hosts[1]
    _outage(trial, lambda: host.plug(up=False), lambda: host.plug(up=True))


def hiccup(trial: Trial) -> None:
    """The wire is whole again before any limit: TCP repeats, the request arrives."""
    wire = trial.wire
    strikes = [
        Strike(trial.midway(), lambda _flow: wire.cut()),
        Strike(lambda _flow: True, lambda _flow: wire.mend(), seconds=HICCUP_SECONDS),
    ]
    with wire.slow(rate=NARROW):
        trial.seconds = trial.arrive("over the hiccup", strikes=strikes)
    if not all(strike.struck for strike in strikes):
        trial.wrong.append("the wire was never cut: the transfer had ended before")


def cut_at_rest(trial: Trial) -> None:
    """Nothing is under way; connections that lie idle are dead when the wire is whole again."""
    trial.wire.cut()
    time.sleep(OUTAGE_SECONDS)
    trial.wire.mend()
    trial.whole_again()


def far(trial: Trial) -> None:
    """Nothing fails because the other host is far away."""
    with trial.wire.slow(delay=FAR_SECONDS):
        trial.seconds = trial.arrive("over 200 ms", [Handoff(129, 2, seed=4)])


def narrow(trial: Trial) -> None:
    """The wire is what a request waits for, and it does not fail."""
    start = trial.wire.ways[0].carried
    with trial.wire.slow(rate=NARROW):
        trial.seconds = trial.arrive("over 100 Mbit/s", [replace(each, seed=20 + each.seed) for each in PROMPTS])
    least = (trial.wire.ways[0].carried - start) * 8 / NARROW
    if trial.seconds < least:
        trial.wrong.append(f"the wire was not narrow: {trial.seconds:.2f} s, at least {least:.2f} s are needed")


MID = "mid-push"
FAILS = f"both fail within {STALL_SECONDS:.0f} s and name the other; units come home when the link is back"
CASES = (
    Case("link cut, then back", MID, FAILS, cut),
    Case(f"link cut for {LONG_OUTAGE_SECONDS:.0f} s", MID, FAILS, cut_for_long),
    Case("decode's interface down, then up", MID, FAILS, unplugged),
    Case(f"link cut for {HICCUP_SECONDS:.0f} s", MID, "the request arrives", hiccup),
    Case("link cut, then back", "when nothing is under way", "the next request arrives", cut_at_rest),
    Case("200 ms there and back", "all the time", "requests arrive", far, FAR_STALL_SECONDS),
    Case("100 Mbit/s", "all the time", "requests arrive", narrow),
)


def run(cases: Sequence[Case], add: Callable[[FaultResult], None], harness: Harness) -> None:
    """Play the faults one after the other; `add` gets each result. Where no second host can be all are skipped."""
    why = obstacle()
    for case in cases:
        if why:
            add(FaultResult(case.fault, case.step, NAME, Kind.HARNESS, case.expectation, skipped=why))
            continue
        with Wire() as wire, _pair(harness, wire, case.stall, WIDE) as pair:
            add(Trial(case, wire, pair).run())


def _pair(harness: Harness, wire: Wire, stall: float, pools: Geometry) -> Pair:
    prefill, decode = wire.hosts
    # SGLang's own limits must be longer than ours, or it is they that are met.
    limits = {
        **LIMITS,
        "SGLANG_HETERO_STALL_TIMEOUT": str(stall),
        "SGLANG_HETERO_WINDOW_TIMEOUT": str(stall),
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(int(2 * stall)),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(int(2 * stall)),
    }
    return harness.pair(
        pools,
        prefill_tp=2,
        decode_tp=1,
        prefill_env={**limits, **prefill.environment},
        decode_env={**limits, **decode.environment},
        hosts=(prefill.address, decode.address),
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
