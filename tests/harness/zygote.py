"""A process that imports SGLang once and forks the rank processes.

It must have a single thread when it forks, so nothing here opens a transfer engine, a zmq context or a torch thread
pool. It dies with the process that started it, and the ranks die with it.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1
PRELOAD = "preload"
PRELOADED = (
    # First of all, as in SGLang's own scheduler processes: plugins look for it.
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.disagg_service",
    "sglang.srt.disaggregation.mooncake.conn",
    "aiohttp.web",
    f"{__package__}.rank",
)
"""Modules of the ranks. Not `mooncake.engine`: it starts threads when it is imported."""
MESSAGE_BYTES = 4096
"""Upper bound of one command; commands are small JSON objects in one SOCK_SEQPACKET message."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exits at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def preload() -> None:
    """Import what the ranks need. Plugins are loaded in each rank, because what they do depends on its environment."""
    for module in PRELOADED:
        importlib.import_module(module)


def threads() -> int:
    """Threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


class Zygote:
    """Serves `spawn`, `status` and `kill` for the children it has forked."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.ended: dict[int, int] = {}
        """Exit codes of ended children, negative for signals."""
        self.running: set[int] = set()

    def run(self) -> None:
        """Serve until the other end closes; each answer repeats the number of its command, the first one has 0."""
        self._reply(0, pid=os.getpid(), threads=threads())
        while True:
            data, fds, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
            if not data:
                return
            self._reap()
            command = json.loads(data)
            number, name = command.pop("number"), command.pop("do")
            if name == "spawn":
                self._reply(number, pid=self._spawn(fds[0], **command))
            elif name == "status":
                self._reply(number, exit_code=self.ended.get(command["pid"]))
            elif name == "kill":
                self._kill(command["pid"])
                self._reply(number, exit_code=self.ended.get(command["pid"]))

    def stop_children(self) -> None:
        """Kill what still runs."""
        for pid in list(self.running):
            os.kill(pid, signal.SIGKILL)
            self._wait(pid)

    def _reply(self, number: int, **fields: object) -> None:
        self.control.send(json.dumps({"number": number, **fields}).encode())

    def _spawn(self, fd: int, log: str, environment: dict[str, str]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_rank(self.control, parent, fd, log, environment)
        os.close(fd)
        self.running.add(pid)
        return pid

    def _kill(self, pid: int) -> None:
        # Only children that have not been waited for: their ids cannot have been given to another process.
        if pid in self.running:
            os.kill(pid, signal.SIGKILL)
            self._wait(pid)

    def _wait(self, pid: int, flags: int = 0) -> None:
        ended, status = os.waitpid(pid, flags)
        if ended == pid:
            self.running.discard(pid)
            self.ended[pid] = os.waitstatus_to_exitcode(status)

    def _reap(self) -> None:
        for pid in list(self.running):
            self._wait(pid, os.WNOHANG)


def _become_rank(control: socket.socket, parent: int, fd: int, log: str, environment: dict[str, str]) -> None:
    """Child side of the fork; never returns."""
    code = 1
    try:
        die_with_parent(parent)
        control.close()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        os.environ.update(environment)
        import logging

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
        from sglang.srt.plugins import load_plugins

        from .rank import serve

        preload()
        load_plugins()
        serve(Connection(fd))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Engine and server threads are still running: no interpreter shutdown, no native destructors.
        os._exit(code)


def main() -> None:
    """`python -m <package>.zygote CONTROL_FD PARENT_PID [preload]`."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    if PRELOAD in sys.argv:
        preload()
    zygote = Zygote(socket.socket(fileno=fd))
    try:
        zygote.run()
    finally:
        zygote.stop_children()


if __name__ == "__main__":
    main()
