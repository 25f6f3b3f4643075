"""Answers of HTTP servers that nobody vouches for: no proxy, no redirection, no more bytes and seconds than were said.

One place for all that this package asks with requests, but etcd (discovery/etcd.py). An answer is read as it comes, so
that neither its length nor a trickle of bytes is without bound.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import requests
from urllib3.exceptions import HTTPError, ReadTimeoutError

MAX_ANSWER_BYTES = 64 << 20
"""Of an answer, and of a line of a stream: above the longest that servers give (docs/security.md)."""
_PIECE = 1 << 16

BROKEN = (requests.RequestException, HTTPError, OSError)
"""What all functions here raise where a server is not reached, or breaks off; requests.Timeout if it is late."""


class TooLong(requests.RequestException):
    """More bytes than an answer may have."""


class TooLate(requests.Timeout):
    """An answer has begun and does not end, or not go on."""


@contextlib.contextmanager
def asked(
    method: str,
    url: str,
    *,
    timeout: tuple[float, float],
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> Iterator[requests.Response]:
    """The answer, of which nothing but the headers has been read; a redirection is an answer like any other.

    timeout: seconds for a connection, and between two pieces of the answer. body: sent as JSON.
    """
    with requests.Session() as session:
        session.trust_env = False  # a proxy of the environment must not see loopback
        # What is compressed could grow beyond every bound.
        wanted = {"Accept-Encoding": "identity"} | dict(headers or {})
        request = session.prepare_request(requests.Request(method, url, headers=wanted, json=body))
        # Not session.send: it would follow a redirection, or read all of its body, however long.
        with session.get_adapter(url).send(request, stream=True, timeout=timeout) as reply:
            yield reply


def whole(reply: requests.Response, seconds: float, most: int = MAX_ANSWER_BYTES) -> bytes:
    """All of its body. Raises TooLong, and TooLate if it has not come in so many seconds."""
    end, data = time.monotonic() + seconds, bytearray()
    for piece in _pieces(reply):
        data += piece
        if len(data) > most:
            raise TooLong(f"the answer is longer than {most} bytes")
        if time.monotonic() > end:
            raise TooLate(f"no whole answer in {seconds:g} s")
    return bytes(data)


def begin(reply: requests.Response, most: int) -> str:
    """The first bytes of its body as text, to be quoted in an error."""
    data = bytearray()
    for piece in _pieces(reply):
        data += piece
        if len(data) >= most:
            break
    return data[:most].decode(errors="replace")


def lines(reply: requests.Response, most: int = MAX_ANSWER_BYTES) -> Iterator[bytes]:
    """The lines of its body, each as soon as it is whole, without their ends. Raises TooLong for one of more bytes."""
    rest = bytearray()
    for piece in _pieces(reply):
        *found, last = piece.split(b"\n")
        for part in found:
            yield bytes(rest + part).rstrip(b"\r")
            rest.clear()
        rest += last
        if len(rest) > most:
            raise TooLong(f"a line of the answer is longer than {most} bytes")
    if rest:
        yield bytes(rest)


def _pieces(reply: requests.Response) -> Iterator[bytes]:
    # Without read1 (urllib3 1) a piece is only whole when all its bytes have come.
    read = getattr(reply.raw, "read1", reply.raw.read)
    try:
        while piece := read(_PIECE, decode_content=False):
            yield piece
    except ReadTimeoutError as error:  # which is no requests.Timeout
        raise TooLate(f"the answer has begun and does not go on: {error}") from error
