"""sync-router and the real sglang-router, with servers that do not exist behind it."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from sglang_hetero.errors import RouterError
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router.sync_command import Router, Sync
from tests.unit.router.fakes import Changing, FakeServer, token

SECONDS = 60
"""For what takes the router a moment, on a machine that does other things, too."""
# Not by launch_router, whose imports take longer than the whole test.
START = """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
port, metrics = map(int, sys.argv[1:])
Router.from_args(
    RouterArgs(pd_disaggregation=True, policy="random", host="127.0.0.1", port=port, prometheus_port=metrics, **MORE)
).start()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


class RustRouter:
    """One process of it at a port that stays."""

    def __init__(self, log: Path, **more: object) -> None:
        """more: of its RouterArgs."""
        self.port, self._metrics, self._log = free_port(), free_port(), log
        self._program = START.replace("**MORE", f"**{more}")
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # It looks for tokenizers on the internet, where it has no business in a test.
        nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
        here = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self._program, str(self.port), str(self._metrics)],
                stdout=log,
                stderr=log,
                env=os.environ | nowhere | here,
            )
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self._log.read_text()[-2000:]
        try:
            Router(self.url, None).workers()
        except RouterError:
            return False
        return True

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(*servers: FakeServer) -> Iterator[None]:
    """Run the servers in a loop of their own, since the router here is another process and the test waits for it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(SECONDS)

    try:
        for server in servers:
            do(server.start())
        yield
    finally:
        for server in servers:
            do(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


def test_the_real_router_has_the_workers_that_there_are(tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    prefill, decode, other, foreign = (
        FakeServer(role, script=lambda call: call.answer(token("x")))
        for role in (Side.PREFILL, Side.DECODE, Side.DECODE, Side.DECODE)
    )
    router = RustRouter(tmp_path / "router.log")
    stop, lines = threading.Event(), []
    thread = None
    with serving(prefill, decode, other, foreign):
        try:
            router.start()
            members = Changing(prefill.instance, decode.instance)
            sync = Sync(
                members,
                Router(router.url, None),
                owner="us",
                own_all=False,
                key="secret",
                say=lines.append,
                stop=stop,
            )
            thread = threading.Thread(target=sync.run, args=(0.2,))
            thread.start()

            def workers() -> dict[str, tuple[str, int, str]]:
                try:
                    found = Router(router.url, None).workers()
                except RouterError:
                    return {}
                return {one.url: (one.role, one.bootstrap_port, one.owner) for one in found}

            ours = {prefill.url: ("prefill", 8998, "us"), decode.url: ("decode", 0, "us")}
            until(lambda: workers() == ours)
            # The list is one thing; that requests take that way is another.
            answer = requests.post(f"{router.url}/generate", json={"text": "a"}, timeout=SECONDS)
            assert answer.status_code == 200, answer.text
            assert prefill.seen[-1].body["bootstrap_port"] == decode.seen[-1].body["bootstrap_port"] == 8998
            assert prefill.seen[-1].room == decode.seen[-1].room

            Router(router.url, None).add({"url": foreign.url, "worker_type": "decode"})
            until(lambda: foreign.url in workers())
            members.change(prefill.instance, other.instance)
            until(lambda: decode.url not in workers() and other.url in workers())
            assert workers() == {
                prefill.url: ("prefill", 8998, "us"),
                other.url: ("decode", 0, "us"),
                foreign.url: ("decode", 0, ""),
            }

            router.stop()
            until(lambda: any("waiting for it" in line for line in lines))
            router.start()
            until(lambda: workers() == {prefill.url: ("prefill", 8998, "us"), other.url: ("decode", 0, "us")})
            assert [line for line in lines if decode.url in line] == [
                f"+ decode {decode.url}: it is there",
                f"- decode {decode.url}: it is gone",
            ]
            assert any("answers again" in line for line in lines)
            # It has asked the servers with the key that it was given.
            assert any(headers.get("Authorization") == "Bearer secret" for _, _, headers in prefill.others)
        finally:
            stop.set()
            if thread is not None:
                thread.join(SECONDS)
            router.stop()
    assert thread is not None and not thread.is_alive()


@pytest.mark.full
def test_workers_that_the_real_router_lists_per_replica_stay(tmp_path: Path) -> None:
    """--dp-aware: it knows a server by `URL@replica`, and no DELETE removes one."""
    pytest.importorskip("sglang_router")
    prefill, decode = FakeServer(Side.PREFILL), FakeServer(Side.DECODE)
    for server in (prefill, decode):
        for path in ("/server_info", "/get_server_info"):
            server.answers[path] = {"dp_size": 2, "tp_size": 2, "model_path": "m", "served_model_name": "m"}
    router, lines = RustRouter(tmp_path / "router.log", dp_aware=True), []
    with serving(prefill, decode):
        try:
            router.start()
            members, here = Changing(prefill.instance, decode.instance), Router(router.url, None)
            sync = Sync(members, here, owner="us", own_all=False, key=None, say=lines.append)
            sync.step()
            until(lambda: len(here.workers()) == 4)
            assert {(one.url, one.replica) for one in here.workers()} == {(prefill.url, True), (decode.url, True)}
            for _ in range(3):
                sync.step()
            assert [line[0] for line in lines] == ["+", "+"]
            members.change(prefill.instance)
            for _ in range(3):
                sync.step()
            (line,) = lines[2:]
            assert line.startswith(f"! decode {decode.url}: it is gone, but stays") and "--dp-aware" in line
            assert len(here.workers()) == 4
        finally:
            router.stop()
