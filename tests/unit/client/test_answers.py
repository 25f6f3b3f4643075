"""Answers without end, in lines without end, or elsewhere: a limit ends each, and nobody follows."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_hetero import answers
from sglang_hetero.client import Client, RequestFailed
from sglang_hetero.errors import PeerAway

SECONDS = 5.0
TIMEOUT = (SECONDS, SECONDS)
SHORT = 0.1
MOST = 1000
ENDLESS = b" " * 4096


@contextmanager
def serving(*, status=200, pieces=(), pause=0.0, headers=(), endless=b""):
    """A server that answers everything so; gives its URL and the paths that it was asked for."""
    paths, stopped = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if ("Transfer-Encoding", "chunked") in headers else "HTTP/1.0"

        def do_GET(self):
            paths.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in pieces:
                    self.wfile.write(piece)
                    time.sleep(pause)
                while endless and not stopped.is_set():
                    self.wfile.write(endless)
                    time.sleep(pause)
            except OSError:
                pass  # whoever asked has gone

        do_POST = do_GET

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()


def get(url, read, *rest):
    with answers.asked("GET", url, timeout=TIMEOUT) as reply:
        return read(reply, *rest)


def test_an_answer_of_the_limit_is_taken_and_one_byte_more_is_not():
    with serving(pieces=[b"x" * MOST]) as (url, _):
        assert get(url, answers.whole, SECONDS, MOST) == b"x" * MOST
        with pytest.raises(answers.TooLong, match="longer than 999 bytes"):
            get(url, answers.whole, SECONDS, MOST - 1)


def test_an_answer_without_end_ends():
    with serving(endless=ENDLESS) as (url, _):
        with pytest.raises(answers.TooLong):
            get(url, answers.whole, SECONDS, MOST)
        with pytest.raises(answers.TooLong, match="a line"):
            get(url, lambda reply: list(answers.lines(reply, MOST)))
    with serving(endless=b" ", pause=0.02) as (url, _), pytest.raises(answers.TooLate, match=r"in 0\.2 s"):
        get(url, answers.whole, 0.2)


def test_an_answer_that_stops_is_late():
    """Not broken off: who asked with too short a time must be told that."""
    with serving(pieces=[b"first\n", b"x"], pause=10 * SHORT) as (url, _):
        with answers.asked("GET", url, timeout=(SECONDS, SHORT)) as reply, pytest.raises(answers.TooLate):
            answers.whole(reply, SECONDS)
        with answers.asked("GET", url, timeout=(SECONDS, SHORT)) as reply, pytest.raises(answers.TooLate):
            list(answers.lines(reply))


def test_a_line_comes_as_soon_as_it_is_whole_however_it_is_cut():
    cut = [b"da", b"ta: 1\r\n\nda", b"ta: 2\nlast"]
    with serving(pieces=cut, pause=0.05) as (url, _), answers.asked("GET", url, timeout=TIMEOUT) as reply:
        assert list(answers.lines(reply)) == [b"data: 1", b"", b"data: 2", b"last"]
    with serving(pieces=[b"first\n"], endless=b"x", pause=0.05) as (url, _):
        assert get(url, lambda reply: next(answers.lines(reply))) == b"first"


def test_chunks_come_as_they_are_sent():
    """As SGLang streams: the first event is there before the last one is made."""
    chunks = [b"6\r\nfirst\n\r\n", b"7\r\nsecond\n\r\n", b"0\r\n\r\n"]
    server = serving(pieces=chunks, pause=0.3, headers=[("Transfer-Encoding", "chunked")])
    with server as (url, _), answers.asked("GET", url, timeout=TIMEOUT) as reply:
        lines, begin = answers.lines(reply), time.monotonic()
        assert next(lines) == b"first" and time.monotonic() - begin < 0.3
        assert list(lines) == [b"second"]


def test_what_is_quoted_of_an_answer_is_its_beginning():
    with serving(pieces=[b"no"]) as (url, _):
        assert get(url, answers.begin, 100) == "no"
    with serving(endless=b"\xff" * 4096) as (url, _):
        assert get(url, answers.begin, 3) == "\ufffd" * 3


def test_nothing_compressed_is_asked_for_and_none_is_unpacked():
    with serving(pieces=[b"\x1f\x8b bytes"], headers=[("Content-Encoding", "gzip")]) as (url, _):
        assert get(url, answers.whole, SECONDS) == b"\x1f\x8b bytes"


def state(url):
    from sglang_hetero.state.ask import ask

    ask(url, "/hetero/state", None)


def peer(url):
    from sglang_hetero.doctor.peers import ask

    ask(url, None)


def health(url):
    from sglang_hetero.launcher.fleet import healthy

    return healthy(url)


def generate(url, **how):
    Client(url).generate("x", 3, **how)


WHO = {
    "state": (state, PeerAway),
    "doctor": (peer, PeerAway),
    "client": (generate, RequestFailed),
    "client, one answer": (lambda url: generate(url, logprobs=True), RequestFailed),
    "client, chat": (lambda url: Client(url).chat("x", 3), RequestFailed),
}


@pytest.mark.parametrize(("ask", "error"), WHO.values(), ids=WHO)
@pytest.mark.parametrize("endless", [b"", ENDLESS], ids=["short", "endless"])
def test_nobody_follows_a_redirection_or_reads_all_of_it(ask, error, endless):
    """An API key would go to whoever it names."""
    with serving(pieces=[b"elsewhere"], headers=[("Location", "/elsewhere")], endless=endless, status=307) as served:
        url, paths = served
        with pytest.raises(error, match=r"307|longer than"):
            ask(url)
        assert len(paths) == 1


@pytest.mark.parametrize(("ask", "error"), WHO.values(), ids=WHO)
def test_everybody_has_a_limit(ask, error, monkeypatch):
    from sglang_hetero.doctor import peers
    from sglang_hetero.state.ask import ask as ask_server

    monkeypatch.setattr(peers, "MAX_DESCRIPTION_BYTES", MOST)
    for function in (answers.whole, answers.lines, ask_server):
        monkeypatch.setattr(function, "__defaults__", (MOST,))
    with serving(endless=ENDLESS) as (url, _), pytest.raises(error, match="longer than"):
        ask(url)


@pytest.mark.parametrize("status", [200, 307, 503])
def test_a_health_route_says_with_its_status_alone(status):
    """A body without end is not waited for, and a server is not healthy because another one is."""
    with serving(status=status, headers=[("Location", "/elsewhere")], endless=ENDLESS) as (url, paths):
        assert health(url) is (status == 200)
        assert len(paths) == 1
    assert not health(url)


def test_an_answer_of_too_many_tokens_is_refused(monkeypatch):
    from sglang_hetero import client

    monkeypatch.setattr(client, "MAX_TOKENS", 2)
    event = b'data: {"output_ids": [1, 2, 3], "text": "", "meta_info": {"completion_tokens": 3}}\n\n'
    with serving(endless=event) as (url, _), pytest.raises(RequestFailed, match="more than 2 tokens"):
        generate(url)


def test_a_chat_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", MOST)
    event = b'data: {"choices": [{"delta": {"content": "many words"}}]}\n\n'
    with serving(endless=event) as (url, _), pytest.raises(RequestFailed, match="more than 1000 characters"):
        Client(url).chat("x", 3)
