"""The hand-over beside prefill's layers: what leaves early, the time that is left over, and what being told costs.

Prefill runs forward passes whose layers wait for a timer (docs/harness.md), so the cores are free for the hand-over, as
they are beside an accelerator. The timer makes prefill slower than the link: all of its layers together take
`SLOWER` times what the same prompt takes to be handed over when nothing leaves before a chunk's end, at best.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench_serving import handoff_run as run
from bench_serving.handoff_run import Failed
from tests.harness import Forward, Geometry, Handoff, Harness, Leftovers, Pair
from tests.harness.flow import SUCCESS, Flow, Step
from tests.harness.processes import call_all
from tests.harness.sides import Turn

SLOWER = 4.0
STATES = ("prepush", "push", "pull")
AT_END, NO_STATE = "at the end", "no state"
VARIANTS = (*STATES, AT_END, NO_STATE)
"""prepush, push and pull: SGLANG_HETERO_STATE. at the end: prepush with SGLANG_HETERO_LAYERWISE=0. no state: prepush
with linear layers of one channel a head, some hundred bytes each, so with the pieces and messages of the others."""
TRIALS = 3
"""Hand-overs of which the fastest sets the timer."""
HOOK_TOKENS = 512
HOOK_PASSES = 40
"""Of each kind: the difference of two medians of some milliseconds is wanted to some ten microseconds."""
HOOK_LAYER_SECONDS = 0.001
"""Of a layer in those passes, in which the threads that the hooks wake do their work, as beside an accelerator."""
AIM = 0.01
"""Of a forward pass, that the hooks may cost."""


@dataclass
class Passed:
    """One prompt. seconds: from the end of prefill, its draft included, until decode is ready."""

    seconds: float
    landed: int
    """Bytes that decode had when prefill ended."""
    bytes: int
    """All of them."""


@dataclass
class Row:
    """One length and variant; medians over the rounds, times in milliseconds."""

    tokens: int
    variant: str
    layer_ms: float
    """The timer: of a layer, in the prompt's longest chunk."""
    ms: float
    ms_min: float
    ms_max: float
    state_ms: float
    """By how much longer than `no state` in the same round."""
    landed: float
    """Share of the bytes that decode had when prefill ended."""
    due: float
    """Share that had been stored before the last layer of the last chunk ran; more may have left while the draft
    ran."""


@dataclass
class Hooks:
    """A pass's time on the scheduler's thread with this package's hooks and without, in microseconds (medians), without
    the timer.

    cpu: what the thread has computed; wall: and waited for, for instance while other threads of the process ran.
    """

    tokens: int
    layers: int
    passes: int
    cpu_with_us: float
    cpu_without_us: float
    wall_with_us: float
    wall_without_us: float

    @property
    def cpu_us(self) -> float:
        return self.cpu_with_us - self.cpu_without_us

    @property
    def pass_ms(self) -> float:
        """How long a pass must be for the hooks to be within AIM of it."""
        return self.cpu_us / AIM / 1e3


class Passes(Flow):
    """One prompt whose chunks prefill runs one after the other, at a time per token and layer."""

    seconds = 0.0
    turns_of: Sequence[Turn] = ()
    token_seconds = 0.0

    def _send(self) -> bool:
        running = [journey for journey in self.under_way if journey.prefill is Step.CHUNKS]
        if not running:
            return False
        (journey,) = running
        for rank in journey.decode_ranks:
            rank.start("await_ends", [journey.room], run.READY_SECONDS)
        start = 0
        for end in journey.chunks:
            forward = Forward(self.token_seconds * (end - start))
            self.turns_of = call_all(journey.prefill_ranks, "turn", [(journey.room, end)], forward, [])
            start = end
        journey.chunks, journey.prefill = deque(), Step.TRANSFER
        deadline = time.monotonic() + 2 * run.READY_SECONDS
        ends = [rank.result("await_ends", deadline)[0] for rank in journey.decode_ranks]
        if any(poll != SUCCESS for poll, _ in ends):
            raise Failed(f"a prompt of {journey.handoff.tokens} tokens did not arrive")
        self.seconds = max(moment for _, moment in ends) - max(turn.ended for turn in self.turns_of)
        return True


class Bench:
    """The pairs of all variants; a prefill side serves decode servers of each state mode."""

    def __init__(self, harness: Harness, shape: Geometry, warm_up: int) -> None:
        """warm_up: tokens of the prompt that each pair hands over first, every byte compared. Raises Failed."""
        self.shape = shape
        self._harness, self._round = harness, 0
        modes = [{"SGLANG_HETERO_STATE": state} for state in STATES]
        followed = self._pair(shape, {}, modes, warm_up)
        at_end = self._pair(shape, {"SGLANG_HETERO_LAYERWISE": "0"}, modes[:1], warm_up)
        # The least that a head can have. Its KV and its number of pieces are the model's.
        tiny = replace(shape, linear_key_dim=1, linear_value_dim=1)
        stateless = self._pair(tiny, {}, modes[:1], warm_up)
        self._places = {state: (followed, number) for number, state in enumerate(STATES)}
        self._places |= {AT_END: (at_end, 0), NO_STATE: (stateless, 0)}

    def sample(self, variant: str, tokens: int, token_seconds: float) -> Passed:
        """Measure once, with layers of so many seconds per token. Raises Failed."""
        pair, decode = self._places[variant]
        self._round += 1
        for group in (*pair.prefills, *pair.decodes):
            call_all(group.ranks, "scatter", self._round)
        before = _written(pair)
        journey = pair.journey(Handoff(tokens, decode=decode))
        journey.chunks = deque(run.chunk_ends(tokens))
        flow = Passes([journey])
        flow.token_seconds = token_seconds
        flow.run()
        call_all(journey.decode_ranks, "close", [journey.room])
        landed = sum(turn.sent_bytes for turn in flow.turns_of) - before
        return Passed(flow.seconds, landed, run.cache_bytes(pair.prefills[0].shards[0].geometry, tokens))

    def pass_times(self, variant: str) -> Turn:
        """A pass of the first prefill rank. Raises Failed."""
        pair, decode = self._places[variant]
        journey = pair.journey(Handoff(HOOK_TOKENS, decode=decode))
        flow = Passes([journey])
        flow.token_seconds = HOOK_LAYER_SECONDS / HOOK_TOKENS
        flow.run()
        call_all(journey.decode_ranks, "close", [journey.room])
        return flow.turns_of[0]

    def close(self) -> None:
        """End the processes, and with them their memory."""
        for pair, _ in self._places.values():
            pair.close()

    def _pair(
        self, shape: Geometry, prefill: Mapping[str, str], decode: Sequence[Mapping[str, str]], warm_up: int
    ) -> Pair:
        pair = self._harness.pair(
            shape, prefill_tp=run.PREFILL_TP, decode_tp=run.DECODE_TP, prefill_env=prefill, decode_env=decode
        )
        for number in range(len(decode)):
            handoff = Handoff(warm_up, decode=number, seed=number)
            result = pair.handoff_many([handoff], Leftovers.UNTOUCHED, forward=Forward())
            if not result.succeeded or result.differences:
                raise Failed(f"{warm_up} tokens: {result.outcomes} {[str(each) for each in result.differences]}")
        call_all(pair.prefill, "meaningless")
        return pair


def measure(bench: Bench, tokens: int, rounds: int, say: Callable[[str], None]) -> Iterator[Row]:
    """The rows of one length. say: told of each sample. Raises Failed."""
    shape = bench.shape
    layers = shape.layers + len(shape.draft_layers)
    trials = [bench.sample(AT_END, tokens, 0.0).seconds for _ in range(TRIALS)]
    token_seconds = SLOWER * min(trials) / tokens / layers
    samples: dict[str, list[Passed]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant in run.order(VARIANTS, number):
            passed = bench.sample(variant, tokens, token_seconds)
            samples[variant].append(passed)
            said = f"{1e3 * passed.seconds:.1f} ms after prefill, {passed.landed / passed.bytes:.1%} before"
            say(f"{tokens} tokens, round {number + 1}/{rounds}, {variant}: {said}")
    longest = min(tokens, run.CHUNK)
    for variant in VARIANTS:
        times = [1e3 * passed.seconds for passed in samples[variant]]
        bare = [1e3 * passed.seconds for passed in samples[NO_STATE]]
        yield Row(
            tokens,
            variant,
            layer_ms=round(1e3 * token_seconds * longest, 3),
            ms=round(statistics.median(times), 2),
            ms_min=round(min(times), 2),
            ms_max=round(max(times), 2),
            state_ms=round(statistics.median(here - there for here, there in zip(times, bare, strict=True)), 2),
            landed=round(statistics.median(passed.landed / passed.bytes for passed in samples[variant]), 4),
            due=round(due(shape, tokens), 4),
        )


def due(shape: Geometry, tokens: int) -> float:
    """Share of a prompt's bytes that should have left when prefill ends: all but the last layer's and the draft's of
    the last chunk, which have only just been computed."""
    *earlier, end = [0, *run.chunk_ends(tokens)]
    layer = run.kv_bytes(shape, layers=1)
    # A chunk that ends within a page leaves that page to the next one.
    start = earlier[-1] // shape.page_size * shape.page_size
    last = len(shape.draft_layers) * layer * (end - start)
    whole = run.cache_bytes(shape, tokens)
    if shape.layers - 1 in shape.full_attention_layers:
        last += layer * (end - start)
    else:
        last += run.cache_bytes(shape, 0) // len(shape.linear_layers)
    return 1 - last / whole


def hooks(bench: Bench) -> Hooks:
    """Passes with and without our hooks, in turn, that differ in nothing else. Raises Failed."""
    turns: dict[str, list[Turn]] = {STATES[0]: [], AT_END: []}
    for number in range(HOOK_PASSES):
        for variant in run.order(list(turns), number):
            turns[variant].append(bench.pass_times(variant))

    def median(variant: str, clock: str) -> float:
        return round(1e6 * statistics.median(getattr(turn, clock) for turn in turns[variant]), 1)

    return Hooks(
        tokens=HOOK_TOKENS,
        layers=bench.shape.layers + len(bench.shape.draft_layers),
        passes=HOOK_PASSES,
        cpu_with_us=median(STATES[0], "cpu_seconds"),
        cpu_without_us=median(AT_END, "cpu_seconds"),
        wall_with_us=median(STATES[0], "seconds"),
        wall_without_us=median(AT_END, "seconds"),
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for the terminal."""
    lines = ["tokens  variant      ms/layer  ms after prefill      min..max   state ms  before     due"]
    for row in rows:
        span = f"{row.ms_min:.1f}..{row.ms_max:.1f}"
        lines.append(
            f"{row.tokens:6}  {row.variant:11}  {row.layer_ms:8.2f}  {row.ms:16.1f}  {span:>12}  {row.state_ms:9.1f}"
            f"  {row.landed:6.1%}  {row.due:6.1%}"
        )
    for tokens in dict.fromkeys(row.tokens for row in rows):
        of = {row.variant: row for row in rows if row.tokens == tokens}
        lines.append(
            f"{tokens:,} tokens: {of[STATES[0]].landed / of[STATES[0]].due:.1%} of what was due had left with prepush"
        )
        if of["pull"].state_ms > 0:
            share = of["prepush"].state_ms / of["pull"].state_ms
            lines.append(f"{tokens:,} tokens: exposed time of the state with prepush {share:.2f} of pull's")
    return lines


def hook_lines(cost: Hooks) -> list[str]:
    """Lines for the terminal."""
    return [
        f"hooks: {cost.cpu_us:.0f} us of the scheduler's thread per pass of {cost.layers} layers (with them "
        f"{cost.cpu_with_us:.0f}, without {cost.cpu_without_us:.0f}; by the clock {cost.wall_with_us:.0f} and "
        f"{cost.wall_without_us:.0f}), {AIM:.0%} of a pass of {cost.pass_ms:.0f} ms"
    ]


def _written(pair: Pair) -> int:
    """Bytes that prefill's ranks have written since they were made."""
    return sum(call["bytes"] for call in call_all(pair.prefill, "hetero", "hetero_counters") if "bytes" in call)
