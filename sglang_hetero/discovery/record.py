"""What one server is, for those who send requests to it: the record in etcd and the answer of `GET /hetero/instance`.

Pure. Whatever is read comes from strangers: bytes that are no sound record raise RecordError, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from sglang_hetero.errors import HeteroError, RecordError
from sglang_hetero.layout import limits
from sglang_hetero.layout.checks import shorten
from sglang_hetero.layout.manifest import Manifest, Side, digest
from sglang_hetero.layout.wire import decode as decode_manifest
from sglang_hetero.transfer.fields import INT64_MAX, MAX_PORT

VERSION = 1
"""Raised with every change of a field's meaning. New fields need no other one: who does not know them skips them."""
MAX_RECORD_BYTES = 16 << 10
"""All fields at their longest, every character escaped, are below it."""
MAX_URL = 512
MAX_TEXT = 1000
"""Characters of a reason why ranks take SGLang's own path only."""
MAX_NOTES = 64
MAX_LEASE = 3600
"""Seconds that a record may stay in etcd, and a server that etcd does not list any more in a router."""
MAX_MANIFESTS = 1024
"""Ranks of one server."""
MAX_DESCRIPTION_BYTES = 64 << 20
"""Of an answer: 90 ranks with the largest manifests, or 1,024 with 45 KB each, which is above today's models."""
MAX_REASON = 300
"""Characters of msgspec's reason that a message shows."""


_T = TypeVar("_T")


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One server. Of one that is known by its URL only, all else is left as it is by default.

    url: where it takes requests, as `clean_url` writes it. bootstrap_port: of prefill; 0 if there is none or it is not
    known. model: the name under which it is served; two servers with different ones do not go together. tp_size: ranks
    of the attention TP group, so of one attention-DP replica; 0 if not known, and so are dp_size and pp_size.
    fingerprint: digest of everything about its ranks that pairing depends on; two servers of the same role with the
    same one can stand in for each other. Empty if it is not known. requests, tokens: how many it can have at a time,
    all replicas together; 0 if not known. incarnation: another one after every start. release: of this package.
    messages: version of our messages; 0 if it does not speak them. lease: seconds, of its record in etcd, which it
    writes again within so long if etcd has lost it; 0 if it is not known.
    """

    role: Side
    url: str
    bootstrap_port: int = 0
    model: str = ""
    tp_size: int = 0
    dp_size: int = 0
    pp_size: int = 0
    fingerprint: str = ""
    requests: int = 0
    tokens: int = 0
    incarnation: str = ""
    release: str = ""
    messages: int = 0
    lease: int = 0

    def __post_init__(self) -> None:
        clean = clean_url(self.url)
        _require(clean == self.url, f"url is {shorten(self.url)}, must be written {shorten(clean)}")
        _within(self.bootstrap_port, MAX_PORT, "bootstrap_port")
        _require(
            self.role is Side.PREFILL or not self.bootstrap_port,
            "a decode server has no bootstrap port, but one is told",
        )
        for name in ("tp_size", "dp_size", "pp_size"):
            _within(getattr(self, name), limits.MAX_RANKS, name)
        _within(self.lease, MAX_LEASE, "lease")
        for name in ("requests", "tokens", "messages"):
            _within(getattr(self, name), INT64_MAX, name)
        for name in ("model", "fingerprint", "incarnation", "release"):
            value = getattr(self, name)
            _require(
                len(value) <= limits.MAX_NAME,
                f"{name} has {len(value)} characters, must have {limits.MAX_NAME} at most",
            )
            _require(
                not value or value.isprintable(), f"{name} is {shorten(value)}, with characters that cannot be printed"
            )

    @property
    def label(self) -> str:
        """Name of the server in messages and logs, for example `prefill http://10.0.0.7:30000`."""
        return f"{self.role} {self.url}"

    @property
    def host(self) -> str:
        """Host of its URL, an IPv6 address without brackets; where its bootstrap server is, too."""
        return urlsplit(self.url).hostname or ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /hetero/instance`.

    mode: SGLANG_HETERO of the server. backend: its transfer backend. manifests: of its ranks, as layout.wire encodes
    them (base64 in JSON); empty if it has none that all its ranks have told. unsupported: why ranks take SGLang's own
    path only. notes: why this answer is not complete. final: whether no more is to come, so that it is of no use to
    wait for manifests that are not there.
    """

    instance: Instance
    mode: str = ""
    backend: str = ""
    manifests: tuple[bytes, ...] = ()
    unsupported: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    final: bool = False

    def __post_init__(self) -> None:
        _require(
            len(self.manifests) <= MAX_MANIFESTS, f"{len(self.manifests)} manifests, must be {MAX_MANIFESTS} at most"
        )
        for name in ("unsupported", "notes"):
            texts = getattr(self, name)
            _require(len(texts) <= MAX_NOTES, f"{name} has {len(texts)} lines, must have {MAX_NOTES} at most")
            for text in texts:
                _require(len(text) <= MAX_TEXT and text.isprintable(), f"{name}: {shorten(text)} is no line of text")
        for name in ("mode", "backend"):
            value = getattr(self, name)
            _require(
                len(value) <= limits.MAX_NAME and (not value or value.isprintable()), f"{name} is {shorten(value)}"
            )

    def ranks(self) -> tuple[Manifest, ...]:
        """The manifests, read and checked: sorted by place, all of this server's role. Raises RecordError."""
        found = []
        for data in self.manifests:
            try:
                found.append(decode_manifest(data))
            except HeteroError as error:
                raise RecordError(f"{self.instance.label}: {error}") from None
        for one in found:
            _require(
                one.side is self.instance.role,
                f"{self.instance.label}: a manifest is that of {one.label}, of another role",
            )
        return tuple(sorted(found, key=_place))


class _Record(msgspec.Struct, frozen=True):
    version: int
    instance: Instance


class _Answer(msgspec.Struct, frozen=True):
    version: int
    description: Description


class _Version(msgspec.Struct):
    """What every release says first, whatever else it says."""

    version: int = 0


def encode(instance: Instance) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(_Record(VERSION, instance))


def decode(data: bytes) -> Instance:
    """The server in these bytes, with all bounds kept. Raises RecordError."""
    return _read(data, _Record, MAX_RECORD_BYTES, "a record").instance


def encode_description(description: Description) -> bytes:
    """The answer of `GET /hetero/instance` as JSON."""
    return msgspec.json.encode(_Answer(VERSION, description))


def decode_description(data: bytes) -> Description:
    """The answer in these bytes, with all bounds kept; manifests are read by its `ranks()`. Raises RecordError."""
    return _read(data, _Answer, MAX_DESCRIPTION_BYTES, "an answer of /hetero/instance").description


def fingerprint_of(
    role: Side, mode: str, backend: str, manifests: Iterable[Manifest], unsupported: Iterable[str]
) -> str:
    """Digest of what pairing depends on: no addresses are in it, no incarnations, and not how many items a pool has."""
    ranks = [(*_place(one), one.coordinates, one.fingerprint) for one in sorted(manifests, key=_place)]
    return digest((role, mode, backend, ranks, sorted(set(unsupported))))


def clean_url(text: str) -> str:
    """A server's URL as records have it: http or https, small letters, no slash at the end. Raises RecordError."""
    shown = shorten(text)
    _require(0 < len(text) <= MAX_URL, f"the URL {shown} has {len(text)} characters, must have 1 to {MAX_URL}")
    _require(
        text.isascii() and text.isprintable() and not set(' "<>\\^`{|}') & set(text), f"{shown} is no URL of a server"
    )
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RecordError(f"{shown} is no URL of a server: {error}") from None
    _require(
        parts.scheme in ("http", "https") and bool(host) and port != 0,
        f"{shown} is no URL of a server: it must be like http://10.0.0.7:30000",
    )
    _require(
        "@" not in parts.netloc and "?" not in text and "#" not in text,
        f"{shown}: the URL of a server has no user, no question and no fragment",
    )
    shown_host = f"[{host}]" if ":" in (host or "") else host
    return f"{parts.scheme}://{shown_host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def _place(one: Manifest) -> tuple[int, int, int]:
    return (one.coordinates.dp_rank, one.coordinates.pp_rank, one.coordinates.tp_rank)


def _read(data: bytes, kind: type[_T], limit: int, what: str) -> _T:
    if len(data) > limit:
        raise RecordError(f"{what} of {len(data)} bytes is larger than {limit}")
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise RecordError(
                f"{what} has version {shorten(version)}, this release reads version {VERSION}; install the same "
                "release of sglang-hetero everywhere"
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError) as error:
        # msgspec repeats a wrong value in its message, however long.
        raise RecordError(f"this is not {what}: {ascii(str(error))[1:-1][:MAX_REASON]}") from None


def _within(value: int, high: int, what: str) -> None:
    _require(0 <= value <= high, f"{what} is {shorten(value)}, must be 0 to {high}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise RecordError(text)
