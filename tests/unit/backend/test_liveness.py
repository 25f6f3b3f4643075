"""Decode notices that a prefill server has ended, was started again, or only stands still; and asks who is gone."""

import logging
import socket
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_hetero.backend import doubts as doubts_module
from sglang_hetero.backend import liveness as liveness_module
from sglang_hetero.backend import owed as owed_module
from sglang_hetero.backend.liveness import Liveness, news
from sglang_hetero.backend.peers import Peers, Server
from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.control import ControlService
from sglang_hetero.transfer.control import service as service_module
from sglang_hetero.transfer.link import Awaited
from sglang_hetero.transfer.seal import Seal
from tests.unit.backend.prefill_server import (
    HOST,
    NOBODY,
    Engine,
    PrefillServer,
    Side,
    Tables,
    free_port,
    stand_in_for_sglang,
    until,
)

LABEL = "prefill TP0/1"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    stand_in_for_sglang(monkeypatch)
    monkeypatch.setattr(service_module, "SWEEP_MS", 20)
    monkeypatch.setattr(liveness_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(liveness_module, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(doubts_module, "DOUBT_SECONDS", 0.05)
    monkeypatch.setattr(doubts_module, "MAX_DOUBT_SECONDS", 0.1)
    monkeypatch.setattr(doubts_module, "APART_SECONDS", 0.1)


class World:
    def __init__(self):
        self.tables, self.side, self.engine = Tables(), Side(), Engine()
        self.peers = Peers(self.tables, Seal())
        self.peers.side, self.peers.engine = self.side, self.engine
        self.liveness = Liveness(self.peers, self.side, self.engine, self.tables)

    def knows(self, server):
        """Find a server; requests of all its ranks are under way."""
        until(lambda: self.peers.ready(server.address))
        self.side.waiting |= {
            each: Awaited(each, server.address, f"session of {each}", NOBODY) for each in server.incarnations()
        }

    def end(self):
        self.liveness.close()
        self.peers.close()


@pytest.fixture
def world():
    made = World()
    yield made
    assert made.liveness.worker.fault == ""
    made.end()


def test_a_server_that_is_well_is_left_alone(world):
    server = PrefillServer(free_port(), tp=2)
    try:
        world.knows(server)
        client = world.peers.servers()[0].client
        until(lambda: client.pong_at > world.peers.servers()[0].since)
        seen = client.pong
        until(lambda: client.pong is not seen)
        for _ in range(5):
            world.liveness.look()
        assert world.peers.path(server.address)
        assert (world.tables.dropped, world.engine.asked, world.side.ended) == (0, [], {})
    finally:
        server.end()


def test_a_server_whose_processes_have_ended_is_lost_at_once(world):
    server = PrefillServer(free_port())
    world.knows(server)
    server.end()
    until(lambda: world.tables.lost)
    assert "has ended" in world.tables.lost[server.address]
    assert "nobody listens" in world.peers.problem(server.address)
    assert world.peers.servers() == []
    assert world.side.ended == {}, "units stay apart until it is certain that nobody writes to them"
    world.engine.ended.add("session of a-0.0.0")
    until(lambda: world.side.ended)


def test_a_server_that_was_started_again_is_accepted_at_once(world):
    port = free_port()
    former = PrefillServer(port, tp=2)
    world.knows(former)
    world.engine.ended |= {f"session of {each}" for each in former.incarnations()}
    former.end()
    again = PrefillServer(port, tp=2, start="b")
    try:
        until(lambda: world.peers.ready(again.address) and world.side.ended)  # a request asks, if need be
        assert set(world.side.ended) == former.incarnations()
        found = world.peers.sources(again.address, 0)
        assert {source.incarnation for source in found.sources} == again.incarnations()
    finally:
        again.end()


def test_one_rank_that_was_replaced(world):
    server = PrefillServer(free_port(), tp=2)
    try:
        world.knows(server)
        server.announcers.pop().close()
        server.announcers.append(server.announce(1, start="b"))
        until(lambda: world.side.failed)
        assert set(world.side.failed) == {"a-0.0.1"}
        assert world.side.ended == {}, "its units stay apart until it is certain that it has ended"
        world.engine.ended.add("session of a-0.0.1")
        world.side.waiting["a-0.0.1"] = replace(world.side.waiting["a-0.0.1"], units=4)
        until(lambda: world.side.ended)
        assert set(world.side.ended) == {"a-0.0.1"}
        assert "started again" in world.side.failed["a-0.0.1"]
        until(lambda: world.peers.path(server.address))
    finally:
        server.end()


def test_one_rank_that_has_ended(world):
    """Its server lives: new requests wait, those under way fail when it is certain."""
    server = PrefillServer(free_port(), tp=2)
    try:
        world.knows(server)
        server.announcers.pop().close()
        until(lambda: world.peers.path(server.address) is None)
        assert "missing" in world.peers.problem(server.address) or "broken" in world.peers.problem(server.address)
        until(lambda: "session of a-0.0.1" in world.engine.asked)
        assert world.side.ended == {}
        world.engine.ended.add("session of a-0.0.1")
        until(lambda: world.side.ended)
        assert set(world.side.ended) == {"a-0.0.1"}
        assert world.tables.lost == {}
    finally:
        server.end()


def test_a_control_service_of_a_new_process_with_the_same_ranks(world):
    """Nothing fails: the ranks report to it, and decode finds them there."""
    server = PrefillServer(free_port())
    try:
        world.knows(server)
        old, server.service = server.service, ControlService(HOST)
        server.offer()
        old.close()
        until(lambda: (known := world.peers.servers()) and known[0].control_port == server.service.port, 30)
        until(lambda: world.peers.path(server.address))
        assert (world.side.ended, world.tables.lost) == ({}, {})
        assert world.side.joins == 1
    finally:
        server.end()


def test_a_request_that_comes_while_a_server_is_asked_is_not_lost_with_it(world):
    """Its successor may be about to listen, and the request is for that one."""
    server = PrefillServer(free_port())
    world.knows(server)
    world.tables.rooms = {1}
    find = world.peers.find

    def while_asked(address):
        error = find(address)
        world.tables.rooms.add(2)
        return error

    world.peers.find = while_asked
    server.end()
    until(lambda: world.tables.lost)
    assert world.tables.failed == frozenset({1})


def test_a_server_that_only_stands_still_is_not_lost(world, monkeypatch, caplog):
    """It cannot be told from one that is stopped: its port takes connections, nobody answers."""
    monkeypatch.setattr(liveness_module, "SILENT_SECONDS", 0.2)
    server = PrefillServer(free_port())
    try:
        world.knows(server)
        monkeypatch.setattr(ControlService, "_handle", lambda *_: None)
        with caplog.at_level(logging.WARNING):
            until(lambda: "may be stopped or cut off" in caplog.text)
        for _ in range(10):
            world.liveness.look()
        assert caplog.text.count("may be stopped") == 1
        assert world.peers.path(server.address)
        assert (world.tables.lost, world.side.ended) == ({}, {})
    finally:
        server.end()


def test_a_connection_that_has_ended_is_made_anew(world, monkeypatch):
    """However it has: nothing would be heard over it for ever."""
    monkeypatch.setattr(liveness_module, "SILENT_SECONDS", 100.0)
    server = PrefillServer(free_port())
    try:
        world.knows(server)
        former = world.peers.servers()[0].client
        former.close()
        until(lambda: (known := world.peers.servers()) and known[0].client is not former and not known[0].outdated)
        assert world.peers.path(server.address)
        assert world.tables.lost == {}
    finally:
        server.end()


def test_one_that_sglang_does_not_ask_is_given_up_as_sglang_would(world, monkeypatch):
    """It is in none of SGLang's tables while it has to be asked anew, and then it hangs."""
    monkeypatch.setattr(liveness_module, "UNANSWERED_SECONDS", 0.1)
    server = PrefillServer(free_port())
    try:
        world.knows(server)
        monkeypatch.setattr("sglang_hetero.backend.capability.TIMEOUT_SECONDS", 0.03)
        server._http.__exit__(None, None, None)
        with socket.create_server((HOST, int(server.address.partition(":")[2]))):
            world.peers.outdate(server.address, "a test")
            until(lambda: world.tables.lost)
            assert "has not answered for" in world.tables.lost[server.address]
            assert world.peers.servers() == []
    finally:
        server._http = nullcontext()
        server.end()


def test_one_that_is_cut_off_and_has_to_be_asked_anew_is_given_up(world, monkeypatch):
    """Its control service is silent too, and somebody may listen there."""
    monkeypatch.setattr(liveness_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(liveness_module, "UNANSWERED_SECONDS", 0.1)
    server = PrefillServer(free_port())
    try:
        world.knows(server)
        monkeypatch.setattr(ControlService, "_handle", lambda *_: None)
        monkeypatch.setattr("sglang_hetero.backend.capability.TIMEOUT_SECONDS", 0.03)
        server._http.__exit__(None, None, None)
        with socket.create_server((HOST, int(server.address.partition(":")[2]))):
            until(lambda: world.peers.servers()[0].client.silent_seconds > 0.3)
            assert world.tables.lost == {}, "SGLang's heartbeat looks after it"
            world.peers.outdate(server.address, "a test")
            until(lambda: world.tables.lost)
    finally:
        server._http = nullcontext()
        server.end()


def test_a_successor_is_not_lost_with_the_former_one(world):
    server = PrefillServer(free_port())
    try:
        world.knows(server)
        (former,) = world.peers.servers()
        assert world.peers.find(server.address) is None
        world.liveness._lost(former, "has ended: a test", frozenset())
        assert world.tables.lost == {}
        assert world.peers.path(server.address)
        (known,) = world.peers.servers()
        world.liveness._lost(known, "has ended: a test", frozenset())
        assert world.tables.lost == {server.address: f"prefill at {server.address} has ended: a test"}
    finally:
        server.end()


def test_what_is_owed_is_paid_without_a_request(world, monkeypatch):
    monkeypatch.setattr(owed_module, "AGAIN_SECONDS", 0.05)
    port = free_port()
    world.peers.owe(f"{HOST}:{port}", 7, "given up")
    until(lambda: world.peers.problem(f"{HOST}:{port}"))
    server = PrefillServer(port)
    try:
        until(lambda: world.tables.told)
        assert world.tables.told == [(7, [7000], "given up", True)]
    finally:
        server.end()


def test_who_units_are_kept_for_is_asked_again_and_again(world):
    world.side.waiting["old"] = Awaited(LABEL, "10.0.0.9:1", "its session", NOBODY, 16)
    until(lambda: world.engine.asked.count("its session") >= 3)
    assert world.side.ended == {}
    world.engine.ended.add("its session")
    until(lambda: world.side.ended)
    assert world.side.ended == {"old": "has ended (server 10.0.0.9:1)"}


def test_units_that_are_kept_for_long_are_told_of(caplog):
    now = [100.0]
    side, tables = Side(waiting={"old": Awaited(LABEL, "10.0.0.9:1", "its session", NOBODY, 16)}), Tables()
    peers = Peers(tables, Seal())
    liveness = Liveness(peers, side, Engine(), tables, clock=lambda: now[0])
    liveness.close()
    liveness.worker.thread.join(5)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            now[0] += 1
            liveness.look()
    told = [each for each in caplog.messages if "16 units of staging are kept" in each]
    assert len(told) == 2, "after a minute, and after ten times as long"
    assert LABEL in told[0] and "10.0.0.9:1" in told[0] and "start this decode server again" in told[0]
    side.waiting.clear()
    liveness.look()
    assert liveness._doubts._doubts == {}


def test_what_is_asked_about_is_bounded_by_what_waits(world):
    for number in range(200):
        world.side.waiting[f"old{number}"] = Awaited(LABEL, f"10.0.0.9:{number}", f"session {number}", NOBODY, 1)
    until(lambda: len(set(world.engine.asked)) == 200)
    assert len(world.liveness._doubts._doubts) == 200
    world.side.waiting.clear()
    until(lambda: not world.liveness._doubts._doubts)


def test_prefill_looks_after_its_decode_ranks(monkeypatch):
    monkeypatch.setattr(doubts_module, "LOOK_SECONDS", 0.02)
    side, engine = Side(waiting={"old": Awaited("decode TP0/1", "10.0.0.9:1", "its session", NOBODY)}), Engine()
    ranks = doubts_module.DecodeRanks("prefill TP0/1", side, engine)
    until(lambda: engine.asked)
    assert side.ended == {}
    engine.ended.add("its session")
    until(lambda: side.ended)
    ranks.close()
    ranks.worker.thread.join(5)
    assert ranks.worker.fault == ""


SERVER = Server(
    SimpleNamespace(address="a:1"), None, service="s", names={0: "t", 1: "u"}, since=10.0, client=SimpleNamespace()
)


@pytest.mark.parametrize(
    ("pong", "at", "word"),
    [
        (None, 0.0, ""),
        (m.Pong(incarnation="s", topologies=((0, "t"), (1, "u"))), 11.0, ""),
        (m.Pong(incarnation="x", topologies=((0, "t"), (1, "u"))), 11.0, "its control service was started again"),
        (m.Pong(incarnation="x", topologies=()), 10.0, ""),
        (m.Pong(incarnation="s", topologies=((0, "t"), (1, "v"))), 11.0, "ranks of its replica 1 were started again"),
        (m.Pong(incarnation="s", topologies=((0, ""), (1, "u"))), 11.0, "ranks of its replica 0 are missing"),
        (m.Pong(incarnation="s", topologies=((0, "t"),)), 11.0, "ranks of its replica 1 are missing"),
        (m.Pong(incarnation="s", topologies=((0, "t"), (1, "u"), (2, "w"))), 11.0, ""),
    ],
)
def test_what_is_news(pong, at, word):
    assert news(SERVER, pong, at) == word
