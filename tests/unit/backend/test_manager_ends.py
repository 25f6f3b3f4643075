"""What SGLang's threads meet in a manager of ours when a prefill server ends."""

import logging
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest

from sglang_hetero.backend.manager import ManagerMixin
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.link import Addressee, Endpoint

ADDRESS = "10.0.0.9:8998"


class Upstream:
    """SGLang's tables of a decode rank."""

    def __init__(self):
        self.connection_lock, self.session_pool_lock, self.failure_lock = (threading.Lock() for _ in range(3))
        self.prefill_info_table, self.connection_pool = {ADDRESS: 1}, {f"{ADDRESS}_0": 1, "other_0": 1}
        self.session_pool, self.heartbeat_failures = defaultdict(dict), {ADDRESS: 1}
        self.addr_to_rooms_tracker = defaultdict(set)
        self.failure_records = {}
        self.ended = []

    def _handle_node_failure(self, address):
        self.ended.append(address)
        self.failure_records.update(dict.fromkeys(self.addr_to_rooms_tracker.pop(address), "SGLang's reason"))


class Manager(ManagerMixin, Upstream):
    def __init__(self):
        Upstream.__init__(self)
        self.hetero_rank = SimpleNamespace(name="decode TP0/1")
        self._hetero_peers = SimpleNamespace(forget=lambda address: None)


def fails(*_args, **_others):
    raise RuntimeError("broken")


@pytest.mark.parametrize("broken", ["forget", "SGLang's own", ""])
def test_nothing_ends_sglangs_heartbeat(broken, monkeypatch, caplog):
    manager = Manager()
    manager.addr_to_rooms_tracker[ADDRESS].add(7)
    if broken == "forget":
        manager._hetero_peers.forget = fails
    elif broken:
        monkeypatch.setattr(Upstream, "_handle_node_failure", fails)
    with caplog.at_level(logging.ERROR):
        manager._handle_node_failure(ADDRESS)
    assert ("broken" in caplog.text) is bool(broken)
    if broken != "SGLang's own":
        assert manager.ended == [ADDRESS], "its requests have to fail, whatever else does"
        assert "heartbeat" in manager.failure_records[7]


def test_a_room_that_is_entered_while_a_server_is_dropped_is_found():
    """As SGLang's receiver does: it looks the set up, and adds to it without a lock."""
    manager = Manager()
    rooms = manager.addr_to_rooms_tracker[ADDRESS]
    manager.hetero_drop(ADDRESS)
    assert (manager.prefill_info_table, manager.connection_pool) == ({}, {"other_0": 1})
    assert manager.heartbeat_failures == {}
    rooms.add(7)
    manager.hetero_lost(ADDRESS, "it has ended")
    assert manager.failure_records == {7: "it has ended"}


def test_requests_that_came_later_are_not_lost_with_a_server():
    manager = Manager()
    rooms = manager.addr_to_rooms_tracker[ADDRESS]
    rooms.add(7)
    there = manager.hetero_rooms(ADDRESS)
    rooms.add(8)
    manager.hetero_lost(ADDRESS, "it has ended", there)
    assert manager.failure_records == {7: "it has ended"}
    assert manager.addr_to_rooms_tracker[ADDRESS] is rooms and rooms == {8}
    manager.hetero_lost(ADDRESS, "its successor has, too", manager.hetero_rooms(ADDRESS))
    assert manager.failure_records == {7: "it has ended", 8: "its successor has, too"}


def test_whoever_is_told_that_a_request_is_given_up_is_named_if_known():
    manager, posted = Manager(), []
    manager._hetero_refuser, manager._hetero_given_up = "this rank", 0
    manager._hetero_post = lambda endpoint, payload: posted.append((endpoint.port, messages.decode(payload)))
    ranks = [Addressee(Endpoint("10.0.0.9", 1), "a process"), Addressee(Endpoint("10.0.0.9", 2))]
    manager.hetero_give_up(7, ranks, "its pages do not match", ours=True)
    assert [(port, said.source, said.room) for port, said in posted] == [(1, "a process", 7), (2, "", 7)]
    assert {said.reason for _, said in posted} == {"its pages do not match"}
