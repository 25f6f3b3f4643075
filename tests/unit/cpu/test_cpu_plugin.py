"""The plugin acts on our CPU platform only."""

import subprocess
import sys
from types import ModuleType

import pytest

from sglang_hetero import plugin
from sglang_hetero.cpu import gaps

SCHEDULER = "sglang.srt.managers.scheduler"


@pytest.fixture
def calls(monkeypatch):
    record = []
    monkeypatch.setattr(gaps, "close_gaps_or_stop", lambda: record.append(1))
    return record


@pytest.fixture
def our_scheduler(monkeypatch):
    """A scheduler process of the CPU engine with our stand-in."""
    ours = ModuleType("sgl_kernel")
    ours.IS_HETERO_CPU_REFERENCE = True
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setitem(sys.modules, SCHEDULER, ModuleType(SCHEDULER))
    monkeypatch.setitem(sys.modules, "sgl_kernel", ours)


def test_acts_on_our_cpu_platform(our_scheduler, calls):
    plugin.activate()
    assert calls == [1]


@pytest.mark.parametrize("value", [None, "0"])
def test_stays_out_of_other_engines(our_scheduler, calls, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    else:
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", value)
    plugin.activate()
    assert not calls


def test_stays_out_of_processes_that_run_no_model(our_scheduler, calls, monkeypatch):
    monkeypatch.delitem(sys.modules, SCHEDULER)
    plugin.activate()
    assert not calls


def test_stays_out_of_a_real_sgl_kernel(our_scheduler, calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    plugin.activate()
    assert not calls


def test_stays_out_without_sgl_kernel(our_scheduler, calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)  # an import of it fails
    plugin.activate()
    assert not calls


def test_importing_and_calling_it_elsewhere_loads_no_torch():
    code = "import sys; from sglang_hetero import plugin; plugin.activate(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert done.stdout.strip() == "False"
