"""A process between the launcher and one server that leaves nothing behind, whoever dies first.

`python -m sglang_hetero.launcher.guard CONTROL_FD STATUS_FD GRACE_SECONDS SCRATCH -- COMMAND ...`

* Ends when the launcher closes (or loses, by dying) the other end of CONTROL_FD, on SIGTERM, or when the command has
  ended: then every process that came from the command is stopped, first politely, after GRACE_SECONDS by SIGKILL.
* Is a child subreaper (Linux): grandchildren whose parent died stay its descendants and are found.
* Gives the command SCRATCH, an empty folder, as TMPDIR and removes it: SGLang leaves names of IPC sockets there.
* Removes the shared memory that those processes had mapped, and lets Python's resource trackers remove semaphores:
  SGLang ends by SIGKILL and leaves both behind, 25 MB for each server with more than one rank.
* Writes `pid N` and, at the end, `exit N` to STATUS_FD.

Standard library and psutil only, so that it starts at once.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Between two looks at whether the command has ended, and whether all has been stopped.
_WATCH_SECONDS = 0.5
_POLL_SECONDS = 0.1
# How often all descendants are looked at (which costs): for orphans, and for the mappings of those that may crash.
_LOOK_SECONDS = 5.0
_SHARED_MEMORY = "/dev/shm/"
# How long SIGKILL may take before a process is given up as unkillable.
_KILL_SECONDS = 30.0
# How long a resource tracker may take to tidy up after the last process that it served.
_TRACKER_SECONDS = 5.0
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """In the child before exec: SIGKILL when the guard itself is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; any of them may end while it is looked at."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _descendants() -> list[psutil.Process]:
    """All living processes that came from the command."""
    return _living(psutil.Process().children(recursive=True))


def _mapped(process: psutil.Process) -> set[str]:
    """Files in /dev/shm that a process has mapped now; none if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/maps") as maps:
        lines = [line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if _SHARED_MEMORY in line]
        return {path for path in lines if path.startswith(_SHARED_MEMORY) and not path.endswith(" (deleted)")}
    return set()


def _shared_memory() -> set[str]:
    """Files in /dev/shm that a descendant has mapped and that this fleet made: this user's, younger than the guard."""
    started = psutil.Process().create_time()
    ours = set()
    for path in set().union(*(_mapped(process) for process in _descendants())):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if status.st_uid == os.getuid() and status.st_ctime >= started:
                ours.add(path)
    return ours


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether it is the helper of Python's multiprocessing that unlinks named semaphores once its parents are gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


def _kill_all(spare_trackers: bool) -> None:
    for process in _descendants():
        if spare_trackers and _is_resource_tracker(process):
            continue  # it ends by itself, and nothing else knows the names of the semaphores
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _reap_orphans(command: subprocess.Popen[bytes]) -> None:
    """Collect grandchildren that were handed to us; the command's own status is left to Popen."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid != command.pid and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _watch(command: subprocess.Popen[bytes], control: int) -> set[str]:
    """Return when the command has ended or the launcher has let go; the shared memory seen meanwhile."""
    shared: set[str] = set()
    looked = time.monotonic()
    while command.poll() is None:
        if select.select([control], [], [], _WATCH_SECONDS)[0]:
            break  # end of file: nothing is ever written
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            _reap_orphans(command)
            shared |= _shared_memory()
    return shared


def _stop(command: subprocess.Popen[bytes], grace: float) -> None:
    """End the command and all that came from it: SIGTERM to the command, after `grace` seconds SIGKILL to all."""
    if command.poll() is None:
        command.terminate()
    start = time.monotonic()
    while left := _descendants():
        waited = time.monotonic() - start
        if waited > grace:
            _kill_all(spare_trackers=waited < grace + _TRACKER_SECONDS)
        if waited > grace + _KILL_SECONDS:
            # In the kernel, on a dead disk say: nobody can end it, and waiting for it would hang the launcher, too.
            print(f"guard: cannot kill {[process.pid for process in left]}", file=sys.stderr, flush=True)
            return
        command.poll()
        _reap_orphans(command)
        time.sleep(_POLL_SECONDS)
    command.wait()
    _reap_orphans(command)


class _Asked(Exception):
    """SIGTERM arrived."""


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    raise _Asked


def main(arguments: list[str]) -> int:
    control, status, grace, scratch = int(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3]
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the launcher's business
    signal.signal(signal.SIGTERM, _on_signal)
    shared: set[str] = set()
    command = None
    try:
        with contextlib.suppress(_Asked, BrokenPipeError):  # asked to stop, or the launcher is gone
            command = subprocess.Popen(
                arguments[5:],
                env=dict(os.environ, TMPDIR=scratch),
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (this process has one thread)
            )
            os.write(status, f"pid {command.pid}\n".encode())
            shared |= _watch(command, control)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if command is not None:
            shared |= _shared_memory()
            _stop(command, grace)
            with contextlib.suppress(BrokenPipeError):
                os.write(status, f"exit {command.returncode}\n".encode())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in shared:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
