"""Load through SGLang's own `sglang.benchmark.serving`, and what its result must hold to be one."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hetero.client import Client, RequestFailed
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher.process import Supervised

SCRIPT = Path(__file__).with_name("matrix_sglang.py")
BACKEND = "sglang"
"""Requests to /generate: the only route that tells, with each piece of text, how many tokens the server has counted."""
LOAD_SEED = 1
"""Of the order in which sglang.benchmark.serving sends the prompts."""
POLL_SECONDS = 0.5
PROGRESS_SECONDS = 30.0
ALL_FAILED = "All requests failed"
"""It warns so, and ends with a traceback of its arithmetic."""
SHOWN = 5
"""So many wrong requests are named in a reason."""

FOREIGN = ("SGLANG_",)
"""Variables of the shell that the client does not get: SGLANG_IS_IN_CI, for one, makes it empty caches."""

FIGURES = {
    "req_per_s": "request_throughput",
    "tokens_per_s": "total_throughput",
    "ttft_ms": "mean_ttft_ms",
    "tpot_ms": "mean_tpot_ms",
    "e2e_ms": "mean_e2e_latency_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "e2e_p99_ms": "p99_e2e_latency_ms",
    "seconds": "duration",
}
"""Our names of figures, and SGLang's. tokens_per_s counts input and output, as the seed's does."""


class NoResult(HeteroError):
    """A run that did not hold what it has to: its figures are not to be used."""


class Unanswered(NoResult):
    """Requests failed. SGLang's client does not say why: a request of our own may."""


@dataclass(frozen=True)
class Load:
    """One run of the client. prompts: its data set; inputs: tokens of each prompt in it."""

    name: str
    prompts: Path
    inputs: Sequence[int]
    output: int
    concurrency: int


def arguments(load: Load, url: str, model: str, tokenizer: Path, result: Path) -> list[str]:
    """For `python -m sglang.benchmark.serving`.

    Its own warm-up is off: it sends the first prompt only, and 32 output tokens at most.
    """
    return [
        *("--backend", BACKEND),
        *("--base-url", url),
        *("--model", str(tokenizer)),
        *("--served-model-name", model),
        *("--tokenizer", str(tokenizer)),
        *("--dataset-name", "custom"),
        *("--dataset-path", str(load.prompts)),
        *("--num-prompts", str(len(load.inputs))),
        *("--sharegpt-output-len", str(load.output)),
        *("--max-concurrency", str(load.concurrency)),
        *("--warmup-requests", "0"),
        *("--seed", str(LOAD_SEED)),
        *("--output-file", str(result)),
        "--output-details",
    ]


def read(path: Path) -> dict[str, Any]:
    """The only line of a result file. Raises NoResult where there is none, or what it says is no object."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        lines = []
    if len(lines) != 1:
        raise NoResult(f"sglang.benchmark.serving wrote {len(lines)} results, not 1")
    try:
        found = json.loads(lines[0])
    except ValueError as error:
        raise NoResult(f"the result of sglang.benchmark.serving is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise NoResult("the result of sglang.benchmark.serving is no JSON object")
    return found


def _list(found: Mapping[str, Any], name: str, count: int) -> list[Any]:
    value = found.get(name)
    if not isinstance(value, list) or len(value) != count:
        have = len(value) if isinstance(value, list) else "no"
        raise NoResult(f"{count} requests were to be sent, the result has {have} {name}")
    return value


def _named(what: str, wrong: Sequence[str], count: int) -> str:
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return f"{what} in {len(wrong)} of {count} requests: {', '.join(wrong[:SHOWN])}{more}"


def check(found: Mapping[str, Any], load: Load) -> None:
    """Raise NoResult where a request failed or is missing, or has other lengths than were asked for.

    SGLang's client takes a request whose stream ends before any text for a success of the length that was asked for, so
    that its own count of successes and lengths says nothing of these: they have no time of a first token.
    """
    count = len(load.inputs)
    errors = _list(found, "errors", count)
    if any(errors):
        wrong = [f"{number}: {str(error).strip().splitlines()[-1]}" for number, error in enumerate(errors) if error]
        raise Unanswered(_named("an error", wrong, count))
    ttfts, texts = _list(found, "ttfts", count), _list(found, "generated_texts", count)
    silent = [str(n) for n, (ttft, text) in enumerate(zip(ttfts, texts, strict=True)) if not ttft > 0 or not text]
    if silent:
        raise Unanswered(_named("no output at all", silent, count))
    outputs = _list(found, "output_lens", count)
    other = [f"{n}: {length}" for n, length in enumerate(outputs) if length != load.output]
    if other:
        raise NoResult(_named(f"not exactly {load.output} output tokens", other, count))
    inputs = _list(found, "input_lens", count)
    if sorted(inputs) != sorted(load.inputs):
        odd = sorted(set(inputs) ^ set(load.inputs))
        raise NoResult(
            f"the server counted other prompt lengths than the data set has ({sum(inputs):,} tokens, not "
            f"{sum(load.inputs):,}; {', '.join(map(str, odd[:SHOWN]))} on one side only): it has another tokenizer, or "
            "puts something before a prompt"
        )
    totals = {
        "completed": count,
        "total_input_tokens": sum(load.inputs),
        "total_output_tokens": count * load.output,
        "max_concurrency": load.concurrency,
    }
    for name, wanted in totals.items():
        if found.get(name) != wanted:
            raise NoResult(f"{name} is {found.get(name)}, not {wanted}")


def figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    """What is kept of a result that has been checked. Raises NoResult for a figure that is no positive number."""
    kept: dict[str, float | None] = {}
    for ours, theirs in FIGURES.items():
        value = found.get(theirs)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise NoResult(f"{theirs} is {value}: no figure")
        kept[ours] = float(value)
    accept = found.get("accept_length")
    kept["accept_length"] = float(accept) if isinstance(accept, int | float) and accept > 0 else None
    return kept


def progress(text: str) -> str:
    """How far the client is, from what it has printed."""
    phases = list(re.finditer(r"^\[(\d+/\d+)\] python", text, re.MULTILINE))
    if not phases:
        return "loading SGLang"
    bars = re.findall(r"(\d+)/(\d+) \[", text[phases[-1].end() :])
    where = f"phase {phases[-1][1]}"
    return f"{where}, {bars[-1][0]} of {bars[-1][1]} requests" if bars else where


def _printed(client: Supervised) -> str:
    return client.log.read_text(errors="replace")


def _alone(url: str, load: Load) -> str:
    """What comes of one request of a load, sent by ourselves."""
    with open(load.prompts) as file:
        text = json.loads(file.readline())["conversations"][0]["content"]
    try:
        Client(url).generate(text, load.output)
    except RequestFailed as error:
        return f"one request alone fails, too: {error}"
    return "one request alone is answered"


def _env() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return inherited | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "no_proxy": "*",
        "NO_PROXY": "*",
    }


def run(
    loads: Sequence[Load],
    url: str,
    model: str,
    tokenizer: Path,
    folder: Path,
    *,
    seconds: float,
    watch: Callable[[], None],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run the loads, one after the other, and return their results, each of them checked.

    folder: where results and the client's log go. seconds: for all of them. watch is called again and again and raises
    when the servers have died. Raises NoResult, too, when the client ends otherwise than it should.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = [folder / f"{load.name}.jsonl" for load in loads]
    for result in results:
        result.unlink(missing_ok=True)
    lines = folder / "arguments.json"
    lines.write_text(
        json.dumps([arguments(load, url, model, tokenizer, path) for load, path in zip(loads, results, strict=True)])
    )
    client = Supervised("client", [sys.executable, str(SCRIPT), str(lines)], _env(), folder / "client.log", url)
    try:
        started = shown = time.monotonic()
        while client.poll() is None:
            watch()
            now = time.monotonic()
            if now - started > seconds:
                raise NoResult(
                    f"not done after {seconds / 60:.0f} minutes ({progress(_printed(client))}): taken for hung; see "
                    f"{client.log}"
                )
            if now - shown > PROGRESS_SECONDS:
                shown = now
                say(f"{now - started:5.0f} s  client: {progress(_printed(client))}")
            time.sleep(POLL_SECONDS)
        if client.exit_code and ALL_FAILED in _printed(client):
            raise NoResult(f"every request failed; {_alone(url, loads[0])}")
        if client.exit_code:
            raise NoResult(
                f"sglang.benchmark.serving ended with exit code {client.exit_code}; the last lines of {client.log}:\n"
                f"{client.tail()}"
            )
    finally:
        client.stop()
    found = []
    for load, path in zip(loads, results, strict=True):
        told = read(path)
        try:
            check(told, load)
        except Unanswered as error:
            raise NoResult(f"{load.name}: {error}; {_alone(url, load)}") from error
        except NoResult as error:
            raise NoResult(f"{load.name}: {error}") from error
        found.append(told)
    return found
