"""scripts/setup_env.py: what it refuses, and what it finds broken."""

import ast
import collections
import errno
import fcntl
import json
import os
import shutil
import subprocess

import pytest

from tests.unit.setup.support import INFO, SCRIPT, add_package, fails

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
