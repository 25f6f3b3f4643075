"""`sglang-hetero sync-router`: keeps the list of workers of sglang-router in step with the servers that there are."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
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
"""For an answer of the router altogether, and for those of all servers that are asked for their bootstrap ports."""
STOP_SECONDS = 0.2
"""How soon a wait for an answer notices that this is to end."""
ASKED_AT_ONCE = 16
"""Servers; an answer may be long."""
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
            Router(url, arguments.router_api_key or os.environ.get(ROUTER_KEY), stop),
            owner=arguments.name,
            own_all=arguments.own_all,
            key=arguments.api_key or os.environ.get(KEY),
            say=lambda text: print(text, flush=True),
            stop=stop,
        ).run(arguments.interval_secs)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), former, strict=True):
            signal.signal(number, handler)
        members.close()
    return 0


class NoAnswer(RouterError):
    """Nobody answers there, or not in time, or this is to end."""


class Router:
    """sglang-router's HTTP API for its workers. Everything raises NoAnswer if it is away."""

    def __init__(self, url: str, key: str | None, stop: threading.Event | None = None) -> None:
        """stop: ends a wait for an answer."""
        self.url, self._key, self._stop = url, key, stop or threading.Event()

    def workers(self) -> tuple[Worker, ...]:
        """Those in its list. Raises RouterError."""
        from .sync import read_workers

        return read_workers(self._ask("GET", "/workers"))

    def add(self, body: dict[str, Any]) -> str:
        """Ask for a worker; its id. The router takes it up when it has found it healthy. Raises RouterError."""
        data = self._ask("POST", "/workers", msgspec.json.encode(body))
        try:
            answer = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RouterError(f"POST /workers is not answered as by sglang-router 0.3: {error}") from None
        return str(answer.get("worker_id", "")) if isinstance(answer, dict) else ""

    def fate(self, worker: str) -> str:
        """What has become of a worker that was asked for: the router's words, empty while it is looked for."""
        try:
            answer = msgspec.json.decode(self._ask("GET", f"/workers/{worker}"))
        except NoAnswer:
            raise
        except (HeteroError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return str(error)
        job = answer.get("job_status") if isinstance(answer, dict) else None
        if not isinstance(job, dict) or job.get("status") != "failed":
            return ""
        return str(job.get("message"))[:SHOWN]

    def remove(self, worker: str) -> None:
        """Have it let go of a worker. Raises RouterError."""
        self._ask("DELETE", f"/workers/{worker}", gone_is_fine=True)

    def _ask(self, method: str, path: str, data: bytes | None = None, *, gone_is_fine: bool = False) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        status, answer = _fetch(method, self.url + path, headers, data, stop=self._stop)
        if status in (401, 403):
            raise RouterError(f"{self.url} wants its key for {method} {path}: give --router-api-key")
        if not 200 <= status < 300 and not (gone_is_fine and status == 404):
            raise RouterError(
                f"{self.url}: {method} {path} says HTTP {status}: {answer[:SHOWN].decode(errors='replace')}"
            )
        return answer


def _fetch(
    method: str, url: str, headers: dict[str, str], data: bytes | None = None, *, stop: threading.Event
) -> tuple[int, bytes]:
    """Status and body. Raises NoAnswer, or RouterError for a body that is too long."""
    (found,) = _fetch_all(method, [url], headers, data, stop=stop)
    if isinstance(found, RouterError):
        raise found
    return found


def _fetch_all(
    method: str, urls: Iterable[str], headers: dict[str, str], data: bytes | None = None, *, stop: threading.Event
) -> list[tuple[int, bytes] | RouterError]:
    """Status and body of each, or why there are none. All of it takes TIMEOUT_SECONDS at most, whatever is answered."""
    return asyncio.run(_all_of(method, list(urls), headers, data, stop))


async def _all_of(
    method: str, urls: list[str], headers: dict[str, str], data: bytes | None, stop: threading.Event
) -> list[tuple[int, bytes] | RouterError]:
    import aiohttp

    from .ask import in_words, read_at_most

    places = asyncio.Semaphore(ASKED_AT_ONCE)

    async def one(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes] | RouterError:
        try:
            async with (
                places,
                session.request(method, url, headers=headers, data=data, allow_redirects=False) as answer,
            ):
                return answer.status, await read_at_most(answer, MAX_ANSWER)
        except RouterError as error:
            return error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return NoAnswer(f"{url} does not answer: {in_words(error)}")

    # A session as it is by default takes no proxy of the environment, and the limit is that of all below.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        tasks = [asyncio.create_task(one(session, url)) for url in urls]
        until = time.monotonic() + TIMEOUT_SECONDS
        while not stop.is_set() and time.monotonic() < until:
            _, left = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            if not left:
                break
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    why = "this is to end" if stop.is_set() else f"no whole answer within {TIMEOUT_SECONDS:g} s"
    return [
        NoAnswer(f"{url} does not answer: {why}") if task.cancelled() else task.result()
        for url, task in zip(urls, tasks, strict=True)
    ]


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
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stop: ends `run`, and whatever is waited for. say: prints a line."""
        self._members, self._router, self._owner, self._own_all, self._key = members, router, owner, own_all, key
        self._say, self._clock = say, clock
        self._stop = stop or threading.Event()
        self._away = ""
        self._asked: dict[str, tuple[Instance, float, str]] = {}
        """Workers that are to come, by URL: the record they were asked for with, when, and their id; no id of those
        that the router has refused."""
        self._ports: dict[tuple[str, str], int] = {}
        """Bootstrap ports that servers have told, by URL and incarnation."""
        self._silent: set[tuple[str, str]] = set()
        """Those that did not tell it when they were asked last. They are asked after the others."""
        self._told: dict[str, str] = {}
        """What was said last of a URL, or of a worker of the router by its id, for which nothing can be done."""
        self._failed: set[str] = set()
        """Labels of changes that the router has not made. They come after the others."""

    def run(self, interval: float) -> None:
        """Until `stop` is set."""
        wake = threading.Event()
        self._members.subscribe(wake.set)
        while not self._stop.is_set():
            wake.clear()
            try:
                self.step()
            except Exception:  # it must not end while nobody looks
                logger.exception("this round has failed; the next one comes")
            deadline = self._clock() + interval
            while not self._stop.is_set() and not wake.is_set() and self._clock() < deadline:
                wake.wait(min(0.5, max(0.0, deadline - self._clock())))

    def step(self) -> None:
        """One comparison, and what follows from it."""
        from . import sync

        # In this order: a set that is not whole must not be taken for one that is. An etcd that has just lost its data
        # is read without trouble, so nobody counts as gone before servers have had time to register again.
        complete = not self._members.trouble and self._members.settled
        wanted, later = self._with_ports(self._members.snapshot())
        try:
            present = self._router.workers()
            self._is_back(len(present))
            steps = sync.changes(wanted, present, self._owner, own_all=self._own_all, complete=complete, later=later)
            here, there = {worker.url for worker in present}, {one.url for one in wanted}
            self._asked = {url: asked for url, asked in self._asked.items() if url in there - here}
            about = there | {key for worker in present for key in (worker.id, worker.label)}
            self._told = {key: text for key, text in self._told.items() if key in about}
            self._failed &= {change.label for change in steps}
            for change in sorted(steps, key=lambda one: one.label in self._failed):
                if self._stop.is_set():
                    return
                self._do(change)
        except HeteroError as error:
            if not self._away and not self._stop.is_set():
                self._say(f"router: {error}; waiting for it")
            self._away = str(error)

    def _is_back(self, workers: int) -> None:
        if self._away:
            self._say(f"router: {self._router.url} answers again, {workers} workers")
            self._asked.clear()  # another process knows nothing of what the former one was asked for
        self._away = ""

    def _do(self, change: Change) -> None:
        """What the router refuses is said, once, and does not keep the others from it. Raises NoAnswer."""
        from .sync import Do

        try:
            if change.do is Do.REMOVE:
                self._router.remove(change.id)
                self._say_once(change.id, f"- {change.label}: {change.why}")
            elif change.do is Do.LEAVE:
                self._say_once(change.label, f"! {change.label}: {change.why}")
            elif change.instance is not None and not self._pending(change.instance):
                self._add(change, change.instance)
            self._failed.discard(change.label)
        except NoAnswer as error:
            self._failed.add(change.label)
            raise NoAnswer(f"{error}; {change.do} {change.label}") from None
        except RouterError as error:
            self._failed.add(change.label)
            about = change.id if change.instance is None else change.instance.url
            self._say_once(about, f"! {change.label} cannot be {_DONE[change.do]}: {error}")

    def _add(self, change: Change, instance: Instance) -> None:
        from .sync import spec

        former = self._asked.get(instance.url)
        self._asked[instance.url] = (instance, self._clock(), "")
        worker = self._router.add(spec(instance, self._owner, self._key))
        if former is None or former[0] != instance or not former[2]:
            self._say(f"+ {change.label}: {change.why}")
        self._asked[instance.url] = (instance, self._clock(), worker)

    def _pending(self, instance: Instance) -> bool:
        """Whether the router has been asked for it, and is not to be asked again yet."""
        asked = self._asked.get(instance.url)
        if asked is None or asked[0] != instance or self._clock() - asked[1] >= ASK_AGAIN_SECONDS:
            return False
        fate = self._router.fate(asked[2]) if asked[2] else ""
        if fate:
            self._say_once(instance.url, f"! {instance.label} is not taken up yet: {fate}")
        return True

    def _with_ports(self, instances: Iterable[Instance]) -> tuple[list[Instance], set[str]]:
        """All of them, prefill servers with their bootstrap ports, which those that are known by URL only tell
        themselves; and the URLs of those that could not be asked."""
        from msgspec.structs import replace

        from sglang_hetero.layout.manifest import Side

        found, unknown = [], []
        for one in instances:
            if one.role is not Side.PREFILL or one.bootstrap_port:
                found.append(one)
            else:
                unknown.append(one)
        self._learn(unknown)
        found += [replace(one, bootstrap_port=self._ports.get(_place(one), 0)) for one in unknown]
        return found, {one.url for one in unknown if _place(one) in self._silent}

    def _learn(self, unknown: list[Instance]) -> None:
        """Ask servers for the ports that they have not told yet."""
        places = {_place(one) for one in unknown}
        self._ports = {place: port for place, port in self._ports.items() if place in places}
        self._silent &= places
        new = sorted(
            (one for one in unknown if _place(one) not in self._ports), key=lambda one: _place(one) in self._silent
        )
        if not new:
            return
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        answers = _fetch_all("GET", [f"{one.url}/hetero/instance" for one in new], headers, stop=self._stop)
        for one, answer in zip(new, answers, strict=True):
            try:
                port = _port(answer)
            except HeteroError as error:
                self._silent.add(_place(one))
                if not self._stop.is_set():
                    self._say_once(one.url, f"! {one.label} is not added yet, for want of its port: {error}")
                continue
            self._silent.discard(_place(one))
            if port is None:
                self._say_once(one.url, f"! {one.label} does not tell its bootstrap port: give it")
            else:
                self._ports[_place(one)] = port

    def _say_once(self, about: str, text: str) -> None:
        if self._told.get(about) != text:
            self._told[about] = text
            self._say(text)


_DONE = {"add": "added", "remove": "removed"}


def _place(one: Instance) -> tuple[str, str]:
    return one.url, one.incarnation


def _port(answer: tuple[int, bytes] | RouterError) -> int | None:
    """The bootstrap port that a server has told; None if it has no such route. Raises HeteroError with the cause."""
    from sglang_hetero.discovery.record import decode_description

    if isinstance(answer, RouterError):
        raise answer
    status, data = answer
    if status == 404:
        return None
    if status != 200:
        raise RouterError(f"HTTP {status}{': give --api-key' if status == 401 else ''}")
    return decode_description(data).instance.bootstrap_port
