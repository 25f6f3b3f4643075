"""Time from the end of prefill until decode is ready, beside what writing the same bytes takes at least.

    python -m bench_serving.handoff
    python -m bench_serving.handoff --tokens 64,512 --rounds 9
    python -m bench_serving.handoff --only layers --tokens 2048
    python -m bench_serving.handoff --only paths --tokens 2048 --concurrency 4 --state pull --json out/handoff.json

Two prefill ranks hand the caches of a prompt to one decode rank (P2/D1): geometry of Qwen3.5-2B, bf16, MTP on, pages of
128 tokens, SGLang's own pools, queues and Mooncake engine over TCP in one process per rank (docs/harness.md). Each
request's pages are scattered over the pools. Variants run in turn, in another order each round. Times are medians over
the rounds, in milliseconds; ratios are medians of the ratios in each round. The parts:

paths     Nothing is sent before prefill has ended: all chunks of 8,192 tokens are handed over then, the worst case.
            upstream             SGLang's own path; `fails` where it does not pass the length
            ours                 this package's path
            bulk write           both prefill ranks write the same bytes, contiguous, with one call each (--piece)
            bulk write + memcpy  that, and one thread copies them into place: the limit, ratio 1
          The time of a transfer ends when decode's poll says Success, that of the limits with the last write or copy.
          Descriptors and bytes are those of both prefill ranks.
layers    Prefill computes: each layer waits for a timer, slower than the link, and what it has stored leaves while the
          next ones run. Which share of the bytes had left before prefill's end, beside the share that was due (all
          but the last layer and the draft of the last chunk), and the time from then until decode is ready:
            prepush, push, pull  SGLANG_HETERO_STATE
            at the end           prepush with SGLANG_HETERO_LAYERWISE=0
            no state             prepush of the same model with next to no linear state; by how much longer the others
                                 take is the exposed time of the state
together  1, 4, 16 and 32 prompts at the same time, nothing sent before: bytes per second beside those of one.
fair      A short prompt alone, and handed over right behind a long one.
hooks     A forward pass with what tells us of its layers and without: time of the scheduler's thread.

All processes share the cores of this machine. Engine, merge and TCP use them at the same time, so the figures of
`paths` and `together` are those of the cores, not of a link; and in `layers` the timer leaves the cores to the
hand-over, as an accelerator would, but for the storing of K and V, which is a copy on them. What else runs on the
machine is in all of them.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_serving import handoff_load as load
from bench_serving import handoff_overlap as overlap
from bench_serving import handoff_run as run
from bench_serving.handoff_run import LIMIT, OURS, UPSTREAM, VARIANTS, Bench, Failed, Row, Sample, order
from sglang_hetero import models
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import flags
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals
from tests.harness import Harness, HarnessError

MODEL = "qwen35-2b-cache"
TOKENS = (512, 2048, 8192, 18592)
ROUNDS = 3
STATES = overlap.STATES
PATHS, LAYERS, TOGETHER, FAIR, HOOKS = PARTS = ("paths", "layers", "together", "fair", "hooks")
STAGING_TOKENS = (1024, 18592)
"""Lengths after which the staging memory is read: it must not depend on them."""


def lengths(text: str) -> list[int]:
    """Parse `512,2048`."""
    return [flags.positive(part) for part in text.split(",")]


def parts(text: str) -> list[str]:
    """Parse `paths,layers`."""
    chosen = text.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    return [part for part in PARTS if part in chosen]


def measure(bench: Any, tokens: int, rounds: int) -> Iterator[Row]:
    """The rows of one length. A variant that fails once is not tried again; only upstream's path may."""
    samples: dict[str, list[Sample]] = {variant: [] for variant in VARIANTS}
    failed: set[str] = set()
    for number in range(rounds):
        for variant in order(VARIANTS, number):
            if variant in failed:
                continue
            try:
                samples[variant].append(bench.sample(variant, tokens))
                said = f"{1e3 * samples[variant][-1].seconds:.1f} ms"
            except Failed as error:
                if variant != UPSTREAM:
                    raise
                failed.add(variant)
                samples[variant].clear()
                said = f"fails: {error}"
            _progress(f"{tokens} tokens, round {number + 1}/{rounds}, {variant}: {said}")
    for variant in VARIANTS:
        made = run.row(tokens, variant, samples[variant], samples[LIMIT])
        if variant == OURS:
            made.staging_bytes = bench.staging_bytes
        yield made


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for the terminal."""
    lines = ["tokens  variant              descriptors        MB        ms  ratio   min..max ms"]
    for row in rows:
        head = f"{row.tokens:6}  {row.variant:19}"
        if row.ms is None:
            lines.append(f"{head}        fails")
            continue
        assert row.bytes is not None
        lines.append(
            f"{head}  {row.descriptors:11}  {row.bytes / 1e6:8.1f}  {row.ms:8.1f}  {row.ratio:5.2f}"
            f"   {row.ms_min:.1f}..{row.ms_max:.1f}"
        )
    return lines


def report(arguments: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """What goes into the JSON file; found: a value per part, and of `paths` two."""
    return {
        "model": MODEL,
        "prefill_tp": run.PREFILL_TP,
        "decode_tp": run.DECODE_TP,
        "page": run.PAGE,
        "chunk": run.CHUNK,
        "draft_tokens": run.DRAFT_TOKENS,
        "state": arguments.state,
        "piece": arguments.piece << 10,
        "concurrency": arguments.concurrency,
        "rounds": arguments.rounds,
        "cpus": len(os.sched_getaffinity(0)),
        **found,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--tokens", type=lengths, default=list(TOKENS), help=f"prompt lengths (default: {','.join(map(str, TOKENS))})"
    )
    made.add_argument(
        "--only", type=parts, default=list(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)"
    )
    made.add_argument(
        "--concurrency", type=flags.positive, default=1, help="paths: prompts at the same time (default: 1)"
    )
    made.add_argument("--rounds", type=flags.positive, default=ROUNDS, help=f"(default: {ROUNDS})")
    made.add_argument(
        "--state", choices=STATES, default=STATES[0], help=f"paths: SGLANG_HETERO_STATE (default: {STATES[0]})"
    )
    made.add_argument(
        "--piece",
        type=flags.positive,
        default=run.BULK_PIECE >> 10,
        metavar="KIB",
        help=f"of a descriptor of the bulk writes, in KiB (default: {run.BULK_PIECE >> 10}, where Mooncake is fastest)",
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return made


def main() -> int:
    arguments = parser().parse_args()
    found: dict[str, Any] = {}
    print(f"{MODEL}, P{run.PREFILL_TP}/D{run.DECODE_TP}, {len(os.sched_getaffinity(0))} CPUs")
    try:
        raise_on_signals()
        _progress("starting the processes")
        with Harness() as harness:
            if PATHS in arguments.only:
                found |= _paths(harness, arguments)
            if LAYERS in arguments.only or HOOKS in arguments.only:
                found |= _passes(harness, arguments)
            if TOGETHER in arguments.only or FAIR in arguments.only:
                found |= _load(harness, arguments)
    except (HeteroError, HarnessError) as error:
        print(f"handoff: {error}", file=sys.stderr)
        return 1
    except Stopped:
        print("handoff: stopped", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report(arguments, found), indent=1) + "\n")
    return 0


def _paths(harness: Harness, arguments: argparse.Namespace) -> dict[str, Any]:
    # Lengths for the staging check too, so that the arena is that of one server.
    longest = max(*arguments.tokens, *STAGING_TOKENS)
    shape = run.geometry(models.spec(MODEL), longest, arguments.concurrency)
    environment = {"SGLANG_HETERO_STATE": arguments.state}
    bench = Bench(harness, shape, arguments.concurrency, environment, arguments.piece << 10)
    _progress(f"warm-up: {min(arguments.tokens)} tokens, every byte compared")
    bench.warm_up(min(arguments.tokens))
    rows = [row for tokens in arguments.tokens for row in measure(bench, tokens, arguments.rounds)]
    staging = {tokens: _staging(bench, tokens) for tokens in STAGING_TOKENS}
    bench.close()
    _print(f"paths: {arguments.concurrency} at a time, state {arguments.state}", *table(rows))
    for tokens, size in staging.items():
        _print(f"staging memory after {tokens:,} tokens: {size / (1 << 20):.0f} MiB")
    return {
        "staging_bytes": {str(tokens): size for tokens, size in staging.items()},
        "results": [asdict(row) for row in rows],
    }


def _passes(harness: Harness, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    shape = run.geometry(models.spec(MODEL), max(*arguments.tokens, overlap.HOOK_TOKENS), 1)
    bench = overlap.Bench(harness, shape, min(arguments.tokens))
    if LAYERS in arguments.only:
        rows = [
            row for tokens in arguments.tokens for row in overlap.measure(bench, tokens, arguments.rounds, _progress)
        ]
        _print("layers:", *overlap.table(rows))
        found[LAYERS] = [asdict(row) for row in rows]
    if HOOKS in arguments.only:
        cost = overlap.hooks(bench)
        _print(*overlap.hook_lines(cost))
        found[HOOKS] = asdict(cost) | {"cpu_us": cost.cpu_us, "pass_ms": cost.pass_ms}
    bench.close()
    return found


def _load(harness: Harness, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bench = load.Bench(harness, lambda tokens, requests: run.geometry(models.spec(MODEL), tokens, requests))
    if TOGETHER in arguments.only:
        rows = load.throughput(bench, arguments.rounds, _progress)
        _print("together:", *load.throughput_lines(rows))
        found[TOGETHER] = [asdict(row) for row in rows]
        bench.close()
    if FAIR in arguments.only:
        fair = load.fairness(bench, arguments.rounds, _progress)
        _print("fair:", *load.fairness_lines(fair))
        found[FAIR] = asdict(fair)
        bench.close()
    return found


def _staging(bench: Bench, tokens: int) -> int:
    bench.sample(OURS, tokens)
    return bench.staging_bytes


def _print(*lines: str) -> None:
    print("\n".join(lines), flush=True)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
