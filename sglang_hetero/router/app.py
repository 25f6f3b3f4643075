"""The routes of the router, and its life from start to end.

aiohttp serves, as it asks: a handler is cancelled at the moment when its client's connection ends, whether or not
anything is being sent then, and what is written goes out at once. Starlette (FastAPI), which the mini load balancer
uses, tells a handler that does not stream only when it asks.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from sglang_hetero.discovery.members import Members
from sglang_hetero.errors import HeteroError, RouterError
from sglang_hetero.layout.manifest import Side

from .ask import Asker, in_words, read_at_most
from .exchange import TIMEOUT, back, connector, onward
from .fleet import Fleet, Server
from .metrics import Metrics
from .options import Options
from .pairing import Fit, Pairing
from .policy import Policy
from .proxy import FAREWELL_SECONDS, Proxy, limit, refuse

__all__ = ["Options", "make", "runner_of", "serve"]

logger = logging.getLogger(__name__)

FORWARD_SECONDS = 30.0
"""For a question that is passed on to one server, such as /v1/models."""
MAX_FORWARDED = 64 << 20
"""Bytes of its answer."""
GENERATE_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
MODEL_INFO_ROUTES = ("/model_info", "/get_model_info")
SERVER_INFO_ROUTES = ("/server_info", "/get_server_info")
NO_FIGURES = {"last_gen_throughput": 0.0, "avg_spec_accept_length": None}
"""What the mini load balancer gives where decode has no internal states; SGLang's benchmarks read it."""


def make(members: Members, policy: Policy, options: Options) -> web.Application:
    """The application. It begins to ask the servers when it is started, and ends all requests when it is stopped."""
    router = _Router(members, policy, options)
    app = web.Application(client_max_size=options.max_payload, middlewares=[router.around, errors_as_json])
    app.cleanup_ctx.append(router.life)
    for path in GENERATE_ROUTES:
        app.router.add_post(path, router.generate)
    app.router.add_put("/generate", router.generate)
    app.router.add_get("/health", router.health)
    app.router.add_get("/health_generate", router.health_generate)
    app.router.add_get("/readiness", router.readiness)
    app.router.add_get("/v1/models", router.models)
    for path in MODEL_INFO_ROUTES:
        app.router.add_get(path, router.first_prefill)
    for path in SERVER_INFO_ROUTES:
        app.router.add_get(path, router.server_info)
    app.router.add_route("*", "/flush_cache", router.flush_cache)
    app.router.add_get("/metrics", router.metrics_text)
    app.router.add_get("/hetero/pairs", router.pairs)
    return app


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Unknown routes, and errors of the router itself, in the form of all its errors."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}; docs/router.md has the routes of the router"
        return refuse(error.status, text)
    except Exception:
        logger.exception("%s %s has failed in the router", request.method, request.path)
        return refuse(
            HTTPStatus.INTERNAL_SERVER_ERROR, "the router itself has failed; its log has the traceback; report it"
        )


class _Router:
    """The handlers, and what they share."""

    def __init__(self, members: Members, policy: Policy, options: Options) -> None:
        self._members, self._policy, self._options = members, policy, options
        self._metrics = Metrics()
        self._name = f"sglang-hetero-{secrets.token_hex(8)}"
        self._fleet: Fleet
        self._proxy: Proxy
        self._session: aiohttp.ClientSession

    async def life(self, _: web.Application) -> AsyncIterator[None]:
        """What there is while the application runs."""
        options = self._options
        async with aiohttp.ClientSession(
            connector=connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=TIMEOUT,
            headers={"User-Agent": "sglang-hetero-router", "Accept-Encoding": "identity"},
            read_bufsize=1 << 20,
        ) as self._session:
            asker = Asker(self._session, options.key, options.probe_seconds, options.health_path)
            clock = asyncio.get_running_loop().time
            self._fleet = Fleet(
                self._members,
                asker,
                policy=self._policy,
                pairing=Pairing(options.unknown),
                limits=options.limits,
                clock=clock,
            )
            self._metrics.watch(self._fleet)
            self._proxy = Proxy(self._fleet, self._session, options.settings, self._metrics, self._name)
            await self._fleet.start()
            yield
            await self._proxy.close()
            await self._fleet.close()
            asker.close()

    @web.middleware
    async def around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What holds for all routes: no request of the router's own, and no client that does not take its answer."""
        arrived = asyncio.get_running_loop().time()
        if any(self._name in value for value in request.headers.getall("Via", ())):
            return refuse(
                HTTPStatus.LOOP_DETECTED, "this router is on its own list of servers, by itself or by another router"
            )
        response = await handler(request)
        left = self._options.settings.seconds - (asyncio.get_running_loop().time() - arrived)
        try:
            with suppress(ConnectionError, aiohttp.ClientConnectionError):  # it went away
                async with limit(max(left, FAREWELL_SECONDS)):
                    await response.prepare(request)
                    await response.write_eof()
        except TimeoutError:
            logger.warning("%s %s: its client does not read the answer", request.method, request.path)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A request for tokens."""
        return await self._proxy.handle(request)

    async def health(self, _: web.Request) -> web.Response:
        """200 while the router runs, whatever servers there are; /readiness says whether it can serve."""
        return web.Response()

    async def readiness(self, _: web.Request) -> web.Response:
        """200 if a request would find a pair of healthy servers."""
        if self._fleet.ready():
            return web.json_response({"status": "ready"})
        return web.json_response(
            {"status": "not ready", "reason": self._fleet.why_not_ready()}, status=HTTPStatus.SERVICE_UNAVAILABLE
        )

    async def health_generate(self, request: web.Request) -> web.Response:
        """Every server's own; 200 if all say so."""
        return await self._all("GET", request)

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Passed on to every server; 200 if all have done it."""
        if request.method not in ("GET", "POST"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "POST"))
        return await self._all("POST", request)

    async def _all(self, method: str, request: web.Request) -> web.Response:
        servers = self._fleet.servers

        async def one(server: Server) -> str:
            try:
                status, _, _ = await self._forward(method, server, request, request.path_qs)
            except HeteroError as error:
                return str(error)
            return "" if status == HTTPStatus.OK else f"HTTP {status}"

        said = await asyncio.gather(*(one(server) for server in servers))
        wrong = [f"{server.label}: {text}" for server, text in zip(servers, said, strict=True) if text]
        if wrong or not servers:
            return refuse(HTTPStatus.SERVICE_UNAVAILABLE, "; ".join(wrong) or self._fleet.why_not_ready())
        return web.Response(text=f"{len(servers)} servers: done\n")

    async def first_prefill(self, request: web.Request) -> web.Response:
        """What the first prefill server that answers says."""
        return await self._first(request, self._fleet.of(Side.PREFILL))

    async def models(self, request: web.Request) -> web.Response:
        """What prefill servers say, one of each model, and each one of which no model is known."""
        by_model: dict[str, list[Server]] = {}
        for server in self._fleet.of(Side.PREFILL):
            # One of which no model is known may have any: it is asked for itself.
            by_model.setdefault(server.instance.model or server.instance.url, []).append(server)
        answers = await asyncio.gather(*(self._first(request, servers) for servers in by_model.values()))
        good = [one for one in answers if one.status == HTTPStatus.OK]
        if not good:  # why not, of all of them
            return await self._first(request, self._fleet.of(Side.PREFILL))
        if len(answers) == 1:
            return good[0]
        try:
            lists = [json.loads(one.body)["data"] for one in good]  # type: ignore[arg-type]
            by_name = {entry["id"]: entry for entries in lists for entry in entries}
        except (ValueError, KeyError, TypeError, RecursionError):
            return refuse(HTTPStatus.BAD_GATEWAY, f"a server's answer to {request.path} is no list of models")
        return web.json_response({"object": "list", "data": list(by_name.values())})

    async def _first(self, request: web.Request, servers: list[Server]) -> web.Response:
        wrong = []
        for server in servers:
            try:
                status, headers, data = await self._forward("GET", server, request, request.path_qs)
            except HeteroError as error:
                wrong.append(f"{server.label}: {error}")
                continue
            return web.Response(status=status, headers=back(headers), body=data)
        return refuse(HTTPStatus.SERVICE_UNAVAILABLE, "; ".join(wrong) or self._fleet.why_not_ready())

    async def server_info(self, request: web.Request) -> web.Response:
        """/server_info of all servers, as the mini load balancer and SGLang's benchmarks have it."""

        async def one(server: Server) -> Any:
            for path in SERVER_INFO_ROUTES:
                try:
                    status, _, data = await self._forward("GET", server, request, path)
                    if status == HTTPStatus.NOT_FOUND:
                        continue
                    return json.loads(data) if status == HTTPStatus.OK else {"error": f"HTTP {status}"}
                except (HeteroError, ValueError, RecursionError) as error:
                    return {"error": str(error)}
            return {"error": "it has no such route"}

        prefill, decode = self._fleet.of(Side.PREFILL), self._fleet.of(Side.DECODE)
        infos = await asyncio.gather(*(one(server) for server in (*prefill, *decode)))
        decode_infos = infos[len(prefill) :]
        said = [info.get("internal_states") for info in decode_infos if isinstance(info, dict)]
        states = [state for one in said if isinstance(one, list) for state in one]
        return web.json_response(
            {
                "internal_states": states or [NO_FIGURES],
                "prefill": infos[: len(prefill)],
                "decode": decode_infos,
            }
        )

    async def _forward(self, method: str, server: Server, request: web.Request, path: str) -> tuple[int, Any, bytes]:
        """Status, headers and body. It has the client's key, not the router's: what it may do is up to the server.
        Raises RouterError."""
        headers = onward(request.headers, self._name)
        headers["Accept-Encoding"] = "identity"
        try:
            async with (
                asyncio.timeout(FORWARD_SECONDS),
                self._session.request(
                    method, server.instance.url + path, headers=headers, allow_redirects=False
                ) as response,
            ):
                return response.status, response.headers, await read_at_most(response, MAX_FORWARDED)
        except TimeoutError:
            raise RouterError(f"no answer within {FORWARD_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RouterError(in_words(error)) from None

    async def metrics_text(self, _: web.Request) -> web.Response:
        """For Prometheus."""
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def pairs(self, request: web.Request) -> web.Response:
        """Who there is, how they are, who fits whom and why not."""
        if not _allowed(request, self._options.key):
            return refuse(HTTPStatus.UNAUTHORIZED, "this route wants the router's --api-key")
        shown = self._fleet.verdicts()
        return web.json_response(
            {
                "ready": self._fleet.ready(),
                "trouble": self._fleet.trouble,
                "servers": [_shown(server) for server in self._fleet.servers],
                "pairs": [
                    {
                        "prefill": prefill.instance.url,
                        "decode": decode.instance.url,
                        "fit": verdict.fit,
                        "usable": verdict.fit is Fit.YES and None not in (prefill.health.tier, decode.health.tier),
                        "reason": verdict.reason,
                    }
                    for prefill, decode, verdict in shown
                ],
                "pairs_left_out": self._fleet.pair_count() - len(shown),
            },
            dumps=lambda value: json.dumps(value, indent=1),
        )


def _shown(server: Server) -> dict[str, Any]:
    one = server.instance
    return {
        "role": one.role,
        "url": one.url,
        "bootstrap_port": one.bootstrap_port,
        "model": one.model,
        "tp_size": one.tp_size,
        "dp_size": one.dp_size,
        "pp_size": one.pp_size,
        "fingerprint": one.fingerprint,
        "incarnation": one.incarnation,
        "release": one.release,
        "messages": one.messages,
        "state": server.health.state,
        "cause": server.health.cause,
        "told": server.known.told,
        "outstanding_requests": server.load.requests,
        "outstanding_tokens": server.load.tokens,
        "failures": dict(server.failures),
    }


def _allowed(request: web.Request, key: str | None) -> bool:
    # aiohttp has bytes that are no UTF-8 as surrogates.
    shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    return key is None or hmac.compare_digest(shown, f"Bearer {key}".encode())


def runner_of(app: web.Application, grace: float) -> web.AppRunner:
    """What serves it. A client that goes away ends its handler; at the end handlers have `grace` seconds."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=grace)


async def serve(
    app: web.Application,
    host: str,
    port: int,
    *,
    ready: Callable[[str], None],
    stop: Callable[[], Awaitable[Any]],
    grace: float,
) -> None:
    """Serve until `stop` returns, and requests under way for `grace` seconds more.

    ready: told the URL once requests are taken. Raises OSError for a busy port.
    """
    runner = runner_of(app, grace)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        ready(f"http://{shown}:{bound[1]}")
        await stop()
    finally:
        await runner.cleanup()
