"""One server of a running fleet is killed and started again; the others are left alone."""

import os
import signal
import sys
import time

import psutil
import pytest

from sglang_hetero.launcher import process, topology
from sglang_hetero.launcher.command import Endpoint
from sglang_hetero.launcher.fleet import Fleet, Server, StartError, healthy
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.ports import Ports
from sglang_hetero.launcher.process import ProcessDied, Supervised

HOST = "127.0.0.1"
WAIT_SECONDS = 30.0
# Answers /health on its port, and has a worker that outlives it: SGLang's do when they are stopped by SIGSTOP.
SERVER = """
import subprocess, sys, http.server
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("worker", worker.pid, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """A fleet of p1_d1 with its router whose processes are the server above."""
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    ports = Ports(HOST)
    said: list[str] = []
    fleet = Fleet(topology.parse("p1_d1"), Options(start_seconds=WAIT_SECONDS), said.append)

    def started(name: str) -> tuple[Endpoint, Supervised]:
        endpoint = Endpoint(HOST, ports.free(), 1)
        command = [sys.executable, "-c", SERVER, str(endpoint.port)]
        return endpoint, Supervised(name, command, os.environ, tmp_path / f"{name}.log", endpoint.url)

    try:
        for instance in fleet.topology.instances:
            fleet.servers.append(Server(instance, *started(instance.name)))
        _, fleet.router = started("router")
        fleet.wait_until_healthy()
        yield fleet
    finally:
        fleet.stop()


def worker(supervised: Supervised, run: int) -> int:
    """The worker of a server's first, second, ... run, as its log tells."""
    lines = [line for line in supervised.log.read_text().splitlines() if line.startswith("worker")]
    return int(lines[run - 1].split()[1])


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_for(condition) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["prefill0", "decode0", "router"])
def test_a_killed_server_is_started_again_on_the_same_port_and_the_others_stay(fleet, name):
    former = fleet.process(name)
    others = {each.name: each.pid for each in fleet.processes if each is not former}
    fleet.kill(name)
    wait_for(lambda: former.poll() is not None)
    assert former.exit_code == -signal.SIGKILL
    assert not healthy(former.health_url)
    with pytest.raises(ProcessDied, match=f"{name} ended with exit code -9"):
        fleet.check()
    seconds = fleet.restart(name)
    now = fleet.process(name)
    assert 0 < seconds < WAIT_SECONDS
    assert now.pid != former.pid and now.url == former.url and healthy(now.health_url)
    assert gone(worker(former, 1)), "what the killed server left behind"
    assert not gone(worker(now, 2)), "its log goes on behind the former run's"
    assert {each.name: each.pid for each in fleet.processes if each is not now} == others
    fleet.check()
    assert now.pid in [server["pid"] for server in (*fleet.describe()["servers"], fleet.describe()["router"])]


def test_a_server_that_still_runs_is_stopped_before_it_is_started_again(fleet):
    former = fleet.process("decode0")
    fleet.kill("decode0", signal.SIGSTOP)
    fleet.restart("decode0")
    assert gone(former.pid) and gone(worker(former, 1))
    assert healthy(fleet.process("decode0").health_url)


def test_a_server_can_be_started_again_while_another_one_is_dead(fleet):
    fleet.kill("prefill0")
    fleet.kill("decode0")
    fleet.restart("decode0")
    with pytest.raises(ProcessDied, match="prefill0 ended"):
        wait_for(lambda: fleet.check() is not None)
    fleet.restart("prefill0")
    fleet.check()


def test_nothing_is_left_of_a_fleet_after_a_restart(fleet):
    fleet.restart("prefill0")
    pids = [each.pid for each in fleet.processes] + [worker(fleet.process("prefill0"), 2)]
    fleet.stop()
    assert all(gone(pid) for pid in pids)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(fleet):
    with pytest.raises(StartError, match="p1_d1 has no 'prefill1'; it has prefill0, decode0, router"):
        fleet.restart("prefill1")
