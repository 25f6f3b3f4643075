"""A small HTTP client for SGLang's endpoints; what the demo, the tests and the benchmarks send requests with."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_hetero.errors import HeteroError

# A streamed line may take as long as a prefill of the longest prompt on a busy machine.
READ_SECONDS = 300.0
CONNECT_SECONDS = 10.0


class RequestFailed(HeteroError):
    """The server answered with an error, or not at all."""


@dataclass
class Generation:
    """One finished request.

    text: what was generated; tokens: its token ids (empty through the chat endpoint, which returns none);
    prompt_tokens, completion_tokens: counts; seconds: from sending to the last byte; meta: SGLang's meta_info;
    logprobs: natural logarithm of each token's probability (empty unless asked for).
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    meta: dict[str, Any] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole request, prefill included."""
        return self.completion_tokens / self.seconds

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per verify step of speculation; None without speculation."""
        return self.meta.get("spec_accept_length")

    @property
    def accept_histogram(self) -> list[int] | None:
        """Entry i: verify steps that accepted i drafts; None without speculation."""
        return self.meta.get("spec_correct_drafts_histogram")


class Client:
    """Greedy requests to one SGLang server or router. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        self.url = url

    @contextlib.contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[requests.Response]:
        """The response to a POST, not yet read; raises `RequestFailed` for an HTTP error or a lost connection."""
        with requests.Session() as session:
            session.trust_env = False  # a proxy of the environment must not see loopback
            try:
                response = session.post(
                    f"{self.url}{path}", json=body, stream=True, timeout=(CONNECT_SECONDS, READ_SECONDS)
                )
                if response.status_code != requests.codes.ok:
                    raise RequestFailed(f"{self.url}{path}: HTTP {response.status_code}: {response.text[:500]}")
                yield response
            except requests.RequestException as error:
                raise RequestFailed(f"{self.url}{path}: {error}") from error

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The data objects of a server-sent-event stream; raises `RequestFailed` also for an error inside it."""
        with self._post(path, body | {"stream": True}) as response:
            yield from self._events(path, response)

    def _events(self, path: str, response: requests.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if not line:
                continue
            if not line.startswith(b"data:"):
                # The mini load balancer passes an error of the decode server on as the stream's body.
                raise RequestFailed(f"{self.url}{path}: {line[:500].decode(errors='replace')}")
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(f"{self.url}{path}: {event['error']}")
            yield event
        raise RequestFailed(f"{self.url}{path}: the stream ended before [DONE]")

    def generate(self, prompt: str | list[int], tokens: int, logprobs: bool = False) -> Generation:
        """Greedy `/generate` of exactly `tokens` tokens (ignore_eos); `prompt` is a text or token ids.

        Streamed, except with `logprobs`: the mini load balancer cannot stream those.
        """
        body: dict[str, Any] = {
            ("text" if isinstance(prompt, str) else "input_ids"): prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        start = time.perf_counter()
        ids: list[int] = []
        if logprobs:
            with self._post("/generate", body | {"return_logprob": True}) as response:
                last = response.json()
            ids = last["output_ids"]
        else:
            for event in self._stream("/generate", body):
                last = event
                ids = _join(ids, event.get("output_ids", []), event["meta_info"]["completion_tokens"])
        seconds = time.perf_counter() - start
        meta = last["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise RequestFailed(f"{self.url}/generate: aborted: {reason.get('message')}")
        values = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        return Generation(last["text"], ids, meta["prompt_tokens"], meta["completion_tokens"], seconds, meta, values)

    def chat(self, content: str, tokens: int) -> Generation:
        """Greedy `/v1/chat/completions`, streamed: one user message."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        text = ""
        usage: dict[str, int] = {}
        for event in self._stream("/v1/chat/completions", body):
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            usage = event.get("usage") or usage
        seconds = time.perf_counter() - start
        return Generation(text, [], usage["prompt_tokens"], usage["completion_tokens"], seconds)


def _join(have: list[int], new: list[int], count: int) -> list[int]:
    """Token ids of a stream so far: an event carries all of them, or only those since the event before."""
    if len(new) == count:
        return list(new)
    if len(have) + len(new) == count:
        return have + new
    raise RequestFailed(f"the stream carries {len(have)} + {len(new)} token ids, but counts {count}")
