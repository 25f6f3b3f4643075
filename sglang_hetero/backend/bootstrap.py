"""Prefill's bootstrap server, with a route that tells decode that this package is here, and the control service.

It runs in the process of SGLang's tokenizer manager, on the first node of a prefill server.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hetero.errors import HeteroError, SealError
from sglang_hetero.state.report import Control
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.control import ControlService
from sglang_hetero.transfer.faults import Faults
from sglang_hetero.transfer.seal import Purpose

from .options import Mode, read
from .secret import seal_of

if TYPE_CHECKING:
    from aiohttp.web import Request, Response

logger = logging.getLogger(__name__)

ROUTE = "/hetero"
SEAL_HEADER = "X-Sglang-Hetero-Seal"
"""Of a question (over its nonce), of its answer and of a refusal (over the body, for one instance of the server), if
there is a token."""
NONCE_HEADER = "X-Sglang-Hetero-Nonce"
"""What the answer's seal is made for, so that an old answer is no answer."""
NONCE_BYTES = 16
MAX_BODY = 4096
"""Bytes of a refusal: longer than any reason that is kept of it."""
MAX_REFUSALS = 1024
"""Ranks that say that they cannot take part; one line each."""
REFUSAL_SECONDS = 5.0
"""How often such a rank says so."""
KEEP_SECONDS = 3 * REFUSAL_SECONDS
"""How long its word counts: a line that nobody repeats is of a rank that is gone, or of a stranger."""


class Capability(msgspec.Struct, frozen=True):
    """What the route says; a release that says more says another version.

    version: of the messages. control_port: 0 with mode off. mode: SGLANG_HETERO over there.
    """

    version: int = 0
    control_port: int = 0
    mode: str = Mode.AUTO
    unsupported: tuple[str, ...] = ()
    """Why ranks of this server cannot take part, a line each; empty if all can."""
    instance: str = ""
    """Which start of the bootstrap server this is: a refusal is sealed for one of them."""


class BootstrapMixin:
    """Put in front of a transfer backend's bootstrap server class."""

    hetero_mode: Mode = Mode.AUTO

    def __init__(self, host: str, port: int) -> None:
        self._hetero_unsupported: dict[str, float] = {}  # by reason, when it was said last, time.monotonic()
        self._hetero_instance = uuid.uuid4().hex
        self._hetero_seal = seal_of(read(os.environ).token_file)
        self._hetero_faults = Faults("bootstrap server", logger)
        off = self.hetero_mode is Mode.OFF
        self._hetero_control = None if off else ControlService(_bindable(host), seal=self._hetero_seal)
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

        port, reasons = self._hetero_control_port(), tuple(self._hetero_refusals())
        capability = Capability(messages.VERSION, port, self.hetero_mode, reasons, self._hetero_instance)
        body = msgspec.json.encode(capability)
        return Response(body=body, headers=self._hetero_signed(request, body), content_type="application/json")

    def _hetero_refusals(self) -> dict[str, float]:
        """Those that still count."""
        since = time.monotonic() - KEEP_SECONDS
        self._hetero_unsupported = {reason: at for reason, at in self._hetero_unsupported.items() if at >= since}
        return self._hetero_unsupported

    def _hetero_control_port(self) -> int:
        """Of the control service, which is made anew if it has ended: ranks that miss it ask for its port."""
        control = self._hetero_control
        if control is None:
            return 0
        if control.failure is not None:
            control.close()
            self._hetero_control = control = ControlService(control.host, seal=self._hetero_seal)
            logger.error("hetero control service had ended; a new one listens on %s:%d", control.host, control.port)
        return control.port

    def _hetero_signed(self, request: Request, answer: bytes) -> dict[str, str]:
        """The answer's seal. Who asks learns from it whether the two have the same token; so does this log."""
        nonce = request.headers.get(NONCE_HEADER, "")[: 2 * NONCE_BYTES].encode()
        if not nonce:
            return {}  # a person
        try:
            self._hetero_seal.verify(request.headers.get(SEAL_HEADER, ""), nonce, Purpose.QUESTION)
        except SealError as error:
            self._hetero_faults.note(
                "question", f"a rank at {request.remote} asks, and will refuse this server: {error}"
            )
        return {SEAL_HEADER: self._hetero_seal.sign(answer, Purpose.OFFER, nonce)}

    async def _hetero_put(self, request: Request) -> Response:
        """A rank says why it cannot take part, and says it again as long as that is so."""
        from aiohttp.web import Response

        if request.content_length is None or request.content_length > MAX_BODY:
            return Response(status=413, text=f"a reason has at most {MAX_BODY} bytes")
        try:
            body = await request.read()
            signature, audience = request.headers.get(SEAL_HEADER, ""), self._hetero_instance.encode()
            self._hetero_seal.verify(signature, body, Purpose.REFUSAL, audience)
            reason = msgspec.json.decode(body, type=str)
        except SealError as error:
            self._hetero_faults.note("refusal", f"from {request.remote}: {error}")
            return Response(status=403, text=str(error))
        except (msgspec.MsgspecError, ValueError):
            return Response(status=400, text="a reason is one JSON string")
        known, reason = self._hetero_refusals(), messages.printable(reason)
        if reason in known or len(known) < MAX_REFUSALS:
            known[reason] = time.monotonic()
        return Response(text="OK")

    def hetero_control(self) -> Control | None:
        """How the control service is; None with mode off."""
        one = self._hetero_control
        if one is None:
            return None
        return Control(port=one.port, ranks=one.ranks, parked=one.parked, counts=one.counts, fault=one.fault)

    def close(self) -> None:
        """Stop both servers."""
        if self._hetero_control is not None:
            self._hetero_control.close()
        super().close()  # type: ignore[misc]


def _bindable(host: str) -> str:
    if not host:
        raise HeteroError("the bootstrap server has no host to listen on; start SGLang with --host")
    return host
