"""A prefill server without SGLang, for tests: bootstrap server, control service, ranks; and a decode side."""

import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

from sglang_hetero.backend.announcer import Announcer
from sglang_hetero.backend.bootstrap import ROUTE
from sglang_hetero.backend.pairing import Decision, Path
from sglang_hetero.layout import wire
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.control import ControlService
from sglang_hetero.transfer.link import Awaited, Endpoint
from sglang_hetero.transfer.seal import Seal
from tests.unit.transfer.control.peers import HOST, hello

SOON = 8.0
"""Seconds in which anything must have happened on a busy machine; nothing waits for it to pass."""
NOBODY = Endpoint(HOST, 1)
"""Where nobody takes messages: connections are refused."""


def until(condition, seconds=SOON):
    """Wait until it holds, and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
    return found


@dataclass
class ServerInfo:
    """The fields of SGLang's PrefillServerInfo that are used."""

    attn_tp_size: int
    attn_cp_size: int
    dp_size: int
    pp_size: int
    page_size: int | None
    kv_cache_dtype: str | None
    follow_bootstrap_room: bool


def stand_in_for_sglang(monkeypatch):
    """Importing the real one takes ten seconds, and nothing of it is used but this class."""
    names = ["sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.common"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("conn")
    module.PrefillServerInfo = ServerInfo
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.common.conn", module)


def free_port():
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


@contextmanager
def http_server(answers, port=0):
    """Answers GET by path, {path: (status, body)} or a function of it; PUT bodies are kept in answers["put"]."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            status, body = answers.get(path, (404, b"")) if isinstance(answers, dict) else answers(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = answers["refuse"](body)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_arguments):
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    httpd = ThreadingHTTPServer((HOST, port), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{HOST}:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


class PrefillServer:
    """One prefill server of TP `tp` at a fixed bootstrap port. start: which start of its processes this is."""

    def __init__(self, port, tp=1, start="a", dp=1):
        self.tp, self.start, self.dp = tp, start, dp
        self.service = ControlService(HOST)
        self.answers = {}
        self.offer()
        self.address = f"{HOST}:{port}"
        self._http = http_server(self.answers, port)
        self._http.__enter__()
        self.announcers = [self.announce(rank, dp_rank) for dp_rank in range(dp) for rank in range(tp)]

    def offer(self, **others):
        offer = {"version": messages.VERSION, "control_port": self.service.port, "mode": "auto"} | others
        self.answers[ROUTE] = (200, json.dumps(offer).encode())
        info = ServerInfo(self.tp, 1, self.dp, 1, 64, "bfloat16", True)
        self.answers["/route"] = (200, json.dumps(info.__dict__).encode())

    def announce(self, rank, dp_rank=0, start=None):
        report = hello(
            rank, self.tp, start or self.start, **({"dp_rank": dp_rank, "dp_size": self.dp} if self.dp > 1 else {})
        )
        return Announcer(
            self.address,
            Seal(),
            hello=report,
            dp_rank=dp_rank,
            identity=report.incarnation.encode(),
            topology=lambda _: None,
        )

    def incarnations(self, dp_rank=0):
        return {f"{self.start}-{dp_rank}.0.{rank}" for rank in range(self.tp)}

    def end(self):
        """All of its processes end; nobody listens there any more."""
        self._http.__exit__(None, None, None)
        for announcer in self.announcers:
            announcer.close()
        self.service.close()


class Engine:
    """Of which the sessions in `ended` are known to be gone."""

    sees_ends = True

    def __init__(self):
        self.ended, self.asked = set(), []

    def peer_gone(self, session):
        self.asked.append(session)
        return session in self.ended


@dataclass
class Side:
    """What of a decode side is used."""

    manifest: object = field(default_factory=lambda: SimpleNamespace(incarnation="decode", label="decode TP0/1"))
    control_identity: bytes = b"d0"
    waiting: dict[str, Awaited] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    """Incarnations that are gone, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """Those that are lost: their requests have failed."""
    heard: list = field(default_factory=list)
    joins: int = 0

    def remind(self) -> None:
        """What may have been lost is said again; nothing is, here."""

    def join(self, address, topology):
        self.joins += 1
        sources = tuple(wire.decode(rank.manifest) for rank in topology.ranks)
        sessions = tuple(rank.session for rank in topology.ranks)
        return SimpleNamespace(address=address, topology=topology.topology, sources=sources, sessions=sessions)

    def awaited(self):
        return dict(self.waiting)

    def gone(self, incarnations, why):
        self.ended |= dict.fromkeys(incarnations, why)
        for incarnation in incarnations:
            self.waiting.pop(incarnation, None)

    def lost(self, incarnations, why):
        self.failed |= dict.fromkeys(incarnations, why)

    def handle(self, message):
        self.heard.append(message)


@dataclass
class Tables:
    """What a manager keeps of SGLang's."""

    path: Path = Path.OURS
    adopted: dict = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    rooms: set = field(default_factory=set)
    """Requests that there are."""
    failed: frozenset | None = None
    """Those that failed when the last server was lost."""
    told: list = field(default_factory=list)
    """Of requests that were given up: (room, ports of the ranks, reason, whether they understand our messages)."""
    dropped: int = 0

    def hetero_decide(self, server, sources):
        return Decision(self.path, f"prefill at {server.address} takes it")

    def hetero_adopt(self, server, decision):
        self.adopted[server.address] = decision

    def hetero_drop(self, address):
        self.dropped += 1
        self.adopted.pop(address, None)

    def hetero_rooms(self, address):
        return frozenset(self.rooms)

    def hetero_lost(self, address, reason, rooms=None):
        self.lost[address], self.failed = reason, rooms
        self.adopted.pop(address, None)

    def hetero_give_up(self, room, ranks, reason, *, ours):
        self.told.append((room, [rank.endpoint.port for rank in ranks], reason, ours))
