"""A prefill rank is known to its own server, whichever of the two is started again, and in whichever order."""

import json
import logging

import pytest

from sglang_hetero.backend import announcer as announcer_module
from sglang_hetero.backend.announcer import Announcer
from sglang_hetero.backend.bootstrap import MAX_BODY, ROUTE
from sglang_hetero.errors import ControlError, TransferRefused
from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.control import ControlService
from sglang_hetero.transfer.control import service as service_module
from sglang_hetero.transfer.seal import Seal
from tests.unit.backend.prefill_server import HOST, PrefillServer, free_port, http_server, until
from tests.unit.transfer.control.peers import client, first, hello


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(service_module, "SWEEP_MS", 20)
    monkeypatch.setattr(announcer_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(announcer_module, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(announcer_module, "REFUSAL_SECONDS", 0.05)


def complete(service):
    return service._registry.names() and all(name for _, name in service._registry.names())


def test_it_waits_for_its_server(caplog):
    port, taken = free_port(), []
    with caplog.at_level(logging.INFO):
        report = hello(0, tp=1)
        announcer = Announcer(f"{HOST}:{port}", Seal(), hello=report, identity=b"p0", topology=taken.append)
        until(lambda: "nobody listens" in caplog.text)
        with pytest.raises(TransferRefused, match="has not reached its control service yet: nobody listens"):
            announcer.send_first(first((b"d0", 1)))
    server = PrefillServer(port, tp=1)
    try:
        for each in server.announcers:
            each.close()
        until(lambda: taken)
        assert taken[0].ready
        assert caplog.text.count("nobody listens") <= 2, "said once, however often it was tried"
        assert announcer.fault == ""
    finally:
        announcer.close()
        server.end()
    assert not announcer.worker.thread.is_alive() or not announcer.worker.thread.join(5)


def test_it_reports_again_to_a_new_service():
    server = PrefillServer(free_port(), tp=2)
    try:
        until(lambda: complete(server.service))
        old, server.service = server.service, ControlService(HOST)
        server.offer()
        old.close()
        until(lambda: complete(server.service), 30)
        with client(server.service.port, b"d0") as d0:
            server.announcers[0].send_first(first((b"d0", 1)))
            until(lambda: d0.heard)
    finally:
        server.end()


def test_a_first_token_outlives_a_change_of_the_connection():
    """One that was picked before another took its place, and closed after that, is not the rank's last word."""
    server = PrefillServer(free_port(), tp=1)
    try:
        until(lambda: complete(server.service))
        (announcer,) = server.announcers

        class Closed:
            def send(self, _):
                announcer._client = current
                raise ControlError("is closed")

        with client(server.service.port, b"d0") as d0:
            current, announcer._client = announcer._client, Closed()
            announcer.send_first(first((b"d0", 1)))
            until(lambda: d0.heard)
        current.close()
        with pytest.raises(ControlError, match="is closed"):
            announcer.send_first(first((b"d0", 1)))
    finally:
        server.end()


def test_it_reports_again_if_the_service_does_not_know_it():
    server = PrefillServer(free_port(), tp=1)
    try:
        until(lambda: complete(server.service))
        server.service._registry._replicas.clear()
        server.service._registry._names.clear()
        server.service._answers.clear()
        until(lambda: complete(server.service))
    finally:
        server.end()


def test_a_connection_that_has_failed_is_made_anew():
    server = PrefillServer(free_port(), tp=1)
    try:
        until(lambda: complete(server.service))
        (announcer,) = server.announcers
        former = announcer._client
        former.failure = RuntimeError("a test")
        until(lambda: announcer._client is not former)
        with client(server.service.port, b"d0") as d0:
            until(lambda: announcer._client.pong)
            announcer.send_first(first((b"d0", 1)))
            until(lambda: d0.heard)
    finally:
        server.end()


def test_the_newest_topology_is_asked_for_if_it_was_not_heard():
    taken = []
    server = PrefillServer(free_port(), tp=1)
    try:
        (announcer,) = server.announcers
        announcer._topology = taken.append
        until(lambda: complete(server.service))
        until(lambda: announcer._taken and announcer._answered and announcer._answered.known)
        answered, count = announcer._answered, len(taken)
        until(lambda: announcer._answered is not answered)
        assert len(taken) <= count + 1, "and is not asked for again and again"
        count = len(taken)
        announcer._taken = "another one"
        until(lambda: len(taken) > count)
        assert taken[-1].topology == server.service._registry.names()[0][1]
    finally:
        server.end()


def test_a_refusal_is_told_again_and_again_since_the_server_forgets_it():
    port, told = free_port(), []
    reason = "prefill TP0/1: " + "x" * 3000 + " é"
    announcer = Announcer(f"{HOST}:{port}", Seal(), refusal=reason)

    def serve(statuses):
        def refuse(body):
            told.append(body)
            return statuses.pop(0) if statuses else 200

        return http_server({ROUTE: (200, offer(m.printable(reason))), "refuse": refuse}, port)

    try:
        with serve([500, 500]):
            until(lambda: len(told) > 5)
        seen = len(told)
        with serve([]):
            until(lambda: len(told) > seen + 3, 15)
        assert set(told) == {json.dumps(m.printable(reason, MAX_BODY // 2), ensure_ascii=False).encode()}
        assert announcer.fault == ""
    finally:
        announcer.close()


def offer(*unsupported):
    return json.dumps(
        {"version": m.VERSION, "control_port": 1, "mode": "auto", "unsupported": list(unsupported)}
    ).encode()
