"""The measured handoffs of bench_serving.handoff, on the harness's rank processes."""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sglang_hetero.errors import HeteroError
from sglang_hetero.models.specs import ModelSpec
from tests.harness import Geometry, Harness, Leftovers, Pair
from tests.harness.flow import SUCCESS, Flow, Handoff, Journey, Step
from tests.harness.geometry import ITEMSIZE
from tests.harness.processes import call_all

PREFILL_TP, DECODE_TP = 2, 1
PAGE = 128
DRAFT_TOKENS = 4
CHUNK = 8192
"""Tokens of a prefill chunk."""
OURS, UPSTREAM, BULK, BULK_COPY = "ours", "upstream", "bulk write", "bulk write + memcpy"
VARIANTS = (UPSTREAM, OURS, BULK, BULK_COPY)
LIMIT = BULK_COPY
"""The variant that the others are compared with."""
BULK_PIECE = 256 << 10
"""Bytes of a descriptor of the bulk writes. Mooncake's TCP transport has parallel connections and sends a descriptor
over one of them: one of 143 MB took four times as long as the same bytes in descriptors of this size, the fastest of
those that were tried (64 KiB are refused: too many at once)."""
APPOINTMENT_SECONDS = 0.05
"""How far ahead the start of a measurement is set, so that every process has got the word."""
READY_SECONDS = 60.0
"""After which a request counts as one that does not arrive."""
COUNTED = ("descriptors", "bytes")


class Failed(HeteroError):
    """A handoff that has to arrive did not."""


@dataclass
class Sample:
    """One measurement. Counts are of both prefill ranks together; seconds from the end of prefill until ready."""

    seconds: float
    descriptors: int
    bytes: int


@dataclass
class Row:
    """One length and variant. Times in milliseconds; all None when it fails. ratio: median over the rounds of its time
    to that of the limit in the same round."""

    tokens: int
    variant: str
    descriptors: int | None = None
    bytes: int | None = None
    ms: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    ratio: float | None = None
    staging_bytes: int | None = None


class AtOnce(Flow):
    """All chunks of all requests are handed over when the last prefill has ended, and the time until ready is taken."""

    seconds = 0.0
    each: Sequence[float] = ()
    """The same by request, in order."""

    def _send(self) -> bool:
        running = [journey for journey in self.under_way if journey.prefill is Step.CHUNKS]
        if not running or len(running) < len(self.under_way):
            return False
        prefill, decode = running[0].prefill_ranks, running[0].decode_ranks
        when = time.monotonic() + APPOINTMENT_SECONDS
        for rank in decode:
            rank.start("await_ends", [journey.room for journey in running], READY_SECONDS)
        call_all(prefill, "send_all", [(each.room, end) for each in running for end in each.chunks], when)
        for journey in running:
            journey.chunks, journey.prefill = deque(), Step.TRANSFER
        ends = [rank.result("await_ends", when + 2 * READY_SECONDS) for rank in decode]
        for journey, *of_ranks in zip(running, *ends, strict=True):
            if any(poll != SUCCESS for poll, _ in of_ranks):
                raise Failed(f"a prompt of {journey.handoff.tokens} tokens did not arrive")
        self.each = [max(moment for _, moment in of_ranks) - when for of_ranks in zip(*ends, strict=True)]
        self.seconds = max(self.each)
        return True


def geometry(spec: ModelSpec, tokens: int, concurrency: int) -> Geometry:
    """Caches of a model for so many requests of so many tokens at a time."""
    return Geometry(
        layers=spec.num_layers,
        full_attention_layers=tuple(spec.full_attention_layers),
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        linear_key_heads=spec.linear_key_heads,
        linear_value_heads=spec.linear_value_heads,
        linear_key_dim=spec.linear_key_dim,
        linear_value_dim=spec.linear_value_dim,
        conv_kernel=spec.conv_kernel,
        draft_tokens=DRAFT_TOKENS,
        hidden_size=spec.hidden_size,
        page_size=PAGE,
        pages=concurrency * -(-tokens // PAGE),
        slots=concurrency,
    )


class Bench:
    """One pair of sides that takes our path, and while it works one that takes upstream's."""

    def __init__(
        self, harness: Harness, shape: Geometry, concurrency: int, ours: Mapping[str, str], piece: int = BULK_PIECE
    ) -> None:
        """ours: environment of both sides on our path. piece: bytes of a descriptor of the bulk writes."""
        self._piece = piece
        self._harness, self._shape, self._concurrency = harness, shape, concurrency
        self._ours = self._pair(ours)
        self._round = 0
        self._stock: Pair | None = None
        longest = shape.pages // concurrency * shape.page_size
        self._bulk(longest, copy=True)  # makes and touches the largest buffers

    def warm_up(self, tokens: int) -> None:
        """One request on our path, whose every byte is compared. Raises Failed if one is wrong."""
        result = self._ours.handoff(tokens, leftovers=Leftovers.UNTOUCHED)
        if not result.succeeded or result.differences:
            raise Failed(f"{tokens} tokens: {result.outcomes} {[str(each) for each in result.differences]}")

    @property
    def staging_bytes(self) -> int:
        """Of a decode rank."""
        return max(call_all(self._ours.decode, "staging_bytes"))

    def sample(self, variant: str, tokens: int) -> Sample:
        """Measure once. Raises Failed."""
        if variant == UPSTREAM:
            with self._working_stock() as pair:
                return self._upstream(pair, tokens)
        if variant == OURS:
            return self._transfer(tokens)
        return self._bulk(tokens, copy=variant == BULK_COPY)

    def close(self) -> None:
        """End the processes, and with them their memory."""
        self._ours.close()
        if self._stock is not None:
            self._stock.close()

    def _pair(self, environment: Mapping[str, str]) -> Pair:
        pair = self._harness.pair(
            self._shape,
            prefill_tp=PREFILL_TP,
            decode_tp=DECODE_TP,
            prefill_env=environment,
            decode_env=environment,
        )
        call_all(pair.ranks, "poison")  # touches every page of the pools
        return pair

    @contextmanager
    def _working_stock(self) -> Iterator[Pair]:
        """Upstream refuses every later request of a session that failed once: then the next one gets new processes."""
        if self._stock is None:
            self._stock = self._pair({"SGLANG_HETERO": "off"})
        try:
            yield self._stock
        except Failed:
            self._stock.close()
            self._stock = None
            raise

    def _upstream(self, pair: Pair, tokens: int) -> Sample:
        call_all(pair.prefill, "engine_counts")
        seconds = self._hand_over(pair, tokens)
        counts = call_all(pair.prefill, "engine_counts")
        return Sample(seconds, *(sum(each.get(name, 0) for each in counts) for name in COUNTED))

    def _transfer(self, tokens: int) -> Sample:
        before = self._ours.hetero("hetero_counters")
        seconds = self._hand_over(self._ours, tokens)
        after = self._ours.hetero("hetero_counters")
        grown = [
            sum(now.get(name, 0) - then.get(name, 0) for now, then in zip(after, before, strict=True))
            for name in COUNTED
        ]
        return Sample(seconds, *grown)

    def _hand_over(self, pair: Pair, tokens: int) -> float:
        self._round += 1
        for side in (pair.prefill, pair.decode):
            call_all(side, "scatter", self._round)
        handoff = Handoff(tokens, chunks=1)
        journeys = [pair.journey(handoff) for _ in range(self._concurrency)]
        for journey in journeys:
            journey.chunks = deque(chunk_ends(tokens))
        flow = AtOnce(journeys)
        flow.run()
        _forget(pair, journeys)
        return flow.seconds

    def _bulk(self, tokens: int, *, copy: bool) -> Sample:
        """Every prefill rank writes its share of the bytes with one call."""
        pair, piece = self._ours, self._piece
        share = cache_bytes(self._shape, tokens) * self._concurrency // len(pair.prefill)
        (decode,) = pair.decode
        session, address = decode.call("bulk_buffer", share * len(pair.prefill))
        call_all(pair.prefill, "bulk_buffer", share)
        when = time.monotonic() + APPOINTMENT_SECONDS
        for number, rank in enumerate(pair.prefill):
            rank.start("bulk_write", session, address + number * share, share, piece, when)
        seconds = max(rank.result("bulk_write", when + READY_SECONDS) for rank in pair.prefill) - when
        if copy:
            seconds += decode.call("bulk_copy", share * len(pair.prefill))
        return Sample(seconds, -(-share // piece) * len(pair.prefill), share * len(pair.prefill))


def chunk_ends(tokens: int) -> list[int]:
    """Where the chunks of a prompt end."""
    return [*range(CHUNK, tokens, CHUNK), tokens]


def order(variants: Sequence[str], number: int) -> list[str]:
    """Variants as they run in a round: each is the first one in turn, and every other round goes backwards."""
    start = number % len(variants)
    turned = [*variants[start:], *variants[:start]]
    return turned[::-1] if number % 2 else turned


def kv_bytes(shape: Geometry, layers: int) -> int:
    """Bytes of one token's K and V in so many layers."""
    return 2 * layers * shape.kv_heads * shape.head_dim * ITEMSIZE[shape.kv_dtype]


def cache_bytes(shape: Geometry, tokens: int) -> int:
    """Bytes of one request's caches: K and V of its tokens, conv windows and states."""
    half, full = ITEMSIZE[shape.conv_dtype], ITEMSIZE[shape.ssm_dtype]
    kv = kv_bytes(shape, len(shape.full_attention_layers) + len(shape.draft_layers))
    channels = sum(segment.heads * segment.head_width for segment in shape.conv_segments)
    state = shape.linear_value_heads * shape.linear_value_dim * shape.linear_key_dim * full
    return tokens * kv + len(shape.linear_layers) * (channels * shape.live_window * half + state)


def row(tokens: int, variant: str, samples: Sequence[Sample], limits: Sequence[Sample]) -> Row:
    """The figures of one variant; samples and limits are of the same rounds, in order. No samples: it fails."""
    if not samples:
        return Row(tokens, variant)
    times = [1e3 * sample.seconds for sample in samples]
    ratios = [sample.seconds / limit.seconds for sample, limit in zip(samples, limits, strict=True)]
    return Row(
        tokens,
        variant,
        descriptors=samples[-1].descriptors,
        bytes=samples[-1].bytes,
        ms=round(statistics.median(times), 2),
        ms_min=round(min(times), 2),
        ms_max=round(max(times), 2),
        ratio=round(statistics.median(ratios), 3),
    )


def _forget(pair: Pair, journeys: Sequence[Journey]) -> None:
    """The requests have arrived and are over."""
    call_all(pair.decode, "close", [journey.room for journey in journeys])
