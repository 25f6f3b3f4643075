"""Bad input ends with one clear line and exit status 1, before anything is started."""

import argparse
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from sglang_hetero import cli
from sglang_hetero.discovery.etcd import Held, Listing
from sglang_hetero.launcher import flags
from sglang_hetero.launcher import fleet as fleet_module
from sglang_hetero.launcher.fleet import LOG_BYTES
from sglang_hetero.launcher.options import Options


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(fleet_module, "Supervised", refuse)
    monkeypatch.setattr(fleet_module.models, "path", lambda _name: tmp_path)
    monkeypatch.setattr(fleet_module.enable, "status", lambda: namedtuple("Status", "enabled conflict")(True, None))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends with."""
    assert cli.main(arguments) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("sglang-hetero: ")
    return lines[0]


def test_unknown_topology(capsys):
    assert "unknown topology 'p2'" in fails(capsys, "up", "p2")


def test_unknown_model_lists_the_names(capsys):
    line = fails(capsys, "up", "p2_d1", "--model", "llama")
    assert "'llama'" in line
    assert "tiny-moe" in line


def test_model_that_does_not_fit_the_topology(capsys):
    assert "prefill0 splits heads over 3 ranks, but tiny has 8" in fails(capsys, "up", "p3_d1")


def test_busy_port(capsys, tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        line = fails(capsys, "up", "p2_d1", "--port", str(port), "--log-dir", str(tmp_path))
    assert f"--port {port}: the port is in use on 127.0.0.1 (pid {os.getpid()}" in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--mtp", "-1"), "--mtp -1: the depth is 0 (off) to 16"),
        (("--mtp", "17"), "--mtp 17"),
        (("--prefill-mtp", "-1"), "--prefill-mtp -1: the depth is 0 (off) to 16"),
        (("--decode-mtp", "17"), "--decode-mtp 17"),
        (("--page-size", "0"), "--page-size 0: must be larger than 0"),
        (("--chunk", "100", "--page-size", "64"), "--chunk 100 is not a multiple of --page-size 64"),
        (("--radix-cache", "--page-size", "64"), "--radix-cache with --page-size 64"),
        (("--max-requests", "0"), "--max-requests 0"),
        (("--chunk", "-1"), "--chunk -1: must be 0"),
        (("--port", "70000"), "--port 70000: a TCP port is 1 to 65535"),
        (("--start-seconds", "nan"), "--start-seconds nan: must be larger than 0"),
        (("--host", "nohost"), "--host nohost: must be an IPv4 address"),
        (("--host", "::1"), "--host ::1: must be an IPv4 address"),
        (("--host", "0.0.0.0"), "--host 0.0.0.0: prefill and decode meet at this address"),
        (("--etcd", "127.0.0.1:2379"), "the router mini cannot follow it; add --router hetero"),
        (("--router", "rust", "--etcd", "127.0.0.1:2379"), "the router rust cannot follow it; add --router hetero"),
        (("--router", "hetero", "--etcd", "nonsense"), "--etcd nonsense: must be host:port of etcd"),
        # TEST-NET-1: an address that no machine has (RFC 5737).
        (("--host", "192.0.2.1"), "--host 192.0.2.1: this machine cannot listen there"),
    ],
)
def test_options_that_cannot_work(capsys, tmp_path, arguments, reason):
    assert reason in fails(capsys, "up", "p2_d1", "--log-dir", str(tmp_path), *arguments)


@pytest.mark.parametrize(
    ("topology", "variable", "reason"),
    [
        ("p2_d1", "SGLANG_HETERO=sometimes", "SGLANG_HETERO='sometimes': must be auto, always, off"),
        ("p2_d1", "SGLANG_HETERO_WINDOWS=3", "SGLANG_HETERO_WINDOWS='3': no such option; is SGLANG_HETERO_WINDOW"),
        ("mixed_tp1", "SGLANG_HETERO=off", "--decode-env: mixed_tp1 is one server that does both phases"),
    ],
)
def test_variables_of_a_role_that_cannot_work(capsys, topology, variable, reason):
    assert reason in fails(capsys, "up", topology, "--decode-env", variable)


def test_an_etcd_that_is_not_there(capsys, tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        line = fails(capsys, "up", "p2_d1", "--router", "hetero", "--etcd", address, "--log-dir", str(tmp_path))
    assert f"--etcd {address} cannot be used: " in line
    assert "start etcd first" in line


def test_one_server_has_no_router_that_follows_etcd(capsys):
    line = fails(capsys, "up", "mixed_tp1", "--router", "hetero", "--etcd", "127.0.0.1:2379")
    assert "--etcd: mixed_tp1 is one server without a router" in line


def test_who_is_in_etcd_already_is_told(capsys, tmp_path, monkeypatch):
    """The router of a fleet would use them: a fleet that was killed a moment ago, or another one."""
    keys = ["/sglang-hetero/prefill/10.0.0.1:1", *(f"/sglang-hetero/x\x1b[2J{n}{'y' * 999}" for n in range(4000))]
    given = ("--router", "hetero", "--etcd", "127.0.0.1:1", "--log-dir", str(tmp_path))
    for count in (1, len(keys)):
        there = Listing(1, dict.fromkeys(keys[:count], Held(b"{}", 1)))
        monkeypatch.setattr("sglang_hetero.discovery.etcd.Etcd.read", lambda *_, there=there: there)
        with pytest.raises(AssertionError, match="a process was started"):
            cli.main(("up", "p2_d1", *given))
        said = capsys.readouterr().err
        assert f"{count} servers under /sglang-hetero already, which the router will use, too: '{keys[0]}'" in said
        assert ("more" in said) == (count > 1) and "\x1b" not in said and len(said) < 4000, "others wrote the keys"


@pytest.mark.parametrize("text", ["SGLANG_HETERO", "=off", "1X=2", "A B=1"])
def test_a_variable_of_a_role_has_a_name_and_a_value(capsys, text):
    with pytest.raises(SystemExit):
        cli.main(("up", "p2_d1", "--prefill-env", text))
    assert "is not NAME=VALUE" in capsys.readouterr().err


def test_variables_of_a_role_may_be_several():
    parser = argparse.ArgumentParser()
    flags.add(parser, Options())
    given = ("--decode-env", "SGLANG_HETERO=off", "--decode-env", "X=a=b", "--prefill-env", "Y=")
    options = flags.options(parser.parse_args(given))
    assert options.decode_env == (("SGLANG_HETERO", "off"), ("X", "a=b"))
    assert options.prefill_env == (("Y", ""),)
    assert flags.options(parser.parse_args(())).decode_env == ()


def test_log_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").touch()
    line = fails(capsys, "up", "p2_d1", "--log-dir", str(tmp_path / "file"))
    assert str(tmp_path / "file") in line
    assert "--log-dir" in line


def test_log_folder_of_a_running_fleet(capsys, tmp_path):
    with open(tmp_path / "fleet.lock", "w") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        assert "another fleet is logging there" in fails(capsys, "up", "p2_d1", "--log-dir", str(tmp_path))


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_not_taken_by_pipes(tmp_path, closed):
    """The first descriptors that the command opens must not be 0, 1 or 2."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from sglang_hetero import cli\n"
        "cli._open_standard_streams()\n"
        "open(sys.argv[1], 'w').write(str(min(os.pipe())))\n"
    )
    command = f"{sys.executable} {program} {tmp_path / 'fd'} {closed}"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=60).returncode == 0
    assert int((tmp_path / "fd").read_text()) > 2


def test_no_disk_space(capsys, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=LOG_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert "MB are needed" in fails(capsys, "up", "p2_d1", "--log-dir", str(tmp_path))


@pytest.mark.parametrize(
    ("enabled", "conflict", "reason"),
    [
        (False, None, "run `sglang-hetero cpu enable`"),
        (False, "torch is built for cuda 13.0", "cannot be used in this environment: torch is built for cuda 13.0"),
        (True, "sgl_kernel is installed", "cannot be used in this environment: sgl_kernel is installed"),
    ],
)
def test_platform_that_is_off_or_in_the_way(capsys, monkeypatch, enabled, conflict, reason):
    status = namedtuple("Status", "enabled conflict")(enabled, conflict)
    monkeypatch.setattr(fleet_module.enable, "status", lambda: status)
    assert reason in fails(capsys, "up", "p2_d1")


def test_good_input_would_start_a_process(tmp_path):
    """The fixture above would notice: the refusals of this module are not refusals of everything."""
    with pytest.raises(AssertionError, match="a process was started"):
        cli.main(("up", "p2_d1", "--mtp", "3", "--log-dir", str(tmp_path)))


@pytest.mark.parametrize("command", [(), ("up",), ("demo",), ("models",), ("cpu",)])
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit) as end:
        cli.main((*command, "--help"))
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text


def test_models_lists_every_model(capsys):
    assert cli.main(("models",)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == fleet_module.models.names()


class Started(BaseException):
    """As far as a test goes: the first server would be started now."""


@pytest.mark.parametrize(
    ("arguments", "chunk"),
    [
        (("p1_d1",), 8192),
        (("p2_d1",), 8192),
        (("p2_d1", "--page-size", "100"), 8200),
        (("p2_d1", "--chunk", "1024"), 1024),
    ],
)
def test_prefill_steps_are_whole_pages(capsys, tmp_path, monkeypatch, arguments, chunk):
    def started(_name: str, command: list[str], *_rest: object) -> None:
        assert command[command.index("--chunked-prefill-size") + 1] == str(chunk)
        raise Started

    monkeypatch.setattr(fleet_module, "Supervised", started)
    with pytest.raises(Started):
        cli.main(("up", *arguments, "--log-dir", str(tmp_path)))
    lines = capsys.readouterr().err.splitlines()
    assert f"prefill steps of {chunk} tokens" in lines[0]
