"""Who follows etcd: real ones that are restarted, stopped and emptied, and one that says what no etcd says."""

import logging
import queue
import threading
from types import SimpleNamespace

import pytest

from sglang_hetero.discovery import etcd as etcd_module
from sglang_hetero.discovery import members as members_module
from sglang_hetero.discovery.etcd import Change, Etcd, Held, Listing
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
            return Listing(5, {key_of(PREFIX, decode_server()): Held(encode(decode_server()), 1)})

        def watch(self, prefix, revision, quiet):
            assert (prefix, revision) == (f"{PREFIX}/", 6)
            yield [Change(key_of(PREFIX, prefill_server()), Held(encode(prefill_server()), 1))]
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
            self.listings = iter([Listing(5, {bad: Held(b"?", 1)}), Listing(9, {})])

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


class Told:
    """An etcd that says what the test tells it to: each reading is the next one of these, and what is watched is
    given by hand. None: it is away."""

    def __init__(self, *readings):
        self.readings, self.changes = queue.SimpleQueue(), queue.SimpleQueue()
        for one in readings:
            self.readings.put(one)

    def __call__(self, options):
        return self

    def read(self, prefix):
        found = self.readings.get(timeout=60)
        if found is None:
            raise DiscoveryError("it is away")
        return found

    def watch(self, prefix, revision, quiet):
        yield []
        while (changes := self.changes.get(timeout=60)) is not None:
            yield changes

    def close(self):
        self.readings.put(None)
        self.changes.put(None)


def listing(*servers, lease=1):
    return Listing(5, {key_of(PREFIX, one): Held(encode(one), lease) for one in servers})


TOLD = SimpleNamespace(prefix=PREFIX, lease=10)


def test_after_every_outage_who_is_missing_stays_for_a_lease_anew(follow):
    """etcd that is up for a moment only, away for longer than a lease, and back: servers have had no time."""
    now = SimpleNamespace(time=0.0)
    etcd = Told(listing(decode_server()))
    one = follow(TOLD, connect=etcd, clock=lambda: now.time)
    until(one.snapshot)
    for _ in range(3):
        etcd.readings.put(None)
        etcd.changes.put(None)
        until(lambda: one.trouble)
        now.time += 100.0
        etcd.readings.put(listing())
        until(lambda: not one.trouble)
        assert one.snapshot() == (decode_server(),)
    now.time += 9.9
    etcd.changes.put(None)
    etcd.readings.put(listing())
    until(etcd.readings.empty)
    etcd.changes.put([])  # it watches again, so that reading has been looked at
    until(etcd.changes.empty)
    assert one.snapshot() == (decode_server(),)
    now.time += 0.2
    etcd.changes.put(None)
    etcd.readings.put(listing())
    until(lambda: one.snapshot() == ())


def test_who_is_missing_without_an_outage_stays_for_a_lease_too(follow):
    """An etcd that was silent has been replaced by an empty one between two readings, and nobody has noticed."""
    now = SimpleNamespace(time=0.0)
    slow = decode_server(url="http://10.0.0.77:1", lease=60)
    etcd = Told(listing(decode_server(), slow))
    one = follow(TOLD, connect=etcd, clock=lambda: now.time)
    until(one.snapshot)

    def read_again(*servers):
        etcd.changes.put(None)
        etcd.readings.put(listing(*servers))
        until(etcd.readings.empty)
        etcd.changes.put([])  # it watches again, so that reading has been looked at
        until(etcd.changes.empty)

    read_again()
    assert len(one.snapshot()) == 2, "servers that are well were dropped at once"
    now.time = 9.9
    read_again()
    assert len(one.snapshot()) == 2
    now.time = 10.1
    read_again()
    until(lambda: one.snapshot() == (slow,))  # a server renews as often as its own lease says
    now.time = 60.1
    read_again()
    until(lambda: one.snapshot() == ())


def test_it_is_settled_a_lease_after_the_first_reading_and_after_an_outage(follow):
    now = SimpleNamespace(time=0.0)
    etcd = Told()
    one = follow(TOLD, connect=etcd, clock=lambda: now.time)
    assert not one.settled
    now.time = 100.0
    etcd.readings.put(listing())
    assert one.wait(10) and not one.settled
    now.time = 110.0
    assert one.settled
    etcd.changes.put(None)
    etcd.readings.put(None)
    until(lambda: one.trouble)
    etcd.readings.put(listing())
    until(lambda: not one.trouble)
    assert not one.settled
    now.time = 120.0
    assert one.settled


def test_records_of_others_do_not_put_out_who_is_known(follow, monkeypatch):
    """etcd lists no more than so many, and those that somebody else has written come first."""
    monkeypatch.setattr(members_module, "MAX_INSTANCES", 3)
    known = [decode_server(url=f"http://10.9.0.{number}:1") for number in range(2)]
    others = [decode_server(url=f"http://10.1.0.{number}:1") for number in range(3)]
    now = SimpleNamespace(time=0.0)
    etcd = Told(listing(*known))
    one = follow(TOLD, connect=etcd, clock=lambda: now.time)
    until(one.snapshot)
    for _ in range(2):
        now.time += 1000.0
        etcd.changes.put(None)
        etcd.readings.put(Listing(5, listing(*others).records, truncated=True))
        until(lambda: "more than 3 records" in one.trouble)
        assert set(known) < set(one.snapshot()) and len(one.snapshot()) == 3


def test_who_is_missing_goes_in_time_however_much_is_written(follow):
    now = SimpleNamespace(time=0.0)
    etcd = Told(listing(decode_server()), None, listing())
    one = follow(TOLD, connect=etcd, clock=lambda: now.time)
    until(one.snapshot)
    etcd.changes.put(None)
    until(lambda: one._leaving)
    now.time = 11.0
    etcd.readings.put(listing(prefill_server()))
    etcd.changes.put([Change(key_of(PREFIX, prefill_server()), Held(encode(prefill_server()), 1))])
    until(lambda: one.snapshot() == (prefill_server(),))


def test_a_record_without_a_lease_is_no_server(shared_etcd, follow):
    """Nobody would take it away."""
    hand = Hand(shared_etcd)
    key = key_of(PREFIX, decode_server())
    hand.etcd.put(key, encode(decode_server()), 0)
    one = follow(shared_etcd.options(prefix=PREFIX))
    until(lambda: key in one.skipped)
    assert one.snapshot() == () and "has no lease" in one.skipped[key]
    hand.put(decode_server())
    until(lambda: one.snapshot() == (decode_server(),))
    hand.etcd.put(key, encode(decode_server()), 0)
    until(lambda: one.snapshot() == ())
    hand.etcd.close()


def test_no_more_is_kept_than_servers_need(follow, monkeypatch, caplog):
    """However long the keys are that somebody writes, however many, and however often etcd is away between."""
    monkeypatch.setattr(members_module, "MAX_INSTANCES", 3)

    def others(start, count=3):
        return [decode_server(url=f"http://10.1.0.{start + number}:1") for number in range(count)]

    long = f"{PREFIX}/" + "k" * (1 << 20)
    etcd = Told(Listing(5, {long: Held(b"?", 1)}))
    one = follow(TOLD, connect=etcd)
    until(lambda: one.skipped)
    etcd.changes.put([Change(f"{long}2", Held(b"?", 1))])
    until(lambda: len(one.skipped) == 2)
    assert all(len(key) < 2000 for key in one.skipped)
    etcd.changes.put([Change(long, None)])
    until(lambda: len(one.skipped) == 1)
    for start in range(0, 60, 10):
        etcd.changes.put(None)
        etcd.readings.put(None)
        until(lambda: one.trouble)
        etcd.readings.put(listing(*others(start)))
        until(lambda: not one.trouble)
        assert set(others(start)) == set(one.snapshot()) and len(one._leaving) == 0
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            etcd.changes.put([Change(key_of(PREFIX, new), Held(encode(new), 1)) for new in others(100 + number, 1)])
        until(lambda: "more than 3 records" in one.trouble)
        until(etcd.changes.empty)
    assert len(one.snapshot()) == 3
    assert sum("not all servers are known" in record.getMessage() for record in caplog.records) == 1
