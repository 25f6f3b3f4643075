"""Keeping sglang-router's list of workers: what is to change, and what becomes of it when things go wrong."""

import json
import signal
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hetero.discovery.record import Description, Instance, encode_description
from sglang_hetero.errors import RouterError
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router import sync_command
from sglang_hetero.router.sync import LABEL, Do, Worker, changes, read_workers, spec
from sglang_hetero.router.sync_command import ASK_AGAIN_SECONDS, NoAnswer, Router, Sync

OWNER = "us"


def prefill(number: int = 0, port: int = 8998, incarnation: str = "") -> Instance:
    return Instance(role=Side.PREFILL, url=f"http://p{number}:1", bootstrap_port=port, incarnation=incarnation)


def decode(number: int = 0) -> Instance:
    return Instance(role=Side.DECODE, url=f"http://d{number}:1")


def worker(one: Instance, owner: str = OWNER, **fields: object) -> Worker:
    given = {"role": str(one.role), "bootstrap_port": one.bootstrap_port, **fields}
    return Worker(f"id of {one.url}", one.url, owner=owner, **given)


def what(wanted, present, own_all=False, complete=True):
    return [
        (one.do, one.id or one.label) for one in changes(wanted, present, OWNER, own_all=own_all, complete=complete)
    ]


def test_what_is_there_is_added_and_what_is_gone_removed() -> None:
    found = changes([prefill(), decode()], [worker(decode(1))], OWNER, own_all=False, complete=True)
    assert [(one.do, one.label) for one in found] == [
        (Do.REMOVE, "decode http://d1:1"),
        (Do.ADD, "prefill http://p0:1, bootstrap port 8998"),
        (Do.ADD, "decode http://d0:1"),
    ]


def test_nothing_is_done_where_nothing_differs() -> None:
    assert what([prefill(), decode()], [worker(prefill()), worker(decode(), owner="")]) == []


def test_workers_of_others_stay_but_with_own_all() -> None:
    present = [worker(decode(1), owner=""), worker(decode(2), owner="them")]
    assert what([], present) == []
    assert what([], present, own_all=True) == [(Do.REMOVE, one.id) for one in present]


def test_nothing_is_removed_while_the_list_of_servers_is_not_whole() -> None:
    assert what([], [worker(decode())], complete=False) == []
    assert what([prefill()], [worker(decode())], complete=False, own_all=True) == [
        (Do.ADD, "prefill http://p0:1, bootstrap port 8998")
    ]


@pytest.mark.parametrize("changed", [{"bootstrap_port": 9000}, {"role": "regular"}], ids=str)
def test_a_worker_that_is_something_else_now_is_removed_to_be_added_anew(changed: dict[str, object]) -> None:
    assert what([prefill()], [worker(prefill(), **changed)]) == [(Do.REMOVE, "id of http://p0:1")]
    (left,) = changes([prefill()], [worker(prefill(), owner="", **changed)], OWNER, own_all=False, complete=True)
    assert left.do is Do.LEAVE and "--own-all" in left.why
    assert what([prefill()], [worker(prefill(), owner="", **changed)], own_all=True) == [
        (Do.REMOVE, "id of http://p0:1")
    ]


def test_a_port_that_is_not_known_is_no_difference() -> None:
    assert what([prefill(port=0)], [worker(prefill())]) == []


INSTANCES = st.lists(
    st.one_of(st.builds(prefill, st.integers(0, 3), st.sampled_from([1, 2])), st.builds(decode, st.integers(0, 3))),
    max_size=8,
    unique_by=lambda one: one.url,
)


@given(INSTANCES, INSTANCES, st.data())
def test_two_rounds_make_the_lists_the_same_and_leave_others_alone(wanted, had, data) -> None:
    present = [worker(one, owner=data.draw(st.sampled_from([OWNER, ""]))) for one in had]
    others = {one for one in present if not one.owner}
    for _ in range(2):
        for change in changes(wanted, present, OWNER, own_all=False, complete=True):
            if change.do is Do.REMOVE:
                present = [one for one in present if one.id != change.id]
            elif change.do is Do.ADD:
                present.append(worker(change.instance))
    assert others <= set(present)
    assert {one.url for one in present} == {one.url for one in wanted} | {one.url for one in others}
    assert all(worker(one) in present for one in wanted if one.url not in {other.url for other in others})
    assert not [one for one in changes(wanted, present, OWNER, own_all=False, complete=True) if one.do is not Do.LEAVE]


def test_the_routers_list_is_read() -> None:
    said = {
        "workers": [
            {"id": "a", "url": "http://P0:1/", "worker_type": "prefill", "bootstrap_port": 8998, "load": 3}
            | {"metadata": {LABEL: OWNER, "tp_size": "2"}},
            {"id": "b", "url": "grpc://d0:1", "worker_type": "decode", "bootstrap_port": None},
        ],
        "total": 2,
    }
    assert read_workers(json.dumps(said).encode()) == (
        Worker("a", "http://p0:1", "prefill", 8998, OWNER),
        Worker("b", "grpc://d0:1", "decode", 0, ""),
    )


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"workers": 1}', b'{"workers": [{}]}', b"\xff", b"[" * 100_000], ids=repr
)
def test_what_is_no_list_is_refused(data: bytes) -> None:
    with pytest.raises(RouterError, match="sglang-router"):
        read_workers(data)


def test_what_the_router_is_asked_for() -> None:
    assert spec(prefill(), OWNER, "key") == {
        "url": "http://p0:1",
        "worker_type": "prefill",
        "bootstrap_port": 8998,
        "labels": {LABEL: OWNER},
        "api_key": "key",
    }
    assert spec(decode(), OWNER, None) == {"url": "http://d0:1", "worker_type": "decode", "labels": {LABEL: OWNER}}


class FakeRouter:
    """Takes workers up when it is told to."""

    url = "http://router:1"

    def __init__(self) -> None:
        self.list: list[Worker] = []
        self.asked: list[dict] = []
        self.gone: list[str] = []
        self.away = False
        self.said = ""
        self.refuses: dict[str, RouterError] = {}
        """What it says to a request about a URL, or a worker by its id."""

    def workers(self):
        if self.away:
            raise NoAnswer("http://router:1 does not answer: refused")
        return tuple(self.list)

    def add(self, body):
        self.asked.append(body)
        if body["url"] in self.refuses:
            raise self.refuses[body["url"]]
        return f"id of {body['url']}"

    def fate(self, worker):
        return self.said

    def remove(self, worker):
        self.gone.append(worker)
        if worker in self.refuses:
            raise self.refuses[worker]
        self.list = [one for one in self.list if one.id != worker]

    def take_up(self) -> None:
        for body in self.asked:
            known = {one.url for one in self.list}
            if body["url"] not in known | self.refuses.keys():
                owner, port = body["labels"][LABEL], body.get("bootstrap_port", 0)
                self.list.append(Worker(f"id of {body['url']}", body["url"], body["worker_type"], port, owner))


class Members:
    def __init__(self, *now: Instance) -> None:
        self.now, self.trouble, self.settled = now, "", True
        self.callbacks: list = []

    def snapshot(self):
        return self.now

    def subscribe(self, callback) -> None:
        self.callbacks.append(callback)


class Bench:
    """A `Sync` of which everything around is made up."""

    def __init__(self, *now: Instance) -> None:
        self.members, self.router = Members(*now), FakeRouter()
        self.lines: list[str] = []
        self.now = 0.0
        self.stop = threading.Event()
        self.sync = self.again()

    def again(self) -> Sync:
        self.sync = Sync(
            self.members,
            self.router,
            owner=OWNER,
            own_all=False,
            key=None,
            say=self.lines.append,
            stop=self.stop,
            clock=lambda: self.now,
        )
        return self.sync


def test_a_worker_is_asked_for_once_while_the_router_looks_for_it() -> None:
    bench = Bench(prefill(), decode())
    for _ in range(3):
        bench.sync.step()
    assert [body["url"] for body in bench.router.asked] == ["http://p0:1", "http://d0:1"]
    assert [line[0] for line in bench.lines] == ["+", "+"]
    bench.now += ASK_AGAIN_SECONDS
    bench.sync.step()
    assert len(bench.router.asked) == 4
    bench.router.take_up()
    bench.now += ASK_AGAIN_SECONDS
    bench.sync.step()
    assert len(bench.router.asked) == 4


def test_why_a_worker_is_not_taken_up_is_said_once() -> None:
    bench = Bench(decode())
    bench.router.said = "health checks failed"
    for _ in range(4):
        bench.sync.step()
    assert [line for line in bench.lines if "health checks failed" in line] == [
        "! decode http://d0:1 is not taken up yet: health checks failed"
    ]


def test_a_server_that_goes_is_removed_and_one_that_comes_back_is_added() -> None:
    bench = Bench(prefill(), decode())
    for _ in range(2):
        bench.sync.step()
        bench.router.take_up()
    bench.members.now = (prefill(),)
    bench.sync.step()
    assert bench.router.gone == ["id of http://d0:1"]
    bench.router.asked.clear()
    bench.members.now = (prefill(), decode())
    bench.sync.step()
    assert [body["url"] for body in bench.router.asked] == ["http://d0:1"]
    assert [line for line in bench.lines if "d0" in line] == [
        "+ decode http://d0:1: it is there",
        "- decode http://d0:1: it is gone",
        "+ decode http://d0:1: it is there",
    ]


def test_a_restarted_prefill_with_another_port_is_added_anew() -> None:
    bench = Bench(prefill())
    bench.sync.step()
    bench.router.take_up()
    bench.members.now = (prefill(port=9000),)
    bench.router.asked.clear()
    bench.sync.step()
    bench.sync.step()
    assert bench.router.gone == ["id of http://p0:1"]
    assert [body["bootstrap_port"] for body in bench.router.asked] == [9000]


def test_while_etcd_is_away_nothing_is_removed() -> None:
    bench = Bench(decode())
    bench.sync.step()
    bench.router.take_up()
    bench.members.now, bench.members.trouble = (), "etcd has not been read yet"
    bench.sync.step()
    assert not bench.router.gone
    bench.members.trouble = ""
    bench.sync.step()
    assert bench.router.gone


def test_before_servers_have_had_time_to_register_nothing_is_removed() -> None:
    """etcd has lost its data, and this has just begun: the first reading finds nobody, though all are well."""
    bench = Bench(decode())
    bench.sync.step()
    bench.router.take_up()
    bench.members.now, bench.members.settled = (), False
    bench.again().step()
    assert not bench.router.gone
    bench.members.settled = True
    bench.sync.step()
    assert bench.router.gone == ["id of http://d0:1"]


def test_a_router_that_is_away_is_waited_for_and_filled_again() -> None:
    bench = Bench(prefill(), decode())
    bench.router.away = True
    for _ in range(3):
        bench.sync.step()
    assert bench.lines == ["router: http://router:1 does not answer: refused; waiting for it"]
    bench.router.away = False
    bench.sync.step()
    bench.router.take_up()
    bench.router.away = True
    bench.sync.step()
    bench.router.away, bench.router.list = False, []  # another process, which knows nobody
    bench.router.asked.clear()
    bench.sync.step()
    assert [body["url"] for body in bench.router.asked] == ["http://p0:1", "http://d0:1"]
    assert sum("answers again" in line for line in bench.lines) == 2


def test_after_a_restart_it_knows_its_workers() -> None:
    bench = Bench(prefill(), decode())
    bench.sync.step()
    bench.router.take_up()
    bench.members.now = (prefill(),)
    bench.again().step()
    assert bench.router.gone == ["id of http://d0:1"]


def test_it_goes_on_after_a_round_that_fails_and_wakes_at_a_change() -> None:
    bench = Bench(decode())
    looked = threading.Semaphore(0)

    def workers():
        looked.release()
        raise ZeroDivisionError("0")

    bench.router.workers = workers
    thread = threading.Thread(target=bench.sync.run, args=(1e9,))
    thread.start()
    try:
        assert looked.acquire(timeout=20)
        bench.members.callbacks[0]()
        assert looked.acquire(timeout=20), "a change of servers did not wake it"
    finally:
        bench.stop.set()
        thread.join(20)
    assert not thread.is_alive()


def test_the_command_waits_for_the_router_and_ends_when_it_is_told() -> None:
    flags = (
        "--router",
        "http://127.0.0.1:9",
        "--prefill",
        "http://127.0.0.1:9",
        "8998",
        "--decode",
        "http://127.0.0.1:9",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_hetero", "sync-router", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("router: http://127.0.0.1:9") and line.endswith("waiting for it\n")
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=30)
        assert (process.returncode, rest, errors) == (0, "", "")
    finally:
        process.kill()
        process.wait()


class Away:
    """Servers that give no answer, or these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.headers: list[dict[str, str]] = []
        monkeypatch.setattr(sync_command, "_fetch_all", self.fetch)

    def fetch(self, method, urls, headers, data=None, *, stop):
        self.headers += [headers] * len(urls)
        return [self.answers.get(url) or NoAnswer(f"{url} does not answer: refused") for url in urls]


def test_a_prefill_that_is_given_without_its_port_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, away = Bench(prefill(port=0)), Away(monkeypatch)
    bench.sync._key = "secret"
    for _ in range(2):
        bench.sync.step()
    assert not bench.router.asked and [line for line in bench.lines if "for want of its port" in line] == bench.lines
    description = Description(instance=Instance(role=Side.PREFILL, url="http://0.0.0.0:1", bootstrap_port=9123))
    away.answers["http://p0:1/hetero/instance"] = (200, encode_description(description))
    for _ in range(2):
        bench.sync.step()
    assert [body["bootstrap_port"] for body in bench.router.asked] == [9123]
    assert {headers["Authorization"] for headers in away.headers} == {"Bearer secret"}
    assert len(away.headers) == 3, "it was asked again although it had told"


@pytest.mark.parametrize(
    ("status", "added", "told"), [(404, True, "give it"), (401, False, "--api-key"), (500, False, "HTTP 500")]
)
def test_a_prefill_that_does_not_tell_its_port(monkeypatch, status: int, added: bool, told: str) -> None:
    bench, away = Bench(prefill(port=0)), Away(monkeypatch)
    away.answers["http://p0:1/hetero/instance"] = (status, b"")
    bench.sync.step()
    assert bool(bench.router.asked) is added and any(told in line for line in bench.lines)


def test_the_routers_own_refusals_are_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    away, router = Away(monkeypatch), Router("http://r:1", "key")
    for status, told in ((401, "--router-api-key"), (500, "HTTP 500: broken")):
        away.answers = {"http://r:1/workers": (status, b"broken"), "http://r:1/workers/7": (status, b"broken")}
        for ask in (router.workers, lambda: router.add({}), lambda: router.remove("7")):
            with pytest.raises(RouterError, match=told):
                ask()
    away.answers = {"http://r:1/workers/7": (404, b"{}")}
    router.remove("7")  # it is gone already
    assert all(headers["Authorization"] == "Bearer key" for headers in away.headers)


def test_a_living_prefill_that_cannot_be_asked_for_its_port_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after a restart of ours, nor after one of the server."""
    bench, away = Bench(prefill(port=0)), Away(monkeypatch)
    bench.router.list = [worker(prefill(port=9123))]
    away.answers["http://p0:1/hetero/instance"] = (500, b"busy")
    bench.sync.step()
    assert bench.router.gone == [] and "for want of its port" in bench.lines[0]
    description = Description(instance=Instance(role=Side.PREFILL, url="http://0.0.0.0:1", bootstrap_port=9123))
    away.answers["http://p0:1/hetero/instance"] = (200, encode_description(description))
    bench.sync.step()
    away.answers.clear()
    bench.members.now = (prefill(port=0, incarnation="second"),)
    bench.sync.step()
    assert bench.router.gone == [] and bench.router.asked == []
    bench.members.now = ()
    bench.sync.step()
    assert bench.router.gone == ["id of http://p0:1"]  # that it is gone is known without its port


def test_servers_that_tell_their_port_do_not_wait_for_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, away = Bench(prefill(0, port=0), prefill(1, port=0)), Away(monkeypatch)
    description = Description(instance=Instance(role=Side.PREFILL, url="http://0.0.0.0:1", bootstrap_port=9123))
    away.answers["http://p1:1/hetero/instance"] = (200, encode_description(description))
    bench.sync.step()
    assert [body["url"] for body in bench.router.asked] == ["http://p1:1"]
    first = []
    monkeypatch.setattr(sync_command, "_fetch_all", lambda method, urls, *_, **__: first.append(urls) or [NoAnswer("")])
    bench.members.now = (prefill(0, port=0), prefill(1, port=0), prefill(2, port=0))
    with pytest.raises(ValueError, match="shorter"):  # one answer for two
        bench.sync.step()
    assert first == [["http://p2:1/hetero/instance", "http://p0:1/hetero/instance"]]


REPLICAS = {
    "workers": [
        {"id": f"{url}@{rank}", "url": f"{url}@{rank}", "worker_type": role, "metadata": {LABEL: OWNER}}
        | ({"bootstrap_port": 8998} if role == "prefill" else {})
        for url, role in (("http://p0:1", "prefill"), ("http://d0:1", "decode"))
        for rank in range(2)
    ]
}


def test_replicas_are_workers_of_their_server() -> None:
    """sglang-router --dp-aware lists each, and takes no DELETE of one."""
    present = read_workers(json.dumps(REPLICAS).encode())
    assert {(one.url, one.replica) for one in present} == {("http://p0:1", True), ("http://d0:1", True)}
    assert what([prefill(), decode()], present) == []
    bench = Bench(prefill())
    bench.router.list = list(present)
    for _ in range(3):
        bench.sync.step()
    assert bench.router.gone == [] and bench.router.asked == []
    (line,) = bench.lines
    assert line.startswith("! decode http://d0:1: it is gone, but stays") and "--dp-aware" in line


def test_one_worker_that_the_router_refuses_does_not_keep_the_others_from_it() -> None:
    bench = Bench(prefill(0), prefill(1), decode(0))
    bench.router.list = [worker(decode(9))]
    bench.router.refuses = {
        "http://p0:1": RouterError("POST /workers says HTTP 400: invalid"),
        "id of http://d9:1": RouterError("DELETE says HTTP 500: job queue"),
    }
    for _ in range(3):
        bench.sync.step()
        bench.router.take_up()
    assert {one.url for one in bench.router.list} == {"http://d9:1", "http://p1:1", "http://d0:1"}
    assert [line for line in bench.lines if line[0] == "!"] == [
        "! decode http://d9:1 cannot be removed: DELETE says HTTP 500: job queue",
        "! prefill http://p0:1, bootstrap port 8998 cannot be added: POST /workers says HTTP 400: invalid",
    ]
    assert len([body for body in bench.router.asked if body["url"] == "http://p0:1"]) == 1
    bench.router.refuses.clear()
    bench.now += ASK_AGAIN_SECONDS
    bench.sync.step()
    assert sorted(bench.lines[-2:]) == [
        "+ prefill http://p0:1, bootstrap port 8998: it is there",
        "- decode http://d9:1: it is gone",
    ]


def test_a_request_without_an_answer_ends_the_round_and_is_the_last_one_of_the_next() -> None:
    bench = Bench(prefill(0), prefill(1))
    bench.router.refuses["http://p0:1"] = NoAnswer("http://router:1/workers does not answer: no whole answer")
    bench.sync.step()
    assert [body["url"] for body in bench.router.asked] == ["http://p0:1"]
    assert "add prefill http://p0:1" in bench.lines[0]
    bench.sync.step()
    assert [body["url"] for body in bench.router.asked] == ["http://p0:1", "http://p1:1", "http://p0:1"]


class Slow:
    """A server whose answer never ends, a byte at a time."""

    def __init__(self, beginning: bytes) -> None:
        self._listener, self._beginning = socket.create_server(("127.0.0.1", 0)), beginning
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                threading.Thread(target=self._answer, args=(self._listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(4096)
                connection.sendall(self._beginning)
                self.asked.set()
                while not self._ended.wait(0.05):
                    connection.sendall(b"a")
            except OSError:
                pass

    def close(self) -> None:
        self._ended.set()
        self._listener.close()


@pytest.fixture(
    params=[b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: "], ids=["body", "head"]
)
def slow(request):
    server = Slow(request.param)
    yield server
    server.close()


def test_a_server_that_trickles_its_answer_is_given_up(slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_command, "TIMEOUT_SECONDS", 0.5)
    bench = Bench(Instance(role=Side.PREFILL, url=slow.url), decode())
    bench.sync.step()
    assert slow.asked.is_set() and f"{slow.url}/hetero/instance does not answer: no whole answer" in bench.lines[0]
    assert [body["url"] for body in bench.router.asked] == ["http://d0:1"]


def test_the_end_does_not_wait_for_an_answer(slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_command, "TIMEOUT_SECONDS", 1e9)
    bench = Bench(Instance(role=Side.PREFILL, url=slow.url))
    thread = threading.Thread(target=bench.sync.run, args=(1e9,), daemon=True)
    thread.start()
    assert slow.asked.wait(20)
    bench.stop.set()
    thread.join(20)
    assert not thread.is_alive() and bench.lines == []
