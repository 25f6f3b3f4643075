"""A small SGLang: a server that is told, request by request, what to answer and when.

Nothing here waits for a clock: a test holds what a server sends next, and learns of each thing that happens there.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from sglang_hetero.discovery.record import Description, Instance, encode_description
from sglang_hetero.errors import RecordError
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router.app import Options, make, runner_of
from sglang_hetero.router.health import Limits
from sglang_hetero.router.policy import Policy, RoundRobin
from sglang_hetero.router.proxy import Settings

LIMIT = 60.0
"""Seconds that a test waits for what must happen at once, on a machine that does other things, too."""
HOST = "127.0.0.1"
DONE = b"data: [DONE]\n\n"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an asynchronous test, which must not hang."""
    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT))


async def soon(awaitable: Awaitable[Any]) -> Any:
    """What it gives, which must be soon."""
    async with asyncio.timeout(LIMIT):
        return await awaitable


async def until(condition: Callable[[], Any]) -> None:
    """Return when it holds, which must be soon."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.005)


def event(answer: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def token(text: str, **meta: Any) -> dict[str, Any]:
    """An answer of /generate, or an event of its stream."""
    return {"text": text, "output_ids": [1], "meta_info": {"id": "r", "finish_reason": None, **meta}}


def aborted(message: str, status: int | None = 500) -> dict[str, Any]:
    """What a stream says of a request that the scheduler has ended; without a status its client has aborted it."""
    reason: dict[str, Any] = {"type": "abort", "message": message}
    if status is not None:
        reason["status_code"] = status
    return token("", finish_reason=reason)


@dataclass
class Call:
    """One request at a server. The test puts what is to be sent into `say`: bytes, or an end."""

    path: str
    body: dict[str, Any]
    headers: Any
    say: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """The handler has ended, for whatever reason."""
    left: bool = False
    """Its client went away before the end."""

    def answer(self, answer: Any, status: int = 200) -> None:
        """The whole answer, not streamed."""
        self.say.put_nowait(("json", status, answer))

    def send(self, *events: bytes) -> None:
        """Pieces of a stream, each by itself."""
        for one in events:
            self.say.put_nowait(one)

    def end(self) -> None:
        """The end of a stream."""
        self.say.put_nowait(None)

    def finish(self, *events: bytes) -> None:
        """Pieces, [DONE] and the end."""
        self.send(*events, DONE)
        self.end()

    def die(self) -> None:
        """Break the connection."""
        self.say.put_nowait("die")

    @property
    def room(self) -> Any:
        return self.body["bootstrap_room"]


class FakeServer:
    """One server. `script` is called with each request and may answer at once; else the test takes it from `calls`."""

    def __init__(
        self,
        role: Side,
        description: Description | None = None,
        script: Callable[[Call], None] | None = None,
        key: str | None = None,
    ) -> None:
        self.role, self.description, self.script, self.key = role, description, script, key
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.seen: list[Call] = []
        self.others: list[tuple[str, str, Any]] = []
        """Method, path and headers of everything else."""
        self.peers: list[tuple[str, int]] = []
        """Where each request came from."""
        self.health = 200
        info = {"role": role, "internal_states": [{"last_gen_throughput": 7.0}]}
        self.answers: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [{"id": "tiny"}]},
            "/model_info": info,
            "/server_info": info,
            "/flush_cache": "Cache flushed.\n",
            "/health_generate": "",
        }
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def instance(self) -> Instance:
        return Instance(role=self.role, url=self.url, bootstrap_port=8998 if self.role is Side.PREFILL else 0)

    @property
    def probes(self) -> int:
        return sum(path == "/health" for _, path, _ in self.others)

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._take)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _other(self, request: web.Request) -> web.Response:
        self.others.append((request.method, request.path_qs, request.headers.copy()))
        if request.path == "/health":
            return web.Response(status=self.health, text="" if self.health == 200 else "a rank is gone")
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/hetero/instance" and self.description is not None:
            try:
                return web.Response(body=encode_description(self.description), content_type="application/json")
            except RecordError as error:
                return web.Response(status=500, text=str(error))
        said = self.answers.get(request.path)
        if said is None:
            return web.Response(status=404)
        return web.Response(text=said) if isinstance(said, str) else web.json_response(said)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.path, await request.json(), request.headers.copy())
        self.seen.append(call)
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        if self.script is not None:
            self.script(call)
        self.calls.put_nowait(call)
        try:
            return await self._answer(request, call)
        except asyncio.CancelledError:
            call.left = True
            raise
        finally:
            call.over.set()

    async def _answer(self, request: web.Request, call: Call) -> web.StreamResponse:
        out: web.StreamResponse | None = None
        while True:
            said = await call.say.get()
            if said == "die":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.Event().wait()
            if isinstance(said, tuple):
                _, status, answer = said
                return web.json_response(answer, status=status, headers={"X-From": self.role})
            if out is None:
                out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-From": self.role})
                await out.prepare(request)
            if said is None:
                await out.write_eof()
                return out
            await out.write(said)


class Changing:
    """Members that a test changes."""

    trouble = ""
    settled = True

    def __init__(self, *instances: Instance) -> None:
        self.now = instances
        self.callback: Callable[[], None] = lambda: None

    def snapshot(self) -> tuple[Instance, ...]:
        return self.now

    def subscribe(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def change(self, *instances: Instance) -> None:
        self.now = instances
        self.callback()

    def close(self) -> None:
        pass


@dataclass
class Stand:
    """A router before fake servers, and a client of it."""

    url: str
    client: aiohttp.ClientSession
    members: Changing

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path, headers=headers) as response:
            text = await response.text()
            with suppress(ValueError):
                return response.status, json.loads(text)
            return response.status, text

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def figure(self, name: str) -> float:
        """The sum of the samples of a metric."""
        _, text = await self.get("/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    async def ready(self) -> None:
        async with asyncio.timeout(LIMIT):
            while (await self.get("/readiness"))[0] != 200:
                await asyncio.sleep(0.005)


def options(**changes: Any) -> Options:
    """Quick ones, for tests."""
    settings = {"seconds": LIMIT, "retries": 3, "pause": 0.001, "idle": LIMIT, "grace": 0.05}
    settings.update({name: changes.pop(name) for name in list(changes) if name in settings})
    limits = changes.pop("limits", Limits(interval=60.0, backoff=0.05, max_backoff=0.2))
    return Options(Settings(**settings), limits, probe_seconds=LIMIT, **changes)


@asynccontextmanager
async def serve_router(app: web.Application, members: Any = None) -> AsyncIterator[Stand]:
    """A router and a client of it."""
    runner = runner_of(app, 0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as client:
            yield Stand(f"http://{HOST}:{runner.addresses[0][1]}", client, members)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def standing(
    *servers: FakeServer, ready: bool = True, policy: Policy | None = None, **changes: Any
) -> AsyncIterator[Stand]:
    """Servers, a router that knows them, and a client."""
    for server in servers:
        await server.start()
    members = Changing(*(server.instance for server in servers))
    try:
        async with serve_router(make(members, policy or RoundRobin(), options(**changes)), members) as stand:
            if ready:
                await stand.ready()
            yield stand
    finally:
        for server in servers:
            await server.stop()
