"""A router that follows a real etcd: servers come, go, and etcd goes away."""

import asyncio
from pathlib import Path

from aiohttp import web

from sglang_hetero.discovery.members import EtcdMembers, key_of
from sglang_hetero.discovery.record import Instance, encode
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router.app import make
from sglang_hetero.router.policy import RoundRobin
from tests.unit.discovery.etcd_server import EtcdServer
from tests.unit.router.fakes import LIMIT, FakeServer, options, run, serve_router, token


def register(etcd: EtcdServer, one: Instance) -> None:
    lease = etcd.ctl("lease", "grant", "3600").split()[1]
    etcd.ctl("put", f"--lease={lease}", key_of("/sglang-hetero", one), encode(one).decode())


def test_servers_come_and_go_and_etcd_too(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path)
    servers = [
        FakeServer(role, script=lambda call: call.answer(token("x")))
        for role in (Side.PREFILL, Side.DECODE, Side.DECODE)
    ]
    prefill, decode, other = servers

    async def test() -> None:
        for server in servers:
            await server.start()
        members = EtcdMembers(etcd.options())
        try:
            app: web.Application = make(members, RoundRobin(), options())
            async with serve_router(app) as stand:

                async def until_status(status: int) -> None:
                    async with asyncio.timeout(2 * LIMIT):
                        while (await stand.post("/generate", {"text": "a"}))[0] != status:
                            await asyncio.sleep(0.02)

                async def servers_known(count: int) -> None:
                    async with asyncio.timeout(2 * LIMIT):
                        while len((await stand.get("/hetero/pairs"))[1]["servers"]) != count:
                            await asyncio.sleep(0.02)

                await until_status(503)
                for server in (prefill, decode):
                    await asyncio.to_thread(register, etcd, server.instance)
                await until_status(200)

                await asyncio.to_thread(etcd.kill)
                async with asyncio.timeout(2 * LIMIT):
                    while not (await stand.get("/hetero/pairs"))[1]["trouble"]:
                        await asyncio.sleep(0.02)
                for _ in range(10):
                    assert (await stand.post("/generate", {"text": "a"}))[0] == 200

                await asyncio.to_thread(etcd.start)
                await asyncio.to_thread(register, etcd, other.instance)
                await servers_known(3)
                await asyncio.to_thread(etcd.ctl, "del", key_of("/sglang-hetero", decode.instance))
                await servers_known(2)
                served = len(decode.seen)
                await until_status(200)
                for _ in range(4):
                    assert (await stand.post("/generate", {"text": "a"}))[0] == 200
                assert len(decode.seen) == served and other.seen
        finally:
            await asyncio.to_thread(members.close)
            for server in servers:
                await server.stop()

    try:
        run(test)
    finally:
        etcd.kill()
