"""One endpoint that completes text greedily: SGLang's /generate, or /v1/completions of OpenAI's API.

Whatever it answers is bounded and checked; what is no proper answer raises AccuracyError, which the caller counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import requests

from sglang_hetero import answers
from sglang_hetero.errors import AccuracyError
from sglang_hetero.layout.checks import shorten

CONNECT_SECONDS = 10.0
MAX_ANSWER = 4 << 20
"""Bytes. An answer has some dozens of tokens; a list of models is the longest that is asked for."""
SHOWN = 300
"""Characters of a wrong answer that an error quotes."""
NO_SUCH_PATH = (requests.codes.not_found, requests.codes.method_not_allowed, requests.codes.not_implemented)
GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
FLUSH = "/flush_cache"
APIS = {"generate": GENERATE, "completions": COMPLETIONS}
KEY = "SGLANG_API_KEY"

Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Reply:
    """One finished request. tokens: ids, empty where none are told; accept: tokens per verify step, or None."""

    text: str
    tokens: tuple[int, ...] = ()
    accept: float | None = None
    prompt_tokens: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | str | None = None
    prompt_tokens: Count | None = None
    spec_accept_length: float | None = None


class _Generated(msgspec.Struct):
    text: str
    meta_info: _Meta
    output_ids: list[int] = []


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None


class _Completed(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


def clean(url: str) -> str:
    """The URL without a slash at its end. Raises AccuracyError if it is none of an HTTP server."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
        sound = sound and (parts.port is None or parts.port > 0) and parts.username is None
    except ValueError:
        sound = False
    if not sound:
        raise AccuracyError(
            f"{shorten(url)} is no endpoint: give http://host:port of a server or router, the key by --api-key"
        )
    return url.rstrip("/").removesuffix("/v1")


@dataclass
class Endpoint:
    """Of `url`. Safe to use from several threads once `connect` has returned.

    key: for Authorization; seconds: until an answer begins, and as long again for all of it; path: the route that takes
    prompts, found by `connect` if it is None; model: the first name on its list of models, None if it tells none.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    seconds: float = 300.0
    path: str | None = None
    model: str | None = None

    def connect(self) -> None:
        """Find out by one short request how it is asked. Raises AccuracyError with the remedy if it cannot be."""
        self.model = self._model()
        wanted = [self.path] if self.path else [GENERATE, COMPLETIONS]
        missing = []
        for path in wanted:
            status, data = self._call("POST", path, self._body(path, "1 2 3", 1))
            if status in NO_SUCH_PATH:
                missing.append(f"POST {path}: HTTP {status}")
                continue
            self.path = path
            self._reply(path, status, data, 1)
            return
        raise AccuracyError(
            f"{self.url} takes no prompts ({'; '.join(missing)}); accuracy needs SGLang's {GENERATE} or an OpenAI "
            f"{COMPLETIONS}: give the URL of a server or of its router"
        )

    def ask(self, prompt: str, tokens: int) -> Reply:
        """Complete greedily with at most `tokens` tokens. Raises AccuracyError, which says what came instead."""
        assert self.path is not None, "connect first"
        status, data = self._call("POST", self.path, self._body(self.path, prompt, tokens))
        return self._reply(self.path, status, data, tokens)

    def flush(self) -> None:
        """Have it forget cached prefixes. Raises AccuracyError if it does not."""
        status, data = self._call("POST", FLUSH, {})
        if status != requests.codes.ok:
            raise self._failed(FLUSH, status, data)

    def _body(self, path: str, prompt: str, tokens: int) -> dict[str, Any]:
        if path == GENERATE:
            return {
                "text": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
                "stream": False,
            }
        return {"model": self.model or "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0}

    def _reply(self, path: str, status: int, data: bytes, tokens: int) -> Reply:
        if status != requests.codes.ok:
            raise self._failed(path, status, data)
        try:
            if path == COMPLETIONS:
                completed = msgspec.json.decode(data, type=_Completed)
                choice, usage = completed.choices[0], completed.usage or _Usage()
                return self._checked(path, choice.finish_reason, Reply(choice.text, prompt_tokens=usage.prompt_tokens))
            found = msgspec.json.decode(data, type=_Generated)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise AccuracyError(
                f"{self.url}{path}: unexpected answer: {error}; it begins with {_begin(data)}"
            ) from None
        meta = found.meta_info
        if len(found.output_ids) > tokens:
            raise AccuracyError(
                f"{self.url}{path}: {len(found.output_ids)} tokens came, {tokens} at most were asked for"
            )
        accept = meta.spec_accept_length
        if accept is not None and not (math.isfinite(accept) and accept >= 0):
            raise AccuracyError(f"{self.url}{path}: an accept length of {accept}")
        reply = Reply(found.text, tuple(found.output_ids), accept, meta.prompt_tokens)
        return self._checked(path, meta.finish_reason, reply)

    def _checked(self, path: str, reason: object, reply: Reply) -> Reply:
        """A request that the server has ended itself is none that it has answered."""
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind not in ("stop", "length"):
            raise AccuracyError(f"{self.url}{path}: ended by {shorten(reason, SHOWN)}")
        return reply

    def _failed(self, path: str, status: int, data: bytes) -> AccuracyError:
        if status in (requests.codes.unauthorized, requests.codes.forbidden):
            return AccuracyError(f"{self.url}{path}: HTTP {status}: it wants its API key: --api-key, or set {KEY}")
        return AccuracyError(f"{self.url}{path}: HTTP {status}: {_begin(data)}")

    def _model(self) -> str | None:
        status, data = self._call("GET", MODELS)
        if status in (requests.codes.unauthorized, requests.codes.forbidden):
            raise self._failed(MODELS, status, data)
        try:
            return msgspec.json.decode(data, type=_Models).data[0].id if status == requests.codes.ok else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = (min(CONNECT_SECONDS, self.seconds), self.seconds)
        try:
            with answers.asked(method, f"{self.url}{path}", timeout=timeout, headers=headers, body=body) as reply:
                return reply.status_code, answers.whole(reply, self.seconds, MAX_ANSWER)
        except answers.TooLong as error:
            raise AccuracyError(f"{self.url}{path}: {error}") from None
        except answers.TooLate as error:
            raise AccuracyError(f"{self.url}{path}: {error} (--timeout)") from None
        except requests.Timeout:
            raise AccuracyError(f"{self.url}{path}: no answer has begun in {self.seconds:g} s (--timeout)") from None
        except (*answers.BROKEN, ValueError) as error:
            raise AccuracyError(
                f"{self.url}{path}: no answer: {shorten(str(error), SHOWN)}; is a server or router running there?"
            ) from None


def _begin(data: bytes) -> str:
    return shorten(data[:SHOWN].decode(errors="replace"), SHOWN)
