"""`sglang-hetero state` against servers that answer as SGLang's would, or otherwise."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_hetero import cli
from sglang_hetero.state.report import Control, Report, State, encode

DECODE = Report(
    side="decode",
    rank="decode TP0/1 (h:1)",
    pid=7,
    age=0.4,
    ours={"rooms": 2, "units": 16, "units_free": 12, "units_held": 3, "units_quarantined": 1, "waiting": 0},
    sglang={"pages": 100, "pages_free": 90, "rows": 8, "rows_free": 7, "receiving": 2, "running": 0},
    process={"threads": 31, "sockets": 12, "rss_bytes": 512 << 20},
)


class Server:
    """Answers one path; wants a key if it has one."""

    def __init__(self, answer: bytes, status: int = 200, key: str = "") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                refused = key and self.headers.get("Authorization") != f"Bearer {key}"
                found = 401 if refused else status if self.path == "/hetero/state" else 404
                self.send_response(found)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[object]:
    servers: list[Server] = []

    def start(*given: object, **named: object) -> str:
        servers.append(Server(*given, **named))  # type: ignore[arg-type]
        return servers[-1].url

    yield start
    for each in servers:
        each.close()


def test_a_line_per_rank_and_nothing_wrong(serve, capsys):
    url = serve(encode(State(ok=True, mode="auto", side="decode", ranks=[DECODE])))
    assert cli.main(["state", "--url", f"{url}/"]) == 0
    out, err = capsys.readouterr()
    head, line = out.splitlines()
    assert head == f"{url}/: decode, SGLANG_HETERO=auto, ok"
    assert line == (
        "  decode TP0/1 (h:1): units 12/16 free, 1 quarantined; rooms 2, waiting 0; free: pages 90/100, rows 7/8; "
        "queues: receiving 2; 31 threads, 12 sockets, 512 MiB; 0.4 s old"
    )
    assert err == ""


def test_faults_of_all_servers_and_status_1(serve, capsys):
    first = serve(encode(State(ok=False, mode="auto", side="decode", faults=["a unit is lost"], ranks=[DECODE])))
    second = serve(encode(State(ok=True, mode="off", side="prefill", control=Control(port=5, ranks=2))))
    assert cli.main(["state", "--url", first, "--url", second]) == 1
    out, err = capsys.readouterr()
    assert "NOT OK" in out and "control service: port 5, 2 ranks, 0 messages parked" in out
    assert err == "fault: a unit is lost\n"


def test_what_is_not_known_is_said_too(serve, capsys):
    url = serve(encode(State(ok=True, mode="auto", side="decode", problems=["no folder"], ranks=[DECODE])))
    assert cli.main(["state", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert ", ok\n" in out and err == "not known: no folder\n"


def test_json_is_what_the_server_says(serve, capsys):
    answer = encode(State(ok=True, mode="auto", ranks=[DECODE]))
    assert cli.main(["state", "--json", "--url", serve(answer)]) == 0
    assert capsys.readouterr().out.encode() == answer + b"\n"


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (b"", 404, "there is no /hetero/state: give the URL of an SGLang server, not of a router"),
        (b"", 405, "there is no /hetero/state: give the URL of an SGLang server, not of a router"),
        (b"", 401, "wants its API key: give --api-key, or set SGLANG_API_KEY"),
        (b"down", 503, "HTTP 503: down"),
        (b"<html>", 200, "this is not what /hetero/state answers"),
    ],
)
def test_other_answers(serve, capsys, answer, status, said):
    assert cli.main(["state", "--url", serve(answer, status)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fault: http://127.0.0.1:") and said in err


def test_a_server_that_is_not_there_hides_no_other(serve, capsys):
    url = serve(encode(State(ok=True, mode="auto", ranks=[DECODE])))
    assert cli.main(["state", "--url", "http://127.0.0.1:1", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert "decode TP0/1" in out and "http://127.0.0.1:1: no proper answer: " in err and "is it started" in err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_the_key(serve, capsys, monkeypatch, how):
    url = serve(encode(State(ok=True, mode="auto")), key="secret")
    given = ["--api-key", "secret"] if how == "option" else []
    if not given:
        monkeypatch.setenv("SGLANG_API_KEY", "secret")
    assert cli.main(["state", "--url", url, *given]) == 0
