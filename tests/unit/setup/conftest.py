"""The scripts as a module, and made-up environments for them."""

import collections
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.setup.support import SCRIPT, add_package


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
