"""The client against servers that answer well, badly, or not at all."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_hetero.client import Client, RequestFailed


@contextmanager
def answering(body: bytes, status: int = 200):
    """A server that answers every POST so; gives a client and the requests it has seen."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Client(f"http://127.0.0.1:{server.server_port}"), seen
    finally:
        server.shutdown()
        server.server_close()


def events(*objects, done=True) -> bytes:
    lines = [f"data: {json.dumps(thing)}" for thing in objects] + (["data: [DONE]"] if done else [])
    return "\n\n".join([*lines, ""]).encode()


def step(tokens, text="ab", reason=None, **meta):
    info = {"prompt_tokens": 5, "completion_tokens": len(tokens), "finish_reason": reason} | meta
    return {"text": text, "output_ids": tokens, "meta_info": info}


LENGTH = {"type": "length", "length": 3}
WHOLE = events(step([7]), step([7, 8, 9], "abc", LENGTH, spec_accept_length=1.5))


def test_generate_streams_and_takes_the_last_event():
    with answering(WHOLE) as (client, seen):
        answer = client.generate([1, 2, 3, 4, 5], 3)
    assert (answer.tokens, answer.text, answer.prompt_tokens, answer.completion_tokens) == ([7, 8, 9], "abc", 5, 3)
    assert answer.accept_length == 1.5
    assert answer.accept_histogram is None
    ((path, body),) = seen
    assert path == "/generate"
    assert body["input_ids"] == [1, 2, 3, 4, 5]
    assert body["stream"] is True
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


def test_generate_joins_a_stream_of_new_tokens_only():
    first, second = step([7]), step([8, 9], "abc", LENGTH)
    second["meta_info"]["completion_tokens"] = 3
    with answering(events(first, second)) as (client, _):
        assert client.generate("x", 3).tokens == [7, 8, 9]


def test_generate_with_logprobs_is_one_answer():
    whole = step([7, 8], "ab", LENGTH, output_token_logprobs=[[-0.5, 7, None], [-1.5, 8, None]])
    with answering(json.dumps(whole).encode()) as (client, seen):
        answer = client.generate("x", 2, logprobs=True)
    assert answer.logprobs == [-0.5, -1.5]
    assert answer.tokens == [7, 8]
    assert seen[0][1]["stream"] is False


def chat_event(content=None, reason=None):
    return {"choices": [{"delta": {"content": content}, "finish_reason": reason}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def test_chat_joins_the_text():
    with answering(events(chat_event("a"), chat_event("b"), chat_event(None, "length"), USAGE)) as (client, seen):
        answer = client.chat("question", 2)
    assert (answer.text, answer.tokens, answer.prompt_tokens, answer.completion_tokens) == ("ab", [], 9, 2)
    assert seen[0][0] == "/v1/chat/completions"
    assert seen[0][1]["messages"] == [{"role": "user", "content": "question"}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (events(chat_event("a", "abort"), USAGE), "ended early: abort"),
        (events(chat_event("a"), USAGE), "ended early: None"),
        (events(chat_event("a", "length")), "unexpected answer: KeyError"),
    ],
    ids=["aborted", "no reason", "no usage"],
)
def test_a_chat_that_is_not_whole_is_an_error(body, reason):
    with answering(body) as (client, _), pytest.raises(RequestFailed, match=reason):
        client.chat("question", 2)


BAD = {
    "http error": (b"no such model", 404, "HTTP 404: no such model"),
    "no stream": (b'{"error": "decode is gone"}\n', 200, "decode is gone"),
    "error inside": (events({"error": {"message": "aborted"}}), 200, "aborted"),
    "cut off": (events(step([7]), done=False), 200, r"ended before \[DONE\]"),
    "nothing": (b"", 200, r"ended before \[DONE\]"),
    "only done": (events(), 200, "unexpected answer: KeyError"),
    "no json": (b"data: {x\n\n", 200, "unexpected answer: JSONDecodeError"),
    "missing field": (events({"text": "a"}), 200, "unexpected answer: KeyError"),
    "another type": (events([1, 2]), 200, "unexpected answer: TypeError"),
    "tokens missing": (events(step([7]) | {"meta_info": {"completion_tokens": 3}}), 200, "token ids, but counts 3"),
    "aborted": (events(step([7], reason={"type": "abort", "message": "out of memory"})), 200, "out of memory"),
    "stopped early": (events(step([7], reason={"type": "stop"})), 200, "ended early"),
}


@pytest.mark.parametrize(("body", "status", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_answers_are_errors_with_the_url(body, status, reason):
    with answering(body, status) as (client, _), pytest.raises(RequestFailed, match=reason) as failure:
        client.generate("x", 3)
    assert f"{client.url}/generate" in str(failure.value) or "token ids" in reason


def test_no_server_is_an_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(RequestFailed, match="/generate"):
            Client(f"http://127.0.0.1:{unused.getsockname()[1]}").generate("x", 1)


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(WHOLE) as (client, _):
        assert client.generate("x", 3).tokens == [7, 8, 9]
