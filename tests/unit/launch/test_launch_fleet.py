"""launch/lib/fleet.sh keeps a fleet together: READY when all serve, nothing left when it ends.

A stand-in for Python is given to the scripts: it runs their own small programs, and in place of a server or the router
one that only answers GET.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_hetero.launcher.ports import Ports
from tests.unit.launch.scripts import LAUNCH, environment, run

SECONDS = 30
HOST = "127.0.0.1"
SERVERS = ("prefill0", "decode0", "router")

STAND_IN = """#!{python}
import http.server, os, signal, subprocess, sys
folder = {folder!r}
if sys.argv[1] != "-m":
    os.execv({python!r}, [{python!r}, *{flags!r}, *sys.argv[1:]])
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1]
mode = value("--disaggregation-mode") if "--disaggregation-mode" in sys.argv else "router"
name = mode + ("" if mode == "router" else "0")
print(name, "says hello", flush=True)
child = subprocess.Popen(["sleep", "600"])
open(os.path.join(folder, name), "w").write(f"{{os.getpid()}} {{child.pid}}")
if os.path.exists(os.path.join(folder, "deaf")):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.path.exists(os.path.join(folder, "broken-" + name)):
    sys.exit(f"{{name}} cannot go on")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked = {{"router": "/readiness"}}.get(name, "/health")
        self.send_response(200 if self.path == asked else 404)
        self.end_headers()
http.server.HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


def stand_in(folder: Path, flags: tuple[str, ...] = ()) -> Path:
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, folder=str(folder), flags=list(flags)))
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def fleet(folder: Path, **extra: str) -> Iterator[subprocess.Popen[str]]:
    port = Ports(HOST).free(len(SERVERS))
    settings = {
        "LAUNCH_PYTHON": str(stand_in(folder)),
        "LAUNCH_PORT": str(port),
        "LAUNCH_ROUTER_HOST": HOST,
        "LAUNCH_LOGS": str(folder / "logs"),
    }
    process = subprocess.Popen(
        [LAUNCH / "cuda" / "p2_d1.sh"],
        env=environment(settings | extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in pids(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.communicate(timeout=SECONDS)


def pids(folder: Path) -> list[int]:
    """Of all stand-ins that have started, and of the process that each has started."""
    return [int(one) for name in SERVERS if (folder / name).exists() for one in (folder / name).read_text().split()]


def running(folder: Path) -> list[int]:
    found = []
    for one in pids(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(one).status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def until(true, what: str) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def wait_ready(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline()
    assert line.startswith("READY "), line + (process.stderr.read() if not line else "")
    return line.split()[1]


def test_it_is_ready_when_all_serve_and_ends_with_all_that_came_of_it(tmp_path):
    with fleet(tmp_path) as process:
        assert wait_ready(process) == f"http://{HOST}:{process_port(process)}"
        assert len(running(tmp_path)) == 2 * len(SERVERS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        until(lambda: not running(tmp_path), "processes are left")
    for name in SERVERS:
        assert (tmp_path / "logs" / f"{name}.log").read_text().startswith(f"{name} says hello")


def process_port(process: subprocess.Popen[str]) -> str:
    return psutil.Process(process.pid).environ()["LAUNCH_PORT"]


@pytest.mark.parametrize("name_of_the_shell", ["no_proxy", "NO_PROXY"])
def test_no_proxy_is_asked_for_the_servers_of_this_host(name_of_the_shell, tmp_path):
    """SGLang asks its own servers, and decode asks prefill, with a library that takes proxies from the environment."""
    given = {"http_proxy": "http://10.0.0.1:3128", name_of_the_shell: "10.0.0.2", "LAUNCH_IP": "127.0.0.2"}
    with fleet(tmp_path, **given) as process:
        wait_ready(process)
        for name in SERVERS:
            found = psutil.Process(int((tmp_path / name).read_text().split()[0])).environ()
            assert found["no_proxy"].split(",") == ["127.0.0.2", "127.0.0.1", "localhost", "10.0.0.2"]
            assert found["NO_PROXY"] == found["no_proxy"]
            assert found["http_proxy"] == "http://10.0.0.1:3128", "a checkpoint may have to come through it"


def test_one_that_ends_takes_the_fleet_with_it_and_is_named(tmp_path):
    (tmp_path / "broken-decode0").touch()
    with fleet(tmp_path) as process:
        said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert "READY" not in said
        assert "decode0 cannot go on" in errors
        assert "decode0 has ended with exit status 1" in errors
        until(lambda: not running(tmp_path), "processes are left")


def test_one_that_is_killed_later_takes_the_fleet_with_it(tmp_path):
    with fleet(tmp_path) as process:
        wait_ready(process)
        os.kill(int((tmp_path / "prefill0").read_text().split()[0]), signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert f"prefill0 has ended with exit status {128 + signal.SIGKILL}" in errors
        until(lambda: not running(tmp_path), "processes are left")


def test_what_does_not_listen_to_sigterm_is_killed(tmp_path):
    (tmp_path / "deaf").touch()
    with fleet(tmp_path, LAUNCH_STOP_SECONDS="1") as process:
        wait_ready(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        until(lambda: not running(tmp_path), "processes are left")


def test_a_python_without_the_plugin_is_refused(tmp_path):
    """SGLang would start without it, and hand over by its own path."""
    python = str(stand_in(tmp_path, ("-I", "-S")))
    done = run("cuda/prefill.sh", LAUNCH_PYTHON=python)
    assert done.returncode == 1
    assert "this Python has no sglang-hetero" in done.stderr
    assert "pip install ." in done.stderr
    assert not (tmp_path / "prefill0").exists()


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_a_name_for_the_store_becomes_an_address(tmp_path, address):
    """MemFabric takes no names."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = - ] || echo "$ASCEND_MF_STORE_URL"\n')
    python.chmod(0o755)
    done = run(
        "ascend/decode.sh",
        LAUNCH_PYTHON=str(python),
        LAUNCH_CHIP="a3",
        ASCEND_MF_STORE_URL=f"tcp://{address}:24669",
    )
    assert done.stdout.split() == ["tcp://127.0.0.1:24669"], done.stderr
