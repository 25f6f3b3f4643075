"""The control service over loopback: topologies, first tokens, and what must not end its thread."""

import logging
import threading
import time

import pytest
import zmq

from sglang_hetero.errors import ControlError
from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.control import ControlClient, ControlService, common
from sglang_hetero.transfer.control import client as client_module
from sglang_hetero.transfer.control import service as service_module
from tests.unit.transfer.control.peers import HOST, client, fields, first, hello, report, until

# --- topology


def test_all_learn_the_topology(service):
    with client(service.port, b"p0") as p0, client(service.port, b"p1") as p1, client(service.port, b"d0") as d0:
        p0.send(hello(0))
        p1.send(hello(1))
        topology = d0.topology(1.5)
        assert topology.ready
        assert [rank.port for rank in topology.ranks] == [7000, 7001]
        for each in (p0, p1):
            until(lambda heard=each.heard: heard)
            assert each.heard == [topology]
    assert service.counts == {}


def test_a_restart_is_told_to_all_prefill_ranks(service):
    with client(service.port, b"p0") as p0, client(service.port, b"p1") as p1:
        p0.send(hello(0))
        p1.send(hello(1))
        until(lambda: p0.heard)
        with client(service.port, b"p1b") as again:
            again.send(hello(1, start="b"))
            until(lambda: again.heard)
            until(lambda: len(p0.heard) == 2)
            assert p0.heard[1] == again.heard[0] != p0.heard[0]


def test_a_report_sent_again_is_answered(service):
    with client(service.port, b"p0") as p0:
        report(p0)
        p0.send(hello(0, tp=1))
        until(lambda: p0.heard)


def test_a_topology_that_never_comes(service):
    with client(service.port, b"p0") as p0, client(service.port, b"d0") as d0:
        p0.send(hello(0))
        until(lambda: service._registry.identities(0))
        with pytest.raises(ControlError, match=rf"{HOST}:{service.port} .* within 0.05 s: 1 of 2 ranks .*PP0 TP1"):
            d0.topology(0.05)
        assert d0.heard == []


def test_nobody_answers():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        port = sock.bind_to_random_port(f"tcp://{HOST}")
        with (
            client(port, b"d0") as d0,
            pytest.raises(ControlError, match=rf"{HOST}:{port} .*: it does not answer"),
        ):
            d0.topology(0.05)


def test_a_topology_from_before_the_question_is_no_answer(service):
    with client(service.port, b"d0") as d0, client(service.port, b"p0") as p0:
        report(p0)
        one = d0.topology(1)
        with client(service.port, b"p0b") as again:
            again.send(hello(0, tp=1, start="b"))
            until(lambda: again.heard)
            assert d0.topology(1).topology != one.topology


def test_a_question_is_repeated(service, monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_ASK_SECONDS", 0.01)
    with client(service.port, b"d0") as d0, client(service.port, b"p0") as p0:
        found = []
        thread = threading.Thread(target=lambda: found.append(d0.topology(1.5)))
        thread.start()
        until(lambda: d0._heard)
        p0.send(hello(0, tp=1))
        thread.join()
        assert found[0].ready


# --- who is there


def test_a_sign_of_life_is_answered_with_who_is_there(service):
    with (
        client(service.port, b"p0", "a-0.0.0", heartbeat_seconds=0.02) as p0,
        client(service.port, b"d0", heartbeat_seconds=0.02) as d0,
    ):
        until(lambda: d0.pong)
        assert (d0.pong.known, d0.pong.topologies) == (False, ())
        until(lambda: p0.pong)
        assert not p0.pong.known, "so that the rank reports again"
        p0.send(hello(0))
        until(lambda: d0.pong.topologies == ((0, ""),))
        until(lambda: p0.pong.known)
        with client(service.port, b"p1") as p1:
            p1.send(hello(1))
            until(lambda: d0.pong.topologies == ((0, d0.topology(1).topology),))
    assert service.counts == {}


def test_another_service_at_the_same_place_has_another_name(service):
    with client(service.port, b"d0", heartbeat_seconds=0.02) as d0, ControlService(HOST) as other:
        until(lambda: d0.pong)
        with client(other.port, b"d0", heartbeat_seconds=0.02) as d1:
            until(lambda: d1.pong)
            assert d1.pong.incarnation != d0.pong.incarnation


def test_silence_is_measured(service):
    with client(service.port, b"d0", heartbeat_seconds=0.02) as d0:
        until(lambda: d0.pong)
        service.close()
        until(lambda: d0.silent_seconds > 0.1)


def test_a_rank_whose_process_has_ended_makes_its_replica_incomplete(monkeypatch):
    monkeypatch.setattr(service_module, "SWEEP_MS", 10)
    with ControlService(HOST) as service, client(service.port, b"d0", heartbeat_seconds=0.02) as d0:
        with client(service.port, b"p0") as p0, client(service.port, b"p1", "a-0.0.1") as p1:
            p0.send(hello(0))
            p1.send(hello(1))
            name = d0.topology(1).topology
            until(lambda: d0.pong.topologies == ((0, name),))
            p0.close()
            until(lambda: d0.pong.topologies == ((0, ""),))
            with pytest.raises(ControlError, match=r"the connection to prefill .*TP0/2.* is broken"):
                d0.topology(0.05)
            with client(service.port, b"p0") as again:
                again.send(m.Ping(incarnation="a-0.0.0"))  # the same process, after a break
                until(lambda: d0.pong.topologies == ((0, name),))
        assert service.failure is None


# --- first generation


def test_each_target_gets_it_with_its_own_epoch(service):
    with (
        client(service.port, b"p0") as p0,
        client(service.port, b"d0") as d0,
        client(service.port, b"d1") as d1,
    ):
        report(p0)
        p0.send(first((b"d0", 4), (b"d1", 9)))
        until(lambda: d0.heard and d1.heard)
        assert d0.heard == [m.FirstGeneration(**fields(first((b"d0", 4))) | {"epoch": 4})]
        assert (d1.heard[0].epoch, d1.heard[0].targets) == (9, (m.Target(b"d1", 9),))


def test_parked_until_the_rank_says_anything(service):
    with client(service.port, b"p0") as p0:
        report(p0)
        for room in (5, 6):
            p0.send(first((b"d0", 4), room=room))
        until(lambda: len(service._parking) == 2)
        with client(service.port, b"d0") as d0:
            until(lambda: len(d0.heard) == 2)
            assert [each.room for each in d0.heard] == [5, 6]
        assert len(service._parking) == 0


def test_a_client_that_was_cut_off_gets_it_by_its_heartbeat(service):
    """Its connection breaks and comes back without anybody noticing above ZeroMQ."""
    with client(service.port, b"p0") as p0, client(service.port, b"d0", heartbeat_seconds=0.05) as d0:
        report(p0)
        # Parked although it is connected, as if it had been between two connections.
        service._parking.add(b"d0", m.encode(first((b"d0", 4))), time.monotonic())
        p0.send(first((b"d0", 4), room=6))
        until(lambda: len(d0.heard) == 2)
        assert [each.room for each in d0.heard] == [5, 6], "the newer one must not overtake"


def test_a_rank_that_comes_again_with_its_identity_takes_over(service, raw):
    """Also while its former connection is not known to be dead."""
    ping = m.encode(m.Ping(incarnation="i"))
    raw.send(ping)
    with client(service.port, b"p0") as p0:
        report(p0)
        assert raw.poll(1500)
        assert type(m.decode(raw.recv())) is m.Pong
        p0.send(first((b"raw", 1)))
        assert raw.poll(1500)
        assert type(m.decode(raw.recv())) is m.FirstGeneration
        with client(service.port, b"raw") as new:
            new.send(m.TopologyRequest(incarnation="i"))
            until(lambda: new.heard)
            new.heard.clear()
            p0.send(first((b"raw", 2)))
            until(lambda: new.heard)
        assert not raw.poll(0)


def test_parked_too_long_is_dropped(monkeypatch, caplog):
    monkeypatch.setattr(service_module, "SWEEP_MS", 10)
    with ControlService(HOST, park_seconds=0.01) as service, client(service.port, b"p0") as p0:
        report(p0)
        p0.send(first((b"gone", 1)))
        until(lambda: service.counts.get("expired") == 1)
        assert len(service._parking) == 0
    assert "did not come back" in caplog.text


def test_parking_is_bounded(monkeypatch):
    monkeypatch.setattr(service_module, "PARK_MESSAGES", 3)
    with ControlService(HOST) as service, client(service.port, b"p0") as p0:
        report(p0)
        p0.send(first(*((f"gone{number}".encode(), 1) for number in range(8))))
        until(lambda: service.counts.get("crowded out") == 5)
        assert len(service._parking) == 3


def test_what_is_told_again_is_parked_once(service):
    with client(service.port, b"p0") as p0:
        report(p0)
        for room in (5, 6, 5, 5):
            p0.send(first((b"d0", 4), room=room))
        p0.send(first((b"d1", 4)))
        until(lambda: b"d1" in service._parking)
        assert len(service._parking) == 3
        with client(service.port, b"d0") as d0:
            until(lambda: len(d0.heard) == 2)
            assert [each.room for each in d0.heard] == [6, 5], "the newest word is the last"


def test_a_rank_that_does_not_read_is_parked_too(monkeypatch):
    """A full connection neither blocks the service nor drops anything."""
    monkeypatch.setattr(common, "HIGH_WATER", 1)
    monkeypatch.setattr(common, "LINGER_MS", 0)
    pages, count = m.MAX_PAGES // 4, 24
    large = fields(first((b"d0", 1))) | {"tokens": pages, "pages": m.pack_ids(range(pages)), "chunks": (pages,)}
    go_on = threading.Event()
    heard = []

    def slow(message):
        go_on.wait(5)
        heard.append(message.room)

    with (
        ControlService(HOST) as service,
        client(service.port, b"p0") as p0,
        client(service.port, b"d1") as d1,
        ControlClient(HOST, service.port, identity=b"d0", incarnation="i", on_message=slow, heartbeat_seconds=0.02),
    ):
        report(p0)
        for room in range(count):
            p0.send(m.FirstGeneration(**large | {"room": room}))
        p0.send(first((b"d1", 1)))
        until(lambda: d1.heard)
        assert len(service._parking) > 0
        go_on.set()
        until(lambda: len(heard) == count)
        assert heard == list(range(count))


def test_only_reported_prefill_ranks_may_announce(service):
    with client(service.port, b"x") as x, client(service.port, b"d0") as d0, client(service.port, b"p0") as p0:
        report(p0)
        x.send(first((b"d0", 1)))
        until(lambda: service.counts == {"bad FirstGeneration": 1})
        p0.send(first((b"d0", 2), incarnation="other"))
        until(lambda: service.counts == {"bad FirstGeneration": 2})
        p0.send(first((b"d0", 3)))
        until(lambda: d0.heard)
        assert [each.epoch for each in d0.heard] == [3]


# --- what must not end a thread


def test_bad_messages_are_counted_logged_once_and_dropped(service, raw, caplog):
    good = m.encode(m.Ping(incarnation="i"))
    with caplog.at_level(logging.WARNING):
        for frames in ([b""], [b"junk"], [good[:-1]], [good, good], [b"", good], [good + good], [b"x" * 10_000]):
            raw.send_multipart(frames)
        raw.send(m.encode(m.Ack(incarnation="i")))
        raw.send(m.encode(m.Hello(**fields(hello(0)) | {"manifest": b"junk"})))
        until(lambda: len(service.counts) == 3 and service.counts.get("bad Hello"))
    assert service.counts == {"bad message": 7, "bad Ack": 1, "bad Hello": 1}
    assert len([each for each in caplog.records if "control service" in each.getMessage()]) == 3
    assert max(len(each.getMessage()) for each in caplog.records) < 1000
    raw.send(m.encode(m.TopologyRequest(incarnation="i")))
    assert raw.poll(1500)
    assert not m.decode(raw.recv()).ready


def test_too_much_at_once_costs_the_connection_not_the_service(service, raw):
    raw.send(bytes(m.MAX_MESSAGE_BYTES + 1))
    with client(service.port, b"p0") as p0:
        report(p0)


def test_an_error_of_ours_is_logged_and_the_service_goes_on(service, monkeypatch, caplog):
    with client(service.port, b"p0") as p0:
        monkeypatch.setattr(service._registry, "accept", lambda *_: 1 / 0)
        p0.send(hello(0, tp=1))
        until(lambda: service.counts == {"ZeroDivisionError at Hello": 1})
        monkeypatch.undo()
        report(p0)
    assert "Traceback" in caplog.text


def test_a_callback_that_raises(service, caplog):
    heard = []

    def on_message(message):
        heard.append(message)
        raise KeyError("room")

    with ControlClient(HOST, service.port, identity=b"p0", incarnation="i", on_message=on_message) as p0:
        for _ in range(2):
            p0.send(hello(0, tp=1))
        until(lambda: p0.counts == {"KeyError at Topology": 2})
        assert p0.topology(1).ready
        assert p0.failure is None
    assert caplog.text.count("Traceback") == 1


def test_the_client_drops_what_the_service_has_no_business_sending():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        port = sock.bind_to_random_port(f"tcp://{HOST}")
        with client(port, b"d0") as d0:
            assert sock.poll(1500)
            sock.recv_multipart()
            sock.send_multipart([b"d0", b"junk"])
            sock.send_multipart([b"d0", m.encode(m.Ack(incarnation="i"))])
            sock.send_multipart([b"d0", m.encode(m.Ping(incarnation="i")), b"more"])
            sock.send_multipart([b"d0", m.encode(first((b"d0", 1)))])
            until(lambda: d0.heard)
            assert d0.counts == {"bad message": 2, "bad Ack": 1}
            assert len(d0.heard) == 1


def test_a_thread_that_ends_says_so(monkeypatch, caplog):
    def broken(*_):
        raise zmq.ZMQError(zmq.ENOTSOCK)

    monkeypatch.setattr(service_module.ControlService, "_loop", broken)
    monkeypatch.setattr(client_module.ControlClient, "_loop", broken)
    with ControlService(HOST) as service, client(service.port, b"d0") as d0:
        until(lambda: service.failure and d0.failure)
        for call in (lambda: d0.send(m.Ping(incarnation="i")), lambda: d0.topology(1)):
            with pytest.raises(ControlError, match="has failed: Socket operation on non-socket"):
                call()
    assert "requests will fail" in caplog.text
