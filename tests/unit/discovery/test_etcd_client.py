"""The client of etcd against a real one: what is written, read and watched; who is let in; and what errors say."""

import socket
import struct
import threading
import time

import pytest

from sglang_hetero.discovery import etcd as etcd_module
from sglang_hetero.discovery.etcd import Change, Etcd, Held, LeaseGone
from sglang_hetero.discovery.settings import EtcdOptions
from sglang_hetero.errors import DiscoveryError, OptionError
from tests.unit.discovery.etcd_server import Certificates, EtcdServer, free_port, until

USER, WORD = "server", "pass word"


@pytest.fixture
def client(shared_etcd):
    made = Etcd(shared_etcd.options())
    yield made
    made.close()


@pytest.fixture
def prefix(request):
    return f"/{request.node.name}/"


def test_a_record_lives_as_long_as_its_lease(client, prefix):
    lease = client.grant(60)
    client.put(f"{prefix}a", b"\x00one", lease)
    client.keep_alive(lease)
    assert client.get(f"{prefix}a") == Held(b"\x00one", lease)
    client.revoke(lease)
    assert client.get(f"{prefix}a") is None


def test_what_has_no_lease_any_more_says_so(client, prefix):
    lease = client.grant(60)
    client.revoke(lease)
    for call in (client.keep_alive, client.revoke, lambda gone: client.put(f"{prefix}a", b"", gone)):
        with pytest.raises(LeaseGone):
            call(lease)


def test_a_prefix_is_read_and_nothing_beside_it(client, prefix):
    lease = client.grant(60)
    for key in (f"{prefix}a", f"{prefix}b", f"{prefix[:-1]}0", f"{prefix[:-1]}.", prefix[:-1]):
        client.put(key, key.encode(), lease)
    found = client.read(prefix)
    assert found.records == {f"{prefix}{one}": Held(f"{prefix}{one}".encode(), lease) for one in "ab"}
    assert not found.truncated


def test_more_records_than_are_looked_at_are_said_to_be_there(client, prefix, monkeypatch):
    monkeypatch.setattr(etcd_module, "MAX_INSTANCES", 2)
    lease = client.grant(60)
    for number in range(3):
        client.put(f"{prefix}{number}", b"", lease)
    found = client.read(prefix)
    assert len(found.records) == 2 and found.truncated


def test_an_answer_of_any_length_is_not_taken(client, prefix, monkeypatch):
    client.put(f"{prefix}a", bytes(4096), client.grant(60))
    monkeypatch.setattr(etcd_module, "MAX_ANSWER", 4096)
    with pytest.raises(DiscoveryError, match="more than 4096 bytes"):
        client.read(prefix)


def test_a_watch_begins_where_a_reading_ended(client, shared_etcd, prefix):
    lease = client.grant(60)
    client.put(f"{prefix}old", b"0", lease)
    after = client.read(prefix).revision + 1
    other = Etcd(shared_etcd.options())
    other.put(f"{prefix}a", b"1", lease)  # before the watch
    heard, gone = [], set()
    for changes in client.watch(prefix, after, quiet=600.0):
        heard.append(changes)
        if changes == [Change(f"{prefix}a", Held(b"1", lease))]:
            other.put(f"{prefix}b", b"2", lease)
            other.put(f"{prefix[:-1]}0", b"beside it", lease)
        if changes == [Change(f"{prefix}b", Held(b"2", lease))]:
            other.revoke(lease)
        gone |= {change.key for change in changes if change.record is None}
        if gone == {f"{prefix}{key}" for key in ("a", "b", "old")}:
            break
    other.close()
    assert heard[:3] == [[], [Change(f"{prefix}a", Held(b"1", lease))], [Change(f"{prefix}b", Held(b"2", lease))]]
    assert all(change.record is None for changes in heard[3:] for change in changes)


def test_a_watch_ends_when_it_is_quiet(client, prefix):
    lease = client.grant(600)
    client.put(f"{prefix}a", b"1", lease)
    after = client.read(prefix).revision
    assert [change for changes in client.watch(prefix, after, quiet=0.2) for change in changes] in (
        [Change(f"{prefix}a", Held(b"1", lease))],
        [],  # where etcd takes longer than that
    )


def test_a_record_is_replaced_only_if_it_is_what_was_seen(client, shared_etcd, prefix):
    key, lease, other = f"{prefix}a", client.grant(60), Etcd(shared_etcd.options())
    assert client.get(key) is None
    assert other.replace(key, b"theirs", lease, None)
    assert not client.replace(key, b"ours", lease, None)
    seen = client.get(key)
    assert seen == Held(b"theirs", lease) and seen.revision
    other.put(key, b"theirs", lease)  # the same again, but it was written
    assert not client.replace(key, b"ours", lease, seen)
    assert client.replace(key, b"ours", lease, client.get(key)) and client.get(key) == Held(b"ours", lease)
    seen = client.get(key)
    client.revoke(lease)
    assert not client.replace(key, b"ours", client.grant(60), seen)
    with pytest.raises(LeaseGone):
        client.replace(key, b"ours", lease, None)
    other.close()


def test_a_watch_from_before_a_compaction_ends(client, shared_etcd, prefix):
    lease = client.grant(60)
    first = client.read(prefix).revision + 1
    for number in range(3):
        client.put(f"{prefix}a", b"%d" % number, lease)
    shared_etcd.ctl("compaction", str(first + 2))
    heard = list(client.watch(prefix, first, quiet=60.0))
    assert [] in heard and not any(heard)


def test_a_watch_is_ended_from_another_thread(client, prefix):
    begun, ended = threading.Event(), threading.Event()

    def follow():
        for _ in client.watch(prefix, client.read(prefix).revision + 1, quiet=600.0):
            begun.set()
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert begun.wait(10)
    client.close()
    assert ended.wait(10)
    thread.join()
    with pytest.raises(DiscoveryError, match="is closed"):
        client.read(prefix)


def test_a_long_line_of_a_watch_is_not_kept(client, shared_etcd, prefix, monkeypatch):
    """Its beginning, until it is seen to be too long: etcd's gateway sends 32 KiB at a time."""
    monkeypatch.setattr(etcd_module, "MAX_EVENTS", 1024)
    after = client.read(prefix).revision + 1
    client.put(f"{prefix}a", bytes(1 << 20), client.grant(60))
    with pytest.raises(DiscoveryError, match="more than 1024 bytes at a time"):
        list(client.watch(prefix, after, quiet=60.0))


def test_the_next_endpoint_is_asked_when_one_is_away(shared_etcd, prefix):
    nobody = f"127.0.0.1:{free_port()}"
    one = Etcd(shared_etcd.options(endpoints=(nobody, shared_etcd.address)))
    assert one.endpoint == f"http://{nobody}"
    lease = one.grant(60)
    assert one.endpoint == shared_etcd.url
    one.put(f"{prefix}a", b"1", lease)
    one.close()


def test_nobody_there_is_told_with_every_endpoint_and_the_remedy(shared_etcd):
    nobody = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    one = Etcd(shared_etcd.options(endpoints=tuple(nobody)))
    with pytest.raises(DiscoveryError) as error:
        one.grant(60)
    for address in nobody:
        assert f"etcd at http://{address} does not answer" in str(error.value)
    assert "is it running there?" in str(error.value) and "refused" in str(error.value)


def test_whoever_accepts_and_says_nothing_is_not_waited_for(shared_etcd, monkeypatch):
    monkeypatch.setattr(etcd_module, "TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silence = f"127.0.0.1:{silent.getsockname()[1]}"
        one = Etcd(shared_etcd.options(endpoints=(silence, shared_etcd.address)))
        assert one.grant(60)  # by the other one
        one.close()


def test_who_is_no_etcd_is_told(shared_etcd, tmp_path):
    import http.server

    class Web(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = b"{}"
            self.send_response(200 if self.path.endswith("range") else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        one = Etcd(shared_etcd.options(endpoints=(f"127.0.0.1:{server.server_port}",)))
        with pytest.raises(DiscoveryError, match="no etcd"):
            one.read("/a/")
        with pytest.raises(DiscoveryError, match=r"there must be etcd, 3\.4 or later"):
            one.grant(5)
        server.shutdown()


@pytest.mark.parametrize("answer", [b"[]", b"5", b'{"TTL":"5"}', b'{"ID":"x"}', b"null", b"\xff", b""])
def test_whatever_is_answered_is_one_kind_of_error(shared_etcd, answer, monkeypatch):
    """etcd3gw reads some answers itself, and would raise a KeyError."""
    one = Etcd(shared_etcd.options())
    monkeypatch.setattr(etcd_module._Client, "_answer", lambda *_: answer)
    for call in (lambda: one.grant(5), lambda: one.keep_alive(5), lambda: one.read("/a/")):
        try:
            call()
        except DiscoveryError:
            continue


# Users.


@pytest.fixture
def guarded(etcd, tmp_path):
    """etcd with users: root, and one that may use /fleet/ only. Gives it and the options of that one."""
    (tmp_path / "word").write_text(f"{WORD}\n")
    (tmp_path / "word").chmod(0o600)
    etcd.ctl("user", "add", "root", "--new-user-password", "root")
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("role", "add", "fleet")
    etcd.ctl("role", "grant-permission", "fleet", "readwrite", "--prefix=true", "/fleet/")
    etcd.ctl("user", "add", USER, "--new-user-password", WORD)
    etcd.ctl("user", "grant-role", USER, "fleet")
    etcd.ctl("auth", "enable")
    return etcd


def options_of(etcd, tmp_path, **fields):
    return etcd.options(user=USER, password_file=str(tmp_path / "word"), prefix="/fleet", **fields)


def test_a_user_is_let_in(guarded, tmp_path):
    one = Etcd(options_of(guarded, tmp_path))
    lease = one.grant(60)
    one.put("/fleet/a", b"1", lease)
    assert one.read("/fleet/").records == {"/fleet/a": Held(b"1", lease)}
    assert one.replace("/fleet/a", b"1", lease, one.get("/fleet/a"))
    assert next(one.watch("/fleet/", 1, quiet=60.0)) == []
    one.close()


def test_a_user_whose_password_is_changed_is_let_in_again(guarded, tmp_path):
    """etcd forgets the user's tokens then; the file has the new one."""
    one = Etcd(options_of(guarded, tmp_path))
    lease = one.grant(60)
    one.put("/fleet/a", b"1", lease)
    guarded.ctl("--user", "root:root", "user", "passwd", USER, "--interactive=false", given="another")
    with pytest.raises(DiscoveryError, match="and its password"):
        one.get("/fleet/a")
    (tmp_path / "word").write_text("another")
    assert one.get("/fleet/a") == Held(b"1", lease)
    one.close()


def test_a_token_that_etcd_does_not_know_is_replaced(guarded, tmp_path):
    one = Etcd(options_of(guarded, tmp_path))
    lease = one.grant(60)
    one.put("/fleet/a", b"1", lease)
    one._clients[0].session.headers["Authorization"] = "forgotten.1"
    assert one.read("/fleet/").records == {"/fleet/a": Held(b"1", lease)}
    one.close()


def test_a_user_is_let_in_after_a_restart(guarded, tmp_path):
    one = Etcd(options_of(guarded, tmp_path))
    lease = one.grant(60)
    one.put("/fleet/a", b"1", lease)
    guarded.kill()
    guarded.start()
    one.keep_alive(lease)
    assert one.get("/fleet/a") == Held(b"1", lease)
    one.close()


def test_a_user_that_may_not_hears_what_is_needed(guarded, tmp_path):
    one = Etcd(options_of(guarded, tmp_path))
    with pytest.raises(DiscoveryError, match=r"server may not: servers need readwrite.*grant-permission ROLE"):
        one.put("/other/a", b"1", one.grant(60))
    with pytest.raises(DiscoveryError, match="server may not"):
        list(one.watch("/other/", 1, quiet=60.0))
    one.close()


def test_a_wrong_password_and_nobody_hear_it(guarded, tmp_path):
    (tmp_path / "word").write_text("guess")
    one = Etcd(options_of(guarded, tmp_path))
    with pytest.raises(DiscoveryError, match=r"SGLANG_HETERO_ETCD_USER \(server\) and its password"):
        one.read("/fleet/")
    (tmp_path / "word").write_text(WORD)
    one.read("/fleet/")  # the file is read again
    one.close()
    nobody = Etcd(guarded.options())
    with pytest.raises(DiscoveryError, match="SGLANG_HETERO_ETCD_USER"):
        nobody.read("/fleet/")
    nobody.close()


def test_a_password_that_is_away_when_it_is_wanted_again_is_an_error_like_others(shared_etcd, tmp_path):
    (tmp_path / "word").write_text(WORD)
    (tmp_path / "word").chmod(0o600)
    one = Etcd(options_of(shared_etcd, tmp_path))
    (tmp_path / "word").unlink()
    with pytest.raises(DiscoveryError, match=r"PASSWORD_FILE=.*No such file"):
        one.read("/fleet/")
    one.close()


def test_a_user_where_there_are_none_hears_it(etcd, tmp_path):
    (tmp_path / "word").write_text(WORD)
    (tmp_path / "word").chmod(0o600)
    one = Etcd(options_of(etcd, tmp_path))
    with pytest.raises(DiscoveryError, match="do without SGLANG_HETERO_ETCD_USER"):
        one.grant(5)
    one.close()


# TLS.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure_etcd(tmp_path_factory, certificates):
    server = EtcdServer(tmp_path_factory.mktemp("secure"), certificates)
    yield server
    server.kill()


def with_files(etcd, **fields):
    return etcd.options(**{name: str(path) for name, path in fields.items()})


def test_with_certificates_all_goes_as_without(secure_etcd, certificates):
    here = with_files(secure_etcd, ca=certificates.ca, cert=certificates.client, key=certificates.client_key)
    assert here.secure
    one = Etcd(here)
    lease = one.grant(60)
    one.put("/a/a", b"1", lease)
    watch = one.watch("/a/", one.read("/a/").revision, quiet=600.0)
    assert [next(watch), next(watch)] == [[], [Change("/a/a", Held(b"1", lease))]]
    done = threading.Event()
    thread = threading.Thread(target=lambda: (list(watch), done.set()))
    thread.start()
    time.sleep(0.1)
    one.close()
    assert done.wait(60)  # long before it is quiet
    thread.join()


@pytest.mark.parametrize("which", ["no client", "another authority", "no authority", "no TLS"])
def test_who_cannot_be_trusted_is_told(secure_etcd, certificates, which):
    one, client = certificates, {"cert": certificates.client, "key": certificates.client_key}
    there = {
        "no client": lambda: with_files(secure_etcd, ca=one.ca),
        "another authority": lambda: with_files(secure_etcd, ca=one.other, **client),
        "no authority": lambda: EtcdOptions.of({"endpoints": (secure_etcd.url,)}),
        "no TLS": lambda: EtcdOptions.of({"endpoints": (secure_etcd.address,)}),
    }[which]()
    made = Etcd(there)
    with pytest.raises(DiscoveryError, match="SGLANG_HETERO_ETCD_CA" if which != "no client" else "_CERT") as error:
        made.read("/a/")
    assert secure_etcd.address in str(error.value)
    made.close()


def test_a_reset_instead_of_an_end_is_told_the_same():
    """As of a TLS port that closes the connection before it has read everything."""
    with socket.create_server(("127.0.0.1", 0)) as port:

        def reset():
            connection, _ = port.accept()
            while b"}" not in connection.recv(4096):
                pass  # until it has said everything: it waits for the answer then
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        thread = threading.Thread(target=reset)
        thread.start()
        made = Etcd(EtcdOptions.of({"endpoints": (f"127.0.0.1:{port.getsockname()[1]}",)}))
        with pytest.raises(DiscoveryError, match=r"reset by peer.*SGLANG_HETERO_ETCD_CA"):
            made.read("/a/")
        made.close()
        thread.join()


def test_the_other_way_round(shared_etcd, certificates):
    made = Etcd(with_files(shared_etcd, ca=certificates.ca))
    with pytest.raises(DiscoveryError, match="no TLS with etcd at https://"):
        made.read("/a/")
    made.close()


def test_etcd_that_is_stopped_is_noticed(etcd, monkeypatch):
    """Its machine still accepts connections; nothing answers."""
    monkeypatch.setattr(etcd_module, "TIMEOUT_SECONDS", 0.3)
    one = Etcd(etcd.options())
    etcd.pause()
    try:
        with pytest.raises(DiscoveryError, match="does not answer"):
            one.read("/a/")
    finally:
        etcd.resume()
    until(lambda: one.read("/a/"))
    one.close()


def test_a_password_that_others_can_read_is_not_used(etcd, tmp_path):
    (tmp_path / "word").write_text(WORD)
    (tmp_path / "word").chmod(0o644)
    with pytest.raises(OptionError, match="chmod 600"):
        options_of(etcd, tmp_path)
