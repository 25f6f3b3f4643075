"""`sglang-hetero accuracy`: what an endpoint still knows, alone or beside a reference."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from sglang_hetero import __version__
from sglang_hetero.errors import AccuracyError
from sglang_hetero.layout.checks import shorten
from sglang_hetero.router.flags import count, positive, seconds

from . import harnesses, report
from .asking import Case, Teller, ask
from .endpoint import APIS, KEY, Endpoint, clean
from .recall import ANSWER_DIGITS, CHARACTERS_PER_PAIR, MOST_PAIRS, pair_count, questions, score
from .report import Limits, Run, Task

RECALL = "recall"
WHERE_INSTALLED = "gsm8k"
"""The task that is run without being asked for where a harness is installed."""
MAX_CHARACTERS = 1 << 20
"""Of a prompt: beyond the context of every model served with this package."""
MAX_REPEAT = 5
"""Ways to deal out 10 outputs to two endpoints: 252, all of which the test for noise looks at."""
MOST_QUESTIONS = 1 << 16
MINUTE = 60

EXAMPLES = """examples:
  sglang-hetero accuracy --url http://127.0.0.1:8000 --tasks recall
  sglang-hetero accuracy --url http://p2d1:8000 --reference http://mixed:30000 --lengths 512,2048 --per-depth 100
  sglang-hetero accuracy --url http://p2d1:8000 --reference http://mixed:30000 --tasks gsm8k --examples 1319
  sglang-hetero accuracy --url http://p2d1:8000 --tasks recall --fail-under 0.95 --json result.json

recall asks for one of many key-value pairs of a long text, at several depths of it; other tasks are run by sgl-eval or
lm-eval, if one is installed. Every endpoint is asked --repeat times, which tells the noise of one configuration from
what is different between the two. Exit status 1 if a limit is broken, a request fails (--max-errors) or an endpoint
cannot be asked. docs/accuracy.md says what the figures mean."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "accuracy",
        help="ask an endpoint, and a reference, what it still knows of a long prompt",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="of a server or router")
    parser.add_argument("--reference", metavar="URL", help="of one that is trusted, such as an undivided server")
    parser.add_argument("--api-key", metavar="KEY", help=f"of --url (default: ${KEY})")
    parser.add_argument("--reference-api-key", metavar="KEY", help=f"of --reference (default: ${KEY})")
    parser.add_argument(
        "--api", choices=["auto", *APIS], default="auto", help="SGLang's /generate or /v1/completions (default: auto)"
    )
    parser.add_argument(
        "--tasks",
        type=_tasks,
        metavar="NAMES",
        help=f"separated by commas (default: {RECALL}, and {WHERE_INSTALLED} where sgl-eval or lm-eval is installed)",
    )
    asking = parser.add_argument_group("how it is asked")
    asking.add_argument(
        "--repeat", type=_repeat, default=2, metavar="N", help="passes of every endpoint (default: %(default)s)"
    )
    asking.add_argument(
        "--concurrency", type=positive, default=8, metavar="N", help="requests at a time (default: %(default)s)"
    )
    asking.add_argument("--seed", type=int, default=0, metavar="N", help="of questions and orders (default: 0)")
    asking.add_argument(
        "--timeout",
        type=seconds,
        default=Endpoint.seconds,
        metavar="S",
        help="for an answer to begin, and as long again for all of it (default: %(default)g)",
    )
    asking.add_argument(
        "--flush-cache", action="store_true", help="POST /flush_cache before each pass of recall; disturbs other users"
    )
    recall = parser.add_argument_group("recall")
    recall.add_argument(
        "--lengths",
        type=_lengths,
        default=[512],
        metavar="N,...",
        help="of prompts, in characters (default: 512)",
    )
    recall.add_argument(
        "--depths", type=_depths, default=5, metavar="N", help="from the first pair to the last (default: %(default)s)"
    )
    recall.add_argument(
        "--per-depth",
        type=positive,
        default=20,
        metavar="N",
        help="questions for each length and depth (default: %(default)s)",
    )
    recall.add_argument(
        "--tokens",
        type=positive,
        default=32,
        metavar="N",
        help=f"most that are generated; more than the {ANSWER_DIGITS} digits of an answer compare more of the output "
        "(default: %(default)s)",
    )
    other = parser.add_argument_group("tasks of a harness")
    other.add_argument("--harness", choices=list(harnesses.HARNESSES), help="default: the first that is installed")
    other.add_argument(
        "--examples", type=positive, default=200, metavar="N", help="first N questions (default: %(default)s)"
    )
    other.add_argument(
        "--task-tokens", type=positive, default=2048, metavar="N", help="most for one answer (default: %(default)s)"
    )
    other.add_argument(
        "--task-minutes", type=seconds, default=240.0, metavar="MIN", help="for one pass (default: %(default)g)"
    )
    other.add_argument("--task-dir", metavar="DIR", help="where the harness's files are kept (default: nowhere)")
    limits = parser.add_argument_group("result")
    limits.add_argument("--json", metavar="FILE", help="write the result there")
    limits.add_argument("--fail-under", type=_rate, metavar="RATE", help="least score of --url, 0 to 1")
    limits.add_argument(
        "--max-differences", type=count, metavar="N", help="most outputs that differ from the reference's"
    )
    limits.add_argument(
        "--max-errors", type=count, default=Limits.max_errors, metavar="N", help="most failed requests (default: 0)"
    )
    limits.add_argument(
        "--fail-if-worse",
        action="store_true",
        help="a score or an accept length is found to be lower, or outputs differ more than noise explains",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, print, and say by the exit status whether a limit is broken."""
    limits = Limits(
        arguments.fail_under, arguments.max_differences, arguments.max_errors, bool(arguments.fail_if_worse)
    )
    _check(arguments)
    names = arguments.tasks or [RECALL, WHERE_INSTALLED]
    cases, groups = _cases(arguments) if RECALL in names else ([], [])
    key = os.environ.get(KEY)
    endpoints = [_endpoint(arguments, arguments.url, arguments.api_key or key)]
    if arguments.reference:
        endpoints.append(_endpoint(arguments, arguments.reference, arguments.reference_api_key or key))
    for endpoint in endpoints:
        endpoint.connect()
    done = Run([{"url": one.url, "route": one.path, "model": one.model} for one in endpoints], _settings(arguments))
    done.notes += _notes(endpoints)
    for name in names:
        try:
            if name == RECALL:
                done.tasks.append(_recall(arguments, endpoints, cases, groups))
            elif harnesses.find(arguments.harness):
                done.tasks.append(_harness(arguments, endpoints, name))
            else:
                (done.failed if arguments.tasks else done.skipped)[name] = harnesses.missing(arguments.harness)
        except AccuracyError as error:
            done.failed[name] = str(error)
    print("\n".join(report.lines(done)))
    if arguments.json:
        _write(Path(arguments.json), report.as_json(done, limits, __version__))
    wrong = report.broken(done, limits)
    for line in wrong:
        print(f"broken: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _check(arguments: argparse.Namespace) -> None:
    """What would be found out only at the end of a long run, or never."""
    if not arguments.reference:
        for flag, value in (
            ("--max-differences", arguments.max_differences is not None),
            ("--fail-if-worse", arguments.fail_if_worse),
            ("--reference-api-key", arguments.reference_api_key),
        ):
            if value:
                raise AccuracyError(f"{flag} compares with a reference: give --reference URL, too")
    if arguments.tokens <= ANSWER_DIGITS:
        raise AccuracyError(
            f"--tokens {arguments.tokens}: an answer of recall has {ANSWER_DIGITS} digits, which may be a token each, "
            f"and ends where no further one comes: give {ANSWER_DIGITS + 1} or more"
        )
    asked = len(arguments.lengths) * arguments.depths * arguments.per_depth
    if asked > MOST_QUESTIONS:
        raise AccuracyError(f"{asked} questions of recall are more than {MOST_QUESTIONS}: lower --per-depth")
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        raise AccuracyError(f"--json {arguments.json}: there is no such folder; make it first")


def _endpoint(arguments: argparse.Namespace, url: str, key: str | None) -> Endpoint:
    return Endpoint(clean(url), key, arguments.timeout, APIS.get(arguments.api))


def _notes(endpoints: list[Endpoint]) -> list[str]:
    if len(endpoints) == 1:
        return []
    one, other = endpoints
    notes = []
    if one.model != other.model:
        notes.append(f"the endpoints name different models: {shorten(one.model)} and {shorten(other.model)}")
    if one.path != other.path:
        notes.append(f"they are asked by different routes, {one.path} and {other.path}; --api makes it one")
    return notes


def _cases(arguments: argparse.Namespace) -> tuple[list[Case], list[report.Group]]:
    """All questions of recall. Raises HeteroError for a length that is too short, for a text or for so many depths."""
    last = max(1, arguments.depths - 1)
    depths = [number / last for number in range(arguments.depths)]
    cases: list[Case] = []
    groups: dict[tuple[int, float], list[str]] = {}
    for characters in arguments.lengths:
        asked = questions(characters, depths, arguments.per_depth, arguments.seed)
        if (pairs := pair_count(characters)) < arguments.depths:
            enough = arguments.depths * CHARACTERS_PER_PAIR
            raise AccuracyError(
                f"a text of {characters} characters has {pairs} pairs, so several of {arguments.depths} depths would "
                f"ask for the same one: give --depths {pairs}, or --lengths from {enough} on"
            )
        for place, question in enumerate(asked):
            case = Case(
                f"recall/{characters}/{question.depth:g}/{place % arguments.per_depth}",
                question.prompt,
                arguments.tokens,
                partial(score, question=question),
            )
            cases.append(case)
            groups.setdefault((characters, question.depth), []).append(case.name)
    return cases, [report.Group(*where, tuple(names)) for where, names in groups.items()]


def _recall(
    arguments: argparse.Namespace, endpoints: list[Endpoint], cases: list[Case], groups: list[report.Group]
) -> Task:
    teller = Teller(RECALL)
    try:
        passes = ask(
            endpoints,
            cases,
            repeat=arguments.repeat,
            concurrency=arguments.concurrency,
            seed=arguments.seed,
            flush=arguments.flush_cache,
            say=teller,
        )
    finally:
        teller.close()
    return Task(RECALL, "sglang-hetero", passes, groups)


def _harness(arguments: argparse.Namespace, endpoints: list[Endpoint], name: str) -> Task:
    harness = harnesses.find(arguments.harness)
    assert harness is not None
    settings = harnesses.Settings(
        arguments.examples,
        arguments.task_tokens,
        arguments.concurrency,
        arguments.seed,
        arguments.task_minutes * MINUTE,
    )
    with ExitStack() as stack:
        folder = arguments.task_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="accuracy-"))
        where = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_made(Path(folder))))
        passes = harnesses.passes(harness, endpoints, name, settings, where, repeat=arguments.repeat, say=_say)
    return Task(name, harness.program, passes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AccuracyError(f"--task-dir {folder}: {error}") from None
    return folder


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """Without keys."""
    names = (
        "repeat concurrency seed timeout flush_cache lengths depths per_depth tokens harness examples task_tokens "
        "task_minutes"
    )
    return {name: getattr(arguments, name) for name in names.split()}


def _write(path: Path, result: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise AccuracyError(f"--json {path}: {error}") from None


def _tasks(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if not harnesses.TASK.fullmatch(name):
            raise argparse.ArgumentTypeError(f"{shorten(name)} is no name of a task")
    return names


def _lengths(text: str) -> list[int]:
    lengths = sorted({positive(one) for one in text.split(",")})
    if lengths[-1] > MAX_CHARACTERS:
        raise argparse.ArgumentTypeError(f"{lengths[-1]}: a prompt may have {MAX_CHARACTERS} characters")
    return lengths


def _depths(text: str) -> int:
    value = positive(text)
    if value > MOST_PAIRS:
        raise argparse.ArgumentTypeError(f"{value}: a text has {MOST_PAIRS} pairs at most")
    return value


def _repeat(text: str) -> int:
    value = positive(text)
    if value > MAX_REPEAT:
        raise argparse.ArgumentTypeError(f"{value}: must be {MAX_REPEAT} or less")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0 to 1")
    return value
