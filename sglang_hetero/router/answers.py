"""The router's own errors, as clients of OpenAI's API and of SGLang's know them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from .events import DONE, END

_OURS, _THEIRS = "server_error", "invalid_request_error"
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""Those that have one of their own; the others are the request's fault, or from 500 on the server's."""


@dataclass(frozen=True)
class Tried:
    """One attempt that failed. server: label of the one that failed. cause: in its words, or in ours."""

    prefill: str
    decode: str
    server: str
    cause: str


def error(status: int, message: str, tried: Sequence[Tried] = ()) -> dict[str, Any]:
    """An error as JSON: `error.message` is where both APIs have it. attempts: what was tried, the first one first."""
    inner: dict[str, Any] = {
        "object": "error",
        "message": message,
        "type": _TYPES.get(status, _OURS if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _THEIRS),
        "param": None,
        "code": int(status),
    }
    if tried:
        inner["attempts"] = [
            {"prefill": one.prefill, "decode": one.decode, "server": one.server, "cause": one.cause} for one in tried
        ]
    return {"error": inner}


def error_event(status: int, message: str) -> bytes:
    """The same as the end of a stream that has begun, in the way in which SGLang ends one."""
    return b"data: " + msgspec.json.encode(error(status, message)) + END + b"data: " + DONE + END


def exhausted(tried: Sequence[Tried]) -> str:
    """What a client is told when every attempt has failed."""
    last = tried[-1]
    times = "once" if len(tried) == 1 else f"{len(tried)} times"
    return (
        f"tried {times}, last with {last.prefill} and {last.decode}: {last.server}: {last.cause}; "
        "see that server's log and its GET /hetero/state, and GET /hetero/pairs of the router"
    )
