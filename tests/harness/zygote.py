"""Processes that import SGLang once and fork the rank processes.

The first one imports and forks one template for each environment that ranks are to have: the template sets it, loads
SGLang's plugins, which read it, and forks the ranks. So plugins are loaded once per environment and not once per rank
(0.7 s of CPU time: SGLang looks for each hooked function in all modules).

Each must have a single thread when it forks, so nothing here opens a transfer engine, a zmq context or a torch thread
pool. A process dies with the one that started it.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from . import hosts

_PR_SET_PDEATHSIG = 1
PRELOAD = "preload"
PRELOADED = (
    # First of all, as in SGLang's own scheduler processes: plugins look for it.
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.disagg_service",
    "sglang.srt.disaggregation.mooncake.conn",
    "aiohttp.web",
    # What our plugin imports when it is activated in a rank. Imported only: what it does depends on the environment.
    "sglang.srt.disaggregation.ascend.conn",
    "sglang.srt.mem_cache.kv_cache_configurator",
    "sglang.srt.layers.attention.hybrid_linear_attn_backend",
    "sglang_hetero.cpu.gaps",
    "sglang_hetero.backend.hooks",
    "sglang_hetero.backend.manager",
    "sglang_hetero.backend.endpoints",
    "sglang_hetero.backend.bootstrap",
    "sglang_hetero.backend.make",
    f"{__package__}.serve",
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
    """Serves `template`, `spawn`, `status`, `kill` and `running` for the children it forks."""

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
            if name in ("spawn", "template"):
                self._reply(number, pid=self._fork(fds[0], template=name == "template", **command))
            elif name == "running":
                self._reply(number, running=len(self.running))
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

    def _fork(self, fd: int, *, template: bool, log: str, environment: dict[str, str]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.control.close()
            _become(_run if template else _rank, parent, fd, log, environment)
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


def _become(what: Callable[[int], None], parent: int, fd: int, log: str, environment: dict[str, str]) -> None:
    """Child side of the fork; never returns. A rank finds its template's plugins loaded."""
    code = 1
    try:
        die_with_parent(parent)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        os.environ.update(environment)
        if namespace := environment.get(hosts.NAMESPACE_ENV):
            hosts.enter(namespace)
        import logging

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
        preload()
        from sglang.srt.plugins import load_plugins

        load_plugins()
        what(fd)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Engine and server threads are still running: no interpreter shutdown, no native destructors.
        os._exit(code)


def _rank(fd: int) -> None:
    from .serve import serve

    serve(Connection(fd))


def _run(fd: int) -> None:
    # Objects that live for ever; the collector would touch, and so copy, their memory in every child.
    gc.freeze()
    zygote = Zygote(socket.socket(fileno=fd))
    try:
        zygote.run()
    finally:
        zygote.stop_children()


def main() -> None:
    """`python -m <package>.zygote CONTROL_FD PARENT_PID [preload]`."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    if PRELOAD in sys.argv:
        preload()
    _run(fd)


if __name__ == "__main__":
    main()
