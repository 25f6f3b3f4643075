"""Servers for a cell: our launcher on this machine's CPU, or a command of the user's, on whatever it starts them."""

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench_serving.matrix_plan import Cell
from sglang_hetero import answers, models
from sglang_hetero.errors import OptionError
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.fleet import Fleet, StartError
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.process import Supervised
from sglang_hetero.launcher.topology import Role

POLL_SECONDS = 0.5
INFO_SECONDS = 10.0
READY = re.compile(r"^READY (https?://\S+)\s*$", re.MULTILINE)
"""What a command prints once requests may come: as `sglang-hetero up` does."""
PLACE = "{topology}"
"""In a command: the name of the topology."""


class Servers(Protocol):
    """The running servers of a cell."""

    @property
    def url(self) -> str: ...

    def check(self) -> None:
        """Raise HeteroError if one of them has ended."""

    def accept_length(self) -> float | None:
        """Mean tokens for each verify step since the start; None where it is not told."""


class Starter(Protocol):
    """How servers are started. model: the name under which they serve; tokenizer: its folder."""

    @property
    def model(self) -> str: ...

    @property
    def tokenizer(self) -> Path: ...

    def servers(self, cell: Cell, options: Options) -> AbstractContextManager[Servers]:
        """A context with servers of their own, which are gone after it."""


def told_accept_length(url: str) -> float | None:
    """What the server at `url` says of its speculation."""
    try:
        with answers.asked("GET", f"{url}/server_info", timeout=(INFO_SECONDS, INFO_SECONDS)) as reply:
            said = json.loads(answers.whole(reply, INFO_SECONDS))
        value = said["internal_states"][0]["avg_spec_accept_length"]
    except (*answers.BROKEN, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return float(value) if isinstance(value, int | float) and value > 0 else None


@dataclass
class _Fleet:
    fleet: Fleet

    @property
    def url(self) -> str:
        return self.fleet.url

    def check(self) -> None:
        self.fleet.check()

    def accept_length(self) -> float | None:
        """Of the server that decodes: routers do not pass it on."""
        for server in self.fleet.servers:
            if server.instance.role is not Role.PREFILL:
                return told_accept_length(server.endpoint.url)
        return None


@dataclass(frozen=True)
class Launcher:
    """`sglang_hetero.launcher` on this machine."""

    model: str

    @property
    def tokenizer(self) -> Path:
        return models.path(self.model)

    @contextmanager
    def servers(self, cell: Cell, options: Options) -> Iterator[Servers]:
        with Fleet(topology.parse(cell.topology), options) as fleet:
            yield _Fleet(fleet)


@dataclass
class _Command:
    process: Supervised
    url: str

    def check(self) -> None:
        if self.process.poll() is not None:
            raise self.process.died()

    def accept_length(self) -> float | None:
        return told_accept_length(self.url)


@dataclass(frozen=True)
class Command:
    """A command that runs the servers of the topology that takes the place of `{topology}` in it, prints a line
    `READY <url>` and stops them at SIGTERM."""

    text: str
    model: str
    tokenizer: Path

    def __post_init__(self) -> None:
        if PLACE not in self.text:
            raise OptionError(f"--start {self.text!r}: say with {PLACE} where the name of the topology belongs")
        if not self.tokenizer.is_dir():
            raise OptionError(f"--tokenizer {self.tokenizer}: no folder")

    @contextmanager
    def servers(self, cell: Cell, options: Options) -> Iterator[Servers]:
        assert options.log_dir is not None
        options.log_dir.mkdir(parents=True, exist_ok=True)
        words = [word.replace(PLACE, cell.topology) for word in shlex.split(self.text)]
        process = Supervised("servers", words, os.environ, options.log_dir / "servers.log", "")
        try:
            yield _Command(process, self._ready(process, options.start_seconds))
        finally:
            process.stop()

    def _ready(self, process: Supervised, seconds: float) -> str:
        """The URL that it prints. Raises HeteroError when it ends, or prints none in time."""
        end = time.monotonic() + seconds
        while True:
            ended = process.poll() is not None
            if found := READY.search(process.log.read_text(errors="replace")):
                return found[1].rstrip("/")
            if ended:
                raise process.died()
            if time.monotonic() > end:
                raise StartError(
                    f"no line READY <url> after {seconds:.0f} s (--start-seconds); the last lines of {process.log}:\n"
                    f"{process.tail()}"
                )
            time.sleep(POLL_SECONDS)
