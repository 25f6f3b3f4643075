"""scripts/setup_env.py: what it refuses, what it finds broken, what it leaves alone."""

import ast
import collections
import errno
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup_env.py"
MAKEFILE = SCRIPT.parents[1] / "Makefile"


@pytest.fixture
def setup_env(tmp_path, monkeypatch) -> ModuleType:
    """The script as a fresh module, with its lock elsewhere; what a test sets in it goes with it."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.delitem(sys.modules, "setup_env", raising=False)
    module = importlib.import_module("setup_env")
    monkeypatch.setattr(module, "LOCK", str(tmp_path / ".venv.lock"))
    monkeypatch.delenv(module.TORCH_INDEX, raising=False)
    return module


@pytest.fixture
def lock(setup_env):
    with open(setup_env.LOCK, "w") as file:
        yield file


def add_package(site: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A made-up installed package; gives its dist-info."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    rows = []
    for path, text in {**files, f"{info.name}/METADATA": f"Name: {name}\n"}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        rows.append(f'"{path}",sha256=abc,{len(text)}\r\n')
    rows += [f"{name}/__pycache__/x.cpython-311.pyc,,\r\n", f"{info.name}/RECORD,,\r\n"]
    (info / "RECORD").write_text("".join(rows))
    return info


@pytest.fixture
def venv(setup_env, tmp_path, monkeypatch):
    """A made-up .venv with one locked package of two files; gives its site-packages."""
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(setup_env, "pins", lambda: {"some-package": "1.2"})
    site = Path(setup_env.site_packages())
    add_package(site, "some_package", "1.2", {"some_package.py": "x = 1\n", "data,with comma": "12345"})
    return site


@pytest.fixture
def pip(venv, setup_env, monkeypatch):
    """Replaces pip: `pip.answers` are its (exit status, output lines), `pip.calls` what it was asked to install."""

    def pip_install(arguments, *_others):
        fake.calls.append(arguments)
        return fake.answers.pop(0) if fake.answers else (0, [])

    fake = collections.namedtuple("Pip", "calls answers")([], [])
    monkeypatch.setattr(setup_env, "pip_install", pip_install)
    monkeypatch.setattr(setup_env, "pins", lambda: {"some-package": "1.2", "torch": "2.13.0"})
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "x86_64")
    return fake


def fails(setup_env, capsys) -> str:
    """The one line that the script ends with."""
    sys_argv, sys.argv = sys.argv, [str(SCRIPT)]
    try:
        assert setup_env.main() == 1
    finally:
        sys.argv = sys_argv
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("setup: ")
    return lines[0]


# --- what has to be there before


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.py")), ids=lambda script: script.name)
def test_an_old_python_can_read_the_scripts(script):
    """Else the sentence about the version would be a SyntaxError."""
    ast.parse(script.read_text(), feature_version=(3, 6))


def test_python_3_10_is_refused(setup_env, capsys, monkeypatch):
    version = collections.namedtuple("version_info", "major minor micro releaselevel serial")(3, 10, 14, "final", 0)
    monkeypatch.setattr(setup_env.sys, "version_info", version)
    line = fails(setup_env, capsys)
    assert "this is Python 3.10" in line
    assert "needs 3.11 or newer" in line
    assert "PYTHON=" in line


def test_a_missing_system_library_names_the_package_to_a_user(setup_env, capsys, monkeypatch):
    monkeypatch.setattr(setup_env, "LIBRARY", "libno-such-library.so.1")
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 1000)
    line = fails(setup_env, capsys)
    assert "libno-such-library.so.1 is missing" in line
    assert "apt-get install libibverbs1" in line


def test_root_installs_the_library_and_hears_when_that_fails(setup_env, lock, monkeypatch):
    commands = []

    def run_child(command, _lock, env):
        assert env["DEBIAN_FRONTEND"] == "noninteractive"
        commands.append(command)
        return 100, ["E: Unable to locate package"]

    monkeypatch.setattr(setup_env, "LIBRARY", "libno-such-library.so.1")
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 0)
    monkeypatch.setattr(setup_env.shutil, "which", lambda _name: "/usr/bin/apt-get")
    monkeypatch.setattr(setup_env, "run_child", run_child)
    with pytest.raises(setup_env.SetupError, match=r"installing libibverbs1 failed \(E: Unable to locate package\)"):
        setup_env.check_library(lock)
    assert commands[-1][0] == "apt-get"
    assert "install" in commands[-1]


def test_the_library_is_looked_for_under_the_lock(setup_env, monkeypatch):
    """Two set-ups of root would fight for dpkg."""
    held = []

    def check_library(_lock):
        with open(setup_env.LOCK) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(True)

    monkeypatch.setattr(setup_env, "check_library", check_library)
    monkeypatch.setattr(setup_env, "is_current", lambda: True)
    setup_env.setup()
    assert held == [True]


Usage = collections.namedtuple("Usage", "total used free")


def test_a_full_disk_is_refused(setup_env, venv, monkeypatch):
    shutil.rmtree(venv)
    broken = [f"package-{number}" for number in range(120)]
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda _path: Usage(10**12, 10**12, 4_900_000_000))
    with pytest.raises(setup_env.SetupError, match=r"only 4.9 GB free .* needs 5.0 GB"):
        setup_env.check_disk(broken)


def test_a_small_repair_needs_little_disk(setup_env, venv, monkeypatch):
    (venv / "some_package.py").unlink()
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda _path: Usage(10**12, 10**12, 1_000_000))
    setup_env.check_disk(["some-package"])
    setup_env.check_disk([])


def test_what_is_already_there_needs_no_disk(setup_env, venv, monkeypatch):
    """An installation that was interrupted near its end."""
    monkeypatch.setattr(setup_env.venv_packages, "recorded_bytes", lambda _info: 2_900_000_000)
    assert setup_env.needed_bytes(["torch", "triton"]) == 100_000_000


def test_the_disk_of_temporary_files_is_looked_at(setup_env, venv, tmp_path, monkeypatch):
    stat = os.stat
    other = tmp_path / "tmp"
    other.mkdir()

    def with_another_device(path, *arguments, **options):
        if str(path) == str(other):
            return collections.namedtuple("Stat", "st_dev")(-1)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(setup_env.tempfile, "gettempdir", lambda: str(other))
    monkeypatch.setattr(setup_env.os, "stat", with_another_device)
    free = {str(other): 500_000_000, setup_env.ROOT: 10**12}
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda path: Usage(10**12, 0, free[path]))
    with pytest.raises(setup_env.SetupError, match=rf"only 0.5 GB free on the disk of {other}"):
        setup_env.check_disk(["torch"])


def test_no_room_for_temporary_files_is_a_sentence(setup_env, venv, monkeypatch):
    def gettempdir():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(setup_env.tempfile, "gettempdir", gettempdir)
    with pytest.raises(setup_env.SetupError, match=r"No usable temporary directory .* set TMPDIR"):
        setup_env.check_disk(["torch"])
    assert "full" in setup_env.disk_is_full()


# --- what it finds broken


def test_a_whole_environment_is_not_broken(setup_env, venv):
    assert setup_env.broken_packages() == []


INFO = "some_package-1.2.dist-info"


@pytest.mark.parametrize(
    "damage",
    [
        lambda site: (site / "some_package.py").unlink(),
        lambda site: (site / "some_package.py").write_text(""),
        lambda site: (site / "data,with comma").write_text("1234"),
        lambda site: (site / INFO).rename(site / "some_package-1.3.dist-info"),
        lambda site: (site / INFO).rename(site / "other-1.2.dist-info"),
        lambda site: shutil.copytree(site / INFO, site / "some_package-1.1.dist-info"),
        lambda site: (site / INFO / "METADATA").write_text(""),
        lambda site: (site / INFO / "RECORD").unlink(),
        lambda site: (site / INFO / "RECORD").write_text(""),
        lambda site: (site / INFO / "RECORD").write_text("\n"),
        lambda site: (site / INFO / "RECORD").write_text("some_package.py"),
        lambda site: (site / INFO / "RECORD").write_text("some_package.py,sha256=abc,6\n"),
        lambda site: (site / INFO / "RECORD").write_text(f"{INFO}/RECORD,,"),
        lambda site: (site / INFO / "RECORD").write_text(f"{INFO}/RECORD,,\nsome_package.py,,six\n"),
        lambda site: (site / INFO / "RECORD").write_text(f'{INFO}/RECORD,,\n"some_package.py,,6\n'),
        lambda site: (site / INFO / "RECORD").write_bytes(b"\xff\xfe,,\n" + f"{INFO}/RECORD,,\n".encode()),
        lambda site: (site / INFO / "RECORD").write_bytes(b"\0" * 100),
        shutil.rmtree,
    ],
    ids=[
        "file gone",
        "file empty",
        "file cut",
        "other version",
        "not installed",
        "two versions",
        "no metadata",
        "no RECORD",
        "RECORD empty",
        "RECORD without rows",
        "RECORD cut in a row",
        "RECORD without itself",
        "RECORD cut at its end",
        "size not a number",
        "quote not closed",
        "RECORD not utf-8",
        "RECORD all zeros",
        "site-packages gone",
    ],
)
def test_damage_is_found(setup_env, venv, damage):
    damage(venv)
    assert setup_env.broken_packages() == ["some-package"]


def test_missing_byte_code_is_no_damage(setup_env, venv):
    assert not list(venv.rglob("*.pyc"))
    assert setup_env.broken_packages() == []


CPU_TORCH = "__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("version", "text", "broken"),
    [
        ("2.13.0+cpu", CPU_TORCH, []),
        ("2.13.0", CPU_TORCH, []),
        ("2.13.0", CPU_TORCH.replace("Optional[str] = None", "Optional[str] = '13.0'", 1), ["torch"]),
        ("2.13.0", 'cuda = "13.0"\n', ["torch"]),
        ("2.13.0+rocm7", "cuda = None\nhip: Optional[str] = '7.0'\n", ["torch"]),
        ("2.13.0+xpu", "cuda = None\nxpu: Optional[str] = '20260000'\n", ["torch"]),
        ("2.12.0+cpu", CPU_TORCH, ["torch"]),
    ],
    ids=["cpu", "cpu, bare version", "cuda", "cuda, no annotation", "hip", "xpu", "other version"],
)
def test_an_accelerator_build_of_torch_counts_as_broken(setup_env, venv, version, text, broken):
    add_package(venv, "torch", version, {"torch/version.py": text})
    setup_env.pins = lambda: {"some-package": "1.2", "torch": "2.13.0"}
    assert setup_env.broken_packages() == broken


@pytest.fixture
def own_package(setup_env, venv):
    """Our own package as `pip install -e` leaves it; gives its dist-info."""
    site = venv
    origin = {"dir_info": {"editable": True}, "url": "file://" + setup_env.ROOT.replace(" ", "%20")}
    files = {
        "sglang_hetero-0.1.0.dist-info/direct_url.json": json.dumps(origin),
        "__editable__.sglang_hetero.pth": setup_env.ROOT,
        "../../../bin/sglang-hetero": "#!/bin/sh\n",
    }
    return add_package(site, "sglang_hetero", "0.1.0", files)


@pytest.mark.parametrize(
    ("damage", "whole"),
    [
        (lambda _info: None, True),
        (shutil.rmtree, False),
        (lambda info: (info.parents[3] / "bin" / "sglang-hetero").unlink(), False),
        (lambda info: (info.parent / "__editable__.sglang_hetero.pth").unlink(), False),
        (lambda info: shutil.copytree(info, info.with_name("sglang_hetero-0.0.9.dist-info")), False),
    ],
    ids=["whole", "not installed", "no console script", "no .pth", "two versions"],
)
def test_damage_of_our_own_package_is_found(setup_env, own_package, damage, whole):
    damage(own_package)
    assert setup_env.own_package_is_whole() == whole


@pytest.mark.parametrize("change", [{"url": "file:///elsewhere"}, {"dir_info": {}}], ids=["elsewhere", "not editable"])
def test_our_own_package_is_this_checkout(setup_env, own_package, change):
    path = own_package / "direct_url.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), **change}))
    record = own_package / "RECORD"
    record.write_text(record.read_text().replace(f",{len(before)}\n", f",{path.stat().st_size}\n"))
    assert not setup_env.venv_packages.damaged(str(own_package))
    assert not setup_env.own_package_is_whole()


def test_the_checkout_does_not_stand_in_for_the_installed_package(setup_env, tmp_path, monkeypatch):
    """`python -c "import sglang_hetero"` succeeds in the checkout without any installation."""
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    subprocess.run([setup_env.base_python(), "-m", "venv", "--without-pip", setup_env.VENV], check=True)
    monkeypatch.chdir(setup_env.ROOT)
    assert setup_env.runs(setup_env.venv_python(), "-c", "import sglang_hetero")
    assert not setup_env.platform_is_on()


@pytest.fixture
def current(setup_env, own_package, monkeypatch):
    """The made-up .venv with all that makes it complete."""
    setup_env.write_text(setup_env.place_file(), setup_env.VENV)
    setup_env.write_text(setup_env.stamp_file(), setup_env.fingerprint())
    monkeypatch.setattr(setup_env, "platform_is_on", lambda: True)
    assert setup_env.is_current()
    return own_package.parent


@pytest.mark.parametrize(
    "damage",
    [
        lambda s, _site: os.remove(s.stamp_file()),
        lambda s, _site: os.remove(s.place_file()),
        lambda s, _site: s.write_text(s.place_file(), "/elsewhere/.venv"),
        lambda _s, site: (site / "some_package.py").unlink(),
        lambda _s, site: (site / "__editable__.sglang_hetero.pth").unlink(),
        lambda s, _site: setattr(s, "platform_is_on", lambda: False),
    ],
    ids=["no stamp", "no place", "moved", "a package", "our package", "platform off"],
)
def test_each_part_is_looked_at(setup_env, current, damage):
    damage(setup_env, current)
    assert not setup_env.is_current()


def test_the_stamp_depends_on_locks_interpreter_and_place(setup_env, monkeypatch):
    before = setup_env.fingerprint()
    assert before == setup_env.fingerprint()
    for name, value in {
        "VENV": "/elsewhere/.venv",
        "REQUIREMENTS": ("cpu.lock", "sglang.lock"),
        "base_python": lambda: "/elsewhere/python3.11",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(setup_env, name, value)
            assert setup_env.fingerprint() != before, name


def test_every_pin_is_exact(setup_env):
    pins = setup_env.pins()
    assert pins["torch"] == "2.13.0"
    assert pins["sglang"] == "0.5.23"
    assert all(version and not set(version) & set("<>~*, ") for version in pins.values())


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
    targets = set(re.findall(r"^([a-z]+):", text, re.M))
    assert targets == set(re.search(r"^\.PHONY: (.*)$", text, re.M).group(1).split())
    assert targets - {"help"} == set(re.findall(r'@echo "make (\w+) ', text))
