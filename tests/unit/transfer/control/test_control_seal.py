"""The control service and its clients with a token: all as without one, and nothing from who has it not."""

import zmq

from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.control import ControlService
from sglang_hetero.transfer.seal import Purpose, Seal
from tests.unit.transfer.control.peers import HOST, client, first, hello, report, until

TOKEN = b"t" * 32


def sealed_client(service, identity, token=TOKEN, **options):
    return client(service.port, identity, seal=Seal(token), **options)


def test_reports_topologies_and_first_tokens():
    with ControlService(HOST, seal=Seal(TOKEN)) as service, sealed_client(service, b"p0") as p0:
        report(p0)
        with sealed_client(service, b"d0") as d0:
            assert d0.topology(1.5).ready
            p0.send(first((b"d0", 3), (b"away", 4)))
            (told,) = until(lambda: [one for one in d0.heard if isinstance(one, m.FirstGeneration)])
            assert told.epoch == 3
        # What is parked is sealed when it goes: by then other messages have gone before it.
        with sealed_client(service, b"away") as late:
            (told,) = until(lambda: [one for one in late.heard if isinstance(one, m.FirstGeneration)])
            assert told.epoch == 4
        assert not service.counts
        assert not p0.counts


def test_what_waits_for_the_service_is_sealed_when_it_goes():
    with ControlService(HOST) as service:
        port = service.port
    seal = Seal(TOKEN)
    with client(port, b"p0", seal=seal) as p0:
        for _ in range(500):
            p0.send(m.TopologyRequest(incarnation="i"))
        context = zmq.Context()
        late = context.socket(zmq.ROUTER)
        late.bind(f"tcp://{HOST}:{port}")
        there = Seal(TOKEN)
        taken = [there.open(late.recv_multipart()[1], Purpose.TO_SERVICE, b"p0") for _ in range(500)]
        assert {type(m.decode(one)) for one in taken} <= {m.TopologyRequest, m.Ping}
        context.destroy(linger=0)


def test_a_client_without_the_token_or_with_another_one_is_told_nothing():
    with ControlService(HOST, seal=Seal(TOKEN)) as service:
        for number, token in enumerate((None, b"u" * 32)):
            with sealed_client(service, b"p%d" % number, token) as stranger:
                stranger.send(hello())
                stranger.send(m.TopologyRequest(incarnation="i"))
                until(lambda expected=2 * number + 2: service.counts.get("unsealed", 0) >= expected)
                assert not stranger.heard
        assert set(service.counts) == {"unsealed"}
        with sealed_client(service, b"p0") as p0:
            report(p0)


def test_a_service_without_the_token_is_not_believed():
    with ControlService(HOST) as service, client(service.port, b"p0") as p0:
        report(p0)
        with sealed_client(service, b"d0") as d0:
            d0.send(m.TopologyRequest(incarnation="i"))
            until(lambda: service.counts.get("unsealed"))
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port(f"tcp://{HOST}")
        with client(port, b"d1", seal=Seal(TOKEN)) as d1:
            identity, _ = router.recv_multipart()
            router.send_multipart([identity, m.encode(first((b"d1", 1)))])
            until(lambda: d1.counts.get("unsealed"))
            assert not d1.heard
        context.destroy(linger=0)


def test_a_sealed_message_under_another_identity_or_again(raw, service):
    """Recorded on the way: neither the same nor another connection can use it."""
    seal = Seal(TOKEN)
    service._seal = Seal(TOKEN)  # the fixture's service, which `raw` is connected to
    request = m.encode(m.TopologyRequest(incarnation="i"))
    raw.send(seal.seal(request, Purpose.TO_SERVICE, b"d0"))
    until(lambda: service.counts.get("unsealed") == 1)
    right = seal.seal(request, Purpose.TO_SERVICE, b"raw")
    raw.send(right)
    answer = seal.open(raw.recv(), Purpose.FROM_SERVICE, b"raw")
    assert not m.decode(answer, limit=m.MAX_TOPOLOGY_BYTES).ready
    raw.send(right)
    until(lambda: service.counts.get("unsealed") == 2)


def test_topologies_that_nobody_asked_for_are_not_kept():
    """A service could name 4,096 replicas of 32 MiB each."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    with client(port, b"d0") as d0:
        identity, _ = router.recv_multipart()
        for number in range(200):
            router.send_multipart([identity, m.encode(m.Topology(incarnation="s", dp_rank=number, reason="none"))])
        router.send_multipart([identity, m.encode(first((b"d0", 1)))])
        until(lambda: d0.heard)
        assert not d0._heard
        assert not d0.counts
    context.destroy(linger=0)
