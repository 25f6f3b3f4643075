"""`GET /hetero/instance`, and the way from SGLang's HTTP process into etcd and out of it."""

import asyncio
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sglang_hetero import __version__
from sglang_hetero.backend import instance as instance_module
from sglang_hetero.backend import state_route
from sglang_hetero.backend.instance import OwnInstance, Serving, own_url, register, serves
from sglang_hetero.backend.options import Options, read
from sglang_hetero.backend.rank_told import RankTold
from sglang_hetero.discovery.etcd import Etcd
from sglang_hetero.discovery.ranks import Told, encode_told
from sglang_hetero.discovery.record import decode, decode_description
from sglang_hetero.discovery.settings import DEFAULT_LEASE
from sglang_hetero.errors import DiscoveryError, ManifestError, OptionError
from sglang_hetero.layout import wire
from sglang_hetero.layout.manifest import Side
from sglang_hetero.state import folder
from sglang_hetero.state.report import decode_state
from sglang_hetero.transfer import messages
from tests.unit.discovery.etcd_server import until
from tests.unit.discovery.servers import manifests

ROOT = Path(__file__).resolve().parents[3]


def serving(**fields) -> Serving:
    given = {
        "host": "10.0.0.8",
        "port": 30000,
        "secure": False,
        "model": "Qwen3.5",
        "bootstrap_port": 8998,
        "backend": "mooncake",
    }
    return Serving(**{**given, **fields})


def leave(where, rank, tp=2, parents=(), **fields):
    """A rank says what it is."""
    one = manifests(Side.DECODE, tp)[rank]
    pid = 1000 + rank
    told = Told(pid=pid, parents=parents, place=one.coordinates, manifest=wire.encode(one), **fields)
    folder.write_rank(where, pid, encode_told(told))


def own(where, side=Side.DECODE, options=None, **fields):
    return OwnInstance(side, options or Options(), where, lambda: serving(**fields))


def test_it_is_what_its_ranks_have_said(tmp_path):
    one = own(tmp_path)
    leave(tmp_path, 0, requests=4, tokens=100)
    before = decode_description(one.answer())
    assert before.manifests == () and before.instance.fingerprint == "" and "1 of 2 ranks" in before.notes[0]
    leave(tmp_path, 1, requests=4, tokens=100)
    found = decode_description(one.answer())
    assert found.ranks() == manifests(Side.DECODE, 2)
    assert found.notes == () and (found.mode, found.backend) == ("auto", "mooncake")
    told = found.instance
    assert (told.role, told.url, told.bootstrap_port, told.model) == (
        Side.DECODE,
        "http://10.0.0.8:30000",
        0,
        "Qwen3.5",
    )
    assert (told.tp_size, told.requests, told.tokens) == (2, 4, 100)
    assert (told.release, told.messages) == (__version__, messages.VERSION)
    assert told.fingerprint and told.incarnation == before.instance.incarnation
    assert own(tmp_path).description().instance.incarnation != told.incarnation


def test_what_cannot_come_any_more_is_not_promised(tmp_path):
    """A server of two nodes, of whose ranks half are here; and one that has no folder for them."""
    leave(tmp_path, 0, tp=2)
    assert own(tmp_path, nodes=2).description().final and not own(tmp_path).description().final
    assert own(None).description().final
    assert own(tmp_path, backend="nixl").description().final  # its ranks have no manager of ours


def test_ranks_with_the_path_switched_off_tell_it_too(tmp_path):
    """Routers are to see what SGLang's own path would do wrong."""
    one = own(tmp_path, options=read({"SGLANG_HETERO": "off"}))
    assert not one.description().final
    for rank in range(2):
        leave(tmp_path, rank)
    found = decode_description(one.answer())
    assert found.mode == "off" and len(found.manifests) == 2 and found.instance.messages == 0


def test_once_it_is_known_it_is_not_read_again(tmp_path):
    one = own(tmp_path)
    for rank in range(2):
        leave(tmp_path, rank)
    answer = one.answer()
    for path in tmp_path.iterdir():
        path.unlink()
    assert one.answer() == answer


def test_its_url_stays_while_its_ranks_are_waited_for(tmp_path, monkeypatch):
    """Its record lies at one place, also if the machine gets another address meanwhile."""
    addresses = iter(["10.0.0.8", "10.0.0.9"])
    monkeypatch.setattr(instance_module, "own_url", lambda *_: (f"http://{next(addresses)}:30000", ""))
    one = own(tmp_path)
    before = one.description().instance
    leave(tmp_path, 0, tp=1)
    after = one.description().instance
    assert after.url == before.url == "http://10.0.0.8:30000" and after.fingerprint and not before.fingerprint


def test_ranks_of_another_server_in_the_folder_are_not_its_own(tmp_path):
    leave(tmp_path, 0, tp=1, parents=(os.getpid(), 1))
    leave(tmp_path, 1, parents=(os.getppid(), 1))
    assert own(tmp_path).description().instance.tp_size == 1


def test_a_rank_file_that_is_none_is_a_note(tmp_path):
    leave(tmp_path, 0, tp=1)
    folder.write_rank(tmp_path, 7, b"\xc1")
    found = own(tmp_path).description()
    assert found.instance.tp_size == 1 and "has not said what it is" in found.notes[0]


@pytest.mark.parametrize(
    ("given", "version"),
    [({}, messages.VERSION), ({"backend": "nixl"}, 0), ({"backend": "ascend"}, messages.VERSION)],
)
def test_who_does_not_speak_our_messages_says_so(given, version):
    assert own(None, **given).description().instance.messages == version
    off = own(None, options=read({"SGLANG_HETERO": "off"}), **given).description()
    assert off.instance.messages == 0 and off.mode == "off"


def test_prefill_tells_its_bootstrap_port():
    assert own(None, side=Side.PREFILL).description().instance.bootstrap_port == 8998


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.8", "http://10.0.0.8:30000"),
        ("Prefill-0.Fleet", "http://prefill-0.fleet:30000"),
        ("2001:db8::1", "http://[2001:db8::1]:30000"),
    ],
)
def test_the_url_is_hosts(host, url):
    assert own_url(Options(), serving(host=host)) == (url, "")
    assert own_url(Options(), serving(host=host, secure=True))[0] == url.replace("http:", "https:")
    given = read({"SGLANG_HETERO_ADVERTISE_URL": "HTTP://gate:1/"})
    assert own_url(given, serving(host=host)) == ("http://gate:1", "")


@pytest.fixture
def network(monkeypatch):
    module = ModuleType("sglang.srt.utils.network")
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.network", module)
    return module


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_server_that_listens_everywhere_tells_its_interfaces_address(network, host):
    network.get_local_ip_auto = lambda fallback: "10.1.1.1"
    assert own_url(Options(), serving(host=host)) == ("http://10.1.1.1:30000", "")


@pytest.mark.parametrize("address", ["", "127.0.0.1", "::1"])
def test_an_address_that_nobody_can_reach_is_a_problem(network, address, tmp_path):
    network.get_local_ip_auto = lambda fallback: address
    assert "set SGLANG_HETERO_ADVERTISE_URL" in own_url(Options(), serving(host="0.0.0.0"))[1]
    found = own(tmp_path, host="0.0.0.0").description()
    assert "SGLANG_HETERO_ADVERTISE_URL" in found.notes[0]
    options = read({"SGLANG_HETERO_ETCD": "10.0.0.5:2379"})
    with pytest.raises(OptionError, match="SGLANG_HETERO_ADVERTISE_URL"):
        register(own(None), options, lambda: serving(host="0.0.0.0"))


# A rank tells.


def rank(**fields):
    one = manifests(Side.DECODE, 2)[1]
    given = {
        "name": "decode TP1/2",
        "place": one.coordinates,
        "manifest": one,
        "here": SimpleNamespace(unsupported=("a reason",)),
        "scheduler": SimpleNamespace(max_running_requests=7, max_total_num_tokens=70),
    }
    return SimpleNamespace(**{**given, **fields})


def told_in(where):
    (data,), _ = folder.read_ranks(where)
    return instance_module.decode_told(data)


def test_a_rank_tells_what_it_is(tmp_path):
    RankTold(rank(), tmp_path)
    found = told_in(tmp_path)
    assert (found.pid, found.requests, found.tokens, found.unsupported) == (os.getpid(), 7, 70, ("a reason",))
    assert wire.decode(found.manifest) == manifests(Side.DECODE, 2)[1]
    assert os.getppid() in found.parents


def test_a_rank_without_a_manifest_tells_why(tmp_path):
    RankTold(rank(manifest=None, scheduler=SimpleNamespace(max_running_requests=None)), tmp_path)
    found = told_in(tmp_path)
    assert (found.manifest, found.requests, found.tokens, found.unsupported) == (b"", 0, 0, ("a reason",))


def test_a_rank_that_nobody_watches_tries_again_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("sglang_hetero.backend.rank_told.AGAIN_SECONDS", 0.01)
    there = RankTold(rank(), tmp_path)
    threads = threading.active_count()
    there.insist()
    assert threading.active_count() == threads, "it has told, so there is nothing to try again"
    RankTold(rank(), tmp_path / "later").insist()
    (tmp_path / "later").mkdir()
    end = time.monotonic() + 10
    while not folder.read_ranks(tmp_path / "later")[0]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_tries_again_when_there_was_no_room(tmp_path, caplog):
    heard = []
    one = RankTold(rank(), tmp_path / "gone")
    tell = one.along(heard.append)
    tell("first")
    (tmp_path / "gone").mkdir()
    tell("second")
    assert told_in(tmp_path / "gone").tokens == 70
    (tmp_path / "gone" / f"{os.getpid()}{folder.RANK_SUFFIX}").unlink()
    tell("third")
    assert folder.read_ranks(tmp_path / "gone") == ([], []), "once is enough"
    assert heard == ["first", "second", "third"]
    assert len(caplog.records) == 1 and "cannot say on /hetero/instance" in caplog.text


def test_a_manifest_that_is_too_large_stops_nothing(tmp_path, monkeypatch, caplog):
    def large(manifest):
        raise ManifestError("too large")

    monkeypatch.setattr("sglang_hetero.backend.rank_told.encode_manifest", large)
    RankTold(rank(), tmp_path)
    assert "too large" in caplog.text and folder.read_ranks(tmp_path) == ([], [])


def test_what_will_not_change_is_not_tried_again(tmp_path, monkeypatch, caplog):
    asked = []

    def large(manifest):
        asked.append(manifest)
        raise ManifestError("too large")

    monkeypatch.setattr("sglang_hetero.backend.rank_told.encode_manifest", large)
    one = RankTold(rank(), tmp_path)
    threads = threading.active_count()
    one.insist()
    one.along(lambda report: None)("a report")
    assert len(asked) == 1 and threading.active_count() == threads
    assert "which will not change" in caplog.text


@pytest.mark.parametrize("watched", [True, False])
def test_a_rank_does_not_try_for_ever(watched, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sglang_hetero.backend.rank_told.AGAIN_SECONDS", 0.001)
    monkeypatch.setattr("sglang_hetero.backend.rank_told.MAX_TRIES", 3)
    heard = []
    one = RankTold(rank(), tmp_path / "gone")
    if watched:
        tell = one.along(heard.append)
        for number in range(5):
            tell(number)
        assert heard == [0, 1, 2, 3, 4]
    else:
        one.insist()
        for each in threading.enumerate():
            if each.name == "hetero-told":
                each.join(10)
                assert not each.is_alive()
    (tmp_path / "gone").mkdir()
    one.along(heard.append)("later")
    assert folder.read_ranks(tmp_path / "gone") == ([], [])
    assert len(caplog.records) == 2 and "after 3 tries" in caplog.text and "restart the server" in caplog.text


def test_reports_and_what_ranks_are_do_not_mix(tmp_path):
    RankTold(rank(), tmp_path)
    assert folder.read(tmp_path) == ([], [])


# The HTTP process.


class Health(http.server.BaseHTTPRequestHandler):
    """SGLang's /health: 503 until it serves."""

    def do_GET(self):
        self.server.asked.append(self.path)
        words = b"" if self.server.status == 200 else b"starting"
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(words)))
        self.end_headers()
        self.wfile.write(words)

    def log_message(self, *_):
        pass


@pytest.fixture
def health():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        server.status, server.asked = 503, []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_serves_when_its_health_says_so(health):
    there = serving(host="0.0.0.0", port=health.server_port)
    with pytest.raises(DiscoveryError, match=r"127\.0\.0\.1:\d+/health says HTTP 503, not 200: starting"):
        serves(there)
    health.status = 200
    assert serves(there) and set(health.asked) == {"/health"}
    with pytest.raises(DiscoveryError, match=r"http://127\.0\.0\.1:1/health does not answer: .*refused"):
        serves(serving(host="127.0.0.1", port=1))
    with pytest.raises(DiscoveryError, match=r"https://.* does not answer: SSLError"):
        serves(serving(host="127.0.0.1", port=health.server_port, secure=True))


@pytest.fixture
def http_process(monkeypatch, tmp_path, health):
    """Where SGLang's application is made."""

    async def models(request):
        return PlainTextResponse("from SGLang")

    module = SimpleNamespace(app=Starlette(routes=[Route("/v1/models", models)]))
    monkeypatch.setitem(sys.modules, state_route.HTTP_SERVER, module)
    monkeypatch.setattr(state_route, "_side", lambda: "decode")
    monkeypatch.setattr(
        instance_module, "_serving", lambda: serving(host="127.0.0.1", port=health.server_port, bootstrap_port=0)
    )
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path))
    found = []
    monkeypatch.setattr(state_route, "leave_at_sigterm", found.append)
    module.registrars = found
    yield module
    for one in found:
        one.close(10)


def get(app, path):
    sent, asked = [], [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        return asked.pop()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:])


def test_the_route_answers_on_sglangs_server(http_process, tmp_path, health):
    state_route.around_start_service(lambda: None)
    leave(tmp_path, 0, tp=1)
    status, body = get(http_process.app, "/hetero/instance")
    found = decode_description(body)
    assert status == 200 and found.ranks() == manifests(Side.DECODE, 1)
    assert found.instance.url == f"http://127.0.0.1:{health.server_port}"
    assert decode_state(get(http_process.app, "/hetero/state")[1]).discovery is None
    assert get(http_process.app, "/v1/models") == (200, b"from SGLang")
    assert http_process.registrars == []


def test_who_is_neither_prefill_nor_decode_has_no_such_route(http_process, monkeypatch, caplog):
    monkeypatch.setattr(state_route, "_side", lambda: "")
    monkeypatch.setenv("SGLANG_HETERO_ETCD", "127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        state_route.around_start_service(lambda: None)
    assert get(http_process.app, "/hetero/instance")[0] == 404
    assert "neither prefill nor decode" in caplog.text


def test_a_server_is_in_etcd_while_it_serves(http_process, tmp_path, health, shared_etcd, monkeypatch):
    monkeypatch.setenv("SGLANG_HETERO_ETCD", shared_etcd.address)
    state_route.around_start_service(lambda: None)
    leave(tmp_path, 0, tp=1)
    until(lambda: health.asked)
    there = Etcd(shared_etcd.options())
    key = f"/sglang-hetero/decode/127.0.0.1:{health.server_port}"
    assert there.get(key) is None
    assert decode_state(get(http_process.app, "/hetero/state")[1]).discovery.standing == "waiting"
    health.status = 200
    data = until(lambda: there.get(key)).value
    said = decode_description(get(http_process.app, "/hetero/instance")[1]).instance
    assert decode(data) == replace(said, lease=DEFAULT_LEASE)
    assert decode(data).fingerprint
    (registrar,) = http_process.registrars
    until(lambda: registrar.registration.standing == "registered")

    def discovery():
        return decode_state(get(http_process.app, "/hetero/state")[1]).discovery

    until(lambda: discovery().standing == "registered")
    assert (discovery().key, discovery().etcd) == (key, shared_etcd.url)
    registrar.leave()  # SIGTERM: SGLang still finishes its requests
    until(lambda: there.get(key) is None)
    until(lambda: discovery().standing == "left")
    there.close()


def test_etcd_that_is_away_is_a_problem_and_no_fault(http_process, health, shared_etcd, monkeypatch):
    monkeypatch.setenv("SGLANG_HETERO_ETCD", "127.0.0.1:1")
    health.status = 200
    state_route.around_start_service(lambda: None)

    def state():
        return decode_state(get(http_process.app, "/hetero/state")[1])

    until(lambda: any("discovery: etcd at http://127.0.0.1:1 does not answer" in one for one in state().problems))
    assert state().ok and state().discovery.standing == "away"


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_process_that_ends_takes_its_record_along_and_one_that_is_killed_does_not(health, shared_etcd, end):
    health.status = 200
    script = Path(__file__).with_name("registered_process.py")
    command = [sys.executable, str(script), shared_etcd.address, str(health.server_port), end]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout.readline() == b"registered\n"
        there = Etcd(shared_etcd.options())
        (record,) = there.read("/fleet/").records.values()
        assert json.loads(record.value)["instance"]["model"] == "model"
        process.stdin.close()
        process.wait(60)
    assert len(there.read("/fleet/").records) == (0 if end == "exit" else 1)
    there.close()


def test_a_password_without_tls_and_a_url_that_is_for_here_only_are_warned_of(tmp_path, caplog, health):
    (tmp_path / "word").write_text("w")
    (tmp_path / "word").chmod(0o600)
    there = {
        "SGLANG_HETERO_ETCD": "etcd.invalid:2379",
        "SGLANG_HETERO_ETCD_USER": "u",
        "SGLANG_HETERO_ETCD_PASSWORD_FILE": str(tmp_path / "word"),
    }
    here = serving(host="127.0.0.1", port=health.server_port)
    with caplog.at_level(logging.WARNING):
        registrar = register(own(None), read(there), lambda: here)
    registrar.close(10)
    assert "use TLS" in caplog.text and "which no other machine can reach" in caplog.text
