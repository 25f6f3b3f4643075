"""One request to an endpoint: what is asked, and what becomes of every kind of wrong answer."""

import gzip
import json
import socket
import threading

import pytest

from sglang_hetero.accuracy.endpoint import MAX_ANSWER, Endpoint, Reply, clean
from sglang_hetero.errors import AccuracyError
from tests.unit.accuracy.fake_endpoint import Fake, completed, generated, serving


def connected(fake, **settings):
    endpoint = Endpoint(fake.url, **settings)
    endpoint.connect()
    return endpoint


def test_generate_is_asked_greedily_and_its_counters_are_read():
    with serving(Fake(lambda *_: generated("48210937\n", accept=2.25))) as fake:
        endpoint = connected(fake)
        reply = endpoint.ask("QK=", 32)
    assert (endpoint.path, endpoint.model) == ("/generate", "fake")
    assert reply == Reply("48210937\n", tuple(b"48210937\n"), 2.25, 9)
    assert fake.calls[-1] == (
        "/generate",
        {"text": "QK=", "sampling_params": {"temperature": 0, "max_new_tokens": 32}, "stream": False},
    )


def test_an_endpoint_of_openais_api_only_is_asked_there():
    with serving(Fake(lambda *_: "48210937", routes=("/v1/completions",), model="a model")) as fake:
        endpoint = connected(fake)
        assert endpoint.ask("QK=", 32) == Reply("48210937", (), None, 9)
    assert fake.calls[-1] == (
        "/v1/completions",
        {"model": "a model", "prompt": "QK=", "max_tokens": 32, "temperature": 0},
    )


def test_the_route_may_be_chosen():
    with serving(Fake(lambda *_: "1", routes=("/generate", "/v1/completions"))) as fake:
        connected(fake, path="/v1/completions").ask("QK=", 1)
    assert {path for path, _ in fake.calls} == {"/v1/completions"}


def test_who_takes_no_prompts_is_refused_with_both_routes():
    with serving(Fake(routes=())) as fake, pytest.raises(AccuracyError) as caught:
        connected(fake)
    for part in (fake.url, "/generate: HTTP 404", "/v1/completions: HTTP 404", "server or of its router"):
        assert part in str(caught.value)


def test_who_is_not_there_is_refused_with_the_url():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(AccuracyError, match=f"{url}.*refused.*is a server or router running there"):
            Endpoint(url).connect()


def test_a_key_is_sent_and_a_missing_one_is_told():
    with serving(Fake(lambda *_: "1", key="secret")) as fake:
        assert connected(fake, key="secret").ask("QK=", 1).text == "1"
        with pytest.raises(AccuracyError, match=r"HTTP 401.*--api-key") as caught:
            connected(fake, key="wrong")
    assert "wrong" not in str(caught.value)
    assert "secret" not in repr(Endpoint("http://a", key="secret"))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ((500, b"no \x1b[31mroom"), r"HTTP 500: 'no \\x1b\[31mroom'"),
        ((302, b""), "HTTP 302"),
        (b"", "unexpected answer"),
        (b"<html>", "unexpected answer.*begins with '<html>'"),
        (b'{"text": "1", "meta_info": {"finish_reason": ', "unexpected answer"),
        (b"[" * 100_000, "unexpected answer"),
        (b"\xff\xfe", "unexpected answer"),
        ([generated("1")], "unexpected answer: Expected `object`"),
        ({"meta_info": {}}, "missing required field `text`"),
        ({"text": "1"}, "missing required field `meta_info`"),
        ({"text": 7, "meta_info": {}}, "Expected `str`, got `int`"),
        (generated("1") | {"output_ids": ["a"]}, "Expected `int`, got `str`"),
        (generated("1") | {"output_ids": None}, "Expected `array`, got `null`"),
        (generated("123456789") | {}, "9 tokens came, 8 at most"),
        (generated("1", accept=-1.0), "accept length of -1"),
        (generated("1", prompt_tokens=-3), "Expected `int` >= 0"),
        (generated("1", finish_reason=None), "ended by None"),
        (generated("1", finish_reason={"type": "abort", "message": "KVTransferError"}), "ended by.*KVTransferError"),
        (b" " * (MAX_ANSWER + 1), "longer than"),
    ],
)
def test_what_is_no_answer_is_an_error_with_the_reason(said, reason):
    with serving(Fake(lambda *_: said)) as fake:
        endpoint = connected(fake)
        with pytest.raises(AccuracyError, match=reason) as caught:
            endpoint.ask("QK=", 8)
    assert f"{fake.url}/generate" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("said", "reason"),
    [({"choices": []}, "length >= 1"), ({}, "choices"), (completed("1") | {"usage": 3}, "Expected `object | null`")],
)
def test_what_is_no_completion_is_an_error(said, reason):
    with serving(Fake(lambda *_: said, routes=("/v1/completions",))) as fake:
        endpoint = connected(fake)
        with pytest.raises(AccuracyError, match=reason):
            endpoint.ask("QK=", 8)


def test_an_answer_is_not_unpacked():
    """Some bytes of gzip may be gigabytes."""
    packed = gzip.compress(json.dumps(generated("1")).encode())
    packing = Fake(lambda *_: packed, headers=[("Content-Encoding", "gzip")])
    with serving(packing) as fake, pytest.raises(AccuracyError, match="unexpected answer"):
        Endpoint(fake.url, path="/generate").ask("QK=", 8)


def test_a_redirection_is_not_followed():
    """It would answer for somebody else. Its body is bounded like any other."""
    with serving(Fake(lambda *_: "1")) as other:
        for body, said in ((b"elsewhere", "HTTP 307: 'elsewhere'"), (b" " * (MAX_ANSWER + 1), "longer than")):
            away = Fake(lambda *_, body=body: (307, body), headers=[("Location", f"{other.url}/generate")])
            with serving(away) as fake, pytest.raises(AccuracyError, match=said):
                Endpoint(fake.url, path="/generate").ask("QK=", 8)
    assert other.calls == []


def test_a_trickle_of_bytes_ends_with_the_time():
    """Each byte comes in time, all of them never do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def trickle():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while not ended.wait(0.01):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AccuracyError, match=r"no whole answer in 0.2 s \(--timeout\)"):
            Endpoint(url, seconds=0.2, path="/generate").ask("QK=", 8)
        ended.set()
        thread.join()


def test_a_connection_that_breaks_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def cut():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"text": ')

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AccuracyError, match=r"no answer|unexpected answer"):
            Endpoint(url, path="/generate").ask("QK=", 8)
        thread.join()


def test_a_list_of_models_is_not_needed():
    with serving(Fake(lambda *_: "1")) as fake:
        fake.model = 7
        assert connected(fake).model is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.1:30000",
        "ftp://a",
        "http://",
        "http://a:x",
        "http://a:0",
        "http://u:p@a",
        "http://a?b",
        "http://[::1",
    ],
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(AccuracyError, match="is no endpoint"):
        clean(url)


def test_urls_are_taken_with_and_without_v1():
    assert clean("http://a:8000/") == clean("http://a:8000/v1") == clean("http://a:8000/v1/") == "http://a:8000"
    assert clean("https://[::1]:8000/prefix") == "https://[::1]:8000/prefix"
