"""The fleets of real servers that the tests run on, each started once per session."""

import ctypes
import functools
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from sglang_hetero import models
from sglang_hetero.client import Client, Generation
from sglang_hetero.state.report import State, decode_state
from tests.reference import Continuation, Speculation, greedy, greedy_with_mtp
from tests.unit.discovery.etcd_server import EtcdServer

# A busy machine needs several times the 20 to 45 s of a quiet one. Below pytest's own limit per test.
START_SECONDS = 500
STOP_SECONDS = 60
# From the last answer until everything has come home and been reported, on a busy machine.
REST_SECONDS = 60
# Prefill steps of at most so many tokens: the longer prompts below come in chunks.
CHUNK = 256
OUTPUT_TOKENS = 24
# Vocabulary ids that no byte of a text has (sglang_hetero/models/tokenizer.py).
WORD_TOKENS = range(256, 500)
# Logit of the best token minus that of the next one: a hundred times the noise of fp32.
SMALLEST_GAP = 5e-4
# fp32 in another order of summation moves a log-probability by up to 5e-6 here. A conv, SSM or key state lost in one
# layer changes the tokens of only half of the prompts, but moves the first log-probabilities by 1.7e-5 and more.
LOGPROB_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Setup:
    """What to start: a topology and the options of `sglang-hetero up` that differ from its defaults.

    end: the signal that ends the launcher; it never reaches the servers themselves. chunk: tokens of a prefill step.
    etcd: servers and router meet in an etcd of their own. prefill_mtp: depth of speculation on prefill, None for `mtp`.
    prefill, decode: environment of the servers of one role, NAME=VALUE.
    """

    topology: str
    mtp: int = 3
    prefill_mtp: int | None = None
    model: str = "tiny"
    conv_layout: str = "channels_first"
    options: tuple[str, ...] = ()
    end: signal.Signals = signal.SIGTERM
    chunk: int = CHUNK
    etcd: bool = False
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        parts = [self.topology, f"mtp{self.mtp}" if self.prefill_mtp is None else f"mtp{self.prefill_mtp}to{self.mtp}"]
        parts += [self.model] if self.model != "tiny" else []
        parts += ["window-first"] if self.conv_layout == "window_first" else []
        parts += [option.strip("-") for option in self.options]
        parts += ["etcd"] if self.etcd else []
        parts += [value.removeprefix("SGLANG_HETERO").strip("_").lower() for value in (*self.prefill, *self.decode)]
        return "-".join(parts)

    def command(self, log_dir: Path, etcd: EtcdServer | None) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang_hetero", "up", self.topology, "--json"),
            *("--mtp", str(self.mtp), "--model", self.model, "--conv-layout", self.conv_layout),
            *("--chunk", str(self.chunk), "--start-seconds", str(START_SECONDS), "--log-dir", str(log_dir)),
            *(() if self.prefill_mtp is None else ("--prefill-mtp", str(self.prefill_mtp))),
            *self.options,
            *(("--etcd", etcd.address) if etcd else ()),
            *(word for value in self.prefill for word in ("--prefill-env", value)),
            *(word for value in self.decode for word in ("--decode-env", value)),
            # Every step tells how many requests it serves.
            *("--", "--decode-log-interval", "1"),
        ]


def pids(described: dict[str, Any]) -> list[int]:
    """Every process that a fleet announced."""
    found = [server["pid"] for server in described["servers"]]
    return found + ([described["router"]["pid"]] if described["router"] else [])


def family(roots: list[int]) -> list[psutil.Process]:
    """The processes and all that came from them."""
    parents = [psutil.Process(pid) for pid in roots]
    return parents + [child for parent in parents for child in parent.children(recursive=True)]


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    found = set()
    for process in processes:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith("/dev/shm/") and not path.endswith("(deleted)"):
                found.add(Path(path))
    return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; an ended one may wait for its parent to notice."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@functools.cache
def _reference(
    model_path: Path, prompt: tuple[int, ...], tokens: int, mtp: int, prompt_drafted: bool
) -> Continuation | Speculation:
    if mtp == 0:
        return greedy(model_path, [prompt], tokens)[0]
    return greedy_with_mtp(model_path, prompt, tokens, mtp, prompt_drafted=prompt_drafted)


@dataclass
class Served:
    """A running fleet and what its answers must be."""

    setup: Setup
    described: dict[str, Any]
    launcher: subprocess.Popen[bytes]
    etcd: EtcdServer | None = None
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.described["url"])
        self.model_path = models.path(self.setup.model)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """`length` token ids, the same in every run, after which greedy decoding is never a matter of rounding.

        None of them occurs in text, so that no prompt begins like SGLang's own warm-up request: with a prefix cache the
        two would share draft KV (docs/upstream_faults.md).
        """
        for attempt in itertools.count():
            prompt = random.Random(f"{length} {seed} {attempt}").choices(WORD_TOKENS, k=length)
            if min(self.reference(prompt).gaps) > SMALLEST_GAP:
                return prompt
        raise AssertionError("unreachable")

    def ask(self, prompt: list[int], tokens: int = OUTPUT_TOKENS) -> Generation:
        return self.client.generate(prompt, tokens, logprobs=True)

    def reference(self, prompt: list[int], tokens: int = OUTPUT_TOKENS) -> Continuation | Speculation:
        """What transformers gives."""
        return _reference(self.model_path, tuple(prompt), tokens, self.setup.mtp, self.setup.prefill_mtp != 0)

    def check(self, prompt: list[int], answer: Generation, drafts: bool = True) -> None:
        """Assert that an answer of `ask` is what transformers gives; `drafts`: also which drafts were accepted."""
        what = f"prompt of {len(prompt)} tokens"
        expected = self.reference(prompt, answer.completion_tokens)
        assert answer.prompt_tokens == len(prompt)
        assert answer.tokens == expected.tokens, what
        assert len(answer.logprobs) == len(expected.logprobs)
        off = max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True))
        assert off < LOGPROB_TOLERANCE, f"{what}: a log-probability is off by {off}"
        if drafts:
            assert counters(answer) == (expected.meta_info() if isinstance(expected, Speculation) else {}), what

    def end(self) -> None:
        """Let go of all of it, whatever has become of it."""
        self.launcher.kill()
        self.launcher.wait()
        self.launcher.stdout.close()
        if self.etcd is not None:
            self.etcd.kill()

    def log(self, role: str) -> str:
        """All that the servers of one role have printed."""
        return "".join(Path(s["log"]).read_text() for s in self.described["servers"] if s["role"] == role)


def counters(generation: Generation) -> dict[str, Any]:
    """The speculation counters of an answer, as `Served.reference` names them."""
    names = ("spec_correct_drafts_histogram", "spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    return {name: generation.meta[name] for name in names if name in generation.meta}


def start(setup: Setup, log_dir: Path) -> Served:
    """Start a fleet through the command line and wait until it is ready."""
    log_dir.mkdir(parents=True, exist_ok=True)
    etcd = EtcdServer(log_dir) if setup.etcd else None
    try:
        return _start(setup, log_dir, etcd)
    except BaseException:
        if etcd is not None:
            etcd.kill()
        raise


def _start(setup: Setup, log_dir: Path, etcd: EtcdServer | None) -> Served:
    with open(log_dir / "up.log", "wb") as progress:
        launcher = subprocess.Popen(
            setup.command(log_dir, etcd),
            stdout=subprocess.PIPE,
            stderr=progress,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 (no thread of ours runs at that time)
        )
    assert launcher.stdout is not None
    try:
        line = launcher.stdout.readline()
        if not line:
            raise AssertionError(f"{setup.id} did not start:\n{(log_dir / 'up.log').read_text()[-4000:]}")
        return Served(setup, json.loads(line), launcher, etcd)
    except BaseException:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        raise


def _end_with_parent() -> None:
    """In the launcher before exec: SIGTERM when pytest is killed."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def held(state: State, ranks: int) -> list[str]:
    """What a server still has, or what is wrong with it, when nothing is under way; empty if all is as at its start."""
    found = list(state.faults)
    if len(state.ranks) != ranks:
        found.append(f"{len(state.ranks)} of {ranks} ranks report")
    for rank in state.ranks:
        rest = {**rank.ours, "units": 0, "units_free": rank.ours.get("units", 0) - rank.ours.get("units_free", 0)}
        found += [f"{rank.rank}: {name} {count}" for name, count in rest.items() if count and name != "peers"]
        # What the prefix cache keeps is not lost.
        cached = {"pages": rank.sglang["cached_tokens"], "slots": rank.sglang.get("cached_slots", 0)}
        slots = ("slots",) if "slots" in rank.sglang else ()  # a model without linear state has none
        for name in ("pages", "rows", "aux_rows", *slots):
            free, total = rank.sglang[f"{name}_free"], rank.sglang[name]
            if free != total and not cached.get(name):
                found.append(f"{rank.rank}: {free} of {total} {name} are free")
    return found


def check_at_rest(served: Served) -> None:
    """Every server says that it is well and that everything is back."""
    deadline = time.monotonic() + REST_SECONDS
    session = requests.Session()
    session.trust_env = False  # a proxy of the environment must not see loopback
    for server in served.described["servers"]:
        ranks = 0 if server["role"] == "mixed" else server["tp"]
        while True:
            answer = session.get(f"{server['url']}/hetero/state", timeout=REST_SECONDS)
            what = held(decode_state(answer.content), ranks)
            if not what:
                break
            assert time.monotonic() < deadline, f"{served.setup.id}: {server['name']}: {what}"
            time.sleep(1.0)
        health = session.get(f"{server['url']}/health", timeout=REST_SECONDS)
        assert health.status_code == requests.codes.ok, health.text


def stop(served: Served) -> None:
    """Check that a fleet is as it was at its start, stop it, and check that nothing of it is left."""
    gone = [pid for pid in pids(served.described) if not psutil.pid_exists(pid)]
    assert not gone, f"{served.setup.id}: processes {gone} died during the tests: {served.described}"
    check_at_rest(served)
    processes = family(pids(served.described))
    shared = shared_memory(processes)
    started = len(pids(served.described))
    assert len(alive(processes)) > started, "the servers had no workers: this check looks at the wrong processes"
    served.launcher.send_signal(served.setup.end)
    status = served.launcher.wait(STOP_SECONDS)
    assert status == (-signal.SIGKILL if served.setup.end is signal.SIGKILL else 0)
    deadline = time.monotonic() + STOP_SECONDS
    while (left := alive(processes)) or (files := [path for path in shared if path.exists()]):
        assert time.monotonic() < deadline, f"{served.setup.id}: left behind: {left or files}"
        time.sleep(0.1)
