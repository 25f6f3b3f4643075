"""What the doctor says of a host, and how it ends."""

import json
import os
import socket
import sys

import pytest

from sglang_hetero import cli
from sglang_hetero.doctor import command, host
from sglang_hetero.doctor.lines import Line, Status, as_json, fail, failed, ok, one_line, skip, summary, text, warn
from sglang_hetero.doctor.source import Release
from sglang_hetero.errors import HeteroError

CPU, NPU = host.Device("cpu", 1), host.Device("npu", 8)


def by_name(lines):
    return {line.name: line for line in lines}


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.WARN, Status.FAIL])
def test_a_bad_line_needs_a_remedy(status):
    with pytest.raises(ValueError, match="needs a remedy"):
        Line(area="a", name="n", status=status, seen="s")


@pytest.mark.parametrize("part", ["area", "name", "seen"])
@pytest.mark.parametrize("words", ["", "two\nlines", "\x1b[31mred"])
def test_a_line_is_one_line_of_text(part, words):
    with pytest.raises(ValueError, match=part):
        Line(**{"area": "a", "name": "n", "seen": "s", "status": Status.OK, part: words})


def test_words_of_strangers_become_one_line():
    assert one_line(" a\n\tb  c ") == "a b c"
    assert one_line("\x1b[31mred") == "\\x1b[31mred"


def test_only_a_failure_fails():
    lines = [ok("a", "1", "s"), warn("a", "2", "s", "r"), skip("a", "3", "s")]
    assert not failed(lines)
    assert failed([*lines, fail("a", "4", "s", "r")])
    assert summary(lines) == "1 ok, 1 warn, 0 fail, 1 skip"
    assert text(lines[1]) == "warn  a, 2: s\n      -> r"
    assert json.loads(as_json(lines))["counts"] == {"ok": 1, "warn": 1, "fail": 0, "skip": 1}


# --- the host ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "environ", "found"),
    [
        ([], {}, host.Device("cpu", 1)),
        (["davinci0", "davinci1", "davinci_manager", "nvidia0"], {}, host.Device("npu", 2)),
        (["nvidia0", "nvidiactl"], {"ASCEND_RT_VISIBLE_DEVICES": ""}, host.Device("cuda", 1)),
        (["davinci0", "davinci1", "davinci2"], {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}, host.Device("npu", 2)),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, host.Device("cuda", 0)),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "-1"}, host.Device("cuda", 0)),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,-1,1"}, host.Device("cuda", 1)),
        (["davinci0"], {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}, host.Device("npu", 1)),
    ],
)
def test_devices_are_those_that_the_kernel_shows(files, environ, found, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    assert host.device(tmp_path, environ) == found


def test_an_npu_host_without_the_vendors_packages_fails_with_what_to_install(monkeypatch):
    there = {"torch": "2.13.0", "mooncake-transfer-engine-npu": "0.3.13"}
    monkeypatch.setattr(host, "release_of", lambda name: there.get(name, ""))
    monkeypatch.setattr(host, "import_problem", lambda module: "")
    assert by_name(host.versions(NPU))["torch_npu"].status is Status.FAIL
    lines = by_name(host.libraries(NPU))
    assert lines["memfabric"].status is Status.FAIL
    assert "memfabric_hybrid==1.3.0" in lines["memfabric"].remedy
    assert lines["cann"].status is Status.FAIL
    assert "set_env.sh" in lines["cann"].remedy


def test_cann_and_driver_are_told(tmp_path, monkeypatch):
    (tmp_path / "version.cfg").write_text("# x\ntoolkit_running_version=[8.3.RC1:8.3.RC1]\n")
    driver = tmp_path / "version.info"
    driver.write_text("Version=25.2.0\nascendhal_version=7\n")
    monkeypatch.setattr(host, "DRIVER_VERSION", driver)
    lines = by_name(host._cann("a", NPU, {"ASCEND_TOOLKIT_HOME": str(tmp_path)}))
    assert lines["cann"].seen.endswith("8.3.RC1")
    assert lines["driver"].seen == "release 25.2.0"
    driver.unlink()
    assert by_name(host._cann("a", NPU, {}))["driver"].status is Status.WARN


@pytest.mark.parametrize(
    ("release", "problem", "status"),
    [("1.3.0", "", Status.OK), ("1.2.0", "", Status.WARN), ("1.3.0", "libhccl.so: no such file", Status.FAIL)],
)
def test_memfabrics_release_and_import_count(release, problem, status, monkeypatch):
    monkeypatch.setattr(host, "release_of", lambda name: release if name == host.MEMFABRIC else "")
    monkeypatch.setattr(host, "import_problem", lambda module: problem)
    line = host._memfabric("a", NPU)
    assert line.status is status
    assert problem in line.seen


def test_a_library_is_imported_in_a_process_of_its_own(tmp_path, monkeypatch):
    for name, code in (
        ("vd_good", ""),
        ("vd_bad", "raise OSError('no libfabric')"),
        ("vd_dead", "import os; os.abort()"),
        ("vd_slow", "import time; time.sleep(60)"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert host.import_problem("vd_good") == ""
    assert host.import_problem("vd_bad") == "OSError: no libfabric"
    assert "signal 6" in host.import_problem("vd_dead")
    assert "more than 1 s" in host.import_problem("vd_slow", 1.0)


def test_options_are_read_as_a_server_reads_them(tmp_path):
    assert [line.status for line in host.options({})] == [Status.OK, Status.OK]
    assert by_name(host.options({"SGLANG_HETERO_WINDOW": "8"}))["environment"].seen == "SGLANG_HETERO_WINDOW=8"
    (bad,) = host.options({"SGLANG_HETERO_WINDO": "8"})
    assert (bad.status, "SGLANG_HETERO_WINDOW meant" in bad.seen) == (Status.FAIL, True)
    short = tmp_path / "token"
    short.write_text("short")
    short.chmod(0o600)
    (bad,) = host.options({"SGLANG_HETERO_TOKEN_FILE": str(short)})
    assert (bad.status, "openssl" in bad.seen) == (Status.FAIL, True)


def test_a_busy_port_is_told_with_its_owner():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        (line,) = host.ports([port], CPU, {})
        assert line.status is Status.WARN
        assert f"pid {os.getpid()}" in line.seen


@pytest.mark.parametrize(("url", "status"), [("tcp://10.0.0.1:24669", Status.OK), ("10.0.0.1", Status.WARN)])
def test_on_npus_the_store_is_looked_for(url, status):
    assert by_name(host.ports([], NPU, {"ASCEND_MF_STORE_URL": url}))["store"].status is status


def test_the_layout_of_conv_slots_is_the_platforms():
    assert "window_first" in host.layouts(NPU).seen
    assert "channels_first" in host.layouts(host.Device("cuda", 1)).seen


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Nothing but the lines that a test puts in."""
    monkeypatch.setattr(host, "libraries", lambda found: [])
    monkeypatch.setattr(host, "ports", lambda *_: [])
    monkeypatch.setattr(command, "sglang_lines", lambda folder, found: ([ok("symbols", "x", "fine")], []))


def test_it_ends_with_0_and_writes_json(quick, tmp_path, capsys):
    file = tmp_path / "deep" / "doctor.json"
    assert cli.main(["doctor", "--json", str(file)]) == 0
    said = json.loads(file.read_text())
    assert said["ok"] and said["needs"] == []
    assert {"versions", "symbols", "options", "peers"} <= {line["area"] for line in said["lines"]}
    assert "0 fail" in capsys.readouterr().out


def test_a_failure_ends_with_1_and_the_others_are_still_told(quick, monkeypatch, capsys):
    def broken(*_arguments):
        raise RuntimeError("surprise")

    monkeypatch.setattr(host, "versions", broken)
    monkeypatch.setattr(command, "sglang_lines", broken)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail  versions, look: RuntimeError: surprise" in out
    assert "fail  symbols, look: RuntimeError: surprise" in out
    assert "options, environment" in out


def test_what_a_release_needs_is_printed(quick, monkeypatch, capsys):
    monkeypatch.setattr(command, "sglang_lines", lambda folder, found: ([ok("symbols", "x", "s")], ["to change: this"]))
    assert cli.main(["doctor"]) == 0
    assert "needs of sglang-hetero (1):\n  to change: this" in capsys.readouterr().out


def test_another_release_is_looked_at_without_importing_it(tmp_path):
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "_version.py").write_text("__version__ = '9.9.9'\n")
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    lines, needs = command.sglang_lines(tmp_path, NPU)
    assert "SGLang 9.9.9, not 0.5.23" in lines[0].seen
    assert sum(line.status is Status.FAIL for line in lines) > 50
    assert all(need.startswith("to change") and "(used in " in need for need in needs)


@pytest.mark.parametrize("options", [["--port", "0"], ["--", "--tp-size", "1"]])
def test_options_that_make_no_sense_are_refused(options, capsys):
    assert cli.main(["doctor", *options]) == 1
    assert capsys.readouterr().err.startswith("sglang-hetero: ")


def test_a_python_without_sglang_is_told(monkeypatch):
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HeteroError, match="has no SGLang"):
        host.installed()


def test_the_installed_release_is_not_imported_for_that():
    assert isinstance(host.installed(), Release)
    assert host.installed().folder.name == "sglang"
    assert sys.version_info >= host.LEAST_PYTHON
