"""sync-router keeps sglang-router's own router in step with real servers in a real etcd (docs/router.md)."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hetero.client import Client
from sglang_hetero.discovery.members import EtcdMembers
from sglang_hetero.errors import RouterError
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.options import Router as Kind
from sglang_hetero.router.sync_command import Router, Sync
from tests.serving.fleets import CHUNK, OUTPUT_TOKENS, Served, Setup, family
from tests.unit.discovery.etcd_server import EtcdServer
from tests.unit.router.test_router_sync_rust import RustRouter, until

LIMIT_SECONDS = 1800
"""Servers start twice; a busy machine needs minutes for each."""
LEASE = (("SGLANG_HETERO_ETCD_LEASE", "3"),)
"""The shortest: how long a server that was killed stays."""


def say(line: str) -> None:
    print(line, file=sys.stderr)


def right(served: Served) -> None:
    """New requests through the router have the right tokens."""
    for length in (40, 41, 300):
        prompt = served.prompt(length, seed=11)
        assert served.client.generate(prompt, OUTPUT_TOKENS).tokens == served.reference(prompt).tokens


def in_step(router: Router, fleet: Fleet, without: str) -> Callable[[], bool]:
    """Whether the router has just the servers of the fleet, but for one that is gone."""
    servers = [server for server in fleet.servers if server.instance.name != without]
    wanted = {(one.endpoint.url, str(one.instance.role), one.endpoint.bootstrap_port or 0) for one in servers}

    def look() -> bool:
        try:
            return {(one.url, one.role, one.bootstrap_port) for one in router.workers()} == wanted
        except RouterError:
            return False

    return look


@pytest.mark.full
@pytest.mark.timeout(LIMIT_SECONDS)
def test_workers_come_from_etcd_and_a_killed_one_goes(server_logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    etcd = EtcdServer(tmp_path)
    rust, stop, lines = RustRouter(tmp_path / "rust.log"), threading.Event(), []
    options = Options(
        chunk=CHUNK,
        router=Kind.HETERO,
        etcd=etcd.address,
        log_dir=server_logs / "sync-router",
        prefill_env=LEASE,
        decode_env=LEASE,
    )
    members = EtcdMembers(etcd.options())
    router = Router(rust.url, None, stop)
    sync = Sync(members, router, owner="us", own_all=False, key=None, say=lines.append, stop=stop)
    thread = threading.Thread(target=sync.run, args=(0.5,))
    try:
        with Fleet(topology.parse("p1x2_d1"), options, say) as fleet:
            rust.start()
            thread.start()
            served = Served(Setup("p1x2_d1", mtp=0), {"url": rust.url}, None)  # type: ignore[arg-type]
            until(in_step(router, fleet, without=""))
            right(served)
            for process in family([fleet.process("prefill1").pid]):
                process.kill()
            until(in_step(router, fleet, without="prefill1"))
            right(served)
            fleet.restart("prefill1")
            until(in_step(router, fleet, without=""))
            right(served)
            # The router of this package has followed the same etcd all the time.
            served.client = Client(fleet.url)
            right(served)
    finally:
        stop.set()
        if thread.is_alive():
            thread.join(LIMIT_SECONDS)
        members.close()
        rust.stop()
        etcd.kill()
    url = next(server.endpoint.url for server in fleet.servers if server.instance.name == "prefill1")
    assert [line[0] for line in lines if f"prefill {url}" in line][:3] == ["+", "-", "+"]
