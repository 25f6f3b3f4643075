"""The client of the control service: sending, opening, closing."""

import subprocess
import sys
import threading
import time

import pytest
import zmq

from sglang_hetero.errors import ControlError, MessageError
from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.control import ControlClient, ControlService, common
from sglang_hetero.transfer.control import client as client_module
from tests.unit.transfer.control.peers import HOST, client, first, hello, report, until


def test_sending_from_many_threads(service):
    count, threads = 50, 4
    with client(service.port, b"p0") as p0, client(service.port, b"d0") as d0:
        report(p0)

        def work(number):
            for each in range(count):
                p0.send(first((b"d0", 1), room=number * count + each))

        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        until(lambda: len(d0.heard) == count * threads)
        rooms = [each.room for each in d0.heard]
        assert sorted(rooms) == list(range(count * threads))
        for number in range(threads):
            own = [room for room in rooms if room // count == number]
            assert own == sorted(own), "one thread's messages stay in order"


def test_more_than_the_connection_takes_at_once(service):
    """Above both high-water marks nothing is lost: it waits at the sender, or is parked until the next heartbeat."""
    count = 3 * common.HIGH_WATER
    with client(service.port, b"p0") as p0, client(service.port, b"d0", heartbeat_seconds=0.02) as d0:
        report(p0)
        for room in range(count):
            p0.send(first((b"d0", 1), room=room))
        until(lambda: len(d0.heard) == count)
        assert [each.room for each in d0.heard] == list(range(count))


def test_sending_never_blocks_and_says_when_nothing_goes_out(monkeypatch):
    monkeypatch.setattr(client_module, "MAX_UNSENT", 5)
    monkeypatch.setattr(common, "HIGH_WATER", 1)
    monkeypatch.setattr(common, "LINGER_MS", 0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        port = sock.bind_to_random_port(f"tcp://{HOST}")
        sock.unbind(sock.get_string(zmq.LAST_ENDPOINT))
        with client(port, b"d0") as d0:
            began = time.monotonic()
            with pytest.raises(
                ControlError, match=rf"messages wait for the control service at {HOST}:{port}.*is prefill"
            ):
                for _ in range(100):
                    d0.send(m.Ping(incarnation="i"))
            assert time.monotonic() - began < 1


def test_what_cannot_be_sent_is_said_to_the_caller(service):
    with client(service.port, b"d0") as d0, pytest.raises(MessageError, match="incarnation"):
        d0.send(m.Ping())


def test_messages_sent_before_the_service_is_there():
    with ControlService(HOST) as service:
        port = service.port
    with client(port, b"p0", heartbeat_seconds=60) as p0, zmq.Context() as context:
        p0.send(hello(0, tp=1))
        with context.socket(zmq.ROUTER) as sock:
            sock.bind(f"tcp://{HOST}:{port}")
            assert sock.poll(1500)
            kinds = {type(m.decode(sock.recv_multipart()[1])) for _ in range(2)}
            assert kinds == {m.Ping, m.Hello}


# --- opening and closing


def test_two_services_have_two_ports(service):
    with ControlService(HOST) as other:
        assert other.port != service.port


def test_an_address_that_is_not_ours():
    with pytest.raises(ControlError, match=r"cannot listen on 192\.0\.2\.1"):
        ControlService("192.0.2.1")


def test_an_address_that_is_none():
    with pytest.raises(ControlError, match="no connection to a control service at"):
        ControlClient("not a host", 1, identity=b"d", incarnation="i", on_message=print)


def test_ipv6():
    with ControlService("::1") as service:
        heard = []
        with ControlClient("::1", service.port, identity=b"p", incarnation="i", on_message=heard.append) as p0:
            p0.send(hello(0, tp=1))
            until(lambda: heard)


def test_whether_a_client_has_ended_is_known(service, monkeypatch):
    with client(service.port, b"d0") as d0:
        assert not d0.ended
        d0.end()
        assert d0.ended
        until(lambda: not d0._thread.is_alive())
    with client(service.port, b"d1") as d1:
        monkeypatch.setattr(d1, "_flush", None)
        until(lambda: d1.failure)
        assert d1.ended


def test_closing_twice_and_using_a_closed_one(service):
    with client(service.port, b"d0") as d0:
        d0.close()
        d0.close()
        with pytest.raises(ControlError, match="is closed"):
            d0.send(m.Ping(incarnation="i"))
        with pytest.raises(ControlError, match="is closed"):
            d0.topology(1)
    service.close()
    service.close()


def test_closing_ends_who_waits(service):
    with client(service.port, b"d0") as d0:
        errors = []

        def wait():
            try:
                d0.topology(60)
            except ControlError as error:
                errors.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: d0._heard)
        d0.close()
        thread.join(1.5)
        assert "is closed" in errors[0]


def test_the_last_message_gets_out(service):
    with client(service.port, b"d0") as d0, client(service.port, b"p0") as p0:
        report(p0)
        p0.send(first((b"d0", 1)))
        p0.close()
        until(lambda: d0.heard)


def test_closing_from_the_callback(service):
    box = []
    box.append(ControlClient(HOST, service.port, identity=b"p0", incarnation="i", on_message=lambda _: box[0].close()))
    box[0].send(hello(0, tp=1))
    until(lambda: not box[0]._thread.is_alive())
    assert box[0].failure is None


def test_asking_from_the_callback_is_refused(service):
    box = []
    with ControlClient(
        HOST, service.port, identity=b"p0", incarnation="i", on_message=lambda _: box[0].topology(60)
    ) as p0:
        box.append(p0)
        p0.send(hello(0, tp=1))
        until(lambda: p0.counts == {"RuntimeError at Topology": 1})


def test_a_process_that_just_ends():
    code = (
        "from sglang_hetero.transfer.control import *\n"
        f"s = ControlService('{HOST}')\n"
        f"c = ControlClient('{HOST}', s.port, identity=b'd', incarnation='i', on_message=print)\n"
        "try: c.topology(0.05)\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "no rank of prefill replica 0" in done.stdout
    assert done.stderr == ""


def test_a_connection_that_breaks_is_known_at_once_and_until_something_comes_again():
    breaks = []
    with ControlService(HOST) as service:
        port = service.port
        d0 = ControlClient(
            HOST,
            port,
            identity=b"d0",
            incarnation="i",
            on_message=print,
            on_broken=lambda: breaks.append(1),
            heartbeat_seconds=0.02,
        )
        until(lambda: d0.pong)
        assert not d0.broken
    with d0:
        until(lambda: d0.broken and breaks == [1])
        with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
            sock.bind(f"tcp://{HOST}:{port}")
            identity, _ = sock.recv_multipart()
            assert d0.broken
            sock.send_multipart([identity, m.encode(m.Pong(incarnation="another"))])
            until(lambda: not d0.broken)
        until(lambda: d0.broken and breaks == [1, 1])
    assert d0.counts == {}
