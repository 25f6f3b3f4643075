"""What prefill says of prompts, put into decode's stream about them."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec

from . import body as bodies
from .events import DONE, END, payload, refusal
from .exchange import Broken, Prompts
from .fleet import REFUSED, Server

PREFILL_SECONDS = 30.0
"""How long prefill's answer is waited for when decode has begun or ended: it has nothing left to do but to send it."""


def broken_of(task: asyncio.Task[Any]) -> Broken | None:
    """How a task failed; None if it has not, or not yet. Raises what is no failure of a server."""
    if not task.done():
        return None
    failed = task.exception()
    if failed is None or isinstance(failed, Broken):
        return failed
    raise failed


class Merge:
    """Puts what prefill has said of a prompt into decode's events about it."""

    def __init__(self, prefill: Server, before: asyncio.Task[None], prompts: Prompts) -> None:
        self._prefill, self._before, self._prompts = prefill, before, prompts

    def head(self, events: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Those that can be sent together, and the others: none waits for what prefill has to say of the next one."""
        if self._prompts.wanted:
            for count, event in enumerate(events, 1):
                if payload(event) is not None:
                    return events[:count], events[count:]
        return events, []

    async def all(self, events: list[bytes]) -> bytes:
        """Events as they are to be sent. Raises Broken if prefill does not say it."""
        if not self._prompts.wanted:
            return b"".join(events)
        return b"".join([await self._one(event) for event in events])

    async def _one(self, event: bytes) -> bytes:
        data = payload(event)
        if data is None or data == DONE:
            return event
        try:
            answer = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return event
        if not bodies.has_meta(answer):
            return event
        said = await self._of_prompt(answer)
        return b"data: " + msgspec.json.encode(bodies.merge_logprobs(said, answer)) + END

    async def _of_prompt(self, answer: Any) -> Any:
        found = asyncio.ensure_future(self._prompts.of(answer))
        try:
            await asyncio.wait({found, self._before}, timeout=PREFILL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not found.done() and broken_of(self._before) is None and self._before.done():
                await asyncio.sleep(0)  # what it said last is there
            if found.done():
                return found.result()
        finally:
            found.cancel()
        raise broken_of(self._before) or silent(self._prefill)


def silent(server: Server) -> Broken:
    """A prefill that does not answer, or not for each prompt."""
    text = f"it did not answer within {PREFILL_SECONDS:g} s, or not all, although decode has its request"
    return Broken(server, REFUSED, refusal(HTTPStatus.GATEWAY_TIMEOUT, text))
