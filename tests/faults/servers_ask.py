"""Requests to a prefill and a decode server at the same time, as a router sends them, with both answers kept apart.

A router hides what the two servers say; here each side's client has its own end. asyncio, so that hundreds of clients
can come and go.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

ROOMS = 2**63 - 1
"""SGLang's rooms are drawn from these, as its routers do."""


@dataclass(frozen=True)
class Pair:
    """Where the two servers of a request are; `router` is before them."""

    prefill: str
    bootstrap_port: int
    decode: str
    router: str

    @classmethod
    def of(cls, described: dict[str, Any]) -> "Pair":
        """The first prefill and the first decode server of `Fleet.describe()`."""
        prefill = next(server for server in described["servers"] if server["role"] == "prefill")
        decode = next(server for server in described["servers"] if server["role"] == "decode")
        return cls(prefill["url"], prefill["bootstrap_port"], decode["url"], described["router"]["url"])


@dataclass(frozen=True)
class End:
    """How one side's client was answered: `tokens` and `logprobs`, or an `error`, or `hung` at its limit.

    ended: by time.monotonic. lost: the connection broke or could not be made, so it is the process that is gone.
    """

    ended: float
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    error: str = ""
    lost: bool = False
    hung: bool = False

    @property
    def arrived(self) -> bool:
        return not self.error and not self.hung


class Ask:
    """One request under way. `left` when its client has gone away: then there are no ends."""

    def __init__(self, prompt: list[int], tokens: int, sides: dict[str, "asyncio.Task[End]"], rid: str) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.rid = rid
        self.left = False
        self.decoded = asyncio.Event()
        """Decode has answered with a token."""
        self._sides = sides

    async def ends(self) -> dict[str, End]:
        """Both answers, by side."""
        return {side: await task for side, task in self._sides.items()}

    async def end(self, side: str) -> End:
        """One side's answer, whatever the other one does."""
        return await self._sides[side]

    def ended(self, side: str) -> bool:
        """Whether a side has answered."""
        return self._sides[side].done()

    async def leave(self) -> None:
        """The client closes its connections and goes away."""
        self.left = True
        for task in self._sides.values():
            task.cancel()
        for task in self._sides.values():
            with suppress(asyncio.CancelledError):
                await task


class Asker:
    """Sends requests; `limit` seconds after its start a request without an answer has hung."""

    def __init__(self, session: aiohttp.ClientSession, pair: Pair, limit: float) -> None:
        self.pair = pair
        self._session = session
        self._limit = limit

    def ask(self, prompt: list[int], tokens: int) -> Ask:
        """To both servers, now."""
        rid = f"{random.getrandbits(64):x}"
        body = _body(prompt, tokens, rid) | {
            "bootstrap_host": urlsplit(self.pair.prefill).hostname,
            "bootstrap_port": self.pair.bootstrap_port,
            "bootstrap_room": random.randrange(1, ROOMS),
        }
        ask = Ask(prompt, tokens, {}, rid)
        ask._sides["prefill"] = asyncio.create_task(self._answer(self.pair.prefill, body, None))
        ask._sides["decode"] = asyncio.create_task(self._answer(self.pair.decode, body, ask.decoded))
        return ask

    def ask_router(self, prompt: list[int], tokens: int) -> Ask:
        """To the router, which asks both; it has one end only, called `router`."""
        rid = f"{random.getrandbits(64):x}"
        body = _body(prompt, tokens, rid)
        body["return_logprob"] = False  # the mini load balancer cannot stream those
        ask = Ask(prompt, tokens, {}, rid)
        ask._sides["router"] = asyncio.create_task(self._answer(self.pair.router, body, ask.decoded))
        return ask

    async def abort(self, ask: Ask) -> None:
        """SGLang's /abort_request on both servers; the client stays and is answered."""
        for url in (self.pair.prefill, self.pair.decode):
            async with self._session.post(f"{url}/abort_request", json={"rid": ask.rid}) as response:
                await response.read()

    async def _answer(self, url: str, body: dict[str, Any], first: asyncio.Event | None) -> End:
        last: dict[str, Any] = {}
        error, lost = "", False
        try:
            async with (
                asyncio.timeout(self._limit),
                self._session.post(f"{url}/generate", json=body) as response,
            ):
                async for event in _events(response):
                    if "error" in event:
                        error = json.dumps(event["error"])
                        break
                    last = event
                    if first is not None and event["output_ids"]:
                        first.set()
        except TimeoutError:
            return End(time.monotonic(), hung=True)
        except (aiohttp.ClientError, ConnectionError) as failed:
            error, lost = f"{type(failed).__name__}: {failed}", True
        return _end(last, error, lost=lost)


def _body(prompt: list[int], tokens: int, rid: str) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "rid": rid,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
        "return_logprob": True,
    }


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """What a stream tells; what is no event is an error of the server, told as {"error": ...}."""
    ended = False
    if response.status != 200:
        yield {"error": f"HTTP {response.status}: {(await response.text())[:1000]}"}
        return
    async for line in response.content:
        text = line.strip()
        if not text:
            continue
        if not text.startswith(b"data:"):
            yield {"error": text[:1000].decode(errors="replace")}
            return
        if text.endswith(b"[DONE]"):
            ended = True
            continue
        yield json.loads(text.removeprefix(b"data:"))
    if not ended:
        raise aiohttp.ClientPayloadError("the stream ended before [DONE]")


def _end(last: dict[str, Any], error: str, *, lost: bool) -> End:
    """The end that the last event of a stream stands for."""
    now = time.monotonic()
    if error:
        return End(now, error=error, lost=lost)
    meta = last.get("meta_info", {})
    reason = meta.get("finish_reason") or {}
    if reason.get("type") != "length":
        return End(now, error=f"ended early: {json.dumps(reason)}")
    logprobs = tuple(entry[0] for entry in meta.get("output_token_logprobs") or ())
    return End(now, tuple(last["output_ids"]), logprobs)
