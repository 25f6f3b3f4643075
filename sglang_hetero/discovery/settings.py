"""How etcd is reached: every setting once, for servers (environment variables) and for commands (flags). Pure."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_hetero.errors import OptionError, RecordError
from sglang_hetero.layout.checks import shorten
from sglang_hetero.secret_file import MAX_SECRET_BYTES, read_secret

from .record import MAX_LEASE, clean_url

DEFAULT_PREFIX = "/sglang-hetero"
DEFAULT_LEASE = 15
"""Seconds. A third of it is the time between two renewals, so that two may fail; and it is how long routers still see a
server that was killed, whose failures they notice by themselves."""
MIN_LEASE = 3
"""etcd grants no shorter one than its election takes, 1.5 s with its defaults."""
MAX_ENDPOINTS = 16
MAX_PREFIX = 200
MAX_USER = 256
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
"""No character that is special to any tool, and whole steps only: `/a` must not be a prefix of `/ab` by accident."""


def parse_endpoints(text: str) -> tuple[str, ...]:
    """`host:port[,host:port]`, with http:// or https:// in front where that is not to follow from the certificates.

    As they were written, each sound by itself. Raises ValueError.
    """
    found = tuple(part.strip() for part in text.split(","))
    if not 1 <= len(found) <= MAX_ENDPOINTS or len(set(found)) != len(found):
        raise ValueError(text)
    for part in found:
        try:
            clean = clean_url(part if "://" in part else f"http://{part}")
        except RecordError as error:
            raise ValueError(str(error)) from None
        if not re.search(r":\d+$", clean) or not re.fullmatch(r"https?://[^/]+", clean):
            raise ValueError(f"{shorten(part)} must be host:port")
    return found


def parse_prefix(text: str) -> str:
    """Where the records lie. Raises ValueError."""
    if len(text) > MAX_PREFIX or not _PREFIX.fullmatch(text):
        raise ValueError(text)
    return text


def parse_user(text: str) -> str:
    """Raises ValueError."""
    if not 1 <= len(text) <= MAX_USER or not text.isprintable():
        raise ValueError(text)
    return text


def parse_file(text: str) -> str:
    """A path. Raises ValueError."""
    if not text.strip() or "\0" in text:
        raise ValueError(text)
    return text


def parse_url(text: str) -> str:
    """Of a server, as records have it. Raises ValueError."""
    try:
        return clean_url(text)
    except RecordError as error:
        raise ValueError(str(error)) from None


def parse_lease(text: str) -> int:
    """Seconds. Raises ValueError."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not MIN_LEASE <= value <= MAX_LEASE:
        raise ValueError(text)
    return value


@dataclass(frozen=True)
class Setting:
    """One of them. field: of EtcdOptions. parse: raises ValueError. values, default: in words. flag: None where
    commands have no use for it."""

    field: str
    variable: str
    flag: str | None
    parse: Callable[[str], Any]
    values: str
    default: str
    what: str


SETTINGS = (
    Setting(
        "endpoints",
        "SGLANG_HETERO_ETCD",
        "--etcd",
        parse_endpoints,
        f"host:port of etcd, at most {MAX_ENDPOINTS} with commas between them, http:// or https:// in front if need be",
        "none: without discovery",
        "the etcd in which servers register and routers look for them (docs/discovery.md)",
    ),
    Setting(
        "prefix",
        "SGLANG_HETERO_ETCD_PREFIX",
        "--etcd-prefix",
        parse_prefix,
        f"steps like /team/fleet of letters, digits, dots, hyphens and _; at most {MAX_PREFIX} characters",
        DEFAULT_PREFIX,
        "where the records of one fleet lie; two fleets in one etcd need two",
    ),
    Setting(
        "user",
        "SGLANG_HETERO_ETCD_USER",
        "--etcd-user",
        parse_user,
        f"a name of at most {MAX_USER} characters",
        "none",
        "the user as which etcd is asked",
    ),
    Setting(
        "password_file",
        "SGLANG_HETERO_ETCD_PASSWORD_FILE",
        "--etcd-password-file",
        parse_file,
        "a file that only its owner, or its group, can read",
        "none",
        "the password of that user",
    ),
    Setting(
        "ca",
        "SGLANG_HETERO_ETCD_CA",
        "--etcd-ca",
        parse_file,
        "a file in PEM form",
        "none: no TLS, or with https:// the authorities that requests comes with",
        "authorities that may sign etcd's certificate",
    ),
    Setting(
        "cert",
        "SGLANG_HETERO_ETCD_CERT",
        "--etcd-cert",
        parse_file,
        "a file in PEM form",
        "none",
        "the own certificate, where etcd asks for one",
    ),
    Setting(
        "key",
        "SGLANG_HETERO_ETCD_KEY",
        "--etcd-key",
        parse_file,
        "a file in PEM form, without a passphrase",
        "none",
        "the key of that certificate",
    ),
    Setting(
        "lease",
        "SGLANG_HETERO_ETCD_LEASE",
        None,
        parse_lease,
        f"seconds, a whole number from {MIN_LEASE} to {MAX_LEASE}",
        str(DEFAULT_LEASE),
        "how long a server that was killed still stands in etcd",
    ),
)

ENDPOINTS = next(one for one in SETTINGS if one.field == "endpoints")


@dataclass(frozen=True)
class EtcdOptions:
    """How etcd is reached, made by `of`. endpoints: URLs. lease: seconds; a router uses it for how long it waits after
    etcd was away until what is missing counts as gone."""

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    lease: int = DEFAULT_LEASE

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EtcdOptions | None:
        """From parsed values by field, None where one is not given; None if etcd is not asked for.

        Raises OptionError where they do not go together or a file cannot be read.
        """
        given = {one.name: values[one.name] for one in fields(cls) if values.get(one.name) is not None}
        names = {setting.field: setting.variable for setting in SETTINGS}
        if "endpoints" not in given:
            if given:
                raise OptionError(
                    f"{names[next(iter(given))]} is set, but not {names['endpoints']} (docs/discovery.md)"
                )
            return None
        for one, other in (("user", "password_file"), ("cert", "key")):
            if (one in given) != (other in given):
                raise OptionError(f"{names[one]} and {names[other]} go together: give both, or neither")
        secure = "ca" in given or "cert" in given
        urls = tuple(
            clean_url(text if "://" in text else f"{'https' if secure else 'http'}://{text}")
            for text in given["endpoints"]
        )
        if len({url.partition("://")[0] for url in urls}) > 1:
            raise OptionError(f"{names['endpoints']}: all of them with TLS, or none: {', '.join(urls)}")
        if secure and not urls[0].startswith("https"):
            raise OptionError(f"{names['endpoints']}: {urls[0]} takes no certificates; write https:// or leave it out")
        for field in ("ca", "cert", "key"):
            if field in given:
                _readable(given[field], names[field])
        options = cls(**{**given, "endpoints": urls})
        options.password()
        return options

    @property
    def secure(self) -> bool:
        """Whether etcd is spoken to by TLS."""
        return self.endpoints[0].startswith("https")

    def password(self) -> str:
        """As it stands in the file now, empty without one. Raises OptionError where the file cannot serve."""
        if self.password_file is None:
            return ""
        what = f"SGLANG_HETERO_ETCD_PASSWORD_FILE={self.password_file!r}"
        data = read_secret(self.password_file, what)
        if not 1 <= len(data) <= MAX_SECRET_BYTES:
            raise OptionError(f"{what}: the password has {len(data)} bytes, must be 1 to {MAX_SECRET_BYTES}")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise OptionError(f"{what}: the password is no UTF-8") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that follows etcd; the environment variables of servers stand in for those not given."""
    group = parser.add_argument_group("etcd (docs/discovery.md)")
    for one in SETTINGS:
        if one.flag is not None:
            metavar = "HOST:PORT" if one.field == "endpoints" else one.field.upper().replace("PASSWORD_FILE", "FILE")
            group.add_argument(one.flag, metavar=metavar, help=f"{one.what} (default: ${one.variable}, {one.default})")


def of_flags(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> EtcdOptions | None:
    """What the flags of `add_flags` and the environment say; None if etcd is not asked for. Raises OptionError."""
    values: dict[str, Any] = {}
    for one in SETTINGS:
        named = None if one.flag is None else getattr(arguments, one.flag.lstrip("-").replace("-", "_"))
        text = environ.get(one.variable) if named is None else named
        if text is None:
            continue
        try:
            values[one.field] = one.parse(text)
        except ValueError:
            name = one.variable if named is None else one.flag
            raise OptionError(f"{name}={shorten(text)}: must be {one.values} (docs/discovery.md)") from None
    return EtcdOptions.of(values)


def _readable(path: str, name: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise OptionError(f"{name}={path!r}: {error.strerror or error}") from None
