"""scripts/setup_env.py: what it refuses, what it finds broken, what it leaves alone."""

import ast
import collections
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup_env.py"


@pytest.fixture
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def venv(setup_env, tmp_path, monkeypatch):
    """A made-up .venv with one locked package of two files; gives its site-packages."""
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(setup_env, "pins", lambda: {"some-package": "1.2"})
    site = Path(setup_env.site_packages())
    info = site / "some_package-1.2.dist-info"
    info.mkdir(parents=True)
    (site / "some_package.py").write_text("x = 1\n")
    (site / "data,with comma").write_text("12345")
    (info / "RECORD").write_text(
        'some_package.py,sha256=abc,6\n"data,with comma",sha256=def,5\n'
        "__pycache__/some_package.pyc,,\nsome_package-1.2.dist-info/RECORD,,\n"
    )
    return site


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


def test_an_old_python_can_read_the_script():
    """Else the sentence about the version would be a SyntaxError."""
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


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


def test_root_installs_the_library_and_hears_when_that_fails(setup_env, capsys, monkeypatch):
    commands = []

    def run(command, **_options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 100, stdout=b"E: Unable to locate package\n")

    monkeypatch.setattr(setup_env, "LIBRARY", "libno-such-library.so.1")
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 0)
    monkeypatch.setattr(setup_env.shutil, "which", lambda _name: "/usr/bin/apt-get")
    monkeypatch.setattr(setup_env.subprocess, "run", run)
    with pytest.raises(setup_env.SetupError, match=r"installing libibverbs1 failed \(E: Unable to locate package\)"):
        setup_env.check_library()
    assert commands[-1][:2] == ["apt-get", "install"]


def test_a_full_disk_is_refused(setup_env, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")(10**12, 10**12, setup_env.NEEDED_BYTES - 1)
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(setup_env.SetupError, match=r"only 5.0 GB free .* needs 5 GB"):
        setup_env.check_disk()


def test_a_whole_environment_is_not_broken(setup_env, venv):
    assert setup_env.broken_packages() == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda site: (site / "some_package.py").unlink(),
        lambda site: (site / "some_package.py").write_text(""),
        lambda site: (site / "data,with comma").write_text("1234"),
        lambda site: (site / "some_package-1.2.dist-info" / "RECORD").unlink(),
        lambda site: (site / "some_package-1.2.dist-info").rename(site / "some_package-1.3.dist-info"),
        lambda site: (site / "some_package-1.2.dist-info").rename(site / "other-1.2.dist-info"),
    ],
    ids=["file gone", "file empty", "file cut", "no record", "other version", "not installed"],
)
def test_damage_is_found(setup_env, venv, damage):
    damage(venv)
    assert setup_env.broken_packages() == ["some-package==1.2"]


def test_a_missing_pyc_is_no_damage(setup_env, venv):
    assert not (venv / "__pycache__" / "some_package.pyc").exists()
    assert setup_env.broken_packages() == []


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ("cuda: Optional[str] = None", True),
        ("cuda = None", True),
        ("cuda: Optional[str] = '13.0'", False),
        ('cuda = "13.0"', False),
    ],
)
def test_a_cuda_build_of_torch_is_refused(setup_env, venv, line, accepted):
    (venv / "torch").mkdir()
    (venv / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    if accepted:
        setup_env.check_torch()
    else:
        with pytest.raises(setup_env.SetupError, match=r"CUDA build \(.13\.0.\).*SGLANG_HETERO_TORCH_INDEX"):
            setup_env.check_torch()


def test_the_stamp_depends_on_locks_interpreter_and_place(setup_env, monkeypatch):
    before = setup_env.fingerprint()
    assert before == setup_env.fingerprint()
    monkeypatch.setattr(setup_env, "VENV", "/elsewhere/.venv")
    assert setup_env.fingerprint() != before
    monkeypatch.undo()
    monkeypatch.setattr(setup_env, "REQUIREMENTS", ("cpu.lock", "sglang.lock"))
    assert setup_env.fingerprint() != before


def test_every_pin_is_exact(setup_env):
    pins = setup_env.pins()
    assert pins["torch"] == "2.13.0"
    assert pins["sglang"] == "0.5.23"
    assert all(version and not set(version) & set("<>~*, ") for version in pins.values())
