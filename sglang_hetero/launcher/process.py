"""One supervised process: started under a guard, its log, its end."""

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_hetero.errors import HeteroError

# Between SIGTERM and SIGKILL. Enough for a router; SGLang would need 5 s and more even when idle (it looks every 5 s)
# and frees nothing in that time that the guard does not.
GRACE_SECONDS = 1.0
START_SECONDS = 20.0
TAIL_LINES = 25
_TAIL_BYTES = 16384


# Longest path of a scratch folder: a Unix socket's has at most 107 bytes, and SGLang adds names of its own.
SCRATCH_LENGTH = 64


class ProcessDied(HeteroError):
    """A server or router ended without being asked to."""


def _scratch_folder() -> str:
    """A new folder with a short path, in TMPDIR where that is short enough."""
    folder = tempfile.mkdtemp(prefix="sgh-")
    if len(os.fsencode(folder)) > SCRATCH_LENGTH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="sgh-", dir="/tmp")
    return folder


class Supervised:
    """A running command with its log file.

    name: for messages; url: where it answers; log: everything that it and its children print, of a former run, too, if
    `append`; health: the route that answers 200 once it can serve.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        url: str,
        *,
        health: str = "/health",
        append: bool = False,
    ) -> None:
        self.name = name
        self.url = url
        self.health_url = url + health
        self._command, self._env, self._health = command, env, health
        self.log = log
        self.exit_code: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._messages = b""
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        self._scratch = _scratch_folder()
        guard = [sys.executable, "-m", "sglang_hetero.launcher.guard", str(control), str(status), str(GRACE_SECONDS)]
        try:
            try:
                with open(log, "ab" if append else "wb") as output:
                    self._guard = subprocess.Popen(
                        [*guard, self._scratch, "--", *command],
                        # Modules of the folder that we happen to stand in must not take the place of installed ones.
                        env=dict(env) | {"PYTHONSAFEPATH": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=(control, status),
                        start_new_session=True,
                    )
            finally:
                os.close(control)
                os.close(status)
            self.pid = self._first_message()
        except BaseException:  # also a signal: whoever asked does not get the object and could not stop it
            self.stop()
            raise

    def _first_message(self) -> int:
        """The command's pid, as the guard tells it."""
        if not select.select([self._status], [], [], START_SECONDS)[0]:
            raise ProcessDied(f"{self.name}: its guard did not start within {START_SECONDS:.0f} s; see {self.log}")
        self._read()
        words = self._messages.split()
        if len(words) < 2 or words[0] != b"pid":
            raise ProcessDied(f"{self.name}: could not be started\n{self.tail()}")
        return int(words[1])

    def _read(self) -> None:
        self._messages += os.read(self._status, 256)

    def poll(self) -> int | None:
        """The exit code once the command and all that came from it have ended, else None."""
        if self.exit_code is None and (self._guard is None or self._guard.poll() is not None):
            self._read()
            words = self._messages.split()
            # No word of the exit: the guard itself was killed, and its command with it.
            self.exit_code = int(words[words.index(b"exit") + 1]) if b"exit" in words else -9
        return self.exit_code

    def request_stop(self) -> None:
        """Ask the guard to stop everything; returns at once."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def stop(self) -> None:
        """Stop and wait until nothing is left."""
        self.request_stop()
        if self._guard is not None:
            self._guard.wait()
        self.poll()
        shutil.rmtree(self._scratch, ignore_errors=True)  # a guard that was killed could not
        if self._status >= 0:
            os.close(self._status)
            self._status = -1

    def again(self) -> "Supervised":
        """The same command once more, behind the same log, after what is left of this run has been stopped."""
        self.stop()
        return Supervised(self.name, self._command, self._env, self.log, self.url, health=self._health, append=True)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Last lines of the log."""
        with open(self.log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def progress(self) -> str:
        """The last line of the log that tells how far a start is: one with a time, and no probe of ours."""
        for line in reversed(self.tail().splitlines()):
            if line.startswith("[") and "/health" not in line:
                return line
        return "starting"

    def died(self) -> ProcessDied:
        """The error for an unexpected end, with the last log lines."""
        return ProcessDied(
            f"{self.name} ended with exit code {self.exit_code}; the last lines of {self.log}:\n{self.tail()}"
        )
