"""Who is let in: the token's file, where sockets listen, what comes with a seal and what without, and how much."""

import asyncio
import json
import os
import re
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import requests
from aiohttp import web

import sglang_hetero
from sglang_hetero.backend import bootstrap, capability
from sglang_hetero.backend.bootstrap import MAX_BODY, NONCE_HEADER, ROUTE, SEAL_HEADER, BootstrapMixin
from sglang_hetero.backend.manager import ManagerMixin
from sglang_hetero.backend.options import Options
from sglang_hetero.backend.secret import MAX_TOKEN_BYTES, MIN_TOKEN_BYTES, seal_of
from sglang_hetero.errors import OptionError, PeerAway, SealError, TransferRefused
from sglang_hetero.layout import Side
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.control import ControlService
from sglang_hetero.transfer.counters import Counters
from sglang_hetero.transfer.link import Endpoint
from sglang_hetero.transfer.seal import Purpose, Seal

HOST = "127.0.0.1"
TOKEN, OTHER = b"a" * MIN_TOKEN_BYTES, b"b" * MIN_TOKEN_BYTES


def token_file(folder, token=TOKEN, mode=0o600):
    path = folder / "token"
    path.write_bytes(token)
    path.chmod(mode)
    return str(path)


# The token's file.


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o440])
def test_a_file_of_the_owner_or_its_group(tmp_path, mode):
    seal = seal_of(token_file(tmp_path, TOKEN + b"\n", mode))
    assert Seal(TOKEN).open(seal.seal(b"x", Purpose.OFFER), Purpose.OFFER) == b"x"


@pytest.mark.parametrize("bit", [stat.S_IROTH, stat.S_IWOTH, stat.S_IXOTH, stat.S_IWGRP])
def test_a_file_of_others_is_refused(tmp_path, bit):
    path = token_file(tmp_path, mode=0o600 | bit)
    with pytest.raises(OptionError, match=f"SGLANG_HETERO_TOKEN_FILE.*chmod 600 {re.escape(path)}"):
        seal_of(path)


@pytest.mark.parametrize("size", [0, 1, MIN_TOKEN_BYTES - 1, MAX_TOKEN_BYTES + 1, MAX_TOKEN_BYTES * 3])
def test_a_token_of_a_wrong_size(tmp_path, size):
    with pytest.raises(OptionError, match="openssl rand"):
        seal_of(token_file(tmp_path, b"x" * size))


def test_no_file(tmp_path):
    with pytest.raises(OptionError, match="No such file"):
        seal_of(str(tmp_path / "none"))
    with pytest.raises(OptionError, match="TOKEN_FILE"):
        seal_of(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="no file"):
        seal_of(str(tmp_path / "pipe"))
    assert not seal_of(None).keyed


@pytest.mark.parametrize("size", [1, MAX_TOKEN_BYTES + 1])
def test_the_token_is_in_no_message(tmp_path, size):
    path = token_file(tmp_path, b"S3cr3t"[:size] * (size if size > 1 else 1))
    with pytest.raises(OptionError) as error:
        seal_of(path)
    assert "S3cr3t" not in str(error.value)


# Where we listen.


def listening():
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", [HOST, "localhost", "::1"])
def test_the_control_service_listens_on_the_address_given_and_no_other(host):
    before = listening()
    with ControlService(host) as service:
        (address,) = {found for found in listening() - before if found.port == service.port}
        assert address.ip.removeprefix("::ffff:") in {HOST, "::1"}


def test_it_listens_everywhere_only_if_told_so():
    """So that the test above can fail."""
    before = listening()
    with ControlService("0.0.0.0") as service:
        (address,) = {found for found in listening() - before if found.port == service.port}
        assert address.ip.removeprefix("::ffff:") == "0.0.0.0"


# The bootstrap server's route.


class Upstream:
    """As SGLang's bootstrap server: an aiohttp application in a thread."""

    def __init__(self, host, port):
        self.app = web.Application()
        self._setup_routes()
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        def serve():
            asyncio.set_event_loop(self._loop)
            self._runner = web.AppRunner(self.app)
            self._loop.run_until_complete(self._runner.setup())
            self._loop.run_until_complete(web.SockSite(self._runner, sock).start())
            ready.set()
            self._loop.run_forever()
            self._loop.run_until_complete(self._runner.cleanup())
            self._loop.close()

        sock = socket.create_server((host, port))
        self.address = f"{host}:{sock.getsockname()[1]}"
        self.thread = threading.Thread(target=serve)
        self.thread.start()
        assert ready.wait(20)

    def _setup_routes(self):
        pass

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join()


class Server(BootstrapMixin, Upstream):
    pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Starts bootstrap servers with a token or without one."""
    made = []

    def start(token=None):
        if token is None:
            monkeypatch.delenv("SGLANG_HETERO_TOKEN_FILE", raising=False)
        else:
            monkeypatch.setenv("SGLANG_HETERO_TOKEN_FILE", token_file(tmp_path, token))
        made.append(Server(HOST, 0))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_the_same_token_or_none_on_both_sides(server, token, caplog):
    one = server(token)
    assert capability.offer(one.address, Seal(token)).control_port > 0
    capability.refuse(one.address, "because", Seal(token))
    assert capability.offer(one.address, Seal(token)).unsupported == ("because",)
    assert not caplog.records


@pytest.mark.parametrize(
    ("theirs", "mine", "reason"),
    [
        (TOKEN, None, "this side has none.*set SGLANG_HETERO_TOKEN_FILE"),
        (None, TOKEN, "has no seal.*set SGLANG_HETERO_TOKEN_FILE"),
        (TOKEN, OTHER, "not of this side's token.*set SGLANG_HETERO_TOKEN_FILE"),
    ],
)
def test_different_tokens_are_refused_at_once_and_both_sides_say_so(server, theirs, mine, reason, caplog):
    one = server(theirs)
    with pytest.raises(TransferRefused, match=f"{one.address}.*{reason}"):
        capability.offer(one.address, Seal(mine))
    (record,) = caplog.records
    assert re.search("127.0.0.1 asks, and will refuse this server: .*set SGLANG_HETERO_TOKEN_FILE", record.getMessage())


def put(one, body, seal, instance=None):
    """The status of a PUT whose seal is for this instance, by default the server's own; and its headers."""
    url = f"http://{one.address}{ROUTE}"
    instance = requests.get(url, timeout=5).json()["instance"] if instance is None else instance
    header = {SEAL_HEADER: seal.sign(body, Purpose.REFUSAL, instance.encode())}
    return requests.put(url, data=body, headers=header, timeout=5).status_code, header


@pytest.mark.parametrize(("theirs", "mine"), [(TOKEN, None), (TOKEN, OTHER), (None, TOKEN)])
def test_a_refusal_of_somebody_else_is_not_taken(server, theirs, mine):
    one = server(theirs)
    assert put(one, b'"forged"', Seal(mine))[0] == 403
    with pytest.raises(TransferRefused):
        capability.refuse(one.address, "forged", Seal(mine))
    assert capability.offer(one.address, Seal(theirs)).unsupported == ()


def test_a_refusal_sent_again_or_changed(server):
    one, seal = server(TOKEN), Seal(TOKEN)
    status, header = put(one, b'"because"', seal)
    url = f"http://{one.address}{ROUTE}"
    assert status == 200
    assert requests.put(url, data=b'"because"', headers=header, timeout=5).status_code == 403
    assert requests.put(url, data=b'"becausf"', headers=header, timeout=5).status_code == 403


def test_a_recorded_refusal_is_for_no_other_server_and_no_later_start(server):
    """From a rank that has the token: every start of every server is another audience."""
    first, second = server(TOKEN), server(TOKEN)
    instance = capability.offer(first.address, Seal(TOKEN)).instance
    assert instance and instance != capability.offer(second.address, Seal(TOKEN)).instance
    assert put(second, b'"because"', Seal(TOKEN), instance)[0] == 403
    assert put(second, b'"because"', Seal(TOKEN), "")[0] == 403
    assert put(first, b'"because"', Seal(TOKEN), instance)[0] == 200
    assert capability.offer(second.address, Seal(TOKEN)).unsupported == ()


def test_a_refusal_that_nobody_repeats_is_withdrawn(server, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = server()
    capability.refuse(one.address, "a rank's", Seal())
    capability.refuse(one.address, "a stranger's", Seal())
    for _ in range(3):
        now[0] += bootstrap.REFUSAL_SECONDS
        assert capability.offer(one.address, Seal()).unsupported == ("a rank's", "a stranger's")
        capability.refuse(one.address, "a rank's", Seal())
    now[0] += bootstrap.REFUSAL_SECONDS
    assert capability.offer(one.address, Seal()).unsupported == ("a rank's",)


def test_ranks_keep_their_places_when_strangers_fill_the_others(server, monkeypatch):
    monkeypatch.setattr(bootstrap, "MAX_REFUSALS", 2)
    now = [1000.0]
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = server()
    for reason in ("a rank's", "1", "2"):
        capability.refuse(one.address, reason, Seal())
    now[0] += bootstrap.KEEP_SECONDS
    capability.refuse(one.address, "a rank's", Seal())
    now[0] += 1
    capability.refuse(one.address, "3", Seal())
    assert capability.offer(one.address, Seal()).unsupported == ("a rank's", "3")


def test_a_person_may_ask(server):
    """The answer is no secret, and asking without our headers is no event."""
    one = server(TOKEN)
    found = requests.get(f"http://{one.address}{ROUTE}", timeout=5)
    assert found.json()["version"] == messages.VERSION
    assert SEAL_HEADER not in found.headers
    assert not one._hetero_faults.counts


def test_an_old_answer_is_no_answer(server, monkeypatch):
    """One that was recorded, from who has the token, sealed for another question."""
    one = server(TOKEN)
    recorded = requests.get(f"http://{one.address}{ROUTE}", headers={NONCE_HEADER: "00" * 16}, timeout=5)
    reply = capability._Reply(200, recorded.content, recorded.headers[SEAL_HEADER])
    monkeypatch.setattr(capability, "_request", lambda address, path, headers: reply)
    with pytest.raises(TransferRefused, match="something else"):
        capability.offer(one.address, Seal(TOKEN))


@pytest.mark.parametrize("size", [MAX_BODY + 1, 1 << 20])
def test_a_refusal_that_is_too_long(server, size):
    one = server()
    body = json.dumps("x" * (size - 2))
    assert requests.put(f"http://{one.address}{ROUTE}", data=body, timeout=5).status_code == 413
    chunked = iter([body.encode()])
    assert requests.put(f"http://{one.address}{ROUTE}", data=chunked, timeout=5).status_code == 413
    assert capability.offer(one.address, Seal()).unsupported == ()


def test_refusals_are_bounded(server, monkeypatch):
    monkeypatch.setattr(bootstrap, "MAX_REFUSALS", 3)
    one = server()
    for number in range(5):
        capability.refuse(one.address, f"{number} " + "\n" * 5000, Seal())
    found = capability.offer(one.address, Seal()).unsupported
    assert len(found) == 3
    assert all(len(reason) <= messages.MAX_REASON and reason.isprintable() for reason in found)


# What decode downloads.


class Endless:
    """An HTTP server that answers everything with the same head, then sends on for ever."""

    def __init__(self, head):
        self._socket = socket.create_server((HOST, 0))
        self.address = "{}:{}".format(*self._socket.getsockname())
        self.sent = 0
        self._head = head
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(20)
                try:
                    connection.recv(65536)
                    connection.sendall(self._head)
                    while True:
                        connection.sendall(b"x" * 65536)
                        self.sent += 65536
                except OSError:
                    continue

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def test_an_answer_without_an_end():
    endless = Endless(b"HTTP/1.1 200 OK\r\n\r\n")
    try:
        with pytest.raises(PeerAway, match="more than"):
            capability.offer(endless.address, Seal())
    finally:
        endless.close()
    assert capability.MAX_REPLY <= endless.sent < 64 * capability.MAX_REPLY


def test_nobody_is_sent_on_to_another_address(server):
    one = server()
    head = f"HTTP/1.1 302 Found\r\nLocation: http://{one.address}{ROUTE}\r\nContent-Length: 0\r\n\r\n".encode()
    elsewhere = Endless(head)
    try:
        with pytest.raises(PeerAway, match="302"):
            capability.offer(elsewhere.address, Seal())
    finally:
        elsewhere.close()


# The ranks' own sockets.


class Manager(ManagerMixin):
    """A rank without SGLang: what it posts is kept, what it is told goes to a side that keeps it."""

    def __init__(self, side, token, endpoint):
        self.hetero_side, self._hetero_seal = side, Seal(token)
        self.hetero_counts = Counters()
        self.hetero_options = Options()
        self.local_ip, self.rank_port = endpoint.host, endpoint.port
        self.posted, self.told = [], []
        self._hetero_posts = SimpleNamespace(post=lambda to, sealed: self.posted.append((to, [sealed])))
        self._hetero_faults = bootstrap.Faults("rank", bootstrap.logger)
        setattr(self, f"hetero_{side.value}", self)

    def handle(self, message):
        self.told.append(message)


P, D = Endpoint(HOST, 4001), Endpoint(HOST, 4002)
ACK = messages.Ack(room=1, epoch=1, incarnation="d")


def two(prefill=TOKEN, decode=TOKEN):
    return Manager(Side.PREFILL, prefill, P), Manager(Side.DECODE, decode, D)


def receive(manager, frames):
    """As SGLang's threads do."""
    manager.hetero_receive(messages.find(frames))


@pytest.mark.parametrize("token", [None, TOKEN])
def test_ranks_with_the_same_token_or_none(token):
    prefill, decode = two(token, token)
    decode._hetero_post(P, messages.encode(ACK))
    ((_, frames),) = decode.posted
    receive(prefill, frames)
    assert prefill.told == [ACK]
    assert (len(frames[0]) > len(messages.encode(ACK))) == (token is not None)
    prefill._hetero_post(D, messages.encode(messages.Drained(incarnation="p")))
    receive(decode, prefill.posted[0][1])
    assert decode.told == [messages.Drained(incarnation="p")]
    assert prefill.hetero_counters == decode.hetero_counters == Counters().snapshot()


@pytest.mark.parametrize(("prefill", "decode"), [(TOKEN, None), (None, TOKEN), (TOKEN, OTHER)])
def test_ranks_with_different_tokens(prefill, decode, caplog):
    there, here = two(prefill, decode)
    for _ in range(5):
        here._hetero_post(P, messages.encode(ACK))
    for _, frames in here.posted:
        receive(there, frames)
    assert not there.told
    assert there.hetero_counters["unsealed"] == 5
    (record,) = caplog.records
    assert "SGLANG_HETERO_TOKEN_FILE" in record.getMessage()


def test_a_message_that_is_turned_round_or_given_to_another_rank_or_sent_again():
    prefill, decode = two()
    decode._hetero_post(P, messages.encode(ACK))
    ((_, frames),) = decode.posted
    receive(decode, frames)
    other = Manager(Side.PREFILL, TOKEN, Endpoint(HOST, 4003))
    receive(other, frames)
    assert not decode.told
    assert not other.told
    receive(prefill, frames)
    receive(prefill, frames)
    assert len(prefill.told) == 1
    assert [each.hetero_counters["unsealed"] for each in (prefill, decode, other)] == [1, 1, 1]


def test_bad_messages_fill_no_log(caplog):
    prefill, _ = two(None, None)
    for number in range(1000):
        receive(prefill, [messages.MAGIC + number.to_bytes(3, "big")])
    assert prefill.hetero_counters["dropped"] == 1000
    assert len(caplog.records) == 1


def test_an_error_of_ours_is_logged_with_its_place(caplog, monkeypatch):
    prefill, _ = two(None, None)
    monkeypatch.setattr(prefill, "handle", lambda _: 1 / 0)
    receive(prefill, [messages.encode(ACK)])
    (record,) = caplog.records
    assert record.exc_info
    assert prefill.hetero_counters["dropped"] == 1


# Nothing that runs what it reads.

FORBIDDEN = re.compile(
    r"\b(pickle|cPickle|cloudpickle|dill|marshal|shelve|recv_pyobj|send_pyobj|joblib)\b|\b(eval|exec|torch\.load)\("
)


def test_no_module_of_the_package_unpickles_or_evaluates():
    folder = Path(sglang_hetero.__file__).parent
    sources = sorted(folder.rglob("*.py"))
    assert len(sources) > 100
    found = [
        f"{path.relative_to(folder)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    "line", ["import pickle", "sock.recv_pyobj()", "x = eval(text)", "torch.load(path)", "from marshal import loads"]
)
def test_what_is_looked_for_would_be_found(line):
    assert FORBIDDEN.search(line)


def test_a_message_of_no_kind_of_ours_has_no_seal_to_lose():
    """The seal comes first: what is behind a wrong one is not read."""
    with pytest.raises(SealError):
        Seal(TOKEN).open(b"\x80\x04\x95garbage", Purpose.TO_DECODE)
