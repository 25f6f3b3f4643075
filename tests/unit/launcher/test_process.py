"""A supervised process leaves nothing behind, whoever dies first."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from sglang_hetero.launcher import guard, process
from sglang_hetero.launcher.process import ProcessDied, Supervised

# A server with a child in a session of its own, which a signal to the server's group does not reach; both ignore
# SIGTERM. It writes the child's pid and TMPDIR to a file, as SGLang writes its sockets.
STUBBORN = """
import json, mmap, multiprocessing, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "time.sleep(600)"], start_new_session=True)
open(os.environ["TMPDIR"] + "/socket", "w").close()
shared = open("/dev/shm/sglang-hetero-test-%d" % os.getpid(), "wb+")
shared.truncate(4096)
mapped = mmap.mmap(shared.fileno(), 4096)
lock = multiprocessing.get_context("spawn").Lock()
with open(sys.argv[1] + ".new", "w") as file:
    json.dump({"child": child.pid, "tmp": os.environ["TMPDIR"], "shared": shared.name,
               "semaphore": "/dev/shm/sem." + lock._semlock.name[1:]}, file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
if "end" in sys.argv:
    os.unlink(shared.name)
    sys.exit(7)
time.sleep(600)
"""
WAIT_SECONDS = 30.0


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)


def wait_for(condition) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def read(file: Path) -> dict:
    wait_for(file.exists)
    return json.loads(file.read_text())


def start(tmp_path: Path, *arguments: str) -> tuple[Supervised, dict]:
    facts = tmp_path / "facts.json"
    command = [sys.executable, "-c", STUBBORN, str(facts), *arguments]
    supervised = Supervised("stubborn", command, os.environ, tmp_path / "log", "http://127.0.0.1:1")
    return supervised, read(facts)


def test_stop_ends_server_and_grandchild_and_removes_tmpdir(tmp_path):
    supervised, facts = start(tmp_path)
    assert supervised.poll() is None
    assert not gone(facts["child"])
    assert Path(facts["tmp"], "socket").exists()
    assert Path(facts["shared"]).exists()
    assert Path(facts["semaphore"]).exists()
    supervised.stop()
    assert gone(supervised.pid)
    assert gone(facts["child"])
    assert not Path(facts["tmp"]).exists()
    assert not Path(facts["shared"]).exists()
    assert not Path(facts["semaphore"]).exists()
    assert supervised.poll() == -signal.SIGKILL


def test_end_of_the_server_ends_its_children_and_gives_the_exit_code(tmp_path):
    supervised, facts = start(tmp_path, "end")
    wait_for(lambda: supervised.poll() is not None)
    assert supervised.exit_code == 7
    assert gone(facts["child"])
    supervised.stop()


def test_death_names_the_log_and_quotes_it(tmp_path):
    command = [sys.executable, "-c", "print('first'); raise SystemExit('no such device')"]
    supervised = Supervised("decode0", command, os.environ, tmp_path / "log", "http://127.0.0.1:1")
    wait_for(lambda: supervised.poll() is not None)
    message = str(supervised.died())
    assert "decode0 ended with exit code 1" in message
    assert str(tmp_path / "log") in message
    assert "no such device" in message
    supervised.stop()


def test_a_command_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ProcessDied, match="decode0: could not be started"):
        Supervised("decode0", ["/no/such/command"], os.environ, tmp_path / "log", "http://127.0.0.1:1")


LAUNCHER = """
import os, sys, time
from pathlib import Path
from sglang_hetero.launcher import guard, process
from sglang_hetero.launcher.process import Supervised
process.GRACE_SECONDS = 0.5
supervised = Supervised("stubborn", sys.argv[2:], os.environ, Path(sys.argv[1]), "http://127.0.0.1:1")
print(supervised.pid, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    facts_file = tmp_path / "facts.json"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "log"), sys.executable, "-c", STUBBORN, str(facts_file)],
        stdout=subprocess.PIPE,
    )
    server = int(launcher.stdout.readline())
    facts = read(facts_file)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_for(lambda: gone(server) and gone(facts["child"]))
    # The guard removes one after the other, and nobody waits for it any more.
    wait_for(lambda: not any(Path(facts[name]).exists() for name in ("tmp", "shared", "semaphore")))


def test_the_server_dies_with_its_guard(tmp_path):
    supervised, facts = start(tmp_path)
    supervised._guard.kill()
    wait_for(lambda: supervised.poll() is not None)
    wait_for(lambda: gone(supervised.pid))
    assert supervised.exit_code == -9
    supervised.stop()
    assert not Path(facts["tmp"]).exists()
    # Nobody is left to end the grandchild (SGLang's own workers ask the kernel for that) or to know the shared memory.
    os.kill(facts["child"], signal.SIGKILL)
    Path(facts["shared"]).unlink()


def test_a_signal_during_start_leaves_nothing(tmp_path, monkeypatch):
    """Ctrl-C while the guard starts: the caller never gets the object, so it has to clean up itself."""

    class Interrupted(BaseException):
        pass

    def interrupted(_self):
        wait_for(facts_file.exists)
        raise Interrupted

    facts_file = tmp_path / "facts.json"
    monkeypatch.setattr(Supervised, "_first_message", interrupted)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Interrupted):
        start(tmp_path)
    facts = read(facts_file)
    assert gone(facts["child"])
    assert not Path(facts["tmp"]).exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_log_that_cannot_be_opened_leaves_no_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Supervised("decode0", ["true"], os.environ, tmp_path / "no" / "log", "http://127.0.0.1:1")
    assert len(os.listdir("/proc/self/fd")) == before


class Vanishing:
    """A process that ends while it is looked at."""

    pid = 2**22  # above the kernel's highest

    def cmdline(self) -> list[str]:
        raise psutil.NoSuchProcess(self.pid)

    def status(self) -> str:
        raise psutil.NoSuchProcess(self.pid)

    def kill(self) -> None:
        raise psutil.NoSuchProcess(self.pid)


def test_a_process_that_ends_while_it_is_looked_at_is_no_error(monkeypatch):
    assert guard._living([Vanishing(), psutil.Process()]) == [psutil.Process()]
    monkeypatch.setattr(guard, "_descendants", lambda: [Vanishing()])
    guard._kill_all(spare_trackers=True)
    assert guard._shared_memory() == set()


def test_shared_memory_of_others_is_not_ours(monkeypatch):
    """Older than the guard: made by somebody else, and only attached by a descendant."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as old:
        monkeypatch.setattr(guard, "_descendants", lambda: [psutil.Process()])
        monkeypatch.setattr(guard, "_mapped", lambda _process: {old.name})
        made = os.stat(old.name).st_ctime
        monkeypatch.setattr(guard.psutil.Process, "create_time", lambda _self: made + 1)
        assert guard._shared_memory() == set()
        monkeypatch.setattr(guard.psutil.Process, "create_time", lambda _self: made - 1)
        assert guard._shared_memory() == {old.name}


def test_a_long_tmpdir_is_not_used(tmp_path, monkeypatch):
    """The paths of SGLang's sockets would not fit."""
    long = tmp_path / ("x" * process.SCRATCH_LENGTH)
    long.mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(long))
    folder = process._scratch_folder()
    try:
        assert len(folder) <= process.SCRATCH_LENGTH
        assert list(long.iterdir()) == []
    finally:
        os.rmdir(folder)


def test_modules_of_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    for name in ("tempfile", "psutil", "sgl_kernel"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import psutil, tempfile"]
    supervised = Supervised("decode0", command, os.environ, tmp_path / "log", "http://127.0.0.1:1")
    wait_for(lambda: supervised.poll() is not None)
    assert supervised.exit_code == 0, supervised.tail()
    supervised.stop()


def test_progress_tells_the_last_step_and_no_warning(tmp_path):
    log = "\n".join(
        ["[12:00 TP0] Load weight end.", "  warnings.warn(", '[12:01] INFO: "GET /health" 503', "Only CUDA"]
    )
    command = [sys.executable, "-c", f"print({log!r})"]
    supervised = Supervised("decode0", command, os.environ, tmp_path / "log", "http://127.0.0.1:1")
    wait_for(lambda: supervised.poll() is not None)
    assert supervised.progress() == "[12:00 TP0] Load weight end."
    supervised.log.write_text("warnings.warn(")
    assert supervised.progress() == "starting"
    supervised.stop()
