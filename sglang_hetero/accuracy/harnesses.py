"""Tasks of other evaluation harnesses, run as they are against an endpoint: sgl-eval and lm-eval.

Written against the command lines and files of sgl-eval 0.1.3 and lm-eval 0.4.13. What they write is read question by
question, so that two endpoints are compared like the recall task's answers. Their files are untrusted, like answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from sglang_hetero.errors import AccuracyError
from sglang_hetero.layout.checks import shorten

from .asking import order
from .compare import Answer, Failure, Pass
from .endpoint import COMPLETIONS, Endpoint

TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_FILE = 512 << 20
"""Bytes of a file of answers: 14,042 questions of MMLU with long thinking are below."""
LOG_SHOWN = 400
"""Characters of a harness's log, from its end, that an error quotes."""
MAX_LINES = 3
"""Of it."""
STOP_SECONDS = 10.0
"""For a harness to end after SIGTERM."""
LOOK_SECONDS = 0.1
"""Between two looks whether it has ended."""
PREFERRED_FILTER = "flexible-extract"
"""Of lm-eval's gsm8k: takes the last number of an answer. `strict-match` wants the format of the examples, which is
also a test of following it."""


@dataclass(frozen=True)
class Settings:
    """The same for every endpoint. examples: first questions of the task; tokens: most that one answer generates;
    seconds: for one run."""

    examples: int
    tokens: int
    concurrency: int
    seed: int
    seconds: float


@dataclass(frozen=True)
class Harness:
    """One of them. program: on PATH or beside this Python; arguments: of its command line, for an endpoint, a task and
    a folder that it writes to; read: that folder's answers."""

    program: str
    package: str
    arguments: Callable[[Endpoint, str, Settings, Path], list[str]]
    read: Callable[[str, Path], Pass]

    def path(self) -> str | None:
        """Of the program, if it is installed."""
        beside = str(Path(sys.executable).parent)
        return shutil.which(self.program, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))


def _sgl_eval(endpoint: Endpoint, task: str, settings: Settings, folder: Path) -> list[str]:
    arguments = [
        "run",
        task,
        *("--base-url", f"{endpoint.url}/v1"),
        *("--num-examples", str(settings.examples)),
        *("--num-threads", str(settings.concurrency)),
        *("--n-repeats", "1"),
        *("--temperature", "0"),
        *("--max-tokens", str(settings.tokens)),
        *("--seed", str(settings.seed)),
        *("--out-dir", str(folder)),
    ]
    # It has no other way to take one, so the process list of this machine shows it while it runs.
    return arguments + (["--api-key", endpoint.key] if endpoint.key else [])


def _lm_eval(endpoint: Endpoint, task: str, settings: Settings, folder: Path) -> list[str]:
    model = {
        "model": endpoint.model or "default",
        "base_url": f"{endpoint.url}{COMPLETIONS}",
        "num_concurrent": settings.concurrency,
        # Prompts go as text: no tokenizer of the model has to be here.
        "tokenizer_backend": "None",
    }
    return [
        "run",
        *("--model", "local-completions"),
        *("--model_args", json.dumps(model)),
        *("--tasks", task),
        *("--limit", str(settings.examples)),
        *("--gen_kwargs", json.dumps({"temperature": 0.0, "max_gen_toks": settings.tokens})),
        *("--seed", str(settings.seed)),
        *("--output_path", str(folder)),
        "--log_samples",
    ]


class _SglAnswer(msgspec.Struct):
    """A line of output-rs0.jsonl. An answer that it could not get has a finish_reason of its own, such as error, and
    counts as a wrong one in its own score."""

    id: str | int
    symbolic_correct: bool | float
    generation: str | None = ""
    finish_reason: str | None = None


class _LmAnswer(msgspec.Struct):
    """A line of samples_<task>_<date>.jsonl; there is one for each document and filter, with the metrics' values
    beside these fields."""

    doc_id: int
    resps: list[Any]
    metrics: list[str]
    filter: str = "none"


def _read_sgl_eval(task: str, folder: Path) -> Pass:
    metrics = msgspec.json.decode(_one(folder, f"sgl_eval_{task}_*/metrics.json"))
    if not isinstance(metrics, dict) or metrics.get("partial"):
        raise AccuracyError("its metrics.json says that it ended before all questions were asked")
    found: dict[str, Answer | Failure] = {}
    for line in _one(folder, f"sgl_eval_{task}_*/output-rs0.jsonl").splitlines():
        one = msgspec.json.decode(line, type=_SglAnswer)
        if one.finish_reason in ("stop", "length"):
            found[str(one.id)] = Answer(one.generation or "", bool(one.symbolic_correct))
        else:
            found[str(one.id)] = Failure(f"sgl-eval got no answer: finish_reason {shorten(one.finish_reason)}")
    if len(found) != metrics.get("num_examples"):
        raise AccuracyError(
            f"its metrics.json counts {shorten(metrics.get('num_examples'))} questions, its answers are {len(found)}"
        )
    return found


def _read_lm_eval(task: str, folder: Path) -> Pass:
    lines = _one(folder, f"*/samples_{task}_*.jsonl").splitlines()
    answers = [(msgspec.json.decode(line, type=_LmAnswer), line) for line in lines]
    filters = {one.filter for one, _ in answers}
    chosen = PREFERRED_FILTER if PREFERRED_FILTER in filters else min(filters, default="none")
    found: dict[str, Answer | Failure] = {}
    for one, line in answers:
        if one.filter == chosen:
            text = _text(one.resps)
            found[str(one.doc_id)] = Answer(text, _right(one.metrics, msgspec.json.decode(line)))
    return found


def _right(metrics: Sequence[str], fields: Mapping[str, Any]) -> bool:
    """The first metric that is right or wrong. Others, such as bleu, are no score of an answer."""
    for name in metrics:
        if fields.get(name) in (0, 1):
            return bool(fields[name])
    raise AccuracyError(f"none of its metrics {shorten(list(metrics))} is 0 or 1 for an answer")


def _text(responses: Any) -> str:
    """Of the first response, which lm-eval puts into a list for each request."""
    while isinstance(responses, list) and responses:
        responses = responses[0]
    return responses if isinstance(responses, str) else ""


def _one(folder: Path, pattern: str) -> bytes:
    """The only file of that name."""
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise AccuracyError(f"it wrote {len(paths)} files {pattern} where one was expected")
    if paths[0].stat().st_size > MAX_FILE:
        raise AccuracyError(f"its {paths[0].name} has more than {MAX_FILE} bytes")
    return paths[0].read_bytes()


HARNESSES = {
    "sgl-eval": Harness("sgl-eval", "sgl-eval", _sgl_eval, _read_sgl_eval),
    "lm-eval": Harness("lm-eval", "lm-eval[api]", _lm_eval, _read_lm_eval),
}


def find(wanted: str | None) -> Harness | None:
    """The first that is installed, or the one that is wanted if it is."""
    names = [wanted] if wanted else list(HARNESSES)
    return next((HARNESSES[name] for name in names if HARNESSES[name].path()), None)


def missing(wanted: str | None) -> str:
    """What to do where none is installed."""
    kinds = [HARNESSES[wanted]] if wanted else list(HARNESSES.values())
    return f"{' and '.join(kind.program for kind in kinds)} not installed: " + " or ".join(
        f"pip install '{kind.package}'" for kind in kinds
    )


def passes(
    harness: Harness,
    endpoints: Sequence[Endpoint],
    task: str,
    settings: Settings,
    folder: Path,
    *,
    repeat: int,
    say: Callable[[str], None],
) -> list[list[Pass]]:
    """`repeat` runs against every endpoint, one after the other. `folder` gets a folder for each."""
    found: list[list[Pass]] = [[] for _ in endpoints]
    turns = order(len(endpoints), repeat)
    for turn, which in enumerate(turns, 1):
        endpoint = endpoints[which]
        say(f"{task}: {harness.program} against {endpoint.url}, run {turn} of {len(turns)}")
        found[which].append(run(harness, endpoint, task, settings, folder / f"run{turn}"))
    return found


def run(harness: Harness, endpoint: Endpoint, task: str, settings: Settings, folder: Path) -> Pass:
    """One run. `folder` must be new; `harness.log` in it has what the program said. AccuracyError if it failed."""
    program = harness.path()
    if program is None:
        raise AccuracyError(missing(harness.program))
    folder.mkdir(parents=True)
    log = folder / "harness.log"
    what = f"{harness.program} run {task} against {endpoint.url}"
    with log.open("wb") as sink:
        try:
            status = _run(
                [program, *harness.arguments(endpoint, task, settings, folder)], _environment(endpoint), sink, settings
            )
        except OSError as error:
            raise AccuracyError(f"{what}: {error}") from None
    if status is None:
        raise AccuracyError(f"{what}: not done in {settings.seconds:g} s (--task-minutes); {_end(log)}")
    if status != 0:
        raise AccuracyError(f"{what}: exit status {status}; {_end(log)}")
    try:
        return harness.read(task, folder)
    except (AccuracyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise AccuracyError(f"{what}: no usable result: {error}; {_end(log)}") from None


def _environment(endpoint: Endpoint) -> dict[str, str]:
    """This process's, with what lm-eval takes the key from. A proxy, with which data sets may have to be downloaded,
    does not see the endpoint."""
    direct = ",".join(
        filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(endpoint.url).hostname])
    )
    return os.environ | {"OPENAI_API_KEY": endpoint.key or "EMPTY", "no_proxy": direct, "NO_PROXY": direct}


def _run(command: list[str], environment: dict[str, str], sink: IO[bytes], settings: Settings) -> int | None:
    """Exit status, None if it took too long. Whatever happens here, it and what it started have ended."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
    )
    try:
        timely = _ended(process, settings.seconds)
    finally:
        if not _ended(process, 0):
            process.send_signal(signal.SIGTERM)
            _ended(process, STOP_SECONDS)
        # The program leads a group of its own, and while it is not waited for its number is nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    return status if timely else None


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends in that time; it is not waited for."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _end(log: Path) -> str:
    """Its last words."""
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - MAX_LINES * LOG_SHOWN))
        said = source.read().decode(errors="replace").split("\n")
    last = " | ".join([line.strip() for line in said if line.strip()][-MAX_LINES:])
    return f"it said last: {ascii(last)[1:-1][-LOG_SHOWN:]}" if last else "it said nothing"
