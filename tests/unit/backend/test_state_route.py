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
from sglang_hetero.backend.hooks import launches, make_folder
from sglang_hetero.backend.options import Mode
from sglang_hetero.backend.state_route import (
    CONFIRM_SECONDS,
    HTTP_SERVER,
    Source,
    StateMiddleware,
    around_start_service,
)
from sglang_hetero.errors import StateError, UpstreamChanged
from sglang_hetero.state import folder
from sglang_hetero.state.report import STALE_SECONDS, Control, Report, decode_state


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
    assert set(json.loads(body)) == {"ok", "mode", "side", "faults", "problems", "ranks", "control", "discovery"}


OLD = STALE_SECONDS + 1


@pytest.fixture
def now(monkeypatch):
    """The route's clock, in seconds, which the test sets; every answer is a new one."""
    clock = [time.monotonic()]
    monkeypatch.setattr(state_route, "KEEP_SECONDS", -1.0)
    monkeypatch.setattr(state_route, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_rank_that_is_silent_though_it_could_report_is_a_fault(app, tmp_path, now):
    """It is stopped."""
    folder.write(tmp_path, report(beat=now[0] - OLD))
    assert get(app, "/health")[0] == 200, "its disk may have been full until now"
    assert "has not reported" in decode_state(get(app, "/hetero/state")[1]).problems[0]
    now[0] += CONFIRM_SECONDS
    status, body = get(app, "/health")
    assert status == 503 and b"has not reported for" in body
    folder.write(tmp_path, report(beat=now[0]))
    assert get(app, "/health")[0] == 200


def test_a_full_disk_takes_no_server_out(app, tmp_path, now, monkeypatch):
    folder.write(tmp_path, report(beat=now[0] - OLD))
    trouble = ["No space left on device"]
    monkeypatch.setattr(folder, "unwritable", lambda where: trouble[0])
    for _ in range(4):
        now[0] += CONFIRM_SECONDS
        assert get(app, "/health") == (200, b"from SGLang")
    found = decode_state(get(app, "/hetero/state")[1])
    assert found.ok and found.faults == []
    assert found.problems[0] == "no report can be written: No space left on device"
    assert "has not reported" in found.problems[1]
    trouble[0] = ""
    assert get(app, "/health")[0] == 200, "there is room again, and the rank has had no time to report"


def test_a_folder_that_is_gone_takes_no_server_out(tmp_path):
    made = sglang()
    made.add_middleware(StateMiddleware, source=source(tmp_path / "gone"))
    assert get(made, "/health")[0] == 200
    assert "is gone" in decode_state(get(made, "/hetero/state")[1]).problems[0]


def test_without_a_folder_it_says_that_it_knows_nothing():
    made = sglang()
    made.add_middleware(StateMiddleware, source=source(None))
    found = decode_state(get(made, "/hetero/state")[1])
    assert found.ok and found.problems == [state_route.NO_FOLDER]
    assert get(made, "/health")[0] == 200


def test_ranks_of_another_server_that_shares_the_folder_are_not_shown(app, tmp_path):
    """One program has started both, and had made the folder before."""
    folder.write(tmp_path, report(pid=1, rank="another's", parents=[os.getppid(), 1], faults=["a unit is lost"]))
    folder.write(tmp_path, report(rank="ours", parents=[os.getpid(), os.getppid(), 1]))
    found = decode_state(get(app, "/hetero/state")[1])
    assert [one.rank for one in found.ranks] == ["ours"] and found.faults == []


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


# Who makes the folder.

HAS, HAS_NOT = {folder.VARIABLE: "/a/folder"}, {}
COULD_NOT = {folder.VARIABLE: ""}


@pytest.mark.parametrize("environ", [HAS, HAS_NOT, COULD_NOT])
def test_who_starts_a_server_makes_a_folder_of_its_own(environ):
    """SGLang's command, from wherever; or a program that calls SGLang's launch_server; not one with an Engine."""
    assert launches(environ, in_scheduler=False, serves=False)
    assert launches(environ, in_scheduler=True, serves=True)
    assert not launches(environ, in_scheduler=True, serves=False)


def child(pipe):
    asked = [(environ, serves) for environ in (HAS, HAS_NOT, COULD_NOT) for serves in (True, False)]
    pipe.send([launches(environ, in_scheduler=True, serves=serves) for environ, serves in asked])


def test_a_server_that_multiprocessing_has_started_makes_one_and_what_it_starts_does_not():
    """As sglang_router.launch_server does. A detokenizer, say, must not make one if its server could or would not."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == [False, False, True, False, False, False]
    process.join()


def test_a_server_starts_though_there_is_no_room_for_its_folder(monkeypatch, caplog):
    def full(environ):
        raise StateError("no folder can be made; set TMPDIR")

    monkeypatch.setattr(folder, "make", full)
    make_folder()
    (record,) = caplog.records
    assert (
        record.getMessage() == "/hetero/state will not tell of this server's ranks: no folder can be made; set TMPDIR"
    )
