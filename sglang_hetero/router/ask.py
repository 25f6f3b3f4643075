"""The router's own questions to servers: are you well, and what are your caches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import aiohttp

from sglang_hetero.discovery.record import MAX_DESCRIPTION_BYTES, Instance, decode_description
from sglang_hetero.errors import HeteroError, RouterError

from .events import words_of
from .pairing import Known, described, stock

INSTANCE_PATH = "/hetero/instance"
MAX_WORDS = 4096
"""Bytes of an answer that is only looked at for its cause."""
DESCRIBED_AT_ONCE = 4
"""Descriptions that are read at a time: each may have 64 MiB, and takes as much again while it is decoded."""


class NoAnswer(RouterError):
    """A server did not answer, or not in time: which says nothing of what it is."""


def bearer(key: str | None) -> dict[str, str]:
    """The header that shows an API key; nothing without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


class Asker:
    """Asks servers, with a limit of `seconds` for each question; for /hetero/instance with the router's API key.

    Whoever registers as a server is asked, so /health, which SGLang answers without a key, does not get it.
    """

    def __init__(
        self, session: aiohttp.ClientSession, key: str | None, seconds: float, health_path: str = "/health"
    ) -> None:
        self._session, self._headers, self._seconds = session, bearer(key), seconds
        self._health_path = health_path
        self._places = asyncio.Semaphore(DESCRIBED_AT_ONCE)
        # Not the loop's own, whose threads may all be waiting for names to be looked up.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hetero-describe")

    def close(self) -> None:
        """Read no more descriptions."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def healthy(self, instance: Instance) -> None:
        """Return if its /health says 200. Raises RouterError with what it says else."""
        status, data = await self._get(instance, self._health_path, MAX_WORDS, {}, only_status=True)
        if status != HTTPStatus.OK:
            raise RouterError(f"{self._health_path} says HTTP {status}: {words_of(data) or 'nothing more'}")

    async def describe(self, instance: Instance) -> Known:
        """What it says of itself. Raises RouterError or RecordError, with the remedy."""
        async with self._places:
            return await self._describe(instance)

    async def _describe(self, instance: Instance) -> Known:
        status, data = await self._get(instance, INSTANCE_PATH, MAX_DESCRIPTION_BYTES, self._headers)
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return stock(instance)
        if status == HTTPStatus.UNAUTHORIZED:
            raise RouterError(f"{INSTANCE_PATH} wants the server's API key: start the router with --api-key")
        if status != HTTPStatus.OK:
            raise RouterError(f"{INSTANCE_PATH} says HTTP {status}: {words_of(data)}")

        def read() -> Known:
            known = described(instance, decode_description(data))
            _ = known.layout  # is kept, and not made in the event loop then
            return known

        # Manifests of many ranks take a while to be read and checked.
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def _get(
        self, instance: Instance, path: str, most: int, headers: Mapping[str, str], *, only_status: bool = False
    ) -> tuple[int, bytes]:
        """Status and body, of which more than `most` bytes are refused. only_status: nothing is read of a good one."""
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._session.get(instance.url + path, headers=headers, allow_redirects=False) as response,
            ):
                if only_status and response.status == HTTPStatus.OK:
                    return response.status, b""
                return response.status, await read_at_most(response, most)
        except TimeoutError:
            raise NoAnswer(f"no answer to {path} within {self._seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(f"no answer to {path}: {in_words(error)}") from None


async def read_at_most(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises RouterError if it is longer."""
    found = bytearray()
    async for data in response.content.iter_any():
        found += data
        if len(found) > most:
            raise RouterError(f"{response.url} answers with more than {most} bytes")
    return bytes(found)


def in_words(error: BaseException) -> str:
    """An error of a connection, for people; some say nothing but their kind."""
    if isinstance(error, HeteroError):
        return str(error)
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke before the answer was complete"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed without an answer"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
