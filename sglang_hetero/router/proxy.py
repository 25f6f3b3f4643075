"""The way of one request through the router, from top to bottom.

Both servers get it at the same time. Prefill's answer only says how it went there; decode's is the client's. Until a
first piece of it has gone to the client, a failure on either side ends the other's request, too, and another pair is
tried with rooms of its own. Afterwards nothing is tried again: the client would get a second beginning.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from sglang_hetero.errors import HeteroError, RouterError

from . import body as bodies
from .answers import Tried, error, error_event, exhausted
from .events import Failure, failure_in
from .exchange import Broken, Exchange, Passed, Prompts, encode, onward
from .fits import Avoid, Key
from .fleet import (
    CHARGE_DECODE,
    CHARGE_MOST,
    CHARGE_PAIR,
    CHARGE_PREFILL,
    ENDED,
    LOST,
    REFUSED,
    Fleet,
    Lease,
    NoPair,
    Server,
)
from .merge import PREFILL_SECONDS, Merge, broken_of, silent
from .metrics import CLIENT_LEFT, Metrics
from .options import Settings

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 1.0
"""To tell a client that its time is over; one that does not read is not told."""
RETRY_AFTER = "1"
"""Seconds, of an answer that says that there is no server now."""


def limit(seconds: float) -> asyncio.Timeout:
    """What ends a request after so long. In one place, so that tests need not wait for it."""
    return asyncio.timeout(seconds)


class Gone(Exception):
    """The client went away while it was written to."""


class Proxy:
    """Passes requests on."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, settings: Settings, metrics: Metrics, name: str
    ) -> None:
        """name: under which the router knows its own requests again."""
        self.name = name
        self.fleet, self.session, self.settings, self.metrics = fleet, session, settings, metrics
        self.draw = random.SystemRandom().randrange
        self._late: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for nothing any more."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer to one request. When the client goes away, aiohttp cancels this, and with it both sides."""
        arrived, status = time.monotonic(), CLIENT_LEFT
        try:
            response = await self._handle(request, arrived)
            status = str(response.status)
        except Gone:
            # To nobody; a stream that has begun is not there to be ended, either.
            return web.Response(status=int(CLIENT_LEFT))
        except Exception:
            status = str(int(HTTPStatus.INTERNAL_SERVER_ERROR))
            raise
        finally:
            self.metrics.requests.labels(request.path, status).inc()
        if response.status == HTTPStatus.OK:
            self.metrics.duration.labels(request.path).observe(time.monotonic() - arrived)
        return response

    async def _handle(self, request: web.Request, arrived: float) -> web.StreamResponse:
        try:
            async with limit(self.settings.seconds):
                data = await request.read()
            body = msgspec.json.decode(data)
            if not isinstance(body, dict):
                raise RouterError(f"the body must be a JSON object, not {type(body).__name__}")
            bodies.check(body, request.path)
        except web.HTTPRequestEntityTooLarge:
            return refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "the body is longer than the router takes; start it with a larger --max-payload-size",
            )
        except TimeoutError:
            text = f"the request had not come within {self.settings.seconds:g} s"
            return refuse(HTTPStatus.REQUEST_TIMEOUT, f"{text}; --request-timeout-secs is its limit")
        except (msgspec.DecodeError, RecursionError, HeteroError, web.RequestPayloadError) as bad:
            return refuse(HTTPStatus.BAD_REQUEST, f"not a request: {bad}")
        return await _Request(self, request, body, arrived).run()

    def finish_later(self, task: asyncio.Task[Any], exchange: Exchange, lease: Lease) -> None:
        """Let prefill end a request that decode has already; close it if it does not."""

        async def wait() -> None:
            try:
                async with asyncio.timeout(PREFILL_SECONDS):
                    await task
                self.fleet.succeeded(lease.prefill)
            except (Broken, TimeoutError) as ended:
                logger.info("%s, after its hand-over: %s", lease.prefill.label, ended)
            finally:
                task.cancel()
                exchange.close()
                lease.prefill_done()

        late = asyncio.create_task(wait())
        self._late.add(late)
        late.add_done_callback(self._late.discard)


class _Request:
    """One request, with all its attempts."""

    def __init__(self, proxy: Proxy, request: web.Request, body: bodies.Body, arrived: float) -> None:
        self._proxy, self._fleet, self._metrics = proxy, proxy.fleet, proxy.metrics
        self._settings = proxy.settings
        self._request, self._body, self._arrived = request, body, arrived
        self._path, self._headers = request.path, onward(request.headers, proxy.name)
        self._headers["Content-Type"] = "application/json"
        self._headers["Accept-Encoding"] = "identity"
        self._stream = bodies.is_stream(body)
        self._logprobs = self._path == "/generate" and bodies.wants_logprobs(body)
        self._prompt, self._new = bodies.prompt_tokens(body), bodies.new_tokens(body)
        self._name = f"{proxy.draw(1 << 32):08x}"
        self._tried: list[Tried] = []
        self._avoid: Avoid = {}
        self._refused: list[tuple[Server, Failure, list[Server]]] = []
        """Who has refused this request how, and who is blamed for it."""
        self._doubted: Broken | None = None
        """A refusal that another server is asked about."""
        self._now: Lease | None = None
        self._out: web.StreamResponse | None = None
        """The answer, once a piece of it has gone to the client."""

    async def run(self) -> web.StreamResponse:
        """Try until it succeeds, or cannot be tried any more."""
        try:
            async with limit(self._settings.seconds - (time.monotonic() - self._arrived)):
                return await self._attempts()
        except TimeoutError:
            return await self._too_late()

    async def _attempts(self) -> web.StreamResponse:
        pause, status = self._settings.pause, int(HTTPStatus.BAD_GATEWAY)
        for attempt in range(1 + self._settings.retries):
            if attempt:
                self._metrics.retries.inc()
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 1.5, self._settings.max_pause)
            try:
                lease = self._fleet.take(self._prompt, self._new, self._avoid, self._body.get("model"))
            except NoPair as none:
                return self._no_pair(none)
            self._now = lease
            try:
                return await self._attempt(lease, attempt)
            except Broken as broken:
                self._tried.append(
                    Tried(
                        lease.prefill.instance.url,
                        lease.decode.instance.url,
                        broken.server.label,
                        broken.failure.cause,
                    )
                )
                logger.warning(
                    "request %s, attempt %d: %s failed: %s", self._name, attempt + 1, broken.server.label, broken
                )
                if not broken.failure.retry and not (attempt < self._settings.retries and self._doubts(broken)):
                    return self._pass(broken)
                status = broken.failure.status
            finally:
                lease.done()
        return self._refuse(status, exhausted(self._tried))

    def _doubts(self, broken: Broken) -> bool:
        """Whether a refusal is taken to another server before it is believed: once, and where there is another one. A
        server that refuses at once is never busy, so that without this it would get, and refuse, most requests."""
        model = self._body.get("model")
        if not broken.failure.doubtful or self._doubted is not None or not self._fleet.another(broken.server, model):
            return False
        self._doubted = broken
        self._against(broken.server.key, CHARGE_MOST)
        return True

    def _accepted(self) -> None:
        """Servers have taken the request: who refused it before was wrong."""
        if self._doubted is not None:
            cause = f"it refused a request that another server took: {self._doubted.failure.cause}"
            self._fleet.blame(self._doubted.server, cause, REFUSED)
            self._doubted = None

    async def _attempt(self, lease: Lease, attempt: int) -> web.StreamResponse:
        """One pair. Raises Broken while nothing has gone to the client; never leaves a request behind at a server."""
        body = bodies.again(self._body, attempt) if attempt else self._body
        met = bodies.meet(body, self._path, lease.prefill.instance, self._proxy.draw)
        logger.info(
            "request %s: %s, %d tokens, room %s: %s and %s",
            self._name,
            self._path,
            self._prompt,
            _shown(met["bootstrap_room"]),
            lease.prefill.label,
            lease.decode.label,
        )
        data = encode(met)
        prefill, decode = (
            Exchange(self._proxy.session, server, self._path, self._headers, data)
            for server in (lease.prefill, lease.decode)
        )
        run = self._streamed if self._stream else self._whole
        try:
            return await run(lease, prefill, decode)
        finally:
            decode.close()

    # Not streamed

    async def _whole(self, lease: Lease, prefill: Exchange, decode: Exchange) -> web.StreamResponse:
        before = asyncio.create_task(prefill.read())
        answer = asyncio.create_task(decode.read())
        handed_over = False
        try:
            data = await self._both(lease, before, answer)
            self._accepted()
            if self._logprobs:
                data = await self._with_logprobs(lease, prefill, before, decode.json(data))
            handed_over = True
            self._fleet.succeeded(lease.decode)
            return web.Response(status=HTTPStatus.OK, body=data, headers=decode.headers)
        finally:
            await self._leave(lease, prefill, before, answer, handed_over=handed_over)

    async def _with_logprobs(self, lease: Lease, prefill: Exchange, before: asyncio.Task[bytes], answer: Any) -> bytes:
        """Decode's answer with prefill's log-probabilities of the prompt. Raises Broken."""
        done, _ = await asyncio.wait({before}, timeout=PREFILL_SECONDS)
        if (failed := broken_of(before) if done else silent(lease.prefill)) is not None:
            self._charge(lease, failed)
            raise failed
        return msgspec.json.encode(bodies.merge_logprobs(prefill.json(before.result()), answer))

    # Streamed

    async def _streamed(self, lease: Lease, prefill: Exchange, decode: Exchange) -> web.StreamResponse:
        prompts = Prompts(wanted=self._logprobs, most=bodies.answers(self._body))
        before = asyncio.create_task(prefill.watch(prompts))
        handed_over = False
        async with aclosing(decode.pieces()) as pieces:
            first = asyncio.create_task(_next(pieces))
            try:
                events = await self._both(lease, before, first)
                prompts.begun = True
                self._accepted()
                merge = Merge(lease.prefill, before, prompts)
                try:
                    head, rest = merge.head(events)
                    piece = await merge.all(head)
                except Broken as broken:
                    self._charge(lease, broken)
                    raise
                out = self._out = await self._begin(decode.headers)
                await self._pass_on(out, lease, pieces, piece, events=rest, merge=merge)
                handed_over = True
                return out
            finally:
                await self._leave(lease, prefill, before, first, handed_over=handed_over)

    async def _begin(self, headers: CIMultiDict[str]) -> web.StreamResponse:
        """From here on the client has an answer, and nothing is tried again."""
        headers.setdefault("Content-Type", "text/event-stream")
        headers.setdefault("Cache-Control", "no-cache")
        headers["X-Accel-Buffering"] = "no"  # a proxy before us is asked not to collect pieces, either
        out = web.StreamResponse(status=HTTPStatus.OK, headers=headers)
        try:
            await out.prepare(self._request)
        except (ConnectionError, aiohttp.ClientConnectionError):
            raise Gone from None
        return out

    async def _pass_on(
        self,
        out: web.StreamResponse,
        lease: Lease,
        pieces: AsyncIterator[list[bytes]],
        piece: bytes,
        *,
        events: list[bytes],
        merge: Merge,
    ) -> None:
        """The first piece, the events that came with it, and the rest of the stream. A failure is told in the stream,
        which it ends."""
        await _write(out, piece)
        self._metrics.first_token.labels(self._path).observe(time.monotonic() - self._arrived)
        cause, kind, server, told, blame = "", ENDED, lease.decode, False, True
        remedy = "; send the request again"
        try:
            while True:
                while events:
                    head, events = merge.head(events)
                    await _write(out, await merge.all(head))
                    for event in head:
                        if (failure := failure_in(event)) is not None and failure.blame:
                            cause, kind, told = failure.cause, REFUSED, True  # the stream says it itself, and ends
                try:
                    async with asyncio.timeout(self._settings.idle):
                        events = await anext(pieces)
                except StopAsyncIteration:
                    break
        except Broken as broken:
            cause, server, blame = broken.failure.cause, broken.server, broken.failure.blame
            kind = ENDED if broken.kind == LOST else REFUSED
            remedy = remedy if broken.failure.retry else ""
        except TimeoutError:
            cause = f"nothing came for {self._settings.idle:g} s"
        if not cause:
            self._fleet.succeeded(lease.decode)
        else:
            self._metrics.broken.labels(self._path).inc()
            self._fleet.failed(server, f"a stream broke off: {cause}", kind, blame=blame)
            logger.warning("request %s broke off: %s: %s", self._name, server.label, cause)
        if cause and not told:
            text = f"{server.label} broke off after the first token: {cause}{remedy}"
            await _write(out, error_event(HTTPStatus.BAD_GATEWAY, text))
        await _end(out)

    # Both sides

    async def _both(self, lease: Lease, before: asyncio.Task[Any], answer: asyncio.Task[Any]) -> Any:
        """What decode answers. Raises Broken as soon as either side fails, having found out whose fault it is."""
        before.add_done_callback(lambda _: lease.prefill_done())
        await asyncio.wait({before, answer}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and broken_of(before) is None:
            self._fleet.succeeded(lease.prefill)
            await asyncio.wait({answer})
        failed = broken_of(answer) if answer.done() else broken_of(before)
        if failed is None:
            return answer.result()
        # Let the other one speak, unless it is clear already.
        other = before if failed.server is lease.decode else answer
        if failed.kind != LOST and failed.failure.blame:
            await asyncio.wait({other}, timeout=self._settings.grace)
        told = broken_of(other)
        if other is answer and answer.done() and told is None:
            return answer.result()  # what failed on prefill came after the hand-over
        worse = told if told is not None and _weight(told) > _weight(failed) else failed
        self._charge(lease, worse)
        raise worse

    def _charge(self, lease: Lease, broken: Broken) -> None:
        """Write down who failed; a retry goes elsewhere where it can."""
        prefill, decode = lease.prefill, lease.decode
        server, failure = broken.server, broken.failure
        blame = failure.blame and not (broken.kind == REFUSED and self._excused(lease, server, failure))
        self._fleet.failed(server, failure.cause, broken.kind, blame=blame)
        blamed = [server] if blame else []
        if failure.retry:
            self._against((prefill.key, decode.key), CHARGE_PAIR)
            if broken.kind == LOST or failure.status == HTTPStatus.SERVICE_UNAVAILABLE:
                self._against(server.key, CHARGE_MOST)
            else:
                # It says that a hand-over failed. That may be the other's fault; more often it is prefill's, whose part
                # it was.
                self._against(prefill.key, CHARGE_PREFILL)
                self._against(decode.key, CHARGE_DECODE)
                if blame:
                    other = decode if server is prefill else prefill
                    self._fleet.failed(other, f"a request failed at {server.label}: {failure.cause}", REFUSED)
                    blamed.append(other)
        if broken.kind == REFUSED:
            self._refused.append((server, failure, blamed))

    def _excused(self, lease: Lease, server: Server, failure: Failure) -> bool:
        """Whether this request has been refused in the same words before: then it is the request's own fault, and not
        that of those who had it. A server that had it both times may still be to blame, once."""
        role = server.instance.role
        same = [one for one in self._refused if one[1].alike(failure) and one[0].instance.role is role]
        for first, _, blamed in same:
            if first is not server:
                for one in blamed:
                    if one not in (lease.prefill, lease.decode):
                        self._fleet.excuse(one)
                blamed[:] = [one for one in blamed if one in (lease.prefill, lease.decode)]
        return bool(same)

    def _against(self, key: Key | tuple[Key, Key], charge: int) -> None:
        self._avoid[key] = self._avoid.get(key, 0) + charge

    async def _leave(
        self,
        lease: Lease,
        prefill: Exchange,
        before: asyncio.Task[Any],
        answer: asyncio.Task[Any],
        *,
        handed_over: bool,
    ) -> None:
        """End what is under way. Where decode has answered, prefill may finish."""
        if handed_over and not before.done():
            self._proxy.finish_later(before, prefill, lease)
        elif handed_over and broken_of(before) is None:
            self._fleet.succeeded(lease.prefill)
        else:
            before.cancel()
            prefill.close()
        answer.cancel()
        # No exception of theirs is news: what counts has been raised.
        await asyncio.gather(
            answer, *([before] if before.cancelling() or before.done() else []), return_exceptions=True
        )

    # Answers of the router's own

    def _no_pair(self, none: NoPair) -> web.Response:
        text = f"{none}; before that: {exhausted(self._tried)}" if self._tried else str(none)
        response = self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, text)
        response.headers["Retry-After"] = RETRY_AFTER
        return response

    def _pass(self, broken: Broken) -> web.Response:
        """A refusal that is about the request itself, in the server's own words where it gave an answer."""
        passed: Passed | None = broken.passed
        if passed is not None and passed.status != HTTPStatus.OK:
            return web.Response(status=passed.status, headers=passed.headers, body=passed.body)
        return self._refuse(broken.failure.status, f"{broken.server.label}: {broken.failure.cause}")

    def _refuse(self, status: int, text: str) -> web.Response:
        logger.warning("request %s: HTTP %d: %s", self._name, status, text)
        return refuse(status, text, self._tried)

    async def _too_late(self) -> web.StreamResponse:
        lease = self._now
        who = f" by {lease.prefill.label} and {lease.decode.label}" if lease else ""
        text = (
            f"not finished{who} within {self._settings.seconds:g} s; start the router with a larger "
            "--request-timeout-secs, or see what those servers wait for (GET /hetero/state)"
        )
        if self._out is None:
            return self._refuse(HTTPStatus.GATEWAY_TIMEOUT, text)
        logger.warning("request %s broke off: %s", self._name, text)
        self._metrics.broken.labels(self._path).inc()
        # A client that does not read must not keep this here, either.
        with suppress(TimeoutError, Gone):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await _write(self._out, error_event(HTTPStatus.GATEWAY_TIMEOUT, text))
                await _end(self._out)
        return self._out


def refuse(status: int, text: str, tried: list[Tried] | tuple[()] = ()) -> web.Response:
    """An error of the router's own."""
    return web.Response(
        status=status, body=msgspec.json.encode(error(status, text, tried)), content_type="application/json"
    )


def _weight(broken: Broken) -> int:
    """Which of two failures of one attempt is the cause: a lost connection, or a refusal of the request itself."""
    return 2 if broken.kind == LOST else 1 if not broken.failure.retry else 0


def _shown(room: Any) -> str:
    """The room, or rooms, of a request for the log."""
    return f"{room[0]} and {len(room) - 1} more" if isinstance(room, list) and len(room) > 1 else str(room)


async def _next(pieces: AsyncIterator[list[bytes]]) -> list[bytes]:
    """The first events, for a task: what `anext` gives is no coroutine."""
    return await anext(pieces)


async def _write(out: web.StreamResponse, data: bytes) -> None:
    try:
        await out.write(data)
    except (ConnectionError, aiohttp.ClientConnectionError):
        raise Gone from None


async def _end(out: web.StreamResponse) -> None:
    try:
        await out.write_eof()
    except (ConnectionError, aiohttp.ClientConnectionError):
        raise Gone from None
