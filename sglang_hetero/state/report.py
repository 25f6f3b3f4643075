"""What one rank says of itself, and what a whole server does (docs/state.md). Pure: no SGLang, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from sglang_hetero.errors import StateError

STALE_SECONDS = 60.0
"""A rank reports about once a second from a thread of its own, whatever its scheduler does. Only a call that does not
let go of the interpreter keeps that thread: loading a kernel or a checkpoint for seconds, and nothing for a minute."""


class Report(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One rank at one moment. Everything but side, rank and pid may be empty: what could not be read is left out.

    beat: CLOCK_MONOTONIC of the host in seconds, for the reader to tell the age; at: seconds since 1970.
    """

    side: str
    """`prefill` or `decode`."""
    rank: str
    """As in messages and in the log: side, place, and host and port of the server."""
    pid: int
    parents: list[int] = []
    """Processes above it, the nearest first: the one that serves HTTP is among them."""
    host: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    incarnation: str = ""
    at: float = 0.0
    beat: float = 0.0
    age: float = 0.0
    """Seconds since it was made; filled in by who reads it."""
    ours: dict[str, int] = {}
    """What this package holds: rooms, writes in flight, units of staging."""
    in_doubt: list[str] = []
    """Failed requests whose units a source may still write into."""
    sglang: dict[str, int] = {}
    """Pools and queues of SGLang's scheduler."""
    process: dict[str, int] = {}
    """Threads, sockets, resident bytes."""
    threads: list[str] = []
    """Names of this package's threads that run."""
    counters: dict[str, int] = {}
    notes: list[str] = []
    """What is as it may be, and worth to know: a rank that takes SGLang's own path only."""
    faults: list[str] = []
    """What keeps it from serving as it must, in words."""
    problems: list[str] = []
    """What of it cannot be told, in words."""


class Control(msgspec.Struct, kw_only=True):
    """The control service of a prefill server, in its HTTP process. counts: what went wrong, by kind."""

    port: int = 0
    ranks: int = 0
    """Prefill ranks that have reported."""
    parked: int = 0
    """Messages for decode ranks that are not connected."""
    counts: dict[str, int] = {}
    fault: str = ""


class Discovery(msgspec.Struct, kw_only=True):
    """How a server's record in etcd stands (docs/discovery.md). standing: `waiting` until the server serves,
    `registered`, `away` while etcd is, `displaced` by another server with the same URL, or `left`. since: of that,
    seconds since 1970."""

    standing: str
    key: str = ""
    etcd: str = ""
    """The endpoint that is asked."""
    since: float = 0.0
    trouble: str = ""


class State(msgspec.Struct, kw_only=True):
    """A server: the answer of `GET /hetero/state`."""

    ok: bool
    """Whether there are no faults."""
    mode: str
    """SGLANG_HETERO of the server."""
    side: str = ""
    """`prefill`, `decode`, or empty for a server that is neither."""
    faults: list[str] = []
    """What keeps it from serving as it must, each with the name of its rank."""
    problems: list[str] = []
    """Why this answer is not complete, or not new. It says nothing about the service, so it is no fault."""
    ranks: list[Report] = []
    control: Control | None = None
    discovery: Discovery | None = None


def silent(report: Report, now: float) -> bool:
    """Whether a rank has not reported for too long. now: CLOCK_MONOTONIC, seconds."""
    return now - report.beat > STALE_SECONDS


def state_of(
    reports: Iterable[Report],
    *,
    mode: str,
    side: str,
    now: float,
    alive: Callable[[int], bool],
    control: Control | None = None,
    discovery: Discovery | None = None,
    problems: Sequence[str] = (),
    believed: bool = True,
) -> State:
    """What follows from the reports. now: CLOCK_MONOTONIC, seconds. alive: whether a process runs. problems: what kept
    reports from being read. believed: whether a process that runs and has not reported for long is at fault itself;
    it is not while no report can be written."""
    ranks = sorted(reports, key=lambda one: (one.side, one.dp_rank, one.pp_rank, one.tp_rank, one.pid))
    faults, problems = [], list(problems)
    for one in ranks:
        one.age = max(0.0, round(now - one.beat, 1))
        faults += [f"{one.rank}: {fault}" for fault in one.faults]
        problems += [f"{one.rank}: {problem}" for problem in one.problems]
        if not alive(one.pid):
            faults.append(f"{one.rank}: its process {one.pid} is gone")
        elif silent(one, now):
            (faults if believed else problems).append(
                f"{one.rank} (process {one.pid}) has not reported for {one.age:.0f} s"
            )
    if control is not None and control.fault:
        faults.append(control.fault)
    if discovery is not None and discovery.trouble:
        problems.append(f"discovery: {discovery.trouble}")
    return State(
        ok=not faults,
        mode=mode,
        side=side,
        faults=faults,
        problems=problems,
        ranks=ranks,
        control=control,
        discovery=discovery,
    )


def encode(what: Report | State) -> bytes:
    """JSON."""
    return msgspec.json.encode(what)


def decode_report(data: bytes) -> Report:
    """Raises StateError for what is no report."""
    try:
        return msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StateError(f"no report of a rank: {error}") from None


def decode_state(data: bytes) -> State:
    """Raises StateError for what is no answer of `/hetero/state`."""
    try:
        return msgspec.json.decode(data, type=State)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StateError(f"this is not what /hetero/state answers: {error}") from None
