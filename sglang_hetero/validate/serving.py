"""Stages: a tiny model served end to end, in every mode for the linear state, beside one undivided server.

On a CPU the arithmetic is the same everywhere, so all tokens must be equal to the undivided server's. Accelerators add
up in another order with another TP size: there the modes must agree with each other, every byte is checked on its way
by digests (SGLANG_HETERO_VERIFY=1), and how far the undivided server agrees is told. The same holds for the drafts that
were accepted: wrong draft caches change no token, they only make decode slow.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sglang_hetero import models
from sglang_hetero.client import Client, Generation
from sglang_hetero.doctor.lines import Line, fail, ok, skip, warn
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.ports import Ports
from sglang_hetero.launcher.topology import Role
from sglang_hetero.perf.records import PREFIX
from sglang_hetero.transfer.pieces import StateMode

from .child import Say
from .hearer import Hearer
from .stage import Settings

MODEL, MTP = "tiny", 3
UNDIVIDED, DIVIDED = "mixed_tp1", "p2_d1"
LENGTHS = {True: (48, 900), False: (48, 300, 900, 2500)}
"""Tokens of the prompts; the last one has several chunks, so that layers are handed over while later ones compute."""
CHUNK = 256
OUTPUT = {True: 12, False: 32}
SEED = 18592
START_SECONDS = {"cpu": 900.0, "npu": 3000.0, "cuda": 3000.0}
STOP_SECONDS = 60.0
HOST = "127.0.0.1"
TOKENS, DRAFTS, HAND_OVERS = "tokens", "accepted drafts", "hand-overs"
OVERLAP_PROMISES = ("landed before the end",)
REMEDY = "see the servers' logs in the stage's folder"


class Answer(msgspec.Struct, frozen=True):
    """tokens: ids. drafts: entry i is how many verify steps accepted i drafts."""

    tokens: list[int]
    drafts: list[int]


def promises_of(topology_name: str) -> tuple[str, ...]:
    """Lines of the stage of a topology."""
    if topology_name == UNDIVIDED:
        return (TOKENS,)
    return (TOKENS, DRAFTS, HAND_OVERS) if _divided(topology_name) else (TOKENS, DRAFTS)


def _divided(topology_name: str) -> bool:
    return any(one.role is not Role.MIXED for one in topology.parse(topology_name).instances)


def area_of(topology_name: str, mode: str = "") -> str:
    """Name of the stage of a topology."""
    return f"serve-{topology_name}{'-' if mode else ''}{mode}"


def reference(settings: Settings, _argument: str, say: Say) -> None:
    """The undivided server; its tokens are kept for the others."""
    area = area_of(UNDIVIDED)
    found = _serve(settings, UNDIVIDED, area, "")
    _keep(settings, area, found)
    say(ok(area, TOKENS, f"{len(found)} prompts, {sum(len(one.tokens) for one in found)} tokens"))


def run(settings: Settings, argument: str, say: Say) -> None:
    """One topology in one mode; argument: both."""
    name, _, mode = argument.partition(" ")
    area = area_of(name, mode)
    found = _serve(settings, name, area, mode)
    _keep(settings, area, found)
    say(_tokens(settings, area, found))
    say(_drafts(settings, area, found))
    if _divided(name):
        say(_hand_overs(area, _records(_logs(settings, area)), name, len(found)))


def overlap(settings: Settings, argument: str, say: Say) -> None:
    """What the logs of a stage (argument) tell of the time at which bytes were there."""
    area, name = "overlap", OVERLAP_PROMISES[0]
    sent = [one for one in _records(_logs(settings, argument)) if one.get("side") == "prefill"]
    if not sent:
        say(skip(area, name, f"{argument} has left no {PREFIX} lines"))
        return
    longest = max(int(one["tokens"]) for one in sent)
    shares = [float(one["early_share"]) for one in sent if one["tokens"] == longest and one["early_share"] is not None]
    after = [float(one["after_prefill_ms"]) for one in sent if one["tokens"] == longest]
    share = min(shares, default=0.0)
    seen = (
        f"of a prompt of {longest} tokens {share:.0%} had landed when prefill ended, the rest {max(after):.1f} ms after"
    )
    figures = {"share": round(share, 3), "after prefill ms": round(max(after), 3)}
    if share > 0:
        say(ok(area, name, seen, **figures))
    else:
        remedy = "layers are not sent while later ones compute: see SGLANG_HETERO_LAYERWISE and prefill's log"
        say(fail(area, name, seen, remedy, **figures))


def prompts(lengths: tuple[int, ...], vocabulary: int) -> list[list[int]]:
    """Token ids, the same in every run."""
    chance = random.Random(SEED)
    return [[chance.randrange(vocabulary) for _ in range(length)] for length in lengths]


def agreement(found: list[Answer], other: list[Answer]) -> int:
    """How many answers are equal, token by token."""
    return sum(mine.tokens == theirs.tokens for mine, theirs in zip(found, other, strict=False))


def answer_of(given: Generation, tokens: int) -> Answer:
    """What is compared of an answer. Raises HeteroError for one without, so that nothing equals nothing."""
    if len(given.tokens) != tokens:
        raise HeteroError(f"an answer has the ids of {len(given.tokens)} tokens, asked for were {tokens}; {REMEDY}")
    if not given.accept_histogram:
        raise HeteroError(f"an answer with MTP depth {MTP} tells no accepted drafts; {REMEDY}")
    return Answer(given.tokens, given.accept_histogram)


def _drafts(settings: Settings, area: str, found: list[Answer]) -> Line:
    """Beside the undivided server's: on a CPU they must be those, on an accelerator they are told."""
    whole = _kept(settings, area_of(UNDIVIDED))
    if whole is None:
        return skip(area, DRAFTS, f"{area_of(UNDIVIDED)} has left none to compare with")
    mean, other = (sum(map(_accepted, answers)) / len(answers) for answers in (found, whole))
    figures = {"drafts a step": round(mean, 3), "undivided drafts a step": round(other, 3)}
    seen = f"{mean:.2f} a verify step, of the undivided server {other:.2f}"
    if settings.device == "cpu" and [one.drafts for one in found] != [one.drafts for one in whole]:
        remedy = f"draft caches arrive wrong, which changes no token and makes decode slow: {REMEDY}, and report it"
        return fail(area, DRAFTS, f"others than the undivided server's: {seen}", remedy, **figures)
    return ok(area, DRAFTS, seen, **figures)


def _accepted(answer: Answer) -> float:
    """Drafts that a verify step accepted, on average."""
    return sum(number * steps for number, steps in enumerate(answer.drafts)) / max(1, sum(answer.drafts))


def _tokens(settings: Settings, area: str, found: list[Answer]) -> Line:
    """Beside the undivided server on a CPU; on an accelerator beside the first mode that has run."""
    whole = _kept(settings, area_of(UNDIVIDED))
    if settings.device == "cpu":
        if whole is None:
            return skip(area, TOKENS, f"{area_of(UNDIVIDED)} has left none to compare with")
        same = agreement(found, whole)
        seen = f"{same} of {len(found)} answers are those of the undivided server"
        if same == len(found) == len(whole):
            return ok(area, TOKENS, seen, same=same)
        return fail(area, TOKENS, seen, f"a hand-over is wrong: {REMEDY}, and report it", same=same)
    beside = f"; {agreement(found, whole)} of {len(found)} are the undivided server's" if whole else ""
    others = [
        (other, kept)
        for mode in StateMode
        if (other := area_of(DIVIDED, mode.value)) != area and (kept := _kept(settings, other)) is not None
    ]
    different = [other for other, kept in others if agreement(found, kept) != len(found)]
    if different and area.startswith(area_of(DIVIDED)):
        return fail(area, TOKENS, f"other answers than {', '.join(different)}{beside}", f"{REMEDY}, and report it")
    if whole and not agreement(found, whole):
        seen = f"none of {len(found)} answers is the undivided server's"
        return warn(area, TOKENS, seen, "rounding with another TP size may do that; compare answers of a real model")
    return ok(area, TOKENS, f"{len(found)} answers, alike in {len(others)} other modes{beside}")


def _hand_overs(area: str, records: list[dict[str, Any]], name: str, requests: int) -> Line:
    """Whether every request took our path on every rank, and ended well."""
    wanted = topology.parse(name)
    equal = len({one.tp for one in wanted.instances}) == 1
    if equal and not records:
        return ok(area, HAND_OVERS, "TP sizes are equal: SGLang's own path, as SGLANG_HETERO=auto says")
    if not records:
        return fail(area, HAND_OVERS, f"no {PREFIX} line: this package's path was not taken", "see docs/options.md")
    bad = sorted({str(one.get("outcome")) for one in records if one.get("outcome") != "ok"})
    if bad:
        return fail(area, HAND_OVERS, f"some failed: {'; '.join(bad)}", REMEDY)
    counts = {role.value: _handed_over(records, role, wanted) for role in (Role.PREFILL, Role.DECODE)}
    if min(counts.values()) < requests:
        seen = f"{requests} requests; all ranks handed {counts['prefill']} of them over and received {counts['decode']}"
        return fail(area, HAND_OVERS, seen, REMEDY)
    moved = sum(sum(one["bytes"].values()) for one in records if one.get("side") == "prefill")
    return ok(area, HAND_OVERS, f"{counts['decode']} requests on all ranks, {moved / 1e6:.1f} MB", MB=moved / 1e6)


def _handed_over(records: list[dict[str, Any]], role: Role, wanted: topology.Topology) -> int:
    """Requests that every rank of a server of that role has a line of."""
    ranks: dict[Any, set[Any]] = {}
    for one in records:
        if one.get("side") == role.value:
            ranks.setdefault(one["room"], set()).add(one.get("rank"))
    size = min(one.tp for one in wanted.instances if one.role is role)
    return sum(len(names) >= size for names in ranks.values())


def _serve(settings: Settings, name: str, area: str, mode: str) -> list[Answer]:
    """Start a topology, send the prompts, stop it; each answer."""
    folder = _logs(settings, area)
    vocabulary = models.spec(MODEL).vocab_size
    asked, tokens = prompts(LENGTHS[settings.quick], vocabulary), OUTPUT[settings.quick]
    started = _on_cpu(name, mode, folder) if settings.device == "cpu" else _on_device(settings, name, mode, folder)
    with started as url:
        client = Client(url)
        found = []
        for prompt in asked:
            found.append(answer_of(client.generate(prompt, tokens), tokens))
            print(f"[{time.strftime('%H:%M:%S')}] a prompt of {len(prompt)} tokens is answered", flush=True)
        return found


@contextmanager
def _on_cpu(name: str, mode: str, folder: Path) -> Iterator[str]:
    variables = (("SGLANG_HETERO_STATE", mode),) if mode else ()
    options = Options(
        model=MODEL,
        mtp=MTP,
        chunk=CHUNK,
        max_tokens=8192,
        max_requests=2,
        log_dir=folder,
        start_seconds=START_SECONDS["cpu"],
        prefill_env=variables,
        decode_env=variables,
    )
    with Fleet(topology.parse(name), options, say=lambda text: print(f"[fleet] {text}", flush=True)) as fleet:
        yield fleet.url


@contextmanager
def _on_device(settings: Settings, name: str, mode: str, folder: Path) -> Iterator[str]:
    """With the scripts of launch/, as a user starts them."""
    folder.mkdir(parents=True, exist_ok=True)
    platform = {"npu": "ascend", "cuda": "cuda"}[settings.device]
    environment = dict(os.environ) | {
        "LAUNCH_PYTHON": sys.executable,
        "LAUNCH_MODEL": str(models.path(MODEL)),
        "LAUNCH_MTP": str(MTP),
        "LAUNCH_CHUNK": str(CHUNK),
        "LAUNCH_REQUESTS": "2",
        "LAUNCH_IP": HOST,
        "LAUNCH_LOGS": str(folder),
        "LAUNCH_PORT": str(Ports(HOST).free(count=4)),
        "LAUNCH_START_SECONDS": str(int(START_SECONDS[settings.device])),
        "SGLANG_HETERO_VERIFY": "1",
    }
    if mode:
        environment["SGLANG_HETERO_STATE"] = mode
    process = subprocess.Popen(
        [settings.fleet, platform, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    try:
        yield _ready(process, START_SECONDS[settings.device])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[str], seconds: float) -> str:
    """The URL behind READY. Raises HeteroError if it does not come."""
    deadline = time.monotonic() + seconds
    hearer = Hearer(process)
    while (line := hearer.line(deadline)) is not None:
        if not line:
            raise HeteroError(f"the fleet has ended with exit status {process.wait()}; {REMEDY}")
        if line.startswith("READY "):
            return line.split()[1]
    raise HeteroError(f"the fleet does not serve after {seconds:.0f} s; {REMEDY}")


def _logs(settings: Settings, area: str) -> Path:
    return Path(settings.folder) / area


def _tokens_file(settings: Settings, area: str) -> Path:
    return Path(settings.folder) / f"{area}-tokens.json"


def _keep(settings: Settings, area: str, found: list[Answer]) -> None:
    """For the stages behind."""
    _tokens_file(settings, area).write_bytes(msgspec.json.encode(found))


def _kept(settings: Settings, area: str) -> list[Answer] | None:
    try:
        return msgspec.json.decode(_tokens_file(settings, area).read_bytes(), type=list[Answer])
    except (OSError, msgspec.MsgspecError):
        return None


def _records(folder: Path) -> list[dict[str, Any]]:
    """The figures of all requests in the logs of a folder; what a log has else, torn lines too, is passed over."""
    found = []
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            _, prefix, rest = line.partition(f"{PREFIX} ")
            if prefix:
                try:
                    record = json.loads(rest)
                except ValueError:
                    continue
                found += [record] if isinstance(record, dict) and "room" in record else []
    return found
