"""A server's record in a real etcd: written, kept, written again, and taken away."""

import json
import logging
import threading

import pytest

from sglang_hetero.discovery import etcd as etcd_module
from sglang_hetero.discovery import registrar as registrar_module
from sglang_hetero.discovery.etcd import Etcd, Held
from sglang_hetero.discovery.members import EtcdMembers, key_of
from sglang_hetero.discovery.record import decode, encode
from sglang_hetero.discovery.registrar import Registrar, Server, Standing
from sglang_hetero.errors import DiscoveryError
from tests.unit.discovery.etcd_server import free_port, until
from tests.unit.discovery.servers import decode_server

PREFIX = "/fleet"
KEY = key_of(PREFIX, decode_server())


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(etcd_module, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(registrar_module, "MAX_RETRY_SECONDS", 0.3)


@pytest.fixture
def register():
    made = []

    def start(options, instance=None, serves=lambda: True, **fields):
        server = Server(serves, lambda: decode_server() if instance is None else instance)
        one = Registrar(options, server, **{"retry": 0.05, "health": 0.02, **fields})
        made.append(one)
        return one

    yield start
    for one in made:
        one.close(10)
        assert not one.worker.thread.is_alive()
        assert one.worker.fault == ""


def look(etcd):
    """The record, as it stands in etcd now."""
    one = Etcd(etcd.options())
    try:
        found = one.get(KEY)
    finally:
        one.close()
    return None if found is None else decode(found.value)


def stands(one, standing):
    return lambda: one.registration.standing == standing


def test_it_registers_when_the_server_serves_and_leaves_with_it(shared_etcd, register):
    up = threading.Event()
    one = register(shared_etcd.options(prefix=PREFIX), serves=up.is_set)
    assert one.registration.standing == Standing.WAITING
    assert look(shared_etcd) is None
    up.set()
    until(stands(one, Standing.REGISTERED))
    assert look(shared_etcd) == decode_server()
    told = one.registration
    assert (told.key, told.etcd, told.trouble) == (KEY, shared_etcd.url, "")
    one.close()
    assert look(shared_etcd) is None
    assert one.registration.standing == Standing.LEFT


def test_it_renews_its_lease(shared_etcd, register, monkeypatch):
    monkeypatch.setattr(registrar_module, "RENEWALS", 600)  # so every 0.1 s, of a lease that no busy machine outlasts
    one = register(shared_etcd.options(prefix=PREFIX, lease=60))
    until(stands(one, Standing.REGISTERED))
    lease = one._lease

    def left():
        return int(json.loads(shared_etcd.ctl("lease", "timetolive", f"{lease:x}", "-w", "json"))["ttl"])

    gate, renew = threading.Event(), one._etcd.keep_alive
    one._etcd.keep_alive = lambda number: gate.wait(60) and renew(number)
    until(lambda: left() < 57)
    gate.set()
    until(lambda: left() > 57)
    assert look(shared_etcd) == decode_server(lease=60) and one._lease == lease


def test_a_process_that_is_killed_goes_with_its_lease(shared_etcd, register):
    one = register(shared_etcd.options(prefix=PREFIX))
    until(stands(one, Standing.REGISTERED))
    one._etcd.keep_alive = one._etcd.revoke = lambda lease: None  # as if it were not there any more
    until(lambda: look(shared_etcd) is None)
    until(lambda: look(shared_etcd) == decode_server())  # and this one is, after all


def test_a_lost_lease_is_replaced(shared_etcd, register):
    one = register(shared_etcd.options(prefix=PREFIX))
    until(stands(one, Standing.REGISTERED))
    other = Etcd(shared_etcd.options())
    other.revoke(one._lease)
    assert look(shared_etcd) is None
    until(lambda: look(shared_etcd) == decode_server())
    other.close()


def test_a_record_that_is_removed_by_hand_is_written_again(shared_etcd, register):
    one = register(shared_etcd.options(prefix=PREFIX))
    until(stands(one, Standing.REGISTERED))
    shared_etcd.ctl("del", KEY)
    until(lambda: look(shared_etcd) == decode_server())
    other = Etcd(shared_etcd.options())
    for text in ("nonsense", encode(decode_server()).decode()):  # for ever, since without a lease
        shared_etcd.ctl("put", KEY, text)
        until(lambda: other.get(KEY) == Held(encode(decode_server()), one._lease))
    other.close()
    one.close()
    assert look(shared_etcd) is None  # so it was written with the lease


def test_etcd_that_is_restarted_finds_it_again(etcd, register):
    one = register(etcd.options(prefix=PREFIX))
    until(stands(one, Standing.REGISTERED))
    etcd.kill()
    until(stands(one, Standing.AWAY))
    assert etcd.url in one.registration.trouble
    etcd.start()
    until(stands(one, Standing.REGISTERED))
    assert look(etcd) == decode_server() and one.registration.trouble == ""


def test_etcd_that_has_lost_everything_hears_it_again(etcd, register):
    one = register(etcd.options(prefix=PREFIX))
    until(stands(one, Standing.REGISTERED))
    etcd.kill()
    etcd.empty()
    etcd.start()
    until(lambda: look(etcd) == decode_server())
    until(stands(one, Standing.REGISTERED))


def test_a_follower_does_not_miss_it_while_etcd_restarts(etcd, register, monkeypatch):
    """The two together, etcd losing everything between: no moment without the server."""
    monkeypatch.setattr(registrar_module, "RENEWALS", 200)  # every 0.3 s
    one = register(etcd.options(prefix=PREFIX, lease=60))
    members = EtcdMembers(etcd.options(prefix=PREFIX, lease=60), retry=0.05)
    seen = []
    members.subscribe(lambda: seen.append(members.snapshot()))
    until(lambda: members.snapshot() == (decode_server(lease=60),))
    for lose in (False, True):
        etcd.kill()
        until(lambda: members.trouble)
        if lose:
            etcd.empty()
        etcd.start()
        until(lambda: not members.trouble)
        until(lambda: look(etcd) == decode_server(lease=60))
    assert members.snapshot() == (decode_server(lease=60),)
    assert () not in seen
    one.close()
    until(lambda: members.snapshot() == ())
    members.close()


def test_it_begins_while_etcd_is_away(etcd, register):
    etcd.kill()
    one = register(etcd.options(prefix=PREFIX))
    until(stands(one, Standing.AWAY))
    etcd.start()
    until(lambda: look(etcd) == decode_server())


def test_it_uses_the_endpoint_that_answers(shared_etcd, register):
    nobody = f"127.0.0.1:{free_port()}"
    one = register(shared_etcd.options(prefix=PREFIX, endpoints=(nobody, shared_etcd.address)))
    until(stands(one, Standing.REGISTERED))
    assert one.registration.etcd == shared_etcd.url and look(shared_etcd) == decode_server()


def test_a_restarted_server_takes_its_formers_place_at_once(shared_etcd, register):
    former = register(shared_etcd.options(prefix=PREFIX, lease=3600))
    until(stands(former, Standing.REGISTERED))
    former._etcd.revoke = lambda lease: None  # it was killed: its lease goes on
    former.close()
    one = register(shared_etcd.options(prefix=PREFIX), decode_server(incarnation="second"))
    until(stands(one, Standing.REGISTERED))
    assert look(shared_etcd) == decode_server(incarnation="second")
    other = Etcd(shared_etcd.options())
    other.revoke(former._lease)  # and what ends with it is not the new record
    assert look(shared_etcd) == decode_server(incarnation="second")
    other.close()


def test_of_two_with_one_url_the_newer_one_stays_and_the_older_says_so(shared_etcd, register):
    older = register(shared_etcd.options(prefix=PREFIX))
    until(stands(older, Standing.REGISTERED))
    newer = register(shared_etcd.options(prefix=PREFIX), decode_server(incarnation="second"))
    until(stands(older, Standing.DISPLACED))
    assert "SGLANG_HETERO_ADVERTISE_URL" in older.registration.trouble
    assert look(shared_etcd).incarnation == "second"
    newer.close()
    until(lambda: look(shared_etcd) == decode_server())
    until(stands(older, Standing.REGISTERED))
    assert older.registration.trouble == ""


def test_the_older_one_leaves_the_newer_ones_record_where_it_is(shared_etcd, register):
    older = register(shared_etcd.options(prefix=PREFIX))
    until(stands(older, Standing.REGISTERED))
    newer = register(shared_etcd.options(prefix=PREFIX), decode_server(incarnation="second"))
    until(stands(newer, Standing.REGISTERED))
    older.close()
    assert look(shared_etcd).incarnation == "second"


def test_the_end_does_not_wait_for_an_etcd_that_is_away(etcd, register):
    one = register(etcd.options(prefix=PREFIX))
    until(stands(one, Standing.REGISTERED))
    etcd.pause()
    one.close(10)
    assert one.registration.standing == Standing.LEFT
    assert "the record stays until its lease ends" in one.registration.trouble
    etcd.resume()


def test_a_server_that_cannot_say_what_it_is_is_asked_again(shared_etcd, register):
    said = iter([DiscoveryError("its ranks have not reported yet"), ZeroDivisionError("ours"), None])

    def describe():
        error = next(said)
        if error is not None:
            raise error
        return decode_server()

    one = Registrar(shared_etcd.options(prefix=PREFIX), Server(lambda: True, describe), retry=0.05)
    until(stands(one, Standing.REGISTERED))
    assert look(shared_etcd) == decode_server()
    one.close()


def test_each_trouble_is_logged_once(etcd, register, caplog):
    with caplog.at_level(logging.INFO):
        one = register(etcd.options(prefix=PREFIX))
        until(stands(one, Standing.REGISTERED))
        etcd.kill()
        until(stands(one, Standing.AWAY))
        tried = []
        alive = one._etcd.keep_alive
        one._etcd.keep_alive = lambda lease: tried.append(lease) or alive(lease)
        until(lambda: len(tried) > 3)
        etcd.start()
        until(stands(one, Standing.REGISTERED))
    told = [record.getMessage() for record in caplog.records if record.name == registrar_module.__name__]
    assert [text for text in told if "registered" in text] == [
        f"discovery: registered, {KEY} in etcd at {etcd.url}"
    ] * 2
    away = [text for text in told if "away" in text]
    assert len(away) == len(set(away)) <= 3


def test_a_record_without_a_lease_does_not_displace_a_server(shared_etcd, register, caplog):
    """It would for ever, since nobody ends it."""
    one = register(shared_etcd.options(prefix=PREFIX))
    until(stands(one, Standing.REGISTERED))
    other = Etcd(shared_etcd.options())
    other.put(KEY, encode(decode_server(incarnation="hand")), 0)
    until(lambda: other.get(KEY) == Held(encode(decode_server()), one._lease))
    assert one.registration.standing == Standing.REGISTERED
    until(lambda: "is replaced: " in caplog.text)
    assert "has no lease" in caplog.text
    other.close()
    one.close()
    assert look(shared_etcd) is None


def test_two_that_write_at_the_same_moment_do_not_both_stand_there(shared_etcd, register):
    """The older one finds its record gone; before it writes it again the newer one is there."""
    older = register(shared_etcd.options(prefix=PREFIX))
    until(stands(older, Standing.REGISTERED))
    seen, written, get = threading.Event(), threading.Event(), older._etcd.get

    def slow(key):
        found = get(key)
        if found is None:
            seen.set()
            assert written.wait(60)
        return found

    older._etcd.get = slow
    shared_etcd.ctl("del", KEY)
    assert seen.wait(60)
    newer = register(shared_etcd.options(prefix=PREFIX), decode_server(incarnation="second"))
    until(stands(newer, Standing.REGISTERED))
    written.set()
    until(stands(older, Standing.DISPLACED))
    assert look(shared_etcd).incarnation == "second"
    assert newer.registration.standing == Standing.REGISTERED


def test_why_a_server_is_not_registered_is_told_and_logged_once_for_each_cause(shared_etcd, register, caplog):
    causes = ["refused", "HTTP 503"]
    asked, up = [], threading.Event()

    def serves():
        asked.append(0)
        if not up.is_set():
            raise DiscoveryError(causes[len(asked) % 2])
        return True

    with caplog.at_level(logging.INFO):
        one = register(shared_etcd.options(prefix=PREFIX), serves=serves)
        until(lambda: len(asked) > 6)
        told = one.registration
        assert told.standing == Standing.WAITING and told.trouble in causes
        up.set()
        until(stands(one, Standing.REGISTERED))
    assert one.registration.trouble == ""
    told = [record.getMessage() for record in caplog.records if record.name == registrar_module.__name__]
    texts = [text for text in told if any(cause in text for cause in causes)]
    assert sorted(texts) == sorted(f"discovery: not registered yet: {cause}" for cause in causes)


def test_what_ranks_tell_late_is_written_then(shared_etcd, caplog):
    late = {"fingerprint": ""}

    def describe():
        if late["fingerprint"] is None:
            raise ZeroDivisionError("ours")
        return decode_server(**late)

    one = Registrar(shared_etcd.options(prefix=PREFIX), Server(lambda: True, describe), retry=0.05)
    until(lambda: look(shared_etcd) == decode_server(fingerprint=""))
    late["fingerprint"] = "f" * 32
    until(lambda: look(shared_etcd) == decode_server())
    late["fingerprint"] = None
    until(lambda: "stays as it was: ZeroDivisionError: ours" in caplog.text)
    until(stands(one, Standing.REGISTERED))
    assert look(shared_etcd) == decode_server()
    one.close(10)
    assert one.worker.fault == "" and look(shared_etcd) is None
