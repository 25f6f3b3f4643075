"""scripts/setup_release_env.py: an older release of SGLang beside `.venv`."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hetero.cpu.enable import PTH_NAME
from sglang_hetero.releases import OLDER
from tests.unit.setup.support import MAKEFILE, add_package

NUMBERS = [release.number for release in OLDER]


@pytest.fixture
def script(setup_env, monkeypatch, tmp_path):
    """The script as a fresh module, with a checkout and a `.venv` of its own."""
    monkeypatch.setattr(setup_env, "ROOT", str(tmp_path))
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    for name in ("side_env", "setup_release_env"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "sglang-0.0.1.lock").write_text("sglang==0.0.1\n")
    return importlib.import_module("setup_release_env")


@pytest.fixture
def whole(script, setup_env, monkeypatch):
    """A made-up environment with that release; gives it and the programs that were run in it."""
    environment = script.Environment("0.0.1")
    add_package(Path(environment.site), "sglang", "0.0.1", {"sglang/__init__.py": "x = 1\n"})
    setup_env.write_text(environment.link, script.link_text())
    monkeypatch.setattr(setup_env, "runs", lambda *command: command[0] == environment.python)
    return environment


def test_a_whole_environment_is_seen(whole):
    assert whole.fault() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: (Path(whole.site) / "sglang" / "__init__.py").unlink(),
        lambda whole: add_package(Path(whole.site), "sglang", "0.0.2", {}),
        lambda whole: add_package(Path(whole.site), "torch", "2.0", {}),
        lambda whole: Path(whole.link).write_text("import site; site.addsitedir('/elsewhere')\n"),
        lambda whole: Path(whole.link).unlink(),
    ],
    ids=["a file is gone", "another release", "another package", "another .venv", "no .venv"],
)
def test_damage_is_seen(whole, damage):
    damage(whole)
    assert whole.fault() == whole.name


def test_an_environment_that_does_not_run_is_broken(whole, setup_env, monkeypatch):
    monkeypatch.setattr(setup_env, "runs", lambda *_command: False)
    assert whole.fault() == whole.name


def test_a_release_that_is_not_served_is_refused(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["setup_release_env.py", "0.0.9"])
    assert script.main() == 1
    said = capsys.readouterr().err
    assert "sglang-0.0.9.lock" in said
    assert "docs/versions.md" in said


def test_without_a_venv_it_is_said_what_to_run(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["setup_release_env.py", "0.0.1"])
    assert script.main() == 1
    assert "run `make setup`" in capsys.readouterr().err


def test_what_is_whole_stays_and_what_is_not_is_made_anew(script, setup_env, whole, monkeypatch, capsys):
    python = Path(setup_env.venv_python())
    python.parent.mkdir(parents=True)
    python.touch()
    calls = []

    def install(environment, _lock):
        calls.append(environment.release)
        add_package(Path(environment.site), "sglang", "0.0.1", {"sglang/__init__.py": "x = 1\n"})
        setup_env.write_text(environment.link, script.link_text())

    monkeypatch.setattr(script.Environment, "install", install)
    whole.setup()  # there is no stamp yet
    whole.setup()
    assert calls == ["0.0.1"]
    (Path(whole.site) / "sglang" / "__init__.py").unlink()
    whole.setup()
    assert calls == ["0.0.1", "0.0.1"]
    assert "ready after" in capsys.readouterr().err


def test_what_does_not_work_after_its_installation_has_no_stamp(script, setup_env, whole, monkeypatch, capsys):
    """Nor is a fault of the disk or of pip lost: the next run starts again."""
    python = Path(setup_env.venv_python())
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(script.Environment, "install", lambda *_: None)
    assert whole.run() == 1
    assert "remove .venv-0.0.1 and .venv and run again" in capsys.readouterr().err
    monkeypatch.setattr(script.Environment, "NEEDED_BYTES", 1 << 80)
    assert whole.run() == 1
    assert "another release of SGLang needs" in capsys.readouterr().err
    assert not Path(whole.stamp).exists()


def test_a_python_of_it_finds_that_release_first_and_the_rest_in_venv(script, setup_env):
    """With Python itself: what `.venv` adds to the path, a .pth file among it, comes after, the stand-ins last."""
    environment, base = script.Environment("0.0.1"), Path(setup_env.site_packages())
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", environment.folder], check=True)
    site, stand_ins = Path(environment.site), Path(setup_env.ROOT) / "stand_ins"
    stand_ins.mkdir()
    for folder, version in ((site, "0.0.1"), (base, "0.0.2")):
        add_package(folder, "sglang", version, {"sglang.py": f"version = '{version}'\n"})
    add_package(base, "other", "1", {"other.py": "there = 'venv'\n"})
    (stand_ins / "other.py").write_text("there = 'stand-in'\n")
    for folder in (site, base):
        (folder / PTH_NAME).write_text(f"{stand_ins}\n")
    setup_env.write_text(environment.link, script.link_text())
    program = "import sglang, other; print(sglang.version, other.there)"
    done = subprocess.run([environment.python, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0.0.1", "venv"], done.stderr


@pytest.mark.parametrize("number", NUMBERS)
def test_each_older_release_has_a_lock_and_a_target(number):
    root = MAKEFILE.parent
    assert (root / "requirements" / f"sglang-{number}.lock").read_text() == f"sglang=={number}\n"
    assert f"pair-{number}: setup" in MAKEFILE.read_text()
    assert f".venv-{number}/" in (root / ".gitignore").read_text().splitlines()
