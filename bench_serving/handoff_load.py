"""Many prompts at a time: their throughput beside that of one, and a short one next to a long one.

Nothing is sent before prefill has ended, as when prompts are restored from a cache: the link is what is shared.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench_serving import handoff_run as run
from bench_serving.handoff_run import AtOnce, Failed
from tests.harness import Geometry, Handoff, Harness, Leftovers, Pair
from tests.harness.flow import ENDED, SUCCESS, Flow, Journey, Step
from tests.harness.processes import call_all

TOGETHER = (1, 4, 16, 32)
TOGETHER_TOKENS = 2048
SHORT, LONG = 512, 18592
ALONE, BESIDE = "alone", "beside"


@dataclass
class Throughput:
    """So many prompts at a time; medians over the rounds. ratio: of the bytes per second to that of one prompt in the
    same round."""

    prompts: int
    tokens: int
    ms: float
    gb_per_second: float
    ratio: float


@dataclass
class Fairness:
    """The short prompt's time until ready in milliseconds, medians over the rounds. ratio: median of the rounds'."""

    short: int
    long: int
    alone_ms: float
    beside_ms: float
    long_ms: float
    ratio: float


class Together(Flow):
    """Prompts that are handed over as soon as decode has memory and units of staging for them; the time from the first
    one's start to the last one's end."""

    seconds = 0.0
    _started: float | None = None
    _driven: bool | None = None
    """Whether decode has taken them through, None before it was told to."""

    def _decode(self) -> bool:
        """The decode rank takes all of them through by itself; after that they are committed as always."""
        if self._driven:
            return super()._decode()
        if self._driven is None:
            (rank,) = self.journeys[0].decode_ranks
            rank.start("drive", [journey.room for journey in self.journeys], run.READY_SECONDS)
            self._driven = False
        return False

    def _send(self) -> bool:
        running = [journey for journey in self.under_way if journey.prefill is Step.CHUNKS]
        if running:
            self._started = self._started or time.monotonic()
            chunks = [(each.room, end) for each in running for end in each.chunks]
            call_all(running[0].prefill_ranks, "send_all", chunks, time.monotonic())
            for journey in running:
                journey.chunks, journey.prefill = deque(), Step.TRANSFER
        if not self._driven and all(each.prefill in ENDED for each in self.under_way):
            (rank,) = self.journeys[0].decode_ranks
            ends = rank.result("drive", time.monotonic() + 2 * run.READY_SECONDS)
            lost = sum(poll != SUCCESS for poll, _ in ends)
            if lost:
                raise Failed(f"{lost} of {len(ends)} prompts did not arrive")
            assert self._started is not None
            self.seconds = max(moment for _, moment in ends) - self._started
            self._driven = True
            for journey in self.journeys:
                journey.decode = Step.TRANSFER
        return bool(running)


class Bench:
    """One pair of sides with room for the most prompts, and one for the short and the long one."""

    def __init__(self, harness: Harness, shape: Callable[[int, int], Geometry]) -> None:
        """shape: caches for so many tokens (first) of so many requests (second). Raises Failed."""
        self._harness, self._shape, self._round = harness, shape, 0
        self._pairs: dict[str, Pair] = {}

    def together(self, prompts: int) -> float:
        """Seconds of one hand-over of so many prompts. Raises Failed."""
        pair = self._pair("together", TOGETHER_TOKENS, max(TOGETHER))
        journeys = self._journeys(pair, [TOGETHER_TOKENS] * prompts)
        flow = Together(journeys)
        flow.run()
        self._close(pair, journeys)
        return flow.seconds

    def fair(self, tokens: Sequence[int]) -> Sequence[float]:
        """Seconds until each of these prompts is ready, handed over at the same moment in this order. Raises Failed."""
        pair = self._pair("fair", LONG + run.PAGE * -(-SHORT // run.PAGE), 1, slots=2)
        journeys = self._journeys(pair, tokens)
        flow = AtOnce(journeys)
        flow.run()
        self._close(pair, journeys)
        return flow.each

    def close(self) -> None:
        """End the processes, and with them their memory; the next hand-over starts new ones."""
        while self._pairs:
            self._pairs.popitem()[1].close()

    def prompt_bytes(self, tokens: int) -> int:
        """Bytes of a prompt's caches."""
        return run.cache_bytes(self._shape(tokens, 1), tokens)

    def _pair(self, name: str, tokens: int, requests: int, slots: int | None = None) -> Pair:
        if name not in self._pairs:
            shape = self._shape(tokens, requests)
            if slots is not None:
                shape = replace(shape, slots=slots)
            pair = self._harness.pair(shape, prefill_tp=run.PREFILL_TP, decode_tp=run.DECODE_TP)
            call_all(pair.ranks, "poison")
            result = pair.handoff(SHORT, leftovers=Leftovers.UNTOUCHED)
            if not result.succeeded or result.differences:
                raise Failed(f"{SHORT} tokens: {result.outcomes} {[str(each) for each in result.differences]}")
            self._pairs[name] = pair
        return self._pairs[name]

    def _journeys(self, pair: Pair, tokens: Sequence[int]) -> list[Journey]:
        self._round += 1
        for side in (pair.prefill, pair.decode):
            call_all(side, "scatter", self._round)
        journeys = [pair.journey(Handoff(each)) for each in tokens]
        for journey in journeys:
            journey.chunks = deque(run.chunk_ends(journey.handoff.tokens))
        return journeys

    def _close(self, pair: Pair, journeys: Sequence[Journey]) -> None:
        call_all(pair.decode, "close", [journey.room for journey in journeys])


def throughput(bench: Bench, rounds: int, say: Callable[[str], None]) -> list[Throughput]:
    """A row per number of prompts at a time. Raises Failed."""
    size = bench.prompt_bytes(TOGETHER_TOKENS)
    rates: dict[int, list[float]] = {prompts: [] for prompts in TOGETHER}
    bench.together(1)  # connections
    for number in range(rounds):
        for prompts in TOGETHER if number % 2 == 0 else TOGETHER[::-1]:
            seconds = bench.together(prompts)
            rates[prompts].append(prompts * size / seconds)
            say(f"{prompts} prompts at a time, round {number + 1}/{rounds}: {1e3 * seconds:.1f} ms")
    rows = []
    for prompts in TOGETHER:
        rate = statistics.median(rates[prompts])
        ratio = statistics.median(here / one for here, one in zip(rates[prompts], rates[TOGETHER[0]], strict=True))
        ms = round(1e3 * prompts * size / rate, 2)
        rows.append(Throughput(prompts, TOGETHER_TOKENS, ms, round(rate / 1e9, 3), round(ratio, 3)))
    return rows


def fairness(bench: Bench, rounds: int, say: Callable[[str], None]) -> Fairness:
    """The short prompt alone, and handed over right behind the long one. Raises Failed."""
    alone, beside, long = [], [], []
    bench.fair([SHORT])
    for number in range(rounds):
        for variant in run.order((ALONE, BESIDE), number):
            if variant == ALONE:
                alone += bench.fair([SHORT])
            else:
                first, second = bench.fair([LONG, SHORT])
                long.append(first)
                beside.append(second)
        say(
            f"{SHORT} tokens, round {number + 1}/{rounds}: alone {1e3 * alone[-1]:.1f} ms, "
            f"behind {LONG:,} tokens {1e3 * beside[-1]:.1f} ms (those {1e3 * long[-1]:.1f} ms)"
        )
    return Fairness(
        SHORT,
        LONG,
        *(round(1e3 * statistics.median(times), 2) for times in (alone, beside, long)),
        ratio=round(statistics.median(with_it / without for with_it, without in zip(beside, alone, strict=True)), 3),
    )


def throughput_lines(rows: Sequence[Throughput]) -> list[str]:
    """Lines for the terminal."""
    return [
        "prompts  tokens        ms    GB/s  ratio to one",
        *(
            f"{row.prompts:7}  {row.tokens:6}  {row.ms:8.1f}  {row.gb_per_second:6.2f}  {row.ratio:12.2f}"
            for row in rows
        ),
    ]


def fairness_lines(found: Fairness) -> list[str]:
    """Lines for the terminal."""
    return [
        f"{found.short:,} tokens: {found.alone_ms:.1f} ms alone, {found.beside_ms:.1f} ms behind {found.long:,} tokens "
        f"(those {found.long_ms:.1f} ms), {found.ratio:.2f} times as long"
    ]
