"""`/hetero/state` and /health in front of an application, and the place where SGLang lets us put them there."""

import asyncio
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from sglang_hetero.backend import state_route
from sglang_hetero.backend.bootstrap import BootstrapMixin
from sglang_hetero.backend.hooks import launches
from sglang_hetero.backend.options import Mode
from sglang_hetero.backend.state_route import HTTP_SERVER, Source, StateMiddleware, around_start_service
from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.state import folder
from sglang_hetero.state.report import Control, Report, decode_state


def report(**fields: object) -> Report:
    return Report(**{"side": "decode", "rank": "decode TP0/1", "pid": os.getpid(), "beat": time.monotonic(), **fields})  # type: ignore[arg-type]


def get(app, path, **named):
    """Status and body of one request."""
    start, *bodies = ask(app, path, **named)
    return start["status"], b"".join(message.get("body", b"") for message in bodies)


def ask(app, path, *, method="GET", headers=(), **scope):
    """What an application sends for one request."""
    sent, asked = [], [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        if not asked:
            await asyncio.Event().wait()  # the client stays
        return asked.pop()

    async def send(message):
        sent.append(message)

    given = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "http_version": "1.1",
    }
    asyncio.run(app({**given, **scope}, receive, send))
    return sent


def sglang():
    """An application with the routes that matter."""

    async def health(request):
        return PlainTextResponse("from SGLang")

    async def stream(request):
        return StreamingResponse(iter(["a", "b", "c"]))

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/health_generate", health),
            Route("/generate", stream, methods=["POST"]),
        ]
    )


def source(where, mode=Mode.AUTO, control=lambda: None):
    return Source(mode, "decode", where, control)


@pytest.fixture
def app(tmp_path):
    made = sglang()
    made.add_middleware(StateMiddleware, source=source(tmp_path))
    return made


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health_is_sglangs_while_nothing_is_wrong(app, tmp_path, path):
    folder.write(tmp_path, report())
    assert get(app, path) == (200, b"from SGLang")


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health_says_what_is_wrong(app, tmp_path, path):
    folder.write(tmp_path, report(faults=["the thread hetero-mover has ended", "a unit is lost"]))
    status, body = get(app, path)
    assert status == 503
    assert body.decode() == "decode TP0/1: the thread hetero-mover has ended\ndecode TP0/1: a unit is lost\n"


def test_health_is_right_again_when_the_fault_is_over(app, tmp_path, monkeypatch):
    monkeypatch.setattr(state_route, "KEEP_SECONDS", 0.0)
    folder.write(tmp_path, report(faults=["all units are quarantined"]))
    assert get(app, "/health")[0] == 503
    folder.write(tmp_path, report())
    assert get(app, "/health")[0] == 200


def test_the_state_is_json_whatever_it_is(app, tmp_path):
    folder.write(tmp_path, report(faults=["a unit is lost"], ours={"units": 4}))
    status, body = get(app, "/hetero/state")
    found = decode_state(body)
    assert status == 200 and not found.ok and found.faults == ["decode TP0/1: a unit is lost"]
    assert (found.mode, found.side, found.ranks[0].ours) == ("auto", "decode", {"units": 4})
    assert set(json.loads(body)) == {"ok", "mode", "side", "faults", "ranks", "control"}


def test_below_a_root_path(app, tmp_path):
    assert get(app, "/serving/hetero/state", root_path="/serving")[0] == 200
    assert get(app, "/hetero/state", root_path="/serving")[0] == 200
    assert get(app, "/servings/hetero/state", root_path="/serving")[0] == 404


def test_other_requests_go_through_untouched():
    seen = []

    async def inner(scope, receive, send):
        seen.append((scope, receive, send))

    async def each():
        middle = StateMiddleware(inner, source(None))
        asked = [
            {"type": "http", "method": "POST", "path": "/health"},
            {"type": "http", "method": "GET", "path": "/v1/models"},
            {"type": "websocket", "path": "/hetero/state"},
            {"type": "lifespan"},
        ]
        for scope in asked:
            receive, send = object(), object()
            await middle(scope, receive, send)
            assert seen.pop() == (scope, receive, send)

    asyncio.run(each())
    assert seen == []


def test_a_stream_comes_piece_by_piece(app):
    bodies = [message["body"] for message in ask(app, "/generate", method="POST")[1:]]
    assert bodies[:3] == [b"a", b"b", b"c"]


def test_an_error_of_ours_leaves_the_answer_to_sglang(caplog):
    def broken():
        raise ZeroDivisionError("boom")

    made = sglang()
    made.add_middleware(StateMiddleware, source=source(None, control=broken))
    assert get(made, "/health") == (200, b"from SGLang")
    assert get(made, "/hetero/state")[0] == 404
    assert len([record for record in caplog.records if "cannot be told" in record.message]) == 1


def test_with_mode_off_the_route_says_so_and_health_is_sglangs(tmp_path):
    folder.write(tmp_path, report(faults=["of nobody's interest"]))
    made = sglang()
    made.add_middleware(StateMiddleware, source=source(tmp_path, Mode.OFF))
    assert get(made, "/health") == (200, b"from SGLang")
    assert decode_state(get(made, "/hetero/state")[1]).mode == "off"


def test_many_health_checks_read_the_folder_once(app, tmp_path, monkeypatch):
    folder.write(tmp_path, report())
    reads = []
    monkeypatch.setattr(folder, "read", lambda where: reads.append(where) or ([], []))
    monkeypatch.setattr(state_route, "KEEP_SECONDS", 1e6)
    for _ in range(5):
        get(app, "/health")
    assert reads == [tmp_path]


# Where it is put in.


@pytest.fixture
def http_server(monkeypatch):
    module = SimpleNamespace(app=sglang())
    monkeypatch.setitem(sys.modules, HTTP_SERVER, module)
    monkeypatch.setattr(state_route, "_side", lambda: "prefill")
    monkeypatch.delenv(folder.VARIABLE, raising=False)
    return module


class Bootstrap(BootstrapMixin):
    def __init__(self, fault=""):
        self._hetero_control = SimpleNamespace(port=5, ranks=2, parked=1, counts={"bad Hello": 3}, fault=fault)


def test_the_bootstrap_servers_control_service_is_shown(http_server):
    service = Bootstrap()
    assert around_start_service(lambda: service) is service
    found = decode_state(get(http_server.app, "/hetero/state")[1])
    assert found.control == Control(port=5, ranks=2, parked=1, counts={"bad Hello": 3}) and found.side == "prefill"


def test_a_control_service_that_has_ended_is_a_fault(http_server):
    around_start_service(lambda: Bootstrap("the control service on port 5 has ended"))
    assert get(http_server.app, "/health") == (503, b"the control service on port 5 has ended\n")


@pytest.mark.parametrize("service", [None, object()], ids=["decode", "a stock bootstrap server"])
def test_without_a_control_service(http_server, service):
    assert around_start_service(lambda: service) is service
    assert decode_state(get(http_server.app, "/hetero/state")[1]).control is None


def test_a_program_with_an_engine_of_its_own_has_no_route(monkeypatch):
    monkeypatch.delitem(sys.modules, HTTP_SERVER, raising=False)
    assert around_start_service(lambda: "service") == "service"


def test_another_kind_of_application_stops_the_server(http_server):
    http_server.app = object()
    with pytest.raises(UpstreamChanged, match="/hetero/state"):
        around_start_service(lambda: None)


@pytest.mark.parametrize(
    ("keys", "given", "status"),
    [
        ({"api_key": "k", "admin_api_key": None}, None, 401),
        ({"api_key": "k", "admin_api_key": None}, "other", 401),
        ({"api_key": "k", "admin_api_key": None}, "k", 200),
        ({"api_key": "k", "admin_api_key": "a"}, "a", 401),
        ({"api_key": None, "admin_api_key": None}, None, 200),
    ],
)
def test_sglangs_own_check_of_keys_comes_first(http_server, keys, given, status):
    """In SGLang's order: its check is added when our middleware is there already."""
    around_start_service(lambda: Bootstrap("broken"))
    auth().add_api_key_middleware(http_server.app, **keys)
    headers = [] if given is None else [("authorization", f"Bearer {given}")]
    assert get(http_server.app, "/hetero/state", headers=headers)[0] == status
    assert get(http_server.app, "/health") == (503, b"broken\n")


def auth():
    """sglang.srt.utils.auth, without the package around it, which takes seconds."""
    path = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "utils" / "auth.py"
    spec = importlib.util.spec_from_file_location("sglang_auth", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("sglang_auth", module)
    spec.loader.exec_module(module)
    return module


def child(pipe):
    pipe.send(launches(in_scheduler=False))


def test_only_the_process_that_launches_a_server_makes_the_folder():
    """Not its children, which would each make one of their own, nor a program with an engine of its own."""
    assert launches(in_scheduler=False) and not launches(in_scheduler=True)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(60) and ours.recv() is False
    process.join()
