"""scripts/setup_env.py: how it installs, what it leaves alone, and how it ends."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.setup.support import INFO, MAKEFILE, SCRIPT, add_package, fails

# --- installing


def test_torch_comes_first_and_as_its_cpu_build(setup_env, pip, lock):
    setup_env.install(["some-package", "torch"], lock)
    assert pip.calls[:2] == [["torch==2.13.0+cpu"], ["some-package==1.2"]]
    assert pip.calls[2][-2:] == ["-e", setup_env.ROOT]


def test_elsewhere_torch_has_its_plain_version(setup_env, pip, lock, monkeypatch):
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "aarch64")
    setup_env.install(["torch"], lock)
    assert pip.calls[0] == ["torch==2.13.0"]


def test_the_index_of_cpu_wheels_can_be_named(setup_env, pip, lock, monkeypatch):
    monkeypatch.setenv(setup_env.TORCH_INDEX, "https://wheels.example/cpu")
    setup_env.install(["torch", "some-package"], lock)
    assert pip.calls[0] == ["--extra-index-url", "https://wheels.example/cpu", "torch==2.13.0+cpu"]
    assert pip.calls[1] == ["some-package==1.2"]


NO_TORCH = [
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.12.0, 2.13.0)",
    "ERROR: No matching distribution found for torch==2.13.0+cpu",
]


@pytest.mark.parametrize("lines", [NO_TORCH, ["ERROR: ResolutionImpossible: for help visit"]])
def test_an_index_without_cpu_torch_is_refused_before_all_else(setup_env, pip, lock, lines):
    pip.answers.append((1, lines))
    with pytest.raises(
        setup_env.SetupError, match=r"no CPU build of torch 2.13.0 .*SGLANG_HETERO_TORCH_INDEX=<"
    ) as info:
        setup_env.install(["some-package", "torch"], lock)
    assert "\n" not in str(info.value)
    assert len(pip.calls) == 1


def test_an_index_that_cannot_be_reached_is_another_matter(setup_env, pip, lock):
    retry = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/torch/"
    pip.answers.append((1, [retry, *NO_TORCH]))
    with pytest.raises(setup_env.SetupError, match=r"pip install torch==2.13.0\+cpu failed: .* connection broken by"):
        setup_env.install(["torch"], lock)


def test_a_second_run_replaces_a_cuda_torch(setup_env, pip, lock, venv):
    """Refused once, with the right index named it must come to an end."""
    cuda = {"torch/version.py": "cuda: Optional[str] = '13.0'\n"}
    add_package(venv, "torch", "2.13.0", cuda)
    with pytest.raises(setup_env.SetupError, match=r"built for cuda 13.0, .* SGLANG_HETERO_TORCH_INDEX=<"):
        setup_env.check_result()
    assert setup_env.broken_packages() == ["torch"]
    setup_env.install(["torch"], lock)
    assert pip.calls[0] == ["torch==2.13.0+cpu"]
    assert not (venv / "torch" / "version.py").exists()


@pytest.mark.parametrize("record", ["", "some_package.py", None], ids=["empty", "cut", "whole"])
def test_a_damaged_package_is_taken_away_before_pip_sees_it(setup_env, pip, lock, venv, record):
    """pip ends with an error where it cannot read the RECORD of what it replaces."""
    if record is not None:
        (venv / INFO / "RECORD").write_text(record)
    setup_env.install(["some-package"], lock)
    assert not (venv / INFO).exists()
    assert (venv / "some_package.py").exists() == (record is not None)


def test_nothing_outside_the_environment_is_removed(setup_env, venv, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("")
    info = add_package(venv, "other", "1.0", {"../../../../outside": ""})
    setup_env.venv_packages.discard(str(info), setup_env.VENV)
    assert outside.exists()
    assert not info.exists()


def test_leftovers_of_a_killed_pip_are_removed(setup_env, pip, lock, venv):
    (venv / "~orch" / "lib").mkdir(parents=True)
    (venv / "~umpy-2.0.dist-info").mkdir()
    (venv / "~x.py").write_text("")
    assert setup_env.broken_packages() == ["torch"]
    setup_env.install([], lock)
    assert not list(venv.glob("~*"))


# --- the bare environment


@pytest.fixture
def made(setup_env, tmp_path, monkeypatch):
    """Has an entry for each time that the environment was made; quickly, with a pip that only can be imported."""
    setup_env.VENV = str(tmp_path / ".venv")
    count = []

    def run_child(command, _lock):
        assert command[1:-1] == ["-I", "-m", "venv"]
        subprocess.run([command[0], "-m", "venv", "--without-pip", command[-1]], check=True)
        add_package(Path(setup_env.site_packages()), "pip", "1.0", {"pip/_internal/cli/main.py": ""})
        count.append(command[0])
        return 0, []

    monkeypatch.setattr(setup_env, "run_child", run_child)
    return count


@pytest.mark.parametrize("folder", ["plain", "with space", "long" + "g" * 200])
def test_a_good_environment_is_kept(setup_env, lock, made, tmp_path, folder):
    (tmp_path / folder).mkdir()
    setup_env.VENV = str(tmp_path / folder / ".venv")
    setup_env.make_venv(lock)
    setup_env.make_venv(lock)
    assert len(made) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: os.remove(s.venv_python()),
        lambda s: os.remove(s.place_file()),
        lambda s: shutil.rmtree(s.site_packages()),
        lambda s: Path(s.site_packages(), "pip/_internal/cli/main.py").unlink(),
        lambda s: Path(s.site_packages(), "pip/_internal/cli/main.py").write_text("x"),
        lambda s: (shutil.rmtree(s.VENV), Path(s.VENV).write_text("")),
        lambda s: (shutil.rmtree(s.VENV), os.symlink("/nowhere", s.VENV)),
    ],
    ids=["no python", "interrupted", "no packages", "pip gone", "pip cut", "a file", "a dangling link"],
)
def test_a_broken_environment_is_made_anew(setup_env, lock, made, damage):
    setup_env.make_venv(lock)
    damage(setup_env)
    setup_env.make_venv(lock)
    setup_env.make_venv(lock)
    assert len(made) == 2


def test_a_moved_environment_is_made_anew(setup_env, lock, made, tmp_path, monkeypatch):
    """Its console scripts name the old folder."""
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / "old"))
    setup_env.make_venv(lock)
    os.rename(tmp_path / "old", tmp_path / "new")
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / "new"))
    setup_env.make_venv(lock)
    setup_env.make_venv(lock)
    assert len(made) == 2


def test_a_checkout_behind_a_link_is_the_same(setup_env, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(setup_env.ROOT)
    code = "import setup_env; print(setup_env.VENV, setup_env.fingerprint())"
    output = [
        subprocess.check_output([sys.executable, "-c", code], env={"PYTHONPATH": str(folder)})
        for folder in (SCRIPT.parent, link / "scripts")
    ]
    assert output[0] == output[1] != b""


def test_an_activated_environment_is_not_made_from_itself(setup_env, tmp_path):
    """With .venv activated, PYTHON is the interpreter that is about to be removed."""
    venv = tmp_path / ".venv"
    subprocess.run([setup_env.base_python(), "-m", "venv", "--without-pip", venv], check=True)
    code = "import os, setup_env; print(os.path.realpath(setup_env.base_python())); print(setup_env.base_python())"
    output = subprocess.check_output(
        [venv / "bin" / "python3", "-c", code], env={"PYTHONPATH": str(SCRIPT.parent)}, text=True
    ).splitlines()
    assert output[0] == os.path.realpath(setup_env.base_python())
    assert not output[1].startswith(str(venv))


# --- interruption and failure

# Stands for pip: writes its process id, waits, and tells whether it could tidy up.
PIP = """
import os, sys, time
try:
    with open("started", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
except KeyboardInterrupt:
    open("tidied", "w").close()
"""
# A set-up that does nothing but run it.
DRIVER = """
import fcntl, sys
import setup_env
lock_file, pip = sys.argv[1:]
del sys.argv[1:]
def setup():
    with open(lock_file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        setup_env.run_child([sys.executable, "-c", pip], lock)
setup_env.setup = setup
setup_env.catch_signals()
sys.exit(setup_env.main())
"""


@pytest.fixture
def running(setup_env, tmp_path):
    """A set-up in the middle of pip: (process, process id of its pip)."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, setup_env.LOCK, PIP],
        cwd=tmp_path,
        env={"PYTHONPATH": str(SCRIPT.parent)},
        stderr=subprocess.PIPE,
        text=True,
    )
    started = tmp_path / "started"
    deadline = time.monotonic() + 30
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.1)
    yield process, int(started.read_text())
    process.kill()
    process.communicate()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_pip_ends_with_the_setup(running, tmp_path, number):
    process, pip = running
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors == "setup: interrupted; the next run goes on from here\n"
    assert not exists(pip)
    assert (tmp_path / "tidied").exists()


def test_the_lock_lives_as_long_as_pip(setup_env, running):
    """SIGKILL leaves an orphan; the next set-up must wait for it."""
    process, pip = running
    process.kill()
    process.wait()
    with open(setup_env.LOCK) as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(pip, signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.parametrize(
    ("status", "lines", "sentence"),
    [
        (1, ["a", "ERROR: no such thing", "b"], "pip failed: ERROR: no such thing; "),
        (1, ["a", "b"], "pip failed: b; "),
        (1, [], "pip failed: no output; "),
        (1, ["ERROR: Exception:", "Traceback", "KeyError: 'x'"], "pip failed: KeyError: 'x'; "),
        (-9, ["Collecting torch"], "pip failed: it was ended by signal 9; "),
        (1, ["ERROR: ... [Errno 28] No space left on device: '/x'"], "the disk of "),
        (1, ["a"] * 50 + ["OSError: [Errno 122] Disk quota exceeded"] + ["b"] * 50, "the disk of "),
    ],
)
def test_a_failed_child_gives_one_reason(setup_env, status, lines, sentence):
    with pytest.raises(setup_env.SetupError) as info:
        setup_env.check_child(status, lines, what="pip")
    assert str(info.value).startswith(sentence)
    assert "run again" in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.EACCES, "cannot write /x/.venv.lock (Permission denied): run as the owner"),
        (errno.EROFS, "cannot write /x/.venv.lock (Read-only file system): "),
        (errno.EISDIR, "cannot use /x/.venv.lock (Is a directory): "),
        (errno.ENOSPC, "the disk of "),
    ],
)
def test_an_error_of_the_system_names_the_path_and_the_remedy(setup_env, capsys, monkeypatch, number, sentence):
    def setup():
        raise OSError(number, os.strerror(number), "/x/.venv.lock")

    monkeypatch.setattr(setup_env, "setup", setup)
    line = fails(setup_env, capsys)
    assert line.startswith("setup: " + sentence)
    assert "run again" in line


# --- Makefile


@pytest.mark.parametrize("python", ["", "/no/such/python3.11"])
def test_make_without_python_says_so(tmp_path, python):
    shutil.copy(MAKEFILE, tmp_path)
    env = {"PATH": os.environ["PATH"]}  # no MAKEFLAGS of the make that runs this
    command = ["make", "setup", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0
    assert len(lines) == 1, lines
    assert "Python 3.11" in lines[0]
    assert "PYTHON=/path/to/python3.11" in lines[0]


def test_a_signal_to_make_reaches_the_script(tmp_path):
    """A shell between the two would die of it and leave the script running."""
    shutil.copy(MAKEFILE, tmp_path)
    (tmp_path / "scripts").mkdir()
    script = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    (tmp_path / "scripts" / "setup_env.py").write_text(script)
    command = ["make", "setup", f"PYTHON={sys.executable}"]
    process = subprocess.Popen(command, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    process.wait(timeout=30)
    assert not exists(int(pid.read_text()))


def test_every_target_is_phony_and_in_the_help():
    text = MAKEFILE.read_text()
    targets = set(re.findall(r"^([a-z][\w.-]*):(?!=)", text, re.M))
    assert targets == set(re.search(r"^\.PHONY: (.*)$", text.replace("\\\n", ""), re.M).group(1).split())
    assert targets - {"help"} == set(re.findall(r'@echo "make ([\w.-]+)[ "]', text))
