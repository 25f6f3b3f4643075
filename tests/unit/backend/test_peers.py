"""How a decode rank gets to know prefill servers: waiting for none, bounded, and with the cause when it cannot."""

import socket
import threading
import time

import pytest

from sglang_hetero.backend import peers as peers_module
from sglang_hetero.backend.pairing import Path
from sglang_hetero.backend.peers import Peers
from sglang_hetero.errors import PeerAway, TopologyError, TransferRefused
from sglang_hetero.transfer.link import Addressee, Awaited, Endpoint
from sglang_hetero.transfer.messages import VERSION
from sglang_hetero.transfer.seal import Seal
from tests.unit.backend.prefill_server import (
    HOST,
    NOBODY,
    Engine,
    PrefillServer,
    Side,
    Tables,
    free_port,
    http_server,
    stand_in_for_sglang,
    until,
)
from tests.unit.transfer.control.peers import first


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    stand_in_for_sglang(monkeypatch)


@pytest.fixture
def tables():
    return Tables()


@pytest.fixture
def peers(tables):
    made = Peers(tables, Seal())
    made.side, made.engine = Side(), Engine()
    yield made
    made.close()


@pytest.fixture
def server():
    made = PrefillServer(free_port(), tp=2)
    yield made
    made.end()


@pytest.fixture
def silent():
    """The address of somebody who takes connections and never answers."""
    with socket.create_server((HOST, 0)) as sock:
        yield f"{HOST}:{sock.getsockname()[1]}"


def test_a_server_is_found_and_its_ranks_are_known(peers, tables, server):
    until(lambda: peers.ready(server.address))
    assert tables.adopted[server.address].path is peers.path(server.address) is Path.OURS
    assert peers.refusal(server.address) is None
    assert peers.listens(server.address)
    found = peers.sources(server.address, 0)
    assert {source.incarnation for source in found.sources} == server.incarnations()
    ranks = peers.ranks(server.address, 0)
    assert [rank.endpoint for rank in ranks] == [Endpoint(HOST, 7000), Endpoint(HOST, 7001)]
    assert {rank.incarnation for rank in ranks} == server.incarnations()
    assert peers.problem(server.address) == ""
    server.announcers[0].send_first(first((b"d0", 1)))
    until(lambda: peers.side.heard)


def test_every_replica_is_known_and_no_other(peers):
    server = PrefillServer(free_port(), dp=2)
    try:
        until(lambda: peers.ready(server.address))
        for dp_rank in (0, 1):
            found = peers.sources(server.address, dp_rank).sources
            assert {source.incarnation for source in found} == server.incarnations(dp_rank)
        with pytest.raises(TransferRefused, match=r"has 2 attention-DP replicas, the request is for number 7"):
            peers.sources(server.address, 7)
        assert peers.ranks(server.address, 7) == ()
    finally:
        server.end()


def test_who_never_answers_holds_nobody_up(peers, server, silent):
    assert not peers.ready(silent)
    began = time.monotonic()
    for _ in range(200):
        assert not peers.ready(silent)
    until(lambda: peers.ready(server.address))
    assert silent in peers._asked, "it is still being asked: nothing above waited for it"
    assert time.monotonic() - began < 4, "200 looks and another server in less than one time-out"


def test_why_a_server_cannot_be_used_is_known(peers, silent, monkeypatch):
    nobody = f"{HOST}:{free_port()}"
    assert peers.find(nobody).refused
    assert "nobody listens" in peers.problem(nobody)
    monkeypatch.setattr("sglang_hetero.backend.capability.TIMEOUT_SECONDS", 0.05)
    assert not peers.find(silent).refused
    assert "does not answer" in peers.problem(silent)
    with http_server({"/route": (503, b"1 workers registered"), "/hetero": (404, b"")}) as starting:
        peers.find(starting)
        assert "is not ready: 503 1 workers registered" in peers.problem(starting)
    with pytest.raises(TransferRefused, match="nobody listens"):
        peers.sources(nobody, 0)


def test_ranks_that_are_missing_are_named(peers, monkeypatch):
    monkeypatch.setattr(peers_module, "TOPOLOGY_SECONDS", 0.3)
    server = PrefillServer(free_port(), tp=2)
    server.announcers.pop().close()
    try:
        until(lambda: peers.find(server.address) and "TP1" in peers.problem(server.address))
        assert not peers.servers(), "and nothing is left of the attempt"
    finally:
        server.end()


def test_one_who_sends_a_byte_now_and_then_is_left(monkeypatch):
    monkeypatch.setattr("sglang_hetero.backend.capability.TIMEOUT_SECONDS", 0.3)
    with socket.create_server((HOST, 0)) as sock:
        end, sent = threading.Event(), []

        def drip():
            connection, _ = sock.accept()
            with connection:
                try:
                    while not end.wait(0.02):
                        connection.sendall(b"H")
                        sent.append(1)
                except OSError:
                    pass

        thread = threading.Thread(target=drip)
        thread.start()
        found = Peers(Tables(), Seal())
        assert isinstance(found.find(f"{HOST}:{sock.getsockname()[1]}"), PeerAway)
        end.set()
        thread.join()
        assert len(sent) < 500, "it was listened to until the line was too long for an answer"


def test_a_stock_server_takes_the_path_that_is_decided(peers, tables):
    tables.path = Path.UPSTREAM
    server = PrefillServer(free_port())
    try:
        del server.answers["/hetero"]
        until(lambda: peers.ready(server.address))
        assert peers.path(server.address) is Path.UPSTREAM
        assert not peers.listens(server.address)
        assert peers.servers()[0].client is None
    finally:
        server.end()


def test_a_refused_server_is_asked_anew_for_the_next_request(peers, tables, server):
    tables.path = Path.REFUSED
    until(lambda: peers.ready(server.address))
    assert "takes it" in peers.refusal(server.address)
    assert server.address not in tables.adopted
    assert "takes it" in peers.refusal(server.address), "another request that had begun with it"
    assert peers.ranks(server.address, 0), "so that its ranks can be told"
    tables.path = Path.OURS
    until(lambda: peers.ready(server.address))
    assert peers.refusal(server.address) is None


def test_what_cannot_be_planned_is_refused_and_its_ranks_are_known(peers, server, monkeypatch):
    def join(address, topology):
        raise TopologyError("6 heads cannot be divided")

    monkeypatch.setattr(peers.side, "join", join)
    until(lambda: peers.ready(server.address))
    assert peers.refusal(server.address) == "6 heads cannot be divided"
    assert len(peers.ranks(server.address, 0)) == 2


def test_ranks_of_a_refused_stock_server_are_asked_for(peers, tables):
    tables.path = Path.REFUSED
    whole = b'{"attn_tp_size":2,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,"kv_cache_dtype":"x",'
    whole += b'"follow_bootstrap_room":true}'

    def answers(path):
        if path.startswith("/hetero"):
            return 404, b""
        if "target_tp_rank=-1" in path:
            return 200, whole
        rank = path.partition("target_tp_rank=")[2][0]
        return 200, b'{"rank_ip": "10.0.0.1", "rank_port": 900%s}' % rank.encode()

    with http_server(answers) as address:
        assert peers.find(address) is None
        assert peers.ranks(address, 0) == tuple(Addressee(Endpoint("10.0.0.1", port)) for port in (9000, 9001))


def test_another_release_is_refused_with_the_remedy(peers, server):
    server.offer(version=99, something_new=1)
    until(lambda: peers.ready(server.address))
    assert "install the same release" in peers.refusal(server.address)


def test_a_description_that_nobody_understands_is_refused(peers, server):
    for body in (b"[]", b'{"attn_tp_size": 0}', b"nonsense", b"{}"):
        server.answers["/route"] = (200, body)
        assert peers.find(server.address) is None
        assert "in an unknown way" in peers.refusal(server.address)


def test_servers_that_a_request_names_are_bounded(peers, monkeypatch):
    """Whoever may send requests names the bootstrap address in them."""
    listeners = [socket.create_server((HOST, 0)) for _ in range(10)]
    monkeypatch.setattr(peers_module, "MAX_PROBLEMS", 5)
    monkeypatch.setattr(peers._jobs, "_limit", 3)
    before = threading.active_count()
    try:
        addresses = [f"{HOST}:{each.getsockname()[1]}" for each in listeners]
        for address in addresses:
            assert not peers.ready(address)
        assert threading.active_count() - before <= 2 * peers_module.ASKING_THREADS + 1, "each and its watchdog"
        assert len(peers._asked) <= peers_module.ASKING_THREADS + 3
        assert "other prefill servers wait to be asked" in peers.problem(addresses[-1])
        assert len(peers._problems) <= 5
    finally:
        for each in listeners:
            each.close()
    for port in range(1, 20):
        peers.find(f"{HOST}:{port}")
    assert len(peers._problems) <= 5


def test_the_least_used_server_is_forgotten_unless_requests_wait_for_it(peers, tables, monkeypatch):
    monkeypatch.setattr(peers_module, "MAX_SERVERS", 2)
    servers = [PrefillServer(free_port(), start=name) for name in "abc"]
    try:
        one, two, three = (each.address for each in servers)
        peers.side.waiting["a-0.0.0"] = Awaited("prefill TP0/1", one, "s0", NOBODY)
        for address in (one, two, three):
            until(lambda address=address: peers.ready(address))
        assert {each.address for each in peers.servers()} == {one, three}
        assert two not in tables.adopted
        client = next(each.client for each in peers.servers() if each.address == one)
        peers.side.waiting.clear()
        until(lambda: peers.ready(two))
        assert one not in tables.adopted
        assert not client._thread.is_alive()
    finally:
        for each in servers:
            each.end()


def test_it_asks_again_with_the_same_connection(peers, server):
    until(lambda: peers.ready(server.address))
    (known,) = peers.servers()
    peers.outdate(server.address, "a test")
    assert peers.path(server.address) is None
    assert peers.problem(server.address) == "a test"
    until(lambda: peers.ready(server.address))
    (again,) = peers.servers()
    assert again.client is known.client
    assert again.sources[0] is known.sources[0], "nothing is planned twice"
    assert peers.side.joins == 1
    assert peers.side.ended == {}


def test_a_server_that_sglang_has_dropped_meanwhile_is_found_anew(peers, tables, server):
    until(lambda: peers.ready(server.address))
    until(lambda: server.address in tables.adopted)
    until(lambda: peers.servers()[0].adopted)
    tables.hetero_drop(server.address)
    assert peers.ready(server.address), "which would not end by itself"
    peers.missed(server.address)
    assert peers.path(server.address) is None
    until(lambda: peers.ready(server.address))
    until(lambda: server.address in tables.adopted)


def test_one_that_is_being_adopted_is_not_missed(peers, tables, server, monkeypatch):
    monkeypatch.setattr(tables, "hetero_adopt", lambda *_: peers.missed(server.address))
    assert peers.find(server.address) is None
    assert peers.path(server.address) is Path.OURS


def test_what_fails_in_us_is_a_cause_too(peers, tables, server, monkeypatch):
    def adopt(*_):
        raise KeyError("ours")

    monkeypatch.setattr(tables, "hetero_adopt", adopt)
    peers.find(server.address)
    assert "KeyError" in peers.problem(server.address)
    monkeypatch.undo()
    stand_in_for_sglang(monkeypatch)
    until(lambda: peers.ready(server.address))


@pytest.mark.parametrize(
    ("engine", "messages", "ended"),
    [
        ("refuses", "refuses", True),
        ("refuses", "listens", False),
        ("listens", "refuses", False),
        ("taken over", "taken over", True),
        ("never listens", "refuses", True),
        ("never listens", "listens", False),
    ],
)
def test_a_restart_at_the_same_address_is_a_new_process(peers, silent, engine, messages, ended):
    """Requests of the former one fail in any case; units come home where nothing of it listens any more.

    It may only be stopped: then it writes on when it goes on. Some engines never listen, so that they tell nothing.
    """
    port = free_port()
    former = PrefillServer(port, tp=2)
    until(lambda: peers.ready(former.address))
    session = "s0" if engine == "taken over" else "old"  # those of the new one, which has the same address then
    endpoint = {
        "refuses": NOBODY,
        "listens": Endpoint(HOST, int(silent.rpartition(":")[2])),
        "taken over": Endpoint(HOST, 7000),
    }[messages]
    peers.side.waiting |= {key: Awaited(key, former.address, session, endpoint, 3) for key in former.incarnations()}
    peers.side.waiting["other"] = Awaited("other", "elsewhere:1", session, endpoint, 3)
    peers.engine.ended |= {"old"} if engine == "refuses" else set()
    peers.engine.sees_ends = engine != "never listens"
    former.end()
    peers.forget(former.address)
    again = PrefillServer(port, tp=1, start="b")
    try:
        until(lambda: peers.ready(again.address))
        until(lambda: set(peers.side.failed) == former.incarnations())
        assert "started again" in next(iter(peers.side.failed.values()))
        until(lambda: again.address not in peers._asked)
        assert set(peers.side.ended) == (former.incarnations() if ended else set())
        assert {each.incarnation for each in peers.sources(again.address, 0).sources} == again.incarnations()
    finally:
        again.end()


# --- what changes while a server is asked


def test_a_client_that_was_closed_is_not_used_again(peers, server):
    """SGLang's heartbeat gives a server up while it is asked over the connection that is there."""
    until(lambda: peers.ready(server.address))
    decide = peers._host.hetero_decide

    def given_up(found, sources):
        peers.forget(server.address)
        return decide(found, sources)

    peers._host.hetero_decide = given_up
    assert "given up while it was asked" in str(peers.find(server.address))
    assert peers.servers() == []
    peers._host.hetero_decide = decide
    until(lambda: peers.ready(server.address))
    peers.servers()[0].client.close()
    assert peers.find(server.address) is None
    (known,) = peers.servers()
    assert not known.client.ended
    server.announcers[0].send_first(first((b"d0", 1)))
    until(lambda: peers.side.heard)


def test_a_server_that_has_to_be_asked_again_before_sglang_knows_it(peers, tables, server, monkeypatch):
    adopt = tables.hetero_adopt

    def broken(found, decision):
        peers.outdate(server.address, "the connection is broken")
        adopt(found, decision)

    monkeypatch.setattr(tables, "hetero_adopt", broken)
    assert peers.find(server.address) is None
    assert server.address not in tables.adopted, "SGLang would begin requests that fail"
    monkeypatch.undo()
    stand_in_for_sglang(monkeypatch)
    assert peers.find(server.address) is None
    assert server.address in tables.adopted


def test_only_the_server_that_was_meant_is_lost(peers, server, monkeypatch):
    until(lambda: peers.ready(server.address))
    (former,) = peers.servers()
    assert peers.find(server.address) is None
    assert not peers.lose(former, "has ended")
    (known,) = peers.servers()
    assert not known.client.ended and peers.problem(server.address) == ""
    close, ended = known.client.close, []
    monkeypatch.setattr(known.client, "close", lambda: (ended.append(known.client.ended), close()))
    assert peers.lose(known, "has ended")
    assert ended == [True], "from the moment on in which it is not known any more, however long closing takes"
    assert peers.problem(server.address) == "has ended"
    assert peers.servers() == []


def test_an_answer_is_not_taken_for_a_queue_that_is_full(peers):
    """The job that has asked is still about to return when SGLang asks again."""
    nobody, returns, ask = f"{HOST}:{free_port()}", threading.Event(), peers._ask
    peers._ask = lambda address: (ask(address), returns.wait(5))
    try:
        peers.ready(nobody)
        until(lambda: "nobody listens" in peers.problem(nobody))
        until(lambda: nobody not in peers._asked)
        peers.ready(nobody)
        assert "nobody listens" in peers.problem(nobody)
    finally:
        returns.set()


def test_how_long_a_bootstrap_server_gives_no_answer(peers, server, silent, monkeypatch):
    until(lambda: peers.ready(server.address))
    (known,) = peers.servers()
    clock = [50.0]
    monkeypatch.setattr(peers_module.time, "monotonic", lambda: clock[0])
    away = PeerAway("nothing", unanswered=True)
    for now, error, seconds in (
        (50, away, 0),
        (57, away, 7),
        (60, PeerAway("starting"), 0),
        (70, away, 0),
        (80, away, 10),
    ):
        clock[0] = now
        peers._unanswered(server.address, error)
        assert known.silent_seconds == seconds
    monkeypatch.undo()
    stand_in_for_sglang(monkeypatch)
    monkeypatch.setattr("sglang_hetero.backend.capability.TIMEOUT_SECONDS", 0.05)
    assert peers.find(silent).unanswered
    assert not peers.find(f"{HOST}:{free_port()}").unanswered


# --- requests that are given up before it is known where their prefill ranks are


def test_who_is_not_known_is_told_when_it_is_found(peers, tables):
    address = f"{HOST}:{free_port()}"
    peers.owe(address, 7, "nobody answers")
    peers.owe(address, 8, "another")
    peers.owe(address, 9, "its room begins again")
    peers.begins(address, 9)
    until(lambda: "nobody listens" in peers.problem(address) and not peers._asked)
    peers.pay()
    until(lambda: not peers._asked)
    assert tables.told == []
    server = PrefillServer(int(address.partition(":")[2]), tp=2, dp=2)
    try:
        peers._owed._asked.clear()  # as some seconds later
        until(lambda: peers.pay() or tables.told)
        until(lambda: not peers._asked)
        ports = [7000, 7001] * 2
        assert tables.told == [(7, ports, "nobody answers", True), (8, ports, "another", True)], "all replicas, once"
        peers.owe(address, 10, "a third")
        assert tables.told[2:] == [(10, ports, "a third", True)], "at once, since it is known"
        peers.outdate(address, "a test")
        assert peers.ranks(address, 0) == (), "others may be there"
        peers.owe(address, 11, "a fourth")
        until(lambda: tables.told[3:] == [(11, ports, "a fourth", True)])
        assert peers.path(address)
    finally:
        server.end()


def test_who_cannot_be_joined_is_told_all_the_same(peers, tables, monkeypatch):
    """A firewall before the control service: prefill is well, and waits for the request."""
    monkeypatch.setattr(peers_module, "TOPOLOGY_SECONDS", 0.1)
    control_port = free_port()

    def answers(path):
        if path.startswith("/hetero"):
            return 200, b'{"version": %d, "control_port": %d, "mode": "auto"}' % (VERSION, control_port)
        if "target_tp_rank=-1" in path:
            return 200, b'{"attn_tp_size":2,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,' + (
                b'"kv_cache_dtype":"x","follow_bootstrap_room":true}'
            )
        return 200, b'{"rank_ip": "10.0.0.1", "rank_port": 900%s}' % path.partition("target_tp_rank=")[2][:1].encode()

    with http_server(answers) as address:
        assert "has not named" in str(peers.find(address))
        peers.owe(address, 7, "given up")
        until(lambda: tables.told)
        assert tables.told == [(7, [9000, 9001], "given up", True)]
        assert peers.servers() == []


def test_what_cannot_be_told_ends_nothing(peers, tables, server, monkeypatch):
    def broken(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr(tables, "hetero_give_up", broken)
    peers.owe(server.address, 7, "given up")
    until(lambda: peers.path(server.address))
    assert peers.find(server.address) is None
