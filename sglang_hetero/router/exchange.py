"""One request to one server, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict

from sglang_hetero.errors import HeteroError

from .ask import in_words, read_at_most
from .body import Body
from .events import (
    DONE,
    TELLTALES,
    EventTooLong,
    Failure,
    Splitter,
    failure_in,
    failure_of,
    payload,
    refusal,
    words_of,
)
from .fleet import LOST, REFUSED, Server

CONNECT_SECONDS = 5.0
"""For a connection to a server. Its kernel answers, however busy the process is."""
MAX_REFUSAL = 1 << 20
"""Bytes of an answer that is no success."""
MAX_ANSWER = 1 << 30
"""Bytes of an answer that is not streamed: log-probabilities of a long batch."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 4), 10),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", 5), 5),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", 6), 3),
)
"""A host that has gone without a word is noticed in 25 s, while a request waits for its first token."""
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "trailers", "transfer-encoding", "upgrade"),
    }
)
"""Headers that are for one connection only (RFC 9110, 7.6.1)."""
OURS = frozenset({"host", "content-length", "content-type", "accept-encoding", "expect"})
"""Headers of a request that the router makes itself."""
THEIRS = frozenset({"content-length", "date", "server"})
"""Headers of an answer that it makes itself."""


class Broken(Exception):
    """A request failed at a server, before its client has got anything.

    kind: LOST or REFUSED. passed: the server's own answer, which the client gets if no other attempt is made.
    """

    def __init__(self, server: Server, kind: str, failure: Failure, passed: Passed | None = None) -> None:
        super().__init__(failure.cause)
        self.server, self.kind, self.failure, self.passed = server, kind, failure, passed


@dataclass(frozen=True)
class Passed:
    """An answer that is passed on as it is."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


def connector() -> aiohttp.TCPConnector:
    """Where requests go out. A connection is for one request: to close it is how SGLang learns that nobody wants the
    answer any more, and one that is kept may have been closed by the server when the next request needs it."""

    def make(address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        for level, option, value in KEEPALIVE:
            made.setsockopt(level, option, value)
        return made

    return aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=make)


def onward(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A client's headers for a server: all that are not about the connection, Authorization included."""
    return _without(headers, OURS)


def back(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A server's headers for the client."""
    return _without(headers, THEIRS)


def _without(headers: Mapping[str, str], more: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    drop = HOP_BY_HOP | more | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in drop)


class Exchange:
    """One side of an attempt. Whoever opens it closes it; that ends the request at the server."""

    def __init__(
        self, session: aiohttp.ClientSession, server: Server, path: str, headers: CIMultiDict[str], data: bytes
    ) -> None:
        self._session, self.server, self._path = session, server, path
        self._headers, self._data = headers, data
        self._response: aiohttp.ClientResponse | None = None

    def close(self) -> None:
        """End it: an answer that is not complete makes the server abort its part."""
        if self._response is not None:
            self._response.close()

    @property
    def headers(self) -> CIMultiDict[str]:
        """Those of the answer, for the client."""
        assert self._response is not None
        return back(self._response.headers)

    async def open(self) -> aiohttp.ClientResponse:
        """Send the request; return when the server has said 200. Raises Broken."""
        try:
            response = await self._session.post(
                self.server.instance.url + self._path,
                data=self._data,
                headers=self._headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from None
        self._response = response
        if response.status != HTTPStatus.OK:
            raise await self._refused(response)
        return response

    async def read(self) -> bytes:
        """The whole answer of a request that is not streamed. Raises Broken."""
        response = await self.open()
        try:
            data = await read_at_most(response, MAX_ANSWER)
        except (aiohttp.ClientError, OSError, HeteroError) as error:
            raise self._lost(error) from None
        if any(sign in data for sign in TELLTALES):
            failure = failure_of(self.json(data))
            if failure is not None:
                raise Broken(self.server, REFUSED, failure)
        return data

    async def pieces(self, *, whole: bool = False) -> AsyncGenerator[bytes, None]:
        """What a streamed answer says, as it comes; only the first piece is held back until it has a whole event.

        whole: give it event by event instead. Raises Broken when the connection breaks, for a stream without an event,
        and for a failure in the first one that another server may not have.
        """
        response = await self.open()
        splitter, begun, held = Splitter(), False, bytearray()
        events: list[bytes] = []
        try:
            async for data in response.content.iter_any():
                if begun and not whole:
                    yield data
                    continue
                events += splitter.feed(data)
                if not begun:
                    held += data
                    begun = any(self._tells(event) for event in events)
                    if begun and not whole:
                        yield bytes(held)
                        held.clear()
                if begun and whole:
                    for event in events:
                        yield event
                    events.clear()
        except (aiohttp.ClientError, OSError, EventTooLong) as error:
            raise self._lost(error) from None
        if not begun:
            raise Broken(
                self.server, REFUSED, refusal(HTTPStatus.BAD_GATEWAY, "its stream ended before the first event")
            )
        if whole and splitter.rest.strip():
            yield splitter.rest

    def _tells(self, event: bytes) -> bool:
        """Whether an event says something of the request: a comment does not. Raises Broken for a failure."""
        if payload(event) is None:
            return False
        failure = failure_in(event)
        if failure is not None and failure.retry:
            raise Broken(self.server, REFUSED, failure)
        return True

    async def watch(self, first: asyncio.Future[Any]) -> None:
        """Read a streamed answer to its end for nothing but failures; prefill's. Raises Broken.

        first: gets the first event's JSON.
        """
        async for event in self.pieces(whole=True):
            failure = failure_in(event)
            if failure is not None:
                raise Broken(self.server, REFUSED, failure)
            data = payload(event)
            if not first.done() and data is not None and data != DONE:
                first.set_result(self.json(data))

    def json(self, data: bytes) -> Any:
        """What JSON an answer is. Raises Broken if it is none."""
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            failure = refusal(HTTPStatus.BAD_GATEWAY, f"its answer is no JSON: {error}")
            raise Broken(self.server, REFUSED, failure) from None

    def _lost(self, error: BaseException) -> Broken:
        return Broken(self.server, LOST, Failure(HTTPStatus.BAD_GATEWAY, in_words(error), retry=True))

    async def _refused(self, response: aiohttp.ClientResponse) -> Broken:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                data = await read_at_most(response, MAX_REFUSAL)
        except Exception as error:  # what it wanted to say is lost, that it refused is known
            data = in_words(error).encode()
        said = words_of(data)
        failure = refusal(response.status, f"HTTP {response.status}: {said}" if said else f"HTTP {response.status}")
        return Broken(self.server, REFUSED, failure, Passed(response.status, back(response.headers), data))


def encode(body: Body) -> bytes:
    """A body for the servers, the same bytes for both."""
    return msgspec.json.encode(body)
