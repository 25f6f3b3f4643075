"""A small HTTP client for SGLang's endpoints; what the demo, the tests and the benchmarks send requests with."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_hetero import answers
from sglang_hetero.errors import HeteroError

# A streamed line may take as long as a prefill of the longest prompt on a busy machine.
READ_SECONDS = 300.0
CONNECT_SECONDS = 10.0
# Of an answer: beyond every context length.
MAX_TOKENS = 1 << 24
# Characters of a wrong answer that an error quotes.
SHOWN = 500


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

    def _failed(self, path: str, what: object) -> RequestFailed:
        return RequestFailed(f"{self.url}{path}: {what}")

    @contextlib.contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[requests.Response]:
        """The response to a POST, not yet read; raises `RequestFailed` for whatever is no proper answer."""
        try:
            with answers.asked(
                "POST", f"{self.url}{path}", body=body, timeout=(CONNECT_SECONDS, READ_SECONDS)
            ) as reply:
                if reply.status_code != requests.codes.ok:
                    raise self._failed(path, f"HTTP {reply.status_code}: {answers.begin(reply, SHOWN)}")
                yield reply
        except answers.BROKEN as error:
            raise self._failed(path, error) from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            # The answer is JSON, but not what SGLang 0.5.23 says, or no JSON at all.
            raise self._failed(path, f"unexpected answer: {type(error).__name__}: {error}") from error

    def _events(self, path: str, response: requests.Response) -> Iterator[dict[str, Any]]:
        """The data objects of a server-sent-event stream up to [DONE]."""
        for line in answers.lines(response):
            if not line:
                continue
            if not line.startswith(b"data:"):
                # The mini load balancer passes an error of the decode server on as the stream's body.
                raise self._failed(path, line[:SHOWN].decode(errors="replace"))
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise self._failed(path, event["error"])
            yield event
        raise self._failed(path, "the stream ended before [DONE]")

    def _finished(self, path: str, reason: Any) -> None:
        """Raise unless a request ended because all its tokens were made."""
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind != "length":
            raise self._failed(path, f"ended early: {reason}")

    def generate(self, prompt: str | list[int], tokens: int, logprobs: bool = False) -> Generation:
        """Greedy `/generate` of exactly `tokens` tokens (ignore_eos); `prompt` is a text or token ids.

        Streamed, except with `logprobs`: the mini load balancer cannot stream those.
        """
        path = "/generate"
        body: dict[str, Any] = {
            ("text" if isinstance(prompt, str) else "input_ids"): prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": not logprobs,
            "return_logprob": logprobs,
        }
        start = time.perf_counter()
        last: dict[str, Any] = {}
        ids: list[int] = []
        with self._post(path, body) as response:
            for event in (
                [json.loads(answers.whole(response, READ_SECONDS))] if logprobs else self._events(path, response)
            ):
                last = event
                ids = _join(ids, event["output_ids"], event["meta_info"]["completion_tokens"])
                if len(ids) > MAX_TOKENS:
                    raise self._failed(path, f"more than {MAX_TOKENS} tokens, asked for were {tokens}")
            seconds = time.perf_counter() - start
            meta = last["meta_info"]
            self._finished(path, meta["finish_reason"])
            values = [entry[0] for entry in meta["output_token_logprobs"]] if logprobs else []
            return Generation(
                last["text"], ids, meta["prompt_tokens"], meta["completion_tokens"], seconds, meta, values
            )

    def chat(self, content: str, tokens: int) -> Generation:
        """Greedy `/v1/chat/completions` of exactly `tokens` tokens, streamed: one user message.

        Has neither token ids nor log-probabilities: a chat stream of SGLang tells no ids, and drops the
        log-probabilities of tokens that complete no character.
        """
        path = "/v1/chat/completions"
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        text, reason = "", None
        usage: dict[str, int] = {}
        with self._post(path, body) as response:
            for event in self._events(path, response):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice.get("finish_reason") or reason
                if len(text) > answers.MAX_ANSWER_BYTES:
                    raise self._failed(path, f"a text of more than {answers.MAX_ANSWER_BYTES} characters")
            seconds = time.perf_counter() - start
            self._finished(path, reason)
            return Generation(text, [], usage["prompt_tokens"], usage["completion_tokens"], seconds)


def _join(have: list[int], new: list[int], count: int) -> list[int]:
    """Token ids of a stream so far: an event carries all of them, or only those since the event before."""
    if len(new) == count:
        return list(new)
    if len(have) + len(new) == count:
        return have + new
    raise RequestFailed(f"the stream carries {len(have)} + {len(new)} token ids, but counts {count}")
