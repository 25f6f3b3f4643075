"""Prefill's bootstrap server, with a route that tells decode that this package is here, and the control service.

It runs in the process of SGLang's tokenizer manager, on the first node of a prefill server.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hetero.errors import HeteroError
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.control import ControlService

from .options import Mode

if TYPE_CHECKING:
    from aiohttp.web import Request, Response

logger = logging.getLogger(__name__)

ROUTE = "/hetero"
MAX_REFUSALS = 1024
"""Ranks that say that they cannot take part; one line each."""


class Capability(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the route says. version: of the messages. control_port: 0 with mode off. mode: SGLANG_HETERO over there."""

    version: int = 0
    control_port: int = 0
    mode: str = Mode.AUTO
    unsupported: tuple[str, ...] = ()
    """Why ranks of this server cannot take part, a line each; empty if all can."""


class BootstrapMixin:
    """Put in front of a transfer backend's bootstrap server class."""

    hetero_mode: Mode = Mode.AUTO

    def __init__(self, host: str, port: int) -> None:
        self._hetero_unsupported: dict[str, None] = {}
        self._hetero_control = None if self.hetero_mode is Mode.OFF else ControlService(_bindable(host))
        if self._hetero_control is not None:
            logger.info("hetero control service listens on %s:%d", host, self._hetero_control.port)
        super().__init__(host, port)  # type: ignore[call-arg]

    def _setup_routes(self) -> None:
        super()._setup_routes()  # type: ignore[misc]
        app: Any = self.app  # type: ignore[attr-defined]
        app.router.add_get(ROUTE, self._hetero_get)
        app.router.add_put(ROUTE, self._hetero_put)

    async def _hetero_get(self, request: Request) -> Response:
        from aiohttp.web import Response

        port = 0 if self._hetero_control is None else self._hetero_control.port
        capability = Capability(messages.VERSION, port, self.hetero_mode, tuple(self._hetero_unsupported))
        return Response(body=msgspec.json.encode(capability), content_type="application/json")

    async def _hetero_put(self, request: Request) -> Response:
        """A rank says why it cannot take part."""
        from aiohttp.web import Response

        try:
            reason = msgspec.json.decode(await request.read(), type=str)
        except (msgspec.MsgspecError, ValueError):
            return Response(status=400, text="a reason is one JSON string")
        if len(self._hetero_unsupported) < MAX_REFUSALS:
            self._hetero_unsupported[messages.printable(reason)] = None
        return Response(text="OK")

    def close(self) -> None:
        """Stop both servers."""
        if self._hetero_control is not None:
            self._hetero_control.close()
        super().close()  # type: ignore[misc]


def _bindable(host: str) -> str:
    if not host:
        raise HeteroError("the bootstrap server has no host to listen on; start SGLang with --host")
    return host
