"""`GET /hetero/state`, `GET /hetero/instance` and an honest /health on SGLang's own HTTP server.

SGLang has no hook for routes. Its tokenizer manager starts the bootstrap server (prefill) or not (decode) in the HTTP
process, before the application is served: there an ASGI middleware is put in front of it. SGLang adds its check of API
keys later, so outside of ours: the two routes want the key where there is one, and /health does not, as ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.layout.manifest import Side
from sglang_hetero.state import folder, process
from sglang_hetero.state.report import Control, Discovery, Report, State, encode, silent, state_of

from .instance import INSTANCE_PATH, OwnInstance, leave_at_sigterm, register, told
from .options import Mode, read

logger = logging.getLogger(__name__)

HTTP_SERVER = "sglang.srt.entrypoints.http_server"
"""Loaded in a server's HTTP process; not in a program that makes an sglang.Engine."""
STATE_PATH = "/hetero/state"
HEALTH_PATHS = ("/health", "/health_generate")
KEEP_SECONDS = 0.5
"""How long an answer is used again: ranks report once a second, and health checks may come from many sides."""
CONFIRM_SECONDS = 5.0
"""How long a rank must stay silent while its folder can be written before it is blamed: several looks of its watch, so
that one whose folder was full until now has reported."""
OK, BROKEN = 200, 503
NO_FOLDER = (
    "its ranks tell nothing: there is no folder for their reports; the log of the start says why (docs/state.md)"
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Source:
    """Where the answers come from: the folder of the reports, and, on prefill, the control service. Thread-safe."""

    def __init__(
        self,
        mode: Mode,
        side: str,
        where: Path | None,
        control: Callable[[], Control | None],
        discovery: Callable[[], Discovery | None] = lambda: None,
    ) -> None:
        """where: None if this server has no folder: then nobody reports. control: how the control service is.
        discovery: how the record in etcd stands."""
        self._mode, self._side, self._where, self._control = mode, side, where, control
        self._discovery = discovery
        self._lock = threading.Lock()
        self._kept: tuple[float, State] | None = None
        self._silent_since: float | None = None
        """When a rank was first found to be silent though its folder could be written."""

    @property
    def speaks_for_health(self) -> bool:
        """Whether /health is to be looked after: not with mode off."""
        return self._mode is not Mode.OFF

    def state(self) -> State:
        """What the server's state is now, or was a moment ago."""
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > KEEP_SECONDS:
                self._kept = (now, self._look())
            return self._kept[1]

    def _look(self) -> State:
        reports, problems = self._read()
        now = time.monotonic()
        return state_of(
            reports,
            mode=self._mode,
            side=self._side,
            now=now,
            alive=process.alive,
            control=self._control(),
            discovery=self._discovery(),
            believed=self._believe(reports, problems, now),
            problems=problems,
        )

    def _read(self) -> tuple[list[Report], list[str]]:
        """The reports of this server's ranks, and what kept others from being read."""
        if self._where is None:
            return [], [] if self._mode is Mode.OFF else [NO_FOLDER]
        reports, problems = folder.read(self._where)
        # Servers that one program has started by multiprocessing may share its folder.
        here = os.getpid()
        return [one for one in reports if not one.parents or here in one.parents], problems

    def _believe(self, reports: list[Report], problems: list[str], now: float) -> bool:
        """Whether a rank that is silent is so by its own fault. Adds to the problems why not."""
        if self._where is None or not any(silent(one, now) and process.alive(one.pid) for one in reports):
            self._silent_since = None
            return True
        trouble = folder.unwritable(self._where)
        if trouble:
            problems.append(f"no report can be written: {trouble}")
            self._silent_since = None
            return False
        if self._silent_since is None:
            self._silent_since = now
        return now - self._silent_since >= CONFIRM_SECONDS


class StateMiddleware:
    """Answers what is ours, and hands everything else on as it came: no stream is touched."""

    def __init__(self, app: App, source: Source, instance: OwnInstance | None = None) -> None:
        """instance: None for a server that is neither prefill nor decode: nothing is to be paired."""
        self.app, self._source, self._instance = app, source, instance
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(scope) if scope["type"] == "http" and scope.get("method") == "GET" else None
        if answer is None:
            await self.app(scope, receive, send)
            return
        status, kind, body = answer
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope) -> tuple[int, bytes, bytes] | None:
        """Status, content type and body; None if SGLang is to answer. Raises nothing."""
        try:
            path, root = scope["path"], scope.get("root_path", "")
            path = path.removeprefix(root) if path.startswith(f"{root}/") else path
            if path == STATE_PATH:
                state = await asyncio.to_thread(self._source.state)
                return OK, b"application/json", encode(state)
            if path == INSTANCE_PATH and self._instance is not None:
                return OK, b"application/json", await asyncio.to_thread(self._instance.answer)
            if path in HEALTH_PATHS and self._source.speaks_for_health:
                state = await asyncio.to_thread(self._source.state)
                if not state.ok:
                    return BROKEN, b"text/plain; charset=utf-8", "".join(f"{f}\n" for f in state.faults).encode()
        except Exception:
            if not self._warned:
                logger.exception("the state of this server cannot be told; further ones are not logged")
            self._warned = True
        return None


def around_start_service(original: Callable[[], Any]) -> Any:
    """SGLang starts what disaggregation needs beside the tokenizer manager; None on decode."""
    service = original()
    http = sys.modules.get(HTTP_SERVER)
    if http is None:
        return service
    add = getattr(getattr(http, "app", None), "add_middleware", None)
    if add is None:
        raise UpstreamChanged(f"{HTTP_SERVER}.app takes no middleware any more, so that /hetero/state cannot be there")
    options, side, where = read(os.environ), _side(), folder.given(os.environ)
    instance = registrar = None
    if side:
        instance = OwnInstance(Side(side), options, where)
        registrar = register(instance, options)
    elif options.etcd is not None:
        logger.warning("discovery: this server is neither prefill nor decode, so it is not registered in etcd")
    if registrar is not None:
        leave_at_sigterm(registrar)
    source = Source(options.mode, side, where, _of(service), told(registrar))
    add(StateMiddleware, source=source, instance=instance)
    return service


def _side() -> str:
    from sglang.srt.runtime_context import get_disagg

    side = str(get_disagg().disaggregation_mode)
    return side if side in ("prefill", "decode") else ""


def _of(service: Any) -> Callable[[], Control | None]:
    """How the control service of a bootstrap server of ours is."""

    def control() -> Control | None:
        tell = getattr(service, "hetero_control", None)
        found = None if tell is None else tell()
        return found if isinstance(found, Control) else None

    return control
