"""The fixture `served`: a fleet for one `Setup`, shared by all tests that ask for it."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_hetero.launcher import command
from sglang_hetero.launcher.fleet import healthy
from sglang_hetero.launcher.options import Router
from sglang_hetero.launcher.ports import Ports
from sglang_hetero.launcher.process import Supervised
from tests.serving import fleets
from tests.serving.fleets import Served


@pytest.fixture(scope="session")
def server_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers log; $SGLANG_HETERO_TEST_LOGS keeps them in a known place."""
    chosen = os.environ.get("SGLANG_HETERO_TEST_LOGS")
    return Path(chosen) if chosen else tmp_path_factory.mktemp("servers")


# pytest orders the tests by the parameter of a session fixture, so that each fleet is started once and is the only one
# that runs.
@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, server_logs: Path) -> Iterator[Served]:
    fleet = fleets.start(request.param, server_logs / request.param.id)
    try:
        yield fleet
        fleets.stop(fleet)
    finally:
        fleet.launcher.kill()
        fleet.launcher.wait()
        fleet.launcher.stdout.close()


ROUTER_SECONDS = 120


@pytest.fixture
def rust_router(tmp_path: Path) -> Iterator[Callable[[Served], str]]:
    """Starts sglang-router's Rust router before the servers of a fleet; gives its URL."""
    started = []

    def start(fleet: Served) -> str:
        host = "127.0.0.1"
        port = Ports(host).free()
        endpoints: dict[str, list[command.Endpoint]] = {"prefill": [], "decode": []}
        for server in fleet.described["servers"]:
            port_of_server = int(server["url"].rsplit(":", 1)[1])
            endpoint = command.Endpoint(host, port_of_server, nccl_port=0, bootstrap_port=server["bootstrap_port"])
            endpoints[server["role"]].append(endpoint)
        line = command.router_command(Router.RUST, host, port, endpoints["prefill"], endpoints["decode"])
        url, health = f"http://{host}:{port}", command.ROUTER_HEALTH[Router.RUST]
        router = Supervised("router", line, os.environ, tmp_path / "router.log", url, health=health)
        started.append(router)
        deadline = time.monotonic() + ROUTER_SECONDS
        while not healthy(router.health_url):
            assert router.poll() is None, router.tail()
            assert time.monotonic() < deadline, router.tail()
            time.sleep(0.5)
        return url

    yield start
    for router in started:
        router.stop()
