"""What the plugin does in which process: closes gaps on our CPU platform only, puts the transfer in everywhere."""

import sys
from types import ModuleType

import pytest

from sglang_hetero import plugin
from sglang_hetero.backend import hooks
from sglang_hetero.backend.options import Mode
from sglang_hetero.cpu import enable, gaps
from sglang_hetero.errors import HeteroError

SCHEDULER = "sglang.srt.managers.scheduler"


@pytest.fixture
def calls(monkeypatch):
    record = []
    monkeypatch.setattr(gaps, "close_gaps", lambda: record.append(1))
    return record


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The options with which the transfer was put in."""
    record = []
    monkeypatch.setattr(hooks, "install", record.append)
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


@pytest.fixture
def broken_kernels(our_scheduler, monkeypatch, tmp_path):
    """An sgl_kernel whose import raises; returns its folder."""

    def install(error):
        package = tmp_path / "sgl_kernel"
        package.mkdir()
        (package / "__init__.py").write_text(f"raise {error}('undefined symbol\\nin a library')")
        monkeypatch.delitem(sys.modules, "sgl_kernel")
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return install


def stops_with_one_line(capsys):
    """SystemExit, because SGLang's load_plugins goes on after any Exception. Returns the line."""
    with pytest.raises(SystemExit) as stop:
        plugin.activate()
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sglang-hetero: ")
    return line


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError"])
def test_a_real_sgl_kernel_that_is_broken_is_left_to_sglang(broken_kernels, calls, capsys, error):
    broken_kernels(error)
    plugin.activate()
    assert not calls
    assert not capsys.readouterr().err


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError"])
def test_a_stand_in_that_is_broken_stops_the_process(broken_kernels, calls, capsys, monkeypatch, error):
    monkeypatch.setattr(enable, "SHIMS", broken_kernels(error))
    line = stops_with_one_line(capsys)
    assert f"{error}: undefined symbol in a library" in line
    assert not calls


@pytest.mark.parametrize(
    ("error", "text"),
    [(HeteroError("no op"), "no op"), (RuntimeError("a\nb"), "RuntimeError: a b"), (KeyError(), "Key")],
)
def test_gaps_that_cannot_be_closed_stop_the_process(our_scheduler, capsys, monkeypatch, error, text):
    def fail():
        raise error

    monkeypatch.setattr(gaps, "close_gaps", fail)
    assert text in stops_with_one_line(capsys)


def test_a_table_that_cannot_be_imported_stops_the_process(our_scheduler, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang_hetero.cpu.gaps", None)
    assert "sglang_hetero.cpu.gaps" in stops_with_one_line(capsys)


def test_the_transfer_is_put_in_with_the_options_of_the_environment(installed, monkeypatch):
    monkeypatch.setenv("SGLANG_HETERO", "always")
    plugin.activate()
    assert [options.mode for options in installed] == [Mode.ALWAYS]


def test_the_gaps_are_closed_before_the_transfer_is_put_in(our_scheduler, installed, monkeypatch):
    monkeypatch.setattr(gaps, "close_gaps", lambda: installed.append("gaps"))
    plugin.activate()
    assert [getattr(options, "mode", options) for options in installed] == ["gaps", Mode.AUTO]


def test_a_wrong_option_stops_the_process(installed, capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_HETERO", "perhaps")
    assert "SGLANG_HETERO='perhaps'" in stops_with_one_line(capsys)
    assert not installed


def test_a_transfer_that_does_not_fit_stops_the_process(capsys, monkeypatch):
    def fail(_options):
        raise HeteroError("SGLang has changed")

    monkeypatch.setattr(hooks, "install", fail)
    assert "the transfer cannot be put in: SGLang has changed" in stops_with_one_line(capsys)
