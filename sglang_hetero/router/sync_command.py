"""`sglang-hetero sync-router`: keeps the list of workers of sglang-router in step with the servers that there are."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hetero.errors import HeteroError, RouterError

from . import source
from .flags import KEY, LEVELS, log_to_stderr, seconds

if TYPE_CHECKING:
    from sglang_hetero.discovery.members import Members
    from sglang_hetero.discovery.record import Instance

    from .sync import Change, Worker

logger = logging.getLogger(__name__)

ROUTER_KEY = "SGLANG_ROUTER_API_KEY"
TIMEOUT_SECONDS = 10.0
"""For each answer of the router, or of a server that is asked for its bootstrap port."""
ASK_AGAIN_SECONDS = 60.0
"""How long a worker that was asked for may be missing in the router's list until it is asked for again. The router
itself goes on looking for it for as long as its --worker-startup-timeout-secs says."""
MAX_ANSWER = 64 << 20
"""Bytes."""
SHOWN = 300
"""Characters of the router's own words."""
EXAMPLES = """examples:
  sglang-hetero sync-router --router http://127.0.0.1:30000 --etcd 10.0.0.9:2379
  sglang-hetero sync-router --router http://127.0.0.1:30000 --etcd 10.0.0.9:2379 --own-all --api-key KEY

The router is sglang-router's own, started with --pd-disaggregation; it needs no servers at its start:
  python -m sglang_router.launch_router --pd-disaggregation --host 0.0.0.0 --port 30000

Each change is printed. Workers that somebody else has added stay, but with --own-all. When this ends, the router keeps
its workers. docs/router.md says more."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "sync-router",
        help="keep sglang-router's own list of workers up to date",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--router", required=True, metavar="URL", help="of sglang-router")
    source.add_arguments(parser)
    parser.add_argument("--own-all", action="store_true", help="remove workers that somebody else has added, too")
    parser.add_argument(
        "--name",
        default="sglang-hetero",
        help="whose workers these are; of two that keep one router, each needs its own (default: %(default)s)",
    )
    parser.add_argument(
        "--interval-secs",
        type=seconds,
        default=5.0,
        metavar="S",
        help="between two looks at the router's list; a change of servers is passed on at once (default: %(default)g)",
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"the servers', which the router gets, too (default: ${KEY})")
    parser.add_argument("--router-api-key", metavar="KEY", help=f"of the router's own list (default: ${ROUTER_KEY})")
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Keep on until SIGINT or SIGTERM."""
    from sglang_hetero.discovery.record import clean_url

    log_to_stderr(arguments.log_level)
    url = clean_url(arguments.router)
    members = source.members(arguments)
    stop = threading.Event()
    former = [signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        Sync(
            members,
            Router(url, arguments.router_api_key or os.environ.get(ROUTER_KEY)),
            owner=arguments.name,
            own_all=arguments.own_all,
            key=arguments.api_key or os.environ.get(KEY),
            say=lambda text: print(text, flush=True),
        ).run(stop, arguments.interval_secs)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), former, strict=True):
            signal.signal(number, handler)
        members.close()
    return 0


class Router:
    """sglang-router's HTTP API for its workers."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url, self._key = url, key

    def workers(self) -> tuple[Worker, ...]:
        """Those in its list. Raises RouterError if it is away."""
        from .sync import read_workers

        return read_workers(self._ask("GET", "/workers"))

    def add(self, body: dict[str, Any]) -> str:
        """Ask for a worker; its id. The router takes it up when it has found it healthy. Raises RouterError."""
        answer = msgspec.json.decode(self._ask("POST", "/workers", msgspec.json.encode(body)))
        return str(answer.get("worker_id", "")) if isinstance(answer, dict) else ""

    def fate(self, worker: str) -> str:
        """What has become of a worker that was asked for: the router's words, empty while it is looked for."""
        try:
            answer = msgspec.json.decode(self._ask("GET", f"/workers/{worker}"))
        except (HeteroError, msgspec.DecodeError) as error:
            return str(error)
        job = answer.get("job_status") if isinstance(answer, dict) else None
        if not isinstance(job, dict) or job.get("status") != "failed":
            return ""
        return str(job.get("message"))[:SHOWN]

    def remove(self, worker: str) -> None:
        """Raises RouterError."""
        self._ask("DELETE", f"/workers/{worker}", gone_is_fine=True)

    def _ask(self, method: str, path: str, data: bytes | None = None, *, gone_is_fine: bool = False) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        status, answer = _fetch(method, self.url + path, headers, data)
        if status in (401, 403):
            raise RouterError(f"{self.url} wants its key for {method} {path}: give --router-api-key")
        if not 200 <= status < 300 and not (gone_is_fine and status == 404):
            raise RouterError(
                f"{self.url}: {method} {path} says HTTP {status}: {answer[:SHOWN].decode(errors='replace')}"
            )
        return answer


def _fetch(method: str, url: str, headers: dict[str, str], data: bytes | None = None) -> tuple[int, bytes]:
    """Status and body. Raises RouterError if there is no answer."""
    import requests

    try:
        with requests.Session() as session:
            session.trust_env = False  # a proxy of the environment must not see loopback
            with session.request(
                method, url, headers=headers, data=data, timeout=TIMEOUT_SECONDS, stream=True, allow_redirects=False
            ) as reply:
                found: bytes = reply.raw.read(MAX_ANSWER + 1, decode_content=True)
                status: int = reply.status_code
    except (requests.RequestException, OSError, ValueError) as error:
        raise RouterError(f"{url} does not answer: {error}") from None
    if len(found) > MAX_ANSWER:
        raise RouterError(f"{url} answers with more than {MAX_ANSWER} bytes")
    return status, found


class Sync:
    """Compares the two lists, again and again."""

    def __init__(
        self,
        members: Members,
        router: Router,
        *,
        owner: str,
        own_all: bool,
        key: str | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._router, self._owner, self._own_all, self._key = members, router, owner, own_all, key
        self._say, self._clock = say, clock
        self._away = ""
        self._asked: dict[str, tuple[Instance, float, str]] = {}
        """Workers that are to come, by URL: the record they were asked for with, when, and their id."""
        self._ports: dict[tuple[str, str], int] = {}
        """Bootstrap ports that servers have told, by URL and incarnation."""
        self._told: dict[str, str] = {}
        """What was said last of a URL that nothing can be done for."""

    def run(self, stop: threading.Event, interval: float) -> None:
        """Until `stop` is set."""
        wake = threading.Event()
        self._members.subscribe(wake.set)
        while not stop.is_set():
            wake.clear()
            try:
                self.step()
            except Exception:  # it must not end while nobody looks
                logger.exception("this round has failed; the next one comes")
            deadline = self._clock() + interval
            while not stop.is_set() and not wake.is_set() and self._clock() < deadline:
                wake.wait(min(0.5, max(0.0, deadline - self._clock())))

    def step(self) -> None:
        """One comparison, and what follows from it."""
        from . import sync

        # In this order: a set that is not whole must not be taken for one that is.
        complete = not self._members.trouble
        wanted = [one for one in map(self._complete, self._members.snapshot()) if one is not None]
        try:
            present = self._router.workers()
            self._is_back(len(present))
            steps = sync.changes(wanted, present, self._owner, own_all=self._own_all, complete=complete)
            here = {worker.url for worker in present}
            for url in [url for url in self._asked if url in here or url not in {one.url for one in wanted}]:
                del self._asked[url]
            for change in steps:
                self._do(change)
        except HeteroError as error:
            if not self._away:
                self._say(f"router: {error}; waiting for it")
            self._away = str(error)

    def _is_back(self, workers: int) -> None:
        if self._away:
            self._say(f"router: {self._router.url} answers again, {workers} workers")
            self._asked.clear()  # another process knows nothing of what the former one was asked for
        self._away = ""

    def _do(self, change: Change) -> None:
        from .sync import Do, spec

        if change.do is Do.REMOVE:
            self._router.remove(change.id)
            self._say(f"- {change.label}: {change.why}")
        elif change.do is Do.LEAVE:
            self._say_once(change.label, f"! {change.label}: {change.why}")
        elif change.instance is not None and not self._pending(change.instance):
            worker = self._router.add(spec(change.instance, self._owner, self._key))
            if change.instance.url not in self._told:
                self._say(f"+ {change.label}: {change.why}")
            self._asked[change.instance.url] = (change.instance, self._clock(), worker)

    def _pending(self, instance: Instance) -> bool:
        """Whether the router has been asked for it and still looks for it."""
        asked = self._asked.get(instance.url)
        if asked is None or asked[0] != instance:
            return False
        if self._clock() - asked[1] < ASK_AGAIN_SECONDS:
            fate = self._router.fate(asked[2])
            if fate:
                self._say_once(instance.url, f"! {instance.label} is not taken up yet: {fate}")
            return True
        return False

    def _complete(self, instance: Instance) -> Instance | None:
        """A prefill server with its bootstrap port, which one that is known by URL only tells itself; None if it cannot
        be asked now."""
        from msgspec.structs import replace

        from sglang_hetero.discovery.record import decode_description
        from sglang_hetero.layout.manifest import Side

        if instance.role is not Side.PREFILL or instance.bootstrap_port:
            return instance
        place = (instance.url, instance.incarnation)
        if place not in self._ports:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            try:
                status, data = _fetch("GET", f"{instance.url}/hetero/instance", headers)
                if status == 404:
                    self._say_once(instance.url, f"! {instance.label} does not tell its bootstrap port: give it")
                    return instance
                if status != 200:
                    raise RouterError(f"HTTP {status}{': give --api-key' if status == 401 else ''}")
                self._ports[place] = decode_description(data).instance.bootstrap_port
            except HeteroError as error:
                self._say_once(instance.url, f"! {instance.label} is not added yet, for want of its port: {error}")
                return None
        return replace(instance, bootstrap_port=self._ports[place])

    def _say_once(self, about: str, text: str) -> None:
        if self._told.get(about) != text:
            self._told[about] = text
            self._say(text)
