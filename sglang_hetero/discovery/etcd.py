"""etcd as servers and routers use it: leases, records below a prefix, and what changes there.

Thin over etcd3gw, which speaks to etcd's HTTP gateway (/v3, so etcd 3.4 or later). What it lacks is here: several
endpoints, user and password, a limit of time and size for every answer, and a watch that ends, says why, and notices
an etcd that is silent. Every error is a DiscoveryError.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import requests
import urllib3
from etcd3gw.client import Etcd3Client

from sglang_hetero.errors import DiscoveryError, OptionError
from sglang_hetero.layout.checks import shorten

from .record import MAX_RECORD_BYTES
from .settings import EtcdOptions

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

TIMEOUT_SECONDS = 3.0
"""For a connection, and for each piece of an answer; an etcd that is well takes milliseconds."""
ANSWER_SECONDS = 10.0
"""For an answer altogether."""
MAX_INSTANCES = 4096
"""Records below one prefix that are looked at."""
MAX_ANSWER = 2 * MAX_INSTANCES * MAX_RECORD_BYTES
"""Bytes: base64 and what etcd says of each key are less than once more."""
MAX_EVENTS = 16 << 20
"""Bytes of one line of a watch: etcd takes no request above 1.5 MiB, and puts a few together."""
API = "/v3/"
"""Where etcd 3.4 and later have their HTTP gateway."""
HTTP_OK, HTTP_BAD, HTTP_UNAUTHORIZED, HTTP_FORBIDDEN, HTTP_NOT_FOUND, HTTP_BROKEN = 200, 400, 401, 403, 404, 500
_STALE_TOKEN = ("invalid auth token", "revision in header is old", "user name is empty")
"""What etcd says to a token of its own that it does not know any more, or to none."""


class LeaseGone(DiscoveryError):
    """etcd does not know the lease: it has ended, or etcd has lost its data."""


class _NoAnswer(DiscoveryError):
    """This endpoint cannot serve; another one may."""


@dataclass(frozen=True)
class Held:
    """A record, and the lease that it ends with; 0 for one that stays. revision: of etcd, when it was written."""

    value: bytes
    lease: int
    revision: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Listing:
    """All records at one revision. truncated: there are more than are looked at."""

    revision: int
    records: dict[str, Held]
    truncated: bool = False

    def unseen(self, key: str) -> bool:
        """Whether this one may be there though it is not listed: etcd lists in order, and ends where there are more."""
        return self.truncated and key > max(self.records, default="")


@dataclass(frozen=True)
class Change:
    """record: None if it is gone."""

    key: str
    record: Held | None


class Etcd:
    """A connection for one thread; `close` may come from any."""

    def __init__(self, options: EtcdOptions) -> None:
        """Asks nobody yet."""
        self._options = options
        self._at = 0
        self._clients = [_Client(url, options) for url in options.endpoints]
        self._lock = threading.Lock()
        self._watching: urllib3.BaseHTTPResponse | None = None
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The one that is asked first: whoever answered last."""
        return self._options.endpoints[self._at]

    def close(self) -> None:
        """End a watch, and take no more calls."""
        with self._lock:
            self._closed = True
            watching = self._watching
        if watching is not None:
            _shut(watching)
        for client in self._clients:
            client.session.close()

    def grant(self, seconds: int) -> int:
        """A new lease. Raises DiscoveryError."""
        return self._ask(lambda client: int(client.lease(seconds).id))

    def keep_alive(self, lease: int) -> None:
        """Renew a lease. Raises LeaseGone, or DiscoveryError."""
        self._ask(lambda client: client.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        """End a lease and all records that hang on it. Raises LeaseGone, or DiscoveryError."""
        self._ask(lambda client: client.call("lease/revoke", {"ID": lease}))

    def put(self, key: str, value: bytes, lease: int) -> None:
        """Write a record that ends with the lease. Raises LeaseGone, or DiscoveryError."""
        self._ask(lambda client: client.call("kv/put", {"key": _text(key), "value": _text(value), "lease": lease}))

    def replace(self, key: str, value: bytes, lease: int, seen: Held | None) -> bool:
        """The same, if the record there is still what `get` has returned, so that of two who write at the same moment
        one learns it. Whether it was. Raises LeaseGone, or DiscoveryError."""
        body = {
            "compare": [
                {
                    "key": _text(key),
                    "target": "MOD",
                    "result": "EQUAL",
                    # 0 is that of a key that is not there.
                    "mod_revision": str(0 if seen is None else seen.revision),
                }
            ],
            "success": [{"request_put": {"key": _text(key), "value": _text(value), "lease": lease}}],
        }
        return bool(self._ask(lambda client: client.call("kv/txn", body, kind=_Done)).succeeded)

    def get(self, key: str) -> Held | None:
        """A record, None if there is none. Raises DiscoveryError."""

        def question(client: _Client) -> Held | None:
            found = client.call("kv/range", {"key": _text(key)}, kind=_Range)
            return found.kvs[0].held if found.kvs else None

        return self._ask(question)

    def read(self, prefix: str) -> Listing:
        """All records below a prefix, which ends with a slash. Raises DiscoveryError."""
        body = {**_below(prefix), "limit": MAX_INSTANCES}

        def question(client: _Client) -> Listing:
            found = client.call("kv/range", body, kind=_Range)
            records = {one.name: one.held for one in found.kvs}
            return Listing(int(found.header.revision), records, truncated=found.more)

        return self._ask(question)

    def watch(self, prefix: str, revision: int, quiet: float) -> Generator[list[Change], None, None]:
        """What changes below a prefix, from this revision on; first an empty list, when etcd has begun to watch.

        Ends when nothing has come for `quiet` seconds, when the history from there on is no longer kept, or when it
        is closed: whoever wants to go on reads anew, which also finds out whether etcd still answers. Raises
        DiscoveryError when the connection breaks.
        """
        response = self._ask(lambda client: client.watch(prefix, revision, quiet))
        with self._lock:
            self._watching = response
            closed = self._closed
        try:
            if not closed:
                yield from self._events(response)
        finally:
            with self._lock:
                self._watching = None
            response.close()

    def _events(self, response: urllib3.BaseHTTPResponse) -> Iterator[list[Change]]:
        rest = b""
        try:
            for data in response.stream(None, decode_content=True):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_EVENTS:
                    raise DiscoveryError(f"etcd at {self.endpoint} tells more than {MAX_EVENTS} bytes at a time")
                for line in filter(bytes.strip, lines):
                    told = _decode(line, _Told, self.endpoint)
                    if told.error is not None:
                        raise DiscoveryError(f"etcd at {self.endpoint} ends the watch: {shorten(told.error.message)}")
                    if told.result.canceled:
                        if int(told.result.compact_revision):
                            return
                        raise DiscoveryError(
                            f"etcd at {self.endpoint} ends the watch: {shorten(told.result.cancel_reason)}"
                            f"{_permission(told.result.cancel_reason, self._options)}"
                        )
                    yield [
                        Change(one.kv.name, None if one.type == "DELETE" else one.kv.held) for one in told.result.events
                    ]
        except urllib3.exceptions.ReadTimeoutError:
            return
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            # AttributeError: urllib3 and http.client, of a response that is closed while it is read.
            if self._closed:
                return
            self._next()
            raise DiscoveryError(f"the watch at etcd {self.endpoint} has broken off: {_why(error)}") from None
        if not self._closed:
            self._next()
            raise DiscoveryError(f"etcd at {self.endpoint} has ended the watch")

    def _ask(self, question: Callable[[_Client], _T]) -> _T:
        """Put it to one endpoint after the other until one answers."""
        failures = []
        for _ in self._clients:
            if self._closed:
                raise DiscoveryError("the connection to etcd is closed")
            try:
                return self._signed_in(question)
            except _NoAnswer as error:
                failures.append(str(error))
                self._next()
            except (KeyError, TypeError, ValueError) as error:
                raise DiscoveryError(f"what answers at {self.endpoint} is no etcd: {_why(error)}") from None
        raise DiscoveryError("; ".join(failures))

    def _signed_in(self, question: Callable[[_Client], _T]) -> _T:
        client = self._clients[self._at]
        try:
            client.sign_in()
            return question(client)
        except _StaleToken:
            client.sign_out()
        client.sign_in()
        try:
            return question(client)
        except _StaleToken as error:
            raise DiscoveryError(f"{error}: set SGLANG_HETERO_ETCD_USER and SGLANG_HETERO_ETCD_PASSWORD_FILE") from None

    def _next(self) -> None:
        self._at = (self._at + 1) % len(self._clients)


class _StaleToken(DiscoveryError):
    """etcd wants to be told anew who asks."""


class _Client(Etcd3Client):
    """One endpoint. Its session keeps the connection."""

    def __init__(self, url: str, options: EtcdOptions) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy or authority of the environment
        if options.ca is not None:
            session.verify = options.ca
        if options.cert is not None and options.key is not None:
            session.cert = (options.cert, options.key)
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None  # settings.parse_endpoints
        super().__init__(parts.hostname, parts.port, parts.scheme, api_path=API, session=session)
        self.url, self._options = url, options

    def sign_in(self) -> None:
        """Get a token, unless there is one or no user. Raises DiscoveryError."""
        if self._options.user is None or "Authorization" in self.session.headers:
            return
        try:
            body = {"name": self._options.user, "password": self._options.password()}
            self.session.headers["Authorization"] = self.call("auth/authenticate", body, kind=_Token).token
        except OptionError as error:
            raise DiscoveryError(str(error)) from None  # the file has been good at the start
        except _Refused as error:
            if "not enabled" in str(error):
                raise DiscoveryError(
                    f"{error}: do without SGLANG_HETERO_ETCD_USER, or switch it on with etcdctl auth enable"
                ) from None
            raise DiscoveryError(
                f"{error}: look at SGLANG_HETERO_ETCD_USER ({self._options.user}) and its password"
            ) from None

    def sign_out(self) -> None:
        """Forget the token."""
        self.session.headers.pop("Authorization", None)

    def post(self, url: str, *args: Any, json: Any = None, **kwargs: Any) -> Any:
        """What etcd3gw's own methods call."""
        return msgspec.json.decode(self._answer(url, json))

    def call(self, path: str, body: dict[str, Any], *, kind: Any = Any) -> Any:
        """The answer to one question."""
        return _decode(self._answer(self.get_url(path), body), kind, self.url)

    def keep_alive(self, lease: int) -> None:
        """Renew a lease. etcd answers with a stream of one line, whose errors have status 200."""
        found = self.call("lease/keepalive", {"ID": lease}, kind=_Alive)
        if found.error is not None:
            self._check(HTTP_BAD, msgspec.json.encode(found.error))
        if int(found.result.TTL) <= 0:
            raise LeaseGone(f"etcd at {self.url} does not know the lease any more")

    def watch(self, prefix: str, revision: int, quiet: float) -> urllib3.BaseHTTPResponse:  # type: ignore[override]
        """The answer to a watch, which goes on and on."""
        body = {"create_request": {**_below(prefix), "start_revision": str(revision)}}
        # Whoever is cut off from the other members says so instead of being silent.
        headers = {"Grpc-Metadata-hasleader": "true"}
        reply = self._send(self.get_url("watch"), body, quiet, headers)
        if reply.status_code != HTTP_OK:
            self._check(reply.status_code, self._body(reply))
        raw: urllib3.BaseHTTPResponse = reply.raw
        return raw

    def _answer(self, url: str, body: Any) -> bytes:
        reply = self._send(url, body, TIMEOUT_SECONDS)
        data = self._body(reply)
        self._check(reply.status_code, data)
        return data

    def _send(
        self, url: str, body: Any, read_seconds: float, headers: dict[str, str] | None = None
    ) -> requests.Response:
        try:
            return self.session.post(
                url,
                json=body,
                timeout=(TIMEOUT_SECONDS, read_seconds),
                stream=True,
                allow_redirects=False,
                headers=headers,
            )
        except requests.exceptions.SSLError as error:
            raise _NoAnswer(
                f"no TLS with etcd at {self.url}: {_why(error)}; look at SGLANG_HETERO_ETCD_CA, _CERT and _KEY"
            ) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            why = _why(error)
            # What a TLS port does to who speaks without; which of the two, depends on what it has read by then.
            tls = ("without response" in why or "reset by peer" in why) and not self._options.secure
            remedy = "if it wants TLS, set SGLANG_HETERO_ETCD_CA" if tls else "is it running there?"
            raise _NoAnswer(f"etcd at {self.url} does not answer: {why}; {remedy}") from None

    def _body(self, reply: requests.Response) -> bytes:
        """All of an answer, within bounds."""
        until, parts, size = time.monotonic() + ANSWER_SECONDS, [], 0
        try:
            with reply:
                for part in reply.raw.stream(1 << 16, decode_content=True):
                    parts.append(part)
                    size += len(part)
                    if size > MAX_ANSWER:
                        raise DiscoveryError(f"etcd at {self.url} answers with more than {MAX_ANSWER} bytes")
                    if time.monotonic() > until:
                        raise _NoAnswer(f"etcd at {self.url} takes more than {ANSWER_SECONDS:.0f} s for an answer")
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            raise _NoAnswer(f"etcd at {self.url} breaks off its answer: {_why(error)}") from None
        return b"".join(parts)

    def _check(self, status: int, data: bytes) -> None:
        """Raise what an answer other than 200 means."""
        if status == HTTP_OK:
            return
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            data = msgspec.json.decode(data, type=_Error).message.encode()
        text = f"etcd at {self.url} answers {status}: {shorten(data.decode('utf-8', 'replace'), 200)}"
        if any(one.encode() in data for one in _STALE_TOKEN):
            raise _StaleToken(text)
        if b"lease not found" in data:
            raise LeaseGone(text)
        if b"HTTP request to an HTTPS server" in data:
            raise _NoAnswer(f"{text}: write https://, or set SGLANG_HETERO_ETCD_CA")
        if status == HTTP_NOT_FOUND:
            raise _NoAnswer(f"{text}: there must be etcd, 3.4 or later, with its HTTP gateway on")
        if status >= HTTP_BROKEN:
            raise _NoAnswer(text)
        raise _Refused(f"{text}{_permission(data.decode('utf-8', 'replace'), self._options)}")


class _Refused(DiscoveryError):
    """etcd does not do what it is asked."""


class _Header(msgspec.Struct):
    revision: str
    """Always told, so that not everybody who answers `{}` is taken for an etcd without records."""


class _KeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    lease: str = "0"
    mod_revision: str = "0"

    @property
    def held(self) -> Held:
        """Raises ValueError if the numbers are none."""
        return Held(self.value, int(self.lease), int(self.mod_revision))

    @property
    def name(self) -> str:
        """The key as text; whatever it is, so that nobody's record makes the others unreadable."""
        return self.key.decode("utf-8", "backslashreplace")


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_KeyValue] = []
    more: bool = False


class _Done(msgspec.Struct):
    header: _Header
    succeeded: bool = False


class _Token(msgspec.Struct):
    token: str


class _Event(msgspec.Struct):
    kv: _KeyValue
    type: str = "PUT"


class _Result(msgspec.Struct):
    created: bool = False
    canceled: bool = False
    compact_revision: str = "0"
    cancel_reason: str = ""
    events: list[_Event] = []


class _Error(msgspec.Struct):
    message: str = ""


class _Renewed(msgspec.Struct):
    TTL: str = "0"


class _Alive(msgspec.Struct):
    result: _Renewed = msgspec.field(default_factory=_Renewed)
    error: _Error | None = None


class _Told(msgspec.Struct):
    result: _Result = msgspec.field(default_factory=_Result)
    error: _Error | None = None


def _decode(data: bytes, kind: Any, endpoint: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, binascii.Error, RecursionError) as error:
        raise DiscoveryError(f"what answers at {endpoint} is no etcd: {shorten(str(error), 200)}") from None


def _text(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _below(prefix: str) -> dict[str, str]:
    data = prefix.encode()
    return {"key": _text(data), "range_end": _text(data[:-1] + bytes([data[-1] + 1]))}


def _permission(text: str, options: EtcdOptions) -> str:
    if "permission denied" not in text.lower():
        return ""
    who = "nobody" if options.user is None else options.user
    return (
        f"; {who} may not: servers need readwrite, routers read, on {options.prefix}/ as a prefix "
        f"(etcdctl role grant-permission ROLE readwrite --prefix=true {options.prefix}/)"
    )


def _why(error: BaseException) -> str:
    """The innermost cause that says something, in a line."""
    while True:
        inner = getattr(error, "reason", None) or next(iter(error.args), None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return shorten(str(error) or type(error).__name__, 200)


def _shut(response: urllib3.BaseHTTPResponse) -> None:
    """Make a read in another thread return. Never raises: it may have just ended."""
    with contextlib.suppress(Exception):
        response.shutdown()
