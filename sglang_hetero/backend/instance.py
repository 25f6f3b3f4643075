"""What this server is to routers: `GET /hetero/instance`, and its record in etcd where there is one.

Lives in SGLang's HTTP process. What depends on SGLang's configuration is asked for when it is needed, not at import.
"""

from __future__ import annotations

import http.client
import logging
import os
import ssl
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from sglang_hetero import __version__, releases
from sglang_hetero.discovery.ranks import decode_told, describe
from sglang_hetero.discovery.record import Description, Instance, encode_description
from sglang_hetero.errors import DiscoveryError, OptionError, RecordError
from sglang_hetero.layout import limits
from sglang_hetero.layout.manifest import Side
from sglang_hetero.state import folder
from sglang_hetero.state.report import Discovery
from sglang_hetero.transfer import messages

from . import selfcheck
from .classes import BACKENDS
from .options import Mode, Options

logger = logging.getLogger(__name__)

INSTANCE_PATH = "/hetero/instance"
HEALTH_PATH = "/health"
HEALTH_SECONDS = 30.0
"""For an answer of the own server: SGLang's takes a second, and while it starts it may be busy for longer."""
HTTP_OK = 200
HEALTH_WORDS = 200
"""Bytes of an answer other than 200 that a message shows."""
SIGTERM_HANDLER = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"
"""From then on SGLang finishes what it has, and its /health answers 503."""
LAST = -1
"""Exit priority of multiprocessing: after its own children."""


@dataclass(frozen=True)
class Serving:
    """How the HTTP server was started, as far as routers and discovery need it."""

    host: str
    port: int
    secure: bool
    model: str
    bootstrap_port: int
    backend: str
    nodes: int = 1


class OwnInstance:
    """What this server is, from its configuration and what its ranks have left in the folder. Thread-safe."""

    def __init__(
        self, side: Side, options: Options, where: Path | None, serving: Callable[[], Serving] | None = None
    ) -> None:
        """where: None if the server has no folder: then nothing of its ranks is known. serving: for tests."""
        self._side, self._options, self._where = side, options, where
        self._serving = _serving if serving is None else serving
        self._incarnation = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._kept: tuple[Description, bytes] | None = None
        self._url = ""

    def description(self) -> Description:
        """What is known now. Once all ranks have said what they are it does not change any more."""
        return self._look()[0]

    def answer(self) -> bytes:
        """The body of `GET /hetero/instance`."""
        return self._look()[1]

    def _look(self) -> tuple[Description, bytes]:
        with self._lock:
            if self._kept is not None:
                return self._kept
            serving = self._serving()
            off = self._options.mode is Mode.OFF
            url, problem = (self._url, "") if self._url else own_url(self._options, serving)
            if not problem:
                self._url = url  # its record stays at one place, also if the machine gets other addresses
            server = Instance(
                role=self._side,
                url=url,
                bootstrap_port=serving.bootstrap_port if self._side is Side.PREFILL else 0,
                model=messages.printable(serving.model, limits.MAX_NAME),
                incarnation=self._incarnation,
                release=__version__,
                messages=messages.VERSION if serving.backend in BACKENDS and not off else 0,
            )
            ranks, notes = self._ranks()
            notes += [problem] if problem else []
            description, whole = describe(
                server, self._options.mode, serving.backend, ranks, notes, nodes=serving.nodes
            )
            if self._where is None or serving.backend not in BACKENDS:  # no rank will ever tell anything
                description = replace(description, final=True)
            found = description, encode_description(description)
            if whole:
                self._kept = found
            return found

    def _ranks(self) -> tuple[list[Any], list[str]]:
        if self._where is None:
            return [], []
        found = []
        data, notes = folder.read_ranks(self._where)
        # Servers that one program has started by multiprocessing may share its folder.
        here = os.getpid()
        for one in data:
            try:
                told = decode_told(one)
            except RecordError as error:
                notes.append(str(error))
                continue
            if not told.parents or here in told.parents:
                found.append(told)
        return found, notes


def own_url(options: Options, serving: Serving) -> tuple[str, str]:
    """Where routers reach this server, and why that may be wrong; else an empty text."""
    if options.advertise_url is not None:
        return options.advertise_url, ""
    if not _everywhere(serving.host):
        return _url(serving.host, serving), ""
    from sglang.srt.utils.network import get_local_ip_auto

    host = get_local_ip_auto("") or "127.0.0.1"
    problem = (
        f"this server listens on {serving.host}, and no address of it is known but {host}: "
        "set SGLANG_HETERO_ADVERTISE_URL"
    )
    return _url(host, serving), problem if _loopback(host) else ""


def _url(host: str, serving: Serving) -> str:
    return f"{'https' if serving.secure else 'http'}://{f'[{host}]' if ':' in host else host.lower()}:{serving.port}"


def _everywhere(host: str) -> bool:
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:
        return False


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serving() -> Serving:
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving

    serving, disagg = get_serving(), get_disagg()
    return Serving(
        host=str(serving.host or ""),
        port=int(serving.port),
        secure=bool(serving.ssl_certfile),
        model=str(serving.served_model_name or ""),
        bootstrap_port=int(disagg.disaggregation_bootstrap_port or 0),
        backend=str(disagg.disaggregation_transfer_backend),
        nodes=int(get_parallel().nnodes),
    )


def serves(serving: Serving) -> bool:
    """True if the own server answers /health with 200. Raises DiscoveryError with the cause if it does not."""
    host = serving.host
    if _everywhere(host):
        host = "::1" if ":" in host else "127.0.0.1"
    where = f"this server's {_url(host, serving)}{HEALTH_PATH}"
    connection: http.client.HTTPConnection
    if serving.secure:
        # Itself: a certificate would be of another name than the loopback's.
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(host, serving.port, timeout=HEALTH_SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(host, serving.port, timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", HEALTH_PATH)
        answer = connection.getresponse()
        if answer.status == HTTP_OK:
            return True
        words = messages.printable(answer.read1(HEALTH_WORDS).decode("utf-8", "replace"), HEALTH_WORDS)
    except (OSError, http.client.HTTPException) as error:
        raise DiscoveryError(f"{where} does not answer: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
    raise DiscoveryError(f"{where} says HTTP {answer.status}, not 200{': ' if words else ''}{words}")


def register(instance: OwnInstance, options: Options, serving: Callable[[], Serving] | None = None) -> Any:
    """Start the registrar, if etcd is asked for; None else. Its record goes when SGLang is told to end.

    Raises OptionError where the options of etcd do not go together, or if nobody could reach this server.
    """
    etcd = options.etcd
    if etcd is None:
        return None
    from sglang_hetero.discovery.registrar import Registrar, Server

    asked = serving or _serving
    if etcd.user is not None and not etcd.secure:
        logger.warning("discovery: the password of etcd goes over the network as it is: use TLS (docs/discovery.md)")
    here, problem = own_url(options, asked())
    if problem:
        raise OptionError(f"{problem} (docs/discovery.md)")
    if _loopback(urlsplit(here).hostname or "") and not all(map(_is_here, etcd.endpoints)):
        logger.warning("discovery: this server registers as %s, which no other machine can reach", here)
    registrar = Registrar(
        etcd, Server(serves=lambda: serves(asked()), describe=lambda: instance.description().instance)
    )
    Finalize(None, registrar.close, exitpriority=LAST)
    return registrar


def _is_here(endpoint: str) -> bool:
    return _loopback(urlsplit(endpoint).hostname or "")


def leave_at_sigterm(registrar: Any) -> None:
    """Have the record taken away as soon as SGLang is told to end, while it still finishes its requests.

    Raises UpstreamChanged if SGLang cannot be watched for that.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    selfcheck.require(releases.installed().rows(selfcheck.SERVING))

    def around(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        registrar.leave()
        return original(*arguments, **named)

    HookRegistry.register(SIGTERM_HANDLER, around, HookType.AROUND)
    HookRegistry.apply_hooks()


def told(registrar: Any) -> Callable[[], Discovery | None]:
    """How the registration stands, for `/hetero/state`."""

    def discovery() -> Discovery | None:
        found = None if registrar is None else registrar.registration
        return found if isinstance(found, Discovery) else None

    return discovery
