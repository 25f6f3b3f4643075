"""Server-sent events as SGLang writes them, and what an answer of a server means for a router. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import msgspec

DONE = b"[DONE]"
END = b"\n\n"
_ENDS = re.compile(rb"\n\r?\n(?:\r?\n)*")
"""How an event may end: a proxy before a server may write line ends of its own. Further empty lines are no events."""
MAX_EVENT = 64 << 20
"""Bytes of one event: the log-probabilities of a long prompt are a few MB."""
MAX_DONE = 64
"""Bytes at the end of an event in which [DONE] is looked for, before all of it is."""
SHOWN = 500
"""Characters of a server's own words in an error of ours."""
_EACH_TIME = re.compile(r"""\brid=(?:'[^']*'|"[^"]*"|\S+)|[0-9a-f]{32}|\d{6,}""")
"""What SGLang's words about a request have that is another one in each attempt: its id, and the room of a hand-over."""
_DOUBTFUL = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
)
"""Said by a server that has another key or other routes than the rest, as well as of a request that is wrong."""
_NAMES = ("error", "message", "detail")
"""Where an error has its words."""
TELLTALES = (b'"abort"', b'"error"')
"""One of these is in every event that says that a request has failed. Text that a model writes cannot have them: its
quotation marks are escaped."""


class EventTooLong(ValueError):
    """A stream has no end of an event where there must be one."""


class Splitter:
    """Cuts a stream of bytes into events, however it comes in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now, each with the empty line that ends it. Raises EventTooLong."""
        searched = max(0, len(self._rest) - len(b"\n\r"))
        self._rest += data
        found: list[bytes] = []
        start = 0
        for end in _ENDS.finditer(self._rest, searched):
            found.append(bytes(memoryview(self._rest)[start : end.end()]))
            start = end.end()
        del self._rest[:start]
        if len(self._rest) > MAX_EVENT:
            raise EventTooLong(f"an event of more than {MAX_EVENT} bytes")
        return found

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not complete."""
        return bytes(self._rest)


def payload(event: bytes) -> bytes | None:
    """The data of an event; None for one without, a comment for example."""
    lines = [line[len(b"data:") :].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def is_done(event: bytes) -> bool:
    """Whether it is the one with which SGLang ends every stream."""
    return DONE in event[-MAX_DONE:] and payload(event) == DONE


@dataclass(frozen=True)
class Failure:
    """What a server says went wrong. status: as of HTTP. retry: whether another server may do better.

    blame: whether it says something about the server that has said so. doubtful: it is about the request only if
    another server says so, too. whole: it is about the whole request, not about one answer of a batch.
    """

    status: int
    cause: str
    retry: bool
    blame: bool = True
    doubtful: bool = False
    whole: bool = True

    def alike(self, other: Failure) -> bool:
        """Whether both say the same, whatever id and room the attempts had."""
        return (self.status, _gist(self.cause)) == (other.status, _gist(other.cause))


def refusal(status: int, cause: str) -> Failure:
    """What an HTTP status other than 200, or the same number in an event, means."""
    # A full queue is no fault; one that is starting or broken says so on /health.
    busy = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    broken = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return Failure(
        status, on_a_line(cause), retry=broken or busy, blame=broken and not busy, doubtful=status in _DOUBTFUL
    )


def too_long(cause: str) -> Failure:
    """An answer that the router does not take: the client asked for it, and another server's would be as long."""
    return Failure(HTTPStatus.BAD_GATEWAY, cause, retry=False, blame=False)


def on_a_line(text: str) -> str:
    """A server's words for our log and our errors: bounded, without what ends a line or steers a terminal."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:SHOWN])


def _gist(cause: str) -> str:
    return _EACH_TIME.sub("", cause)


def failure_in(event: bytes) -> Failure | None:
    """The failure that an event of a stream tells; None if it tells none."""
    if not any(telltale in event for telltale in TELLTALES):
        return None
    data = payload(event)
    if data is None or data == DONE:
        return None
    try:
        return failure_of(msgspec.json.decode(data))
    except (msgspec.DecodeError, RecursionError):
        return None


def failure_of(answer: Any) -> Failure | None:
    """The failure in an answer's JSON, an event of a stream or a whole body of status 200; None if there is none.

    A request that its client has aborted (/abort_request) has not failed: SGLang gives no status with it, but for one
    that is being handed over, which looks like any hand-over that failed.
    """
    for one in answer if isinstance(answer, list) else [answer]:
        if not isinstance(one, Mapping):
            continue
        if (error := one.get("error")) is not None:
            return refusal(_status(error, HTTPStatus.INTERNAL_SERVER_ERROR), words(one))
        meta = one.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, Mapping) else None
        if isinstance(reason, Mapping) and reason.get("type") == "abort":
            status = _status({"code": reason.get("status_code")}, 0)
            if status:
                failure = refusal(status, str(reason.get("message", "aborted")))
                return replace(failure, whole="index" not in one)  # SGLang numbers the answers of a batch only
    return None


def _status(error: Any, default: int) -> int:
    code = error.get("code") if isinstance(error, Mapping) else None
    known = isinstance(code, int) and not isinstance(code, bool) and HTTPStatus.BAD_REQUEST <= code < 600
    return code if known and isinstance(code, int) else int(default)


def words(answer: Any) -> str:
    """What an error says, in whichever form SGLang gives it."""
    while isinstance(answer, Mapping) and (name := next((one for one in _NAMES if one in answer), None)):
        answer = answer[name]
    if isinstance(answer, str):
        return answer
    try:
        return msgspec.json.encode(answer).decode(errors="replace")
    except RecursionError:
        return "an error that is nested too deeply to be shown"


def words_of(body: bytes) -> str:
    """What the body of an error says."""
    try:
        return on_a_line(words(msgspec.json.decode(body)))
    except (msgspec.DecodeError, RecursionError):
        return on_a_line(body[:SHOWN].decode(errors="replace"))
