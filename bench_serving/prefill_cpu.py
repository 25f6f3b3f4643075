"""Prefill of one long prompt on the CPU reference platform, beside a shorter one and a matmul of this machine.

    python -m bench_serving.prefill_cpu
    python -m bench_serving.prefill_cpu --tokens 4096 --model tiny-moe --json out/prefill.json

Starts mixed_tp1, sends one warm-up request, then each prompt `--rounds` times. The baseline in the same run is the
floating-point rate of a plain torch matmul, so that figures of different machines can be told apart.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from sglang_hetero import models
from sglang_hetero.client import Client
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import flags, topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import DEFAULT_CHUNK, Options
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals

TOKENS = 16384
ROUNDS = 3
MATMUL_SIZE = 1024
MATMUL_ROUNDS = 10
# Of the vocabulary only bytes are used, as in text.
BYTE_TOKENS = 256


def matmul_gflops() -> float:
    """Median rate of a square fp32 matmul with torch's default threads, in 1e9 floating-point operations per second."""
    import torch

    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    rates = []
    for _ in range(MATMUL_ROUNDS):
        start = time.perf_counter()
        a @ a
        rates.append(2 * MATMUL_SIZE**3 / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)


def measure(client: Client, tokens: int, rounds: int) -> list[float]:
    """Seconds from the request to its only output token, per round, each with a prompt of its own."""
    seconds = []
    for i in range(rounds):
        prompt = random.Random(f"{tokens} {i}").choices(range(BYTE_TOKENS), k=tokens)
        seconds.append(client.generate(prompt, 1).seconds)
        print(f"{tokens} tokens, round {i + 1}/{rounds}: {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=flags.positive, default=TOKENS, help=f"prompt length (default: {TOKENS})")
    parser.add_argument("--rounds", type=flags.positive, default=ROUNDS)
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="exit status 1 when the median is above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    flags.add(parser, Options(max_tokens=TOKENS + 4096))
    arguments = parser.parse_args()
    options = flags.options(arguments)
    options = replace(options, max_tokens=max(options.max_tokens, arguments.tokens + DEFAULT_CHUNK))
    try:
        raise_on_signals()
        gflops = matmul_gflops()
        with Fleet(topology.parse("mixed_tp1"), options) as fleet:
            client = Client(fleet.url)
            client.generate(list(range(64)), 4)  # warm-up
            lengths = [max(1, arguments.tokens // 4), arguments.tokens]
            results = {length: measure(client, length, arguments.rounds) for length in lengths}
    except HeteroError as error:
        print(f"prefill_cpu: {error}", file=sys.stderr)
        return 1
    except Stopped:
        print("prefill_cpu: stopped", file=sys.stderr)
        return 1
    spec = models.spec(options.model)
    figures = {
        "model": options.model,
        "layers": spec.num_layers,
        "full_attention_layers": len(spec.full_attention_layers),
        "dtype": options.dtype.value,
        "cpus": len(os.sched_getaffinity(0)),
        "matmul_gflops": round(gflops, 1),
        "seconds": {str(length): [round(s, 2) for s in seconds] for length, seconds in results.items()},
    }
    print(f"{options.model}, mixed_tp1, {options.dtype.value}, {figures['cpus']} CPUs, matmul {gflops:.0f} GFLOP/s")
    print("prompt tokens   median s   tokens/s   min..max s")
    for length, seconds in results.items():
        median = statistics.median(seconds)
        print(f"{length:13}   {median:8.1f}   {length / median:8.0f}   {min(seconds):.1f}..{max(seconds):.1f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    median = statistics.median(results[arguments.tokens])
    if arguments.limit is not None and median > arguments.limit:
        print(f"prefill_cpu: {median:.1f} s is above the limit of {arguments.limit:.0f} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
