"""What must change in sglang-router's list of workers so that it is that of the servers that there are. Pure.

sglang-router 0.3.2 takes a worker up after it has found it healthy, so that one that was asked for is not in its list
for a while; it cannot change one, only remove and add it. A worker may carry labels, which its list shows as metadata:
by one of them a worker is known as added by us, also after a restart of ours. With --dp-aware its list has a worker for
each attention-DP replica, `URL@replica`; one request adds them all, and none removes one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from sglang_hetero.discovery.record import Instance, clean_url
from sglang_hetero.errors import RecordError, RouterError

LABEL = "sglang-hetero-sync"
"""Its value is whose worker it is: `--name`."""
MAX_SHOWN = 300
"""Characters of the router's own words."""
_REPLICA = re.compile(r"(.+)@\d+")
DP_AWARE = "sglang-router lets go of no worker that it has listed by --dp-aware: start it again without that"


class _Worker(msgspec.Struct):
    """The fields of an entry of `GET /workers` that are looked at."""

    id: str
    url: str
    worker_type: str = ""
    bootstrap_port: int | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class _Workers(msgspec.Struct):
    workers: list[_Worker]


@dataclass(frozen=True)
class Worker:
    """One worker of the router. url: of its server. bootstrap_port: 0 if it has none. owner: whose it is, empty if
    nobody says. replica: whether it is one of several that the router has of one server (--dp-aware)."""

    id: str
    url: str
    role: str
    bootstrap_port: int
    owner: str
    replica: bool = False

    @property
    def label(self) -> str:
        """For people."""
        port = f", bootstrap port {self.bootstrap_port}" if self.bootstrap_port else ""
        return f"{self.role} {self.url}{port}"


class Do(StrEnum):
    """What is to be done."""

    ADD = "add"
    REMOVE = "remove"
    LEAVE = "leave"
    """Nothing, though it should be otherwise: it is not ours, or the router cannot do it."""


@dataclass(frozen=True)
class Change:
    """One step. id: of the worker to be removed. instance: to be added."""

    do: Do
    label: str
    why: str
    id: str = ""
    instance: Instance | None = None


def read_workers(data: bytes) -> tuple[Worker, ...]:
    """The answer of `GET /workers`. Raises RouterError for what is none."""
    try:
        found = msgspec.json.decode(data, type=_Workers, strict=False).workers
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RouterError(f"GET /workers is not answered as by sglang-router 0.3: {str(error)[:MAX_SHOWN]}") from None
    return tuple(
        Worker(one.id, url, one.worker_type, one.bootstrap_port or 0, str(one.metadata.get(LABEL, "")), replica)
        for one in found
        for url, replica in [_clean(one.url)]
    )


def _clean(url: str) -> tuple[str, bool]:
    """As records have it, so that the two can be compared, and whether it names a replica of that server; what is no
    such URL is left as it is."""
    found = _REPLICA.fullmatch(url)
    try:
        return clean_url(found[1] if found else url), found is not None
    except RecordError:
        return url, False


def spec(instance: Instance, owner: str, key: str | None) -> dict[str, Any]:
    """The body of `POST /workers`. key: of the servers, with which the router asks them."""
    body: dict[str, Any] = {"url": instance.url, "worker_type": str(instance.role), "labels": {LABEL: owner}}
    if instance.bootstrap_port:
        body["bootstrap_port"] = instance.bootstrap_port
    if key:
        body["api_key"] = key
    return body


def changes(
    wanted: Iterable[Instance],
    present: Sequence[Worker],
    owner: str,
    *,
    own_all: bool,
    complete: bool,
    later: Collection[str] = (),
) -> list[Change]:
    """What to do, removals first.

    own_all: workers that somebody else has added are ours, too. complete: whether `wanted` is all that there is; if
    not, nothing is removed for not being in it. later: URLs of those in `wanted` that cannot be added yet, for want of
    something; if the router has them they stay.
    """
    by_url: dict[str, Instance] = {}
    for one in wanted:
        by_url.setdefault(one.url, one)
    removed: list[Change] = []
    added: list[Change] = []
    kept: set[str] = set()
    for worker in present:
        mine = own_all or worker.owner == owner
        instance = by_url.get(worker.url)
        if instance is None:
            if mine and complete:
                removed.append(_removal(worker, "it is gone"))
            continue
        kept.add(worker.url)
        differs = _difference(worker, instance)
        if differs and mine:
            # It is added again in the next round, when the router has let go of the address.
            removed.append(_removal(worker, differs))
        elif differs:
            removed.append(Change(Do.LEAVE, worker.label, f"{differs}, but somebody else has added it (--own-all)"))
    for url, instance in by_url.items():
        if url not in kept and url not in later:
            port = f", bootstrap port {instance.bootstrap_port}" if instance.bootstrap_port else ""
            added.append(Change(Do.ADD, f"{instance.label}{port}", "it is there", instance=instance))
    return removed + added


def _removal(worker: Worker, why: str) -> Change:
    if worker.replica:
        return Change(Do.LEAVE, worker.label, f"{why}, but stays in the router's list: {DP_AWARE}")
    return Change(Do.REMOVE, worker.label, why, worker.id)


def _difference(worker: Worker, instance: Instance) -> str:
    if worker.role != instance.role:
        return f"it is a {instance.role} server now"
    if instance.bootstrap_port and worker.bootstrap_port != instance.bootstrap_port:
        return f"its bootstrap port is {instance.bootstrap_port} now"
    return ""
