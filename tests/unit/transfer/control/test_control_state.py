"""The parts of the control service without sockets: who has reported, and what is parked."""

import random

import pytest
from msgspec.structs import replace

from sglang_hetero.errors import HeteroError
from sglang_hetero.layout import wire
from sglang_hetero.transfer.control import registry as registry_module
from sglang_hetero.transfer.control.parking import Parking
from sglang_hetero.transfer.control.registry import Registry
from tests.reshard_oracle.pair import decode
from tests.unit.transfer.control.peers import hello


def reported(*hellos):
    registry = Registry("service")
    for each in hellos:
        registry.accept(each, each.incarnation.encode())
    return registry


# --- registry


def test_ready_when_all_ranks_are_there():
    places = [(pp, tp) for pp in range(2) for tp in range(2)]
    hellos = [hello(tp, pp_rank=pp, pp_size=2) for pp, tp in places]
    shuffled = [hellos[i] for i in (3, 0, 2)]
    registry = reported(*shuffled)
    waiting = registry.topology(0)
    assert not waiting.ready
    assert waiting.reason == "3 of 4 ranks of prefill replica 0 have reported; missing: PP0 TP1"
    assert registry.accept(hellos[1], b"x")[1]
    topology = registry.topology(0)
    assert topology.ready
    assert [rank.manifest for rank in topology.ranks] == [each.manifest for each in hellos]
    assert [(rank.host, rank.port, rank.session) for rank in topology.ranks[:2]] == [
        ("127.0.0.1", 7000, "s0"),
        ("127.0.0.1", 7001, "s1"),
    ]


def test_nobody_and_very_many_missing():
    assert "no rank of prefill replica 3 has reported" in reported().topology(3).reason
    # A claim of 16 million ranks; their names are not even made.
    reason = reported(hello(0, tp=1, pp_size=4096)).topology(0).reason
    assert reason.startswith("1 of 4096")
    assert reason.endswith("PP8 TP0 and 4087 more")


def test_the_order_of_arrival_does_not_name_a_topology():
    hellos = [hello(0), hello(1)]
    names = {reported(*order).topology(0).topology for order in (hellos, hellos[::-1])}
    assert len(names) == 1
    assert reported(hello(0, start="b"), hello(1)).topology(0).topology not in names


def test_a_restarted_rank_replaces_its_former_self():
    registry = reported(hello(0), hello(1))
    before = registry.topology(0)
    _, changed = registry.accept(hello(1, start="b"), b"b")
    after = registry.topology(0)
    assert changed
    assert after.ready
    assert after.topology != before.topology
    assert registry.knows(b"b", "b-0.0.1")
    assert not registry.knows(b"a-0.0.1", "a-0.0.1")
    with pytest.raises(HeteroError, match="a newer process has taken"):
        registry.accept(hello(1), b"a-0.0.1")
    assert registry.topology(0) == after


def test_the_same_report_again_changes_nothing():
    registry = reported(hello(0), hello(1))
    assert registry.accept(hello(1), b"a-0.0.1")[1] is False
    assert registry.identities(0) == [b"a-0.0.0", b"a-0.0.1"]


def test_a_restart_with_another_size_drops_the_former_ranks():
    registry = reported(hello(0), hello(1))
    registry.accept(hello(0, tp=1, start="b"), b"b")
    assert registry.topology(0).ready
    assert registry.identities(0) == [b"b"]
    registry = reported(hello(0, tp=1, start="b"), hello(1))
    assert "1 of 2" in registry.topology(0).reason


def test_replicas_are_apart():
    registry = reported(*(hello(rank, dp_rank=dp, dp_size=2) for dp in range(2) for rank in range(2)))
    one, two = registry.topology(0), registry.topology(1)
    assert one.ready
    assert two.ready
    assert one.topology != two.topology
    assert (one.dp_rank, two.dp_rank) == (0, 1)


def test_what_is_no_report():
    registry, good = reported(hello(0), hello(1)), hello(0, start="b")
    before = registry.topology(0)
    at_decode = wire.encode(replace(decode(), incarnation="b"))
    for bad, words in (
        (replace(good, manifest=b"SGHM\1\x80"), "manifest"),
        (replace(good, manifest=b"junk"), "no manifest"),
        (replace(good, incarnation="c"), "another start"),
        (replace(good, incarnation="b", manifest=at_decode), "no prefill rank"),
    ):
        with pytest.raises(HeteroError, match=words):
            registry.accept(bad, b"b")
    assert registry.topology(0) == before


def test_reports_are_bounded(monkeypatch):
    size = len(hello(0, dp_size=9).manifest)
    monkeypatch.setattr(registry_module, "MAX_HELD_BYTES", 2 * size + size // 2)
    registry = reported(hello(0, dp_size=9), hello(0, dp_rank=1, dp_size=9))
    with pytest.raises(HeteroError, match="too many ranks"):
        registry.accept(hello(0, dp_rank=2, dp_size=9), b"x")
    # Replacing one takes no more.
    for start in "bcdef":
        registry.accept(hello(0, dp_rank=1, dp_size=9, start=start), b"x")


def test_manifests_that_one_message_cannot_hold(monkeypatch):
    registry = reported(hello(0), hello(1))
    monkeypatch.setattr(registry_module, "MAX_TOPOLOGY_BYTES", 1000)
    assert "manifests of prefill replica 0 take" in registry.topology(0).reason


# --- parking


def sent_to(log, room=100):
    """A peer that takes so many messages."""

    def send(payload):
        if len(log) >= room:
            return False
        log.append(payload)
        return True

    return send


def test_first_in_first_out_for_each():
    parking, log = Parking(10, 100, 1000), []
    for identity, payload in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3")):
        assert parking.add(identity, payload, 0.0) == 0
    parking.deliver(b"c", sent_to(log))
    assert log == []
    parking.deliver(b"a", sent_to(log))
    assert log == [b"1", b"3"]
    assert b"a" not in parking
    assert b"b" in parking
    assert (len(parking), parking.nbytes) == (1, 1)


def test_what_could_not_be_delivered_stays():
    parking, log = Parking(10, 100, 1000), []
    for payload in (b"1", b"2", b"3"):
        parking.add(b"a", payload, 0.0)
    parking.deliver(b"a", sent_to(log, room=2))
    assert (log, len(parking)) == ([b"1", b"2"], 1)
    parking.deliver(b"a", sent_to(log))
    assert (log, len(parking), parking.nbytes) == ([b"1", b"2", b"3"], 0, 0)


def test_time_number_and_bytes_are_bounded():
    parking = Parking(10, 3, 100)
    for payload in (b"1", b"2", b"3"):
        parking.add(b"a", payload, float(payload))
    assert parking.add(b"b", b"4", 4.0) == 1
    assert parking.add(b"b", bytes(99), 5.0) == 2
    assert (len(parking), parking.nbytes) == (2, 100)
    assert b"a" not in parking
    assert parking.add(b"c", bytes(101), 6.0) == 3, "what is too large by itself is not kept either"
    assert (len(parking), parking.nbytes) == (0, 0)
    parking.add(b"a", b"1", 7.0)
    assert parking.expire(16.9) == 0
    assert parking.expire(17.0) == 1
    assert len(parking) == 0


def test_its_books_balance():
    rng, parking, now, held = random.Random(3), Parking(5, 20, 500), 0.0, {}
    for _ in range(20_000):
        now += rng.random()
        identity = bytes([rng.randrange(5)])
        action = rng.random()
        if action < 0.7:
            parking.add(identity, rng.randbytes(rng.randrange(120)), now)
        elif action < 0.9:
            parking.deliver(identity, sent_to([], room=rng.randrange(4)))
        else:
            parking.expire(now)
        held = list(parking._held.values())
        assert parking.nbytes == sum(len(payload) for _, _, payload in held) <= 500
        assert len(parking) <= 20
        assert {identity for _, identity, _ in held} == set(parking._numbers)
