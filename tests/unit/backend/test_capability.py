"""What decode makes of a prefill server's answers: ours, a stock server's, another release's, and nonsense."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_hetero.backend import capability
from sglang_hetero.backend.bootstrap import ROUTE, Capability
from sglang_hetero.errors import PeerAway, TransferRefused
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.seal import Seal

OURS = {"version": messages.VERSION, "control_port": 1234, "mode": "auto", "unsupported": []}


@pytest.fixture
def server():
    """An HTTP server whose answers a test chooses: {path: (status, body)}; yields its address and the answers."""
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"127.0.0.1:{httpd.server_port}", answers
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_our_server_says_where_its_control_service_is(server):
    address, answers = server
    answers[ROUTE] = (200, json.dumps(OURS).encode())
    assert capability.offer(address, Seal()) == Capability(messages.VERSION, 1234, "auto", ())


def test_a_stock_server_offers_nothing(server):
    address, _ = server
    with pytest.raises(TransferRefused, match=f"{address} has no /hetero: install sglang-hetero there"):
        capability.offer(address, Seal())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1"])
def test_a_server_that_is_not_there_may_come(address):
    with pytest.raises(PeerAway, match="nobody listens") as error:
        capability.offer(address, Seal())
    assert error.value.refused


@pytest.mark.parametrize(
    "address", ["", ":", "a:b:c", "x y:1", "127.0.0.1:99999", "a/b?c:1", "\n:1", "é:1", "localhost:"]
)
def test_what_is_no_address_is_nobody(address):
    """It comes with a request, from whoever may send one."""
    with pytest.raises(PeerAway):
        capability.offer(address, Seal())


def test_an_answer_without_end_is_none(server, monkeypatch):
    address, answers = server
    monkeypatch.setattr(capability, "MAX_REPLY", 100)
    answers[ROUTE] = (200, b" " * 101)
    with pytest.raises(PeerAway, match="more than 100 bytes"):
        capability.offer(address, Seal())


def test_nobody_is_sent_elsewhere(server):
    address, answers = server
    answers[ROUTE] = (302, b"")
    with pytest.raises(PeerAway, match="302"):
        capability.offer(address, Seal())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (OURS | {"version": 99}, "speaks version 99 of our messages.*install the same release"),
        (OURS | {"mode": "perhaps"}, "perhaps"),
        (OURS | {"version": 99, "control_port": {"more": 1}}, "speaks version 99.*install the same release"),
        ({"surprise": 1}, "speaks version 0 .*install the same release"),
        (OURS | {"control_port": "x"}, "control_port"),
        ([], "/hetero"),
    ],
)
def test_what_is_not_ours_is_refused(server, answer, reason):
    address, answers = server
    answers[ROUTE] = (200, json.dumps(answer).encode())
    with pytest.raises(TransferRefused, match=reason):
        capability.offer(address, Seal())
