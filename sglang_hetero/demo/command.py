"""`sglang-hetero demo`: the same prompts on a prefill/decode pair and on one undivided server, compared."""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_hetero import models
from sglang_hetero.client import Client, Generation
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import flags, topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.stopping import Stopped, raise_on_signals
from sglang_hetero.launcher.topology import Role

DISAGGREGATED = "p2_d1"
UNDIVIDED = "mixed_tp1"
OUTPUT_TOKENS = 64
DEFAULTS = Options(mtp=3)
TRACE = "SGLANG_HETERO_TRACE"
SEED = 18592
"""Of the token ids of prompts whose length was asked for."""


@dataclass(frozen=True)
class Request:
    """One prompt through one endpoint."""

    name: str
    endpoint: str
    send: Callable[[Client], Generation]


def _requests(tokens: int) -> list[Request]:
    result = []
    for file in sorted(resources.files("sglang_hetero.demo").joinpath("prompts").iterdir(), key=lambda f: f.name):
        name, text = file.name.removesuffix(".txt"), file.read_text(encoding="utf-8")
        result.append(Request(name, "/v1/chat/completions", lambda client, text=text: client.chat(text, tokens)))
        result.append(Request(name, "/generate", lambda client, text=text: client.generate(text, tokens)))
    return result


def _long_requests(lengths: Sequence[int], vocabulary: int, tokens: int) -> list[Request]:
    """Prompts of given lengths, of token ids from a seed, through the endpoint that takes ids."""
    chance = random.Random(SEED)
    result = []
    for length in lengths:
        ids = [chance.randrange(vocabulary) for _ in range(length)]
        result.append(Request(f"{length:,} tokens", "/generate", lambda client, ids=ids: client.generate(ids, tokens)))
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _serve(name: str, options: Options, todo: list[Request], tokens: int) -> list[Generation]:
    """The answers of one topology, in order."""
    results = []
    if options.log_dir is not None:
        options = replace(options, log_dir=options.log_dir / name)
    with Fleet(topology.parse(name), options) as fleet:
        client = Client(fleet.url)
        for i, request in enumerate(todo, 1):
            result = request.send(client)
            check_complete(result, tokens, options.mtp_of(Role.DECODE))
            results.append(result)
            _say(
                f"{name} {i}/{len(todo)}: {request.name} through {request.endpoint}, {result.prompt_tokens} -> "
                f"{result.completion_tokens} tokens in {result.seconds:.1f} s: {result.text[:40]!r}..."
            )
    return results


def same(divided: Generation, undivided: Generation, *, drafts: bool = True) -> bool:
    """Whether both gave the same output.

    /generate tells token ids and the histogram of accepted drafts, the chat endpoint only text and counts.

    drafts: compare the histogram, too. Where prefill has no draft cache, decode's drafts are other ones
    (docs/speculation.md).
    """
    return (
        divided.tokens == undivided.tokens
        and divided.text == undivided.text
        and (divided.prompt_tokens, divided.completion_tokens) == (undivided.prompt_tokens, undivided.completion_tokens)
        and (divided.accept_histogram == undivided.accept_histogram or not drafts)
    )


def check_complete(answer: Generation, asked: int, mtp: int) -> None:
    """Raise `HeteroError` when an answer lacks what it is to be compared by, so that nothing equals nothing."""
    # Ids that chance has put together may decode to no text at all: what is compared then are the ids.
    if answer.completion_tokens != asked or not (answer.tokens or answer.text):
        raise HeteroError(f"asked for {asked} tokens, the answer has {answer.completion_tokens}: {answer.text!r}")
    if answer.tokens and len(answer.tokens) != asked:
        raise HeteroError(f"an answer of {asked} tokens tells the ids of {len(answer.tokens)}")
    if answer.tokens and mtp and not answer.accept_histogram:
        raise HeteroError(f"an answer with MTP depth {mtp} tells no accepted drafts")


def _table(
    name: str, todo: list[Request], divided: list[Generation], undivided: list[Generation], verdicts: list[bool]
) -> Table:
    table = Table(title=f"{name} beside {UNDIVIDED}: tokens/s counts output over the whole request")
    table.add_column("request")
    table.add_column("endpoint")
    for column in ("prompt", "output", f"{name}\ntokens/s", f"{UNDIVIDED}\ntokens/s", "accept\nlength"):
        table.add_column(column, justify="right")
    table.add_column("tokens")
    for request, one, other, equal in zip(todo, divided, undivided, verdicts, strict=True):
        accept = "-" if one.accept_length is None else f"{one.accept_length:.2f}"
        table.add_row(
            request.name,
            request.endpoint,
            str(one.prompt_tokens),
            str(one.completion_tokens),
            f"{one.tokens_per_second:.1f}",
            f"{other.tokens_per_second:.1f}",
            accept,
            "same" if equal else "DIFFERENT",
        )
    return table


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="P2/D1 on the real SGLang, checked against the undivided server",
        epilog="examples:\n  sglang-hetero demo\n  sglang-hetero demo --topology p1_d1 --mtp 0 --tokens 16\n"
        "  sglang-hetero demo --prefill-mtp 0 --decode-mtp 3\n"
        "  sglang-hetero demo --model qwen35-2b-cache --prompt-tokens 512,18592 --tokens 32 --trace out/trace",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--topology", default=DISAGGREGATED, help=f"default: {DISAGGREGATED}")
    parser.add_argument(
        "--tokens", type=flags.positive, default=OUTPUT_TOKENS, help=f"to generate (default: {OUTPUT_TOKENS})"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_lengths,
        metavar="N[,N]",
        help="prompts of these lengths, of random token ids, instead of the texts",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="record there what every rank does; see sglang-hetero trace"
    )
    flags.add(parser, DEFAULTS)
    parser.set_defaults(run=run)


def _lengths(text: str) -> list[int]:
    return [flags.positive(part) for part in text.split(",")]


def _traced(options: Options, folder: Path | None) -> Options:
    """The pair's servers with a trace; the undivided one has nothing to tell."""
    if folder is None:
        return options
    setting = ((TRACE, str(folder.absolute())),)
    return replace(options, prefill_env=(*options.prefill_env, *setting), decode_env=(*options.decode_env, *setting))


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 and prints PASS when every output is the same, else 1 and FAIL."""
    options = flags.options(arguments, tuple(arguments.server_arguments))
    todo = _requests(arguments.tokens)
    if arguments.prompt_tokens:
        todo = _long_requests(arguments.prompt_tokens, models.spec(options.model).vocab_size, arguments.tokens)
    start = time.monotonic()
    try:
        raise_on_signals()
        divided = _serve(arguments.topology, _traced(options, arguments.trace), todo, arguments.tokens)
        alone = replace(
            options,
            prefill_env=(),
            decode_env=(),
            mtp=options.mtp_of(Role.DECODE),
            prefill_mtp=None,
            decode_mtp=None,
        )
        undivided = _serve(UNDIVIDED, alone, todo, arguments.tokens)
    except Stopped:
        _say("demo: stopped")
        return 1
    drafts = options.mtp_of(Role.PREFILL) > 0 or options.mtp_of(Role.DECODE) == 0
    verdicts = [same(one, other, drafts=drafts) for one, other in zip(divided, undivided, strict=True)]
    table = _table(arguments.topology, todo, divided, undivided, verdicts)
    Console(width=120 if not sys.stdout.isatty() else None).print(table)
    if not drafts:
        print("prefill has no draft: tokens are compared, accepted drafts are not (docs/speculation.md)")
    print(
        f"tokens/s say that it runs, not how fast: {topology.parse(arguments.topology).ranks} ranks share "
        f"{len(os.sched_getaffinity(0))} CPUs"
    )
    different = verdicts.count(False)
    print(f"{len(todo)} requests, {different} different, {time.monotonic() - start:.0f} s")
    print("FAIL" if different else "PASS")
    return 1 if different else 0
