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

from sglang_hetero.errors import HeteroError, RouterError

from .ask import in_words, read_at_most
from .body import Body
from .events import (
    DONE,
    END,
    TELLTALES,
    EventTooLong,
    Failure,
    Splitter,
    failure_in,
    failure_of,
    is_done,
    payload,
    refusal,
    too_long,
    words_of,
)
from .fleet import LOST, REFUSED, Server

CONNECT_SECONDS = 5.0
"""For a connection to a server. Its kernel answers, however busy the process is."""
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
"""With the time that it takes to look a name up."""
MAX_REFUSAL = 1 << 20
"""Bytes of an answer that is no success."""
MAX_BEFORE = 1 << 20
"""Bytes of comments before the first event of a stream: a proxy may keep a connection alive with some."""
MAX_ANSWER = 1 << 30
"""Bytes of an answer that is not streamed: log-probabilities of a long batch."""
NOTICED_SECONDS = 25
"""A host that has gone without a word is noticed in so long."""
KEEPALIVE = (
    # While data are under way the kernel sends no keep-alives, and would go on sending the data for a quarter of an
    # hour.
    (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", 18), NOTICED_SECONDS * 1000),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 4), NOTICED_SECONDS - 3 * 5),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", 5), 5),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", 6), 3),
)
"""Options of a connection: with data under way, and while a request waits for its first token."""
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "trailers", "transfer-encoding", "upgrade"),
    }
)
"""Headers that are for one connection only (RFC 9110, 7.6.1)."""
OURS = frozenset({"host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect"})
"""Headers of a request that the router makes itself. A body that was compressed is passed on unpacked."""
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


class Prompts:
    """What prefill's stream says of each prompt of a request: the first event of each has its log-probabilities.

    wanted: whether it is kept at all. most: how many answers the request has. begun: whether decode has begun, so that
    a prompt of a batch that fails takes nothing away from the others.
    """

    def __init__(self, *, wanted: bool, most: int) -> None:
        self.wanted, self._most, self.begun = wanted, most, False
        self._first: dict[int, Any] = {}
        self._more = asyncio.Event()

    def add(self, answer: Any) -> None:
        """An event's JSON."""
        index = index_of(answer)
        if index not in self._first and len(self._first) < self._most:
            self._first[index] = answer
            self._more.set()

    async def of(self, answer: Any) -> Any:
        """The first event of the prompt that `answer`, an event of decode's, is about. Waits until it is there."""
        index = index_of(answer)
        while index not in self._first:
            self._more.clear()
            await self._more.wait()
        return self._first[index]


def index_of(answer: Any) -> int:
    """Which answer of a batch an event belongs to; SGLang numbers them from 0, and single ones not at all."""
    index = answer.get("index") if isinstance(answer, dict) else None
    return index if isinstance(index, int) else 0


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


def onward(headers: Mapping[str, str], router: str) -> CIMultiDict[str]:
    """A client's headers for a server: all that are not about the connection, Authorization included. router: the
    name under which this one knows its own requests again, if a server is a router itself (RFC 9110, 7.6.3)."""
    found = _without(headers, OURS)
    found.add("Via", f"1.1 {router}")
    return found


def back(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A server's headers for the client."""
    return _without(headers, THEIRS)


def _without(headers: Mapping[str, str], more: frozenset[str]) -> CIMultiDict[str]:
    given = [value for name, value in headers.items() if name.lower() == "connection"]
    named = {name.strip().lower() for value in given for name in value.split(",")}
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
                timeout=TIMEOUT,
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
        except HeteroError as error:
            raise Broken(self.server, REFUSED, too_long(str(error))) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from None
        if any(sign in data for sign in TELLTALES):
            failure = failure_of(self.json(data))
            if failure is not None:
                raise Broken(self.server, REFUSED, failure)
        return data

    async def pieces(self) -> AsyncGenerator[list[bytes], None]:
        """Events of a streamed answer, each whole: those that have come since the last ones.

        Raises Broken when the connection breaks, for a stream without an event or without its end, for one that is too
        long, and for a failure among the first ones that another server may not have or that leaves nothing of the
        request. What has come of an event that the break cut in two is dropped.
        """
        response = await self.open()
        splitter, begun, before, done = Splitter(), False, 0, False
        events: list[bytes] = []
        try:
            async for data in response.content.iter_any():
                new = [event for event in splitter.feed(data) if not event.isspace()]
                if not begun:
                    # All that came at once: nothing of it has gone to the client.
                    telling = [self._tells(event) for event in new]
                    begun, before = any(telling), before + sum(map(len, new))
                events += new
                done = done or any(is_done(event) for event in new)
                if begun and events:
                    yield events
                    events = []
                elif before > MAX_BEFORE:
                    raise EventTooLong(f"more than {MAX_BEFORE} bytes before the first event")
        except EventTooLong as error:
            raise Broken(self.server, REFUSED, too_long(str(error))) from None
        except (aiohttp.ClientError, OSError) as error:
            if not done:  # what breaks after the end has cost the client nothing
                raise self._lost(error) from None
        if not begun:
            raise Broken(
                self.server, REFUSED, refusal(HTTPStatus.BAD_GATEWAY, "its stream ended before the first event")
            )
        rest = splitter.rest.strip()
        if not done and not is_done(rest):
            # A proxy between, or a server that ends a stream with its connection, makes no error of one that is cut.
            raise self._lost(RouterError("its stream ended without [DONE]"))
        if rest:
            yield [rest + END]

    def _tells(self, event: bytes) -> bool:
        """Whether an event says something of the request: a comment does not. Raises Broken for a failure, but for
        that of one prompt of a batch which no other server would take: the other prompts' answers go on."""
        if payload(event) is None:
            return False
        failure = failure_in(event)
        if failure is not None and (failure.retry or failure.whole):
            raise Broken(self.server, REFUSED, failure)
        return True

    async def watch(self, prompts: Prompts) -> None:
        """Read a streamed answer to its end for nothing but failures, and what it says of the prompts; prefill's.
        Raises Broken: for a failure of one prompt at the end if decode has begun, which tells its client itself."""
        one: Broken | None = None
        async for events in self.pieces():
            for event in events:
                failure = failure_in(event)
                if failure is not None:
                    failed = Broken(self.server, REFUSED, failure)
                    if failure.whole or not prompts.begun:
                        raise failed
                    one = one or failed
                data = payload(event)
                if prompts.wanted and data is not None and data != DONE:
                    prompts.add(self.json(data))
        if one is not None:
            raise one

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
