"""Who follows etcd: real ones that are restarted, stopped and emptied, and one that says what no etcd says."""

import logging
import threading
from types import SimpleNamespace

import pytest

from sglang_hetero.discovery import etcd as etcd_module
from sglang_hetero.discovery import members as members_module
from sglang_hetero.discovery.etcd import Change, Etcd, Listing
from sglang_hetero.discovery.members import EtcdMembers, key_of
from sglang_hetero.discovery.record import encode
from sglang_hetero.errors import DiscoveryError
from tests.unit.discovery.etcd_server import until
from tests.unit.discovery.servers import decode_server, prefill_server

PREFIX = "/fleet"


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(etcd_module, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(members_module, "MAX_RETRY_SECONDS", 0.3)


@pytest.fixture
def follow(request):
    """Members that are closed when the test ends, and how often they have told of a change."""
    made = []

    def start(options, **fields):
        one = EtcdMembers(options, **{"retry": 0.05, **fields})
        one.heard = []
        one.subscribe(lambda: one.heard.append(one.snapshot()))
        made.append(one)
        return one

    yield start
    for one in made:
        one.close()
        assert not one.worker.thread.is_alive()
        assert one.worker.fault == ""


class Hand:
    """Writes records by hand."""

    def __init__(self, etcd, prefix=PREFIX):
        self.prefix, self.etcd = prefix, Etcd(etcd.options())
        self.lease = self.etcd.grant(3600)

    def put(self, instance):
        self.etcd.put(key_of(self.prefix, instance), encode(instance), self.lease)

    def put_bytes(self, key, data):
        self.etcd.put(key, data, self.lease)


def test_servers_come_change_and_go(shared_etcd, follow):
    hand = Hand(shared_etcd)
    hand.put(decode_server())
    one = follow(shared_etcd.options(prefix=PREFIX))
    assert one.wait(10) and one.trouble == ""
    assert one.snapshot() == (decode_server(),)
    hand.put(prefill_server())
    until(lambda: one.snapshot() == (decode_server(), prefill_server()))
    hand.put(prefill_server(incarnation="second"))
    until(lambda: one.snapshot() == (decode_server(), prefill_server(incarnation="second")))
    hand.etcd.revoke(hand.lease)
    until(lambda: one.snapshot() == ())
    until(lambda: one.heard and one.heard[-1] == ())
    assert (decode_server(), prefill_server()) in one.heard


def test_a_server_whose_lease_ends_is_gone(shared_etcd, follow):
    hand = Hand(shared_etcd)
    hand.lease = hand.etcd.grant(1)
    one = follow(shared_etcd.options(prefix=PREFIX))
    hand.put(decode_server())
    until(one.snapshot)
    until(lambda: not one.snapshot())
    assert one.trouble == ""


def test_while_etcd_is_down_nobody_goes_and_afterwards_it_goes_on(etcd, follow, caplog):
    hand = Hand(etcd)
    hand.put(decode_server())
    one = follow(etcd.options(prefix=PREFIX))
    until(one.snapshot)
    with caplog.at_level(logging.WARNING):
        etcd.kill()
        until(lambda: one.trouble)
        until(lambda: "does not answer" in one.trouble)
        assert etcd.url in one.trouble and "the 1 servers that were known stay" in one.trouble
        assert one.snapshot() == (decode_server(),)
        etcd.start()
        until(lambda: not one.trouble)
    assert one.snapshot() == (decode_server(),)
    told = [record.getMessage() for record in caplog.records if record.name == members_module.__name__]
    assert ["etcd is away" in told[0], "etcd is back: 1 servers" in told[1], len(told)] == [True, True, 2]
    hand.put(prefill_server())
    until(lambda: len(one.snapshot()) == 2)


def test_etcd_without_a_word_is_noticed(etcd, follow):
    Hand(etcd).put(decode_server())
    one = follow(etcd.options(prefix=PREFIX), quiet=0.3)
    until(one.snapshot)
    etcd.pause()
    until(lambda: one.trouble)
    assert one.snapshot() == (decode_server(),)
    etcd.resume()
    until(lambda: not one.trouble)
    assert one.snapshot() == (decode_server(),)


def test_who_is_missing_after_etcd_was_away_stays_for_a_lease(etcd, follow):
    """etcd has lost its data; who registers again in time is never missed, who does not is gone then."""
    hand = Hand(etcd)
    hand.put(decode_server())
    hand.put(prefill_server())
    now = SimpleNamespace(time=0.0)
    one = follow(etcd.options(prefix=PREFIX), quiet=0.2, clock=lambda: now.time)
    until(lambda: len(one.snapshot()) == 2)
    etcd.kill()
    until(lambda: one.trouble)
    etcd.empty()
    etcd.start()
    until(lambda: not one.trouble)
    assert len(one.snapshot()) == 2
    Hand(etcd).put(prefill_server())
    now.time = 2.9
    until(lambda: set(one._leaving) == {key_of(PREFIX, decode_server())})
    assert len(one.snapshot()) == 2
    now.time = 3.1
    until(lambda: one.snapshot() == (prefill_server(),))
    assert all(prefill_server() in heard for heard in one.heard[1:])


def test_a_watch_goes_on_behind_a_compaction(shared_etcd, follow):
    """While etcd is stopped for this router only, history goes on and is thrown away."""
    hand = Hand(shared_etcd)
    hand.put(decode_server())
    one = follow(shared_etcd.options(prefix=PREFIX), quiet=600.0, connect=Lagging)
    assert one.wait(10)
    for number in range(5):
        hand.put(prefill_server(incarnation=str(number)))
    shared_etcd.ctl("compaction", str(hand.etcd.read("/").revision))
    Lagging.go.set()
    until(lambda: prefill_server(incarnation="4") in one.snapshot())
    assert one.trouble == ""


class Lagging(Etcd):
    """Its first watch begins late."""

    go = threading.Event()

    def watch(self, *arguments):
        assert self.go.wait(20)
        return super().watch(*arguments)


BAD = {
    f"{PREFIX}/decode/10.0.0.1:1": b"no json",
    f"{PREFIX}/decode/10.0.0.2:1": b'{"version":9}',
    f"{PREFIX}/prefill/10.0.0.9:1": encode(prefill_server()),
    f"{PREFIX}/nobody": encode(prefill_server()),
    f"{PREFIX}/\n": b"",
    f"{PREFIX}/decode/10.0.0.3:1": bytes(1 << 20),
}


def test_records_that_cannot_be_read_are_left_out_and_logged_once(shared_etcd, follow, caplog):
    hand = Hand(shared_etcd)
    with caplog.at_level(logging.WARNING):
        for key, data in list(BAD.items())[:3]:
            hand.put_bytes(key, data)
        one = follow(shared_etcd.options(prefix=PREFIX), quiet=0.1)
        assert one.wait(10)
        for key, data in list(BAD.items())[3:]:
            hand.put_bytes(key, data)
        hand.put(decode_server())
        until(lambda: one.snapshot() == (decode_server(),))
        until(lambda: one.skipped.keys() == BAD.keys())
        reads = one._etcd.read
        count = []
        one._etcd.read = lambda prefix: count.append(prefix) or reads(prefix)
        until(lambda: len(count) >= 3)
    told = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(told) == len(BAD)
    assert all(text.isprintable() for text in told)
    assert one.trouble == ""
    assert "belongs under" in one.skipped[f"{PREFIX}/nobody"]


def test_a_good_record_that_is_overwritten_with_a_bad_one_is_out(shared_etcd, follow):
    hand = Hand(shared_etcd)
    hand.put(decode_server())
    one = follow(shared_etcd.options(prefix=PREFIX))
    until(one.snapshot)
    hand.put_bytes(key_of(PREFIX, decode_server()), b"?")
    until(lambda: not one.snapshot())
    hand.put(decode_server())
    until(one.snapshot)
    assert one.skipped == {}


def test_too_many_records_are_said_to_be_there(shared_etcd, follow, monkeypatch):
    for module in (etcd_module, members_module):
        monkeypatch.setattr(module, "MAX_INSTANCES", 2)
    hand = Hand(shared_etcd)
    one = follow(shared_etcd.options(prefix=PREFIX))
    assert one.wait(10)
    for number in range(3):
        hand.put(decode_server(url=f"http://10.0.0.{number}:1"))
    until(lambda: "more than 2 records" in one.trouble)
    assert len(one.snapshot()) == 2
    late = follow(shared_etcd.options(prefix=PREFIX))
    until(lambda: "more than 2 records" in late.trouble)
    assert len(late.snapshot()) == 2


def test_a_callback_that_fails_is_not_the_last_one(shared_etcd, follow, caplog):
    hand = Hand(shared_etcd)
    one = follow(shared_etcd.options(prefix=PREFIX))
    assert one.wait(10)
    one._callbacks.insert(0, lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        hand.put(decode_server())
        until(lambda: one.heard)
        hand.put(prefill_server())
        until(lambda: len(one.heard) == 2)
    assert "a callback on a change of servers has failed" in caplog.text


def test_what_is_no_discovery_error_does_not_end_the_thread(follow, caplog):
    """An error of ours: it is said, and all is begun anew."""

    class Broken:
        def __init__(self, options):
            self.calls = 0
            self.closed = threading.Event()

        def read(self, prefix):
            self.calls += 1
            if self.calls == 1:
                raise DiscoveryError("etcd is away")
            if self.calls == 2:
                raise KeyError("ours")
            return Listing(5, {key_of(PREFIX, decode_server()): encode(decode_server())})

        def watch(self, prefix, revision, quiet):
            assert (prefix, revision) == (f"{PREFIX}/", 6)
            yield [Change(key_of(PREFIX, prefill_server()), encode(prefill_server()))]
            self.closed.wait(20)

        def close(self):
            self.closed.set()

    one = follow(SimpleNamespace(prefix=PREFIX, lease=3), connect=Broken)
    assert one.wait(10)
    until(lambda: len(one.snapshot()) == 2)
    assert one.trouble == ""
    assert "KeyError" in caplog.text


def test_a_bad_record_that_went_unseen_is_forgotten(follow):
    """The watch has missed its end."""
    bad, second, closed = f"{PREFIX}/decode/a:1", threading.Event(), threading.Event()

    class Once:
        def __init__(self, options):
            self.listings = iter([Listing(5, {bad: b"?"}), Listing(9, {})])

        def read(self, prefix):
            return next(self.listings)

        def watch(self, prefix, revision, quiet):
            yield []
            (second if revision == 6 else closed).wait(20)

        def close(self):
            second.set()
            closed.set()

    one = follow(SimpleNamespace(prefix=PREFIX, lease=3), connect=Once)
    until(lambda: one.skipped.keys() == {bad})
    second.set()
    until(lambda: one.skipped == {})


def test_before_etcd_has_answered_it_is_said(follow):
    gate = threading.Event()

    class Slow:
        def __init__(self, options):
            pass

        def read(self, prefix):
            gate.wait(20)
            raise DiscoveryError("late")

        def close(self):
            gate.set()

    one = follow(SimpleNamespace(prefix=PREFIX, lease=3), connect=Slow)
    assert not one.wait(0.01)
    assert one.trouble == members_module.NOT_READ
