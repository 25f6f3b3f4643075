"""The test's side of the processes: start the zygote, fork ranks, call them, with a limit on every wait.

Commands are numbered and answers repeat the number. The answer to a command that has timed out may come later; the
next wait drops it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from pathlib import Path
from typing import Any

from .errors import CommandFailed, HarnessError, HarnessTimeout, RankDied
from .zygote import MESSAGE_BYTES, PRELOAD

ZYGOTE_SECONDS = 120.0
"""Limit for the zygote's imports (6 s on an idle core)."""
FORK_SECONDS = 30.0
COMMAND_SECONDS = 60.0
"""Default limit of one command of a rank."""
EXIT_SECONDS = 5.0
"""How long a process may take to end after its connection has closed."""
LOG_TAIL_LINES = 25
TEMPLATES = 8
"""Environments that are kept ready; each is a process with a copy of some of SGLang's memory."""
OPTION_PREFIX = "SGLANG_HETERO_"
"""And `SGLANG_HETERO` itself: the options of this package."""

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "MC_FORCE_TCP": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_LOCAL_IP_NIC": "lo",
    "no_proxy": "127.0.0.1,localhost",
    "NO_PROXY": "127.0.0.1,localhost",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # SGLang's own limits of 300 s each would outlast PHASE_SECONDS in pair.py and hide the reason.
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "40",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "40",
    # The same of 30 s, for a request that failed and whose prefill does not say that it has drained.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "2",
}
"""What SGLang and Mooncake need for a PD pair over loopback without an accelerator (docs/cpu.md)."""


class Condition(Enum):
    """What the test has done to a process."""

    RUNNING = "running"
    PAUSED = "paused"
    """It takes no command: SIGSTOP."""
    DEAD = "dead"


class RankProcess:
    """One forked process and the connection that its commands take."""

    def __init__(self, name: str, pid: int, connection: Connection, log: Path, zygote: "ZygoteClient") -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.condition = Condition.RUNNING
        self._connection = connection
        self._zygote = zygote
        self._number = 0

    def start(self, command: str, *arguments: Any) -> None:
        """Send a command; `result` waits for it, before the next one is sent."""
        self._number += 1
        try:
            self._connection.send((self._number, command, arguments))
        except OSError as error:
            raise self._died(command) from error

    def result(self, command: str, deadline: float) -> Any:
        """Wait for the reply to `command`; raises CommandFailed, HarnessTimeout or RankDied."""
        number, value, error = 0, None, ""
        while number != self._number:
            if not wait_for_connections([self._connection], timeout=max(0.0, deadline - time.monotonic())):
                raise HarnessTimeout(f"{self.name}: no answer to {command}\n{self.log_tail()}")
            try:
                number, value, error = self._connection.recv()
            except (EOFError, OSError) as closed:
                raise self._died(command) from closed
        if error:
            raise CommandFailed(f"{self.name}: {command} failed\n{error}\n{self.log_tail()}")
        return value

    def answered(self) -> bool:
        """Whether `result` would return at once: the rank has answered, or it has ended."""
        return self._connection.poll()

    def call(self, command: str, *arguments: Any, seconds: float = COMMAND_SECONDS) -> Any:
        """Run one command and wait for it."""
        self.start(command, *arguments)
        return self.result(command, time.monotonic() + seconds)

    def stop(self) -> None:
        """Close the connection, which ends the process, and kill it if it does not end."""
        self._connection.close()
        if self.condition is Condition.PAUSED:
            self.kill()
        deadline = time.monotonic() + EXIT_SECONDS
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.exit_code() is None:
            self.kill()

    def kill(self) -> None:
        """Kill the process: SIGKILL."""
        self.condition = Condition.DEAD
        self._zygote.command("kill", pid=self.pid)

    def pause(self) -> None:
        """Stop the process where it is, all threads of it: SIGSTOP."""
        self.condition = Condition.PAUSED
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on: SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.condition = Condition.RUNNING

    def exit_code(self) -> int | None:
        """None while it runs, negative when a signal ended it."""
        code: int | None = self._zygote.command("status", pid=self.pid)["exit_code"]
        return code

    def log_tail(self) -> str:
        """Last lines of what the process wrote."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- last lines of {self.name} (process {self.pid})", *lines[-LOG_TAIL_LINES:]])

    def _died(self, command: str) -> RankDied:
        deadline = time.monotonic() + EXIT_SECONDS
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return RankDied(f"{self.name} died during {command}, exit code {self.exit_code()}\n{self.log_tail()}")


def _without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Each side gets the options of this package that its test names, and no others."""
    return {name: value for name, value in environment.items() if not f"{name}_".startswith(OPTION_PREFIX)}


def call_all(
    ranks: Sequence[RankProcess], command: str, *arguments: Any, seconds: float = COMMAND_SECONDS
) -> list[Any]:
    """Run one command on several ranks at the same time; answers in the order of `ranks`.

    All answers are taken before the first failure is raised, so that no answer is left for the next command.
    """
    deadline = time.monotonic() + seconds
    outcomes: list[Any] = []
    for rank in ranks:
        try:
            rank.start(command, *arguments)
            outcomes.append(None)
        except HarnessError as error:
            outcomes.append(error)
    for index, rank in enumerate(ranks):
        if outcomes[index] is None:
            try:
                outcomes[index] = rank.result(command, deadline)
            except HarnessError as error:
                outcomes[index] = error
    for outcome in outcomes:
        if isinstance(outcome, HarnessError):
            raise outcome
    return outcomes


class ZygoteClient:
    """The connection to one process that forks."""

    def __init__(self, control: socket.socket, log: Path) -> None:
        self.log = log
        self._control = control
        self._number = 0

    def command(self, do: str, *descriptors: int, **fields: Any) -> dict[str, Any]:
        """Send one command with file descriptors and take its answer."""
        self._number += 1
        message = json.dumps({"number": self._number, "do": do, **fields}).encode()
        try:
            socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise self._ended() from error
        return self.receive(self._number, FORK_SECONDS)

    def receive(self, number: int, seconds: float) -> dict[str, Any]:
        """Wait for the answer to a command; the first one, when the process is ready, is number 0."""
        deadline = time.monotonic() + seconds
        while True:
            readable, _, _ = select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise HarnessTimeout(
                    f"the zygote did not answer within {seconds} s\n{self.log.read_text(errors='replace')}"
                )
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except OSError as error:
                raise self._ended() from error
            if not data:
                raise self._ended()
            answer: dict[str, Any] = json.loads(data)
            if answer.pop("number") == number:
                return answer

    def close(self) -> None:
        """Close the connection, which ends the process and its children."""
        self._control.close()

    def _ended(self) -> HarnessError:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return HarnessError("\n".join(["the zygote has ended", *lines]))


class ZygoteProcess:
    """The process that holds SGLang's imports, and its templates; see zygote.py."""

    def __init__(self, preload: bool = True) -> None:
        """Without `preload` it starts at once and each template imports SGLang for itself."""
        self._directory = tempfile.TemporaryDirectory(prefix="sglang-hetero-harness-")
        self._forked = 0
        self.log = Path(self._directory.name) / "zygote.log"
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._client = ZygoteClient(control, self.log)
        self._templates: dict[tuple[tuple[str, str], ...], ZygoteClient] = {}
        """By environment, the least recently used first."""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                self._process = self._start(theirs, preload)
            self.ready = self._client.receive(0, ZYGOTE_SECONDS)
            """`pid`, and `threads`: how many threads the zygote has; more than one would make its forks unsafe."""
        except BaseException:
            # It has no children yet, and would look at its connection only after its imports.
            if self._process is not None:
                self._process.kill()
            self.stop()
            raise

    def spawn(self, name: str, environment: dict[str, str]) -> RankProcess:
        """Fork a rank process; `environment` is added to the zygote's before SGLang's plugins are loaded."""
        template = self._template(environment)
        pid, connection, log = self._fork(template, "spawn", name, environment, socket.SOCK_STREAM)
        return RankProcess(name, pid, Connection(connection.detach()), log, template)

    def command(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send one command to the zygote and take its answer."""
        return self._client.command(do, **fields)

    def stop(self) -> None:
        """End the zygote, and with it every template and rank."""
        for client in (*self._templates.values(), self._client):
            client.close()
        if self._process is not None:
            try:
                self._process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._directory.cleanup()

    def _template(self, environment: dict[str, str]) -> ZygoteClient:
        key = tuple(sorted(environment.items()))
        client = self._templates.pop(key, None)
        if client is None:
            self._make_room()
            _, control, log = self._fork(self._client, "template", "template", environment, socket.SOCK_SEQPACKET)
            client = ZygoteClient(control, log)
            ready = client.receive(0, ZYGOTE_SECONDS)
            if ready["threads"] != 1:
                raise HarnessError(f"a template has {ready['threads']} threads after loading plugins, see {log}")
        self._templates[key] = client
        return client

    def _make_room(self) -> None:
        """End the templates that were not used for longest, but for those that have ranks."""
        for key, client in list(self._templates.items()):
            if len(self._templates) < TEMPLATES:
                return
            if client.command("running")["running"] == 0:
                self._templates.pop(key).close()

    def _fork(
        self, zygote: ZygoteClient, do: str, name: str, environment: dict[str, str], kind: socket.SocketKind
    ) -> tuple[int, socket.socket, Path]:
        """Fork a child of a zygote; returns its id, our end of its connection, and its log."""
        self._forked += 1
        log = Path(self._directory.name) / f"{self._forked}-{name.replace(' ', '-').replace(',', '')}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        try:
            with theirs:
                answer = zygote.command(do, theirs.fileno(), log=str(log), environment=environment)
        except BaseException:
            # Should it be forked after all, it ends because its connection is closed.
            ours.close()
            raise
        return answer["pid"], ours, log

    def _start(self, theirs: socket.socket, preload: bool) -> "subprocess.Popen[bytes]":
        package = __package__ or ""
        root = Path(__file__).resolve().parents[package.count(".") + 1]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
        python = [sys.executable, "-m", f"{package}.zygote"]
        with self.log.open("wb") as output:
            return subprocess.Popen(
                [*python, str(theirs.fileno()), str(os.getpid()), *([PRELOAD] if preload else [])],
                env={**_without_options(os.environ), **ENVIRONMENT, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
