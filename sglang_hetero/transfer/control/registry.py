"""Which prefill ranks there are. No sockets, no threads, no clock."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from sglang_hetero.errors import MessageError
from sglang_hetero.layout import Manifest, Side, limits, wire

from ..fields import MAX_TOPOLOGY_BYTES
from ..messages import Hello, RankEntry, Topology, printable

MAX_HELD_BYTES = 8 * MAX_TOPOLOGY_BYTES
"""Manifests of all replicas together."""
MAX_REPLACED = 1024
"""Former processes that are remembered, so that a last word of theirs does not undo a restart."""
MAX_NAMED = 8
"""Missing ranks that a reason lists."""

_ENTRY_BYTES = 4 * limits.MAX_NAME
"""More than host, port, session and what msgpack adds can take."""

_Place = tuple[int, int]
"""(pp_rank, tp_rank); sources of a plan are numbered in this order."""


@dataclass(frozen=True)
class _Reported:
    manifest: Manifest
    entry: RankEntry
    identity: bytes

    @property
    def sizes(self) -> tuple[int, int, int]:
        where = self.manifest.coordinates
        return where.tp_size, where.pp_size, where.dp_size


class Registry:
    """The newest report of every rank, by attention-DP replica. incarnation: of the service."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._replicas: dict[int, dict[_Place, _Reported]] = {}
        self._replaced: OrderedDict[str, None] = OrderedDict()
        self._away: set[bytes] = set()
        self._names: dict[int, str] = {}  # of replicas, as far as they have been asked for since the last change
        self._nbytes = 0

    def __len__(self) -> int:
        """Ranks that have reported; from any thread."""
        return sum(map(len, list(self._replicas.values())))

    def accept(self, hello: Hello, identity: bytes) -> tuple[Manifest, bool]:
        """Enter a rank. Returns its manifest and whether anything changed.

        A rank's newest report replaces the older one, and with other sizes (a restart with another TP) those of its
        whole replica. Raises HeteroError, with nothing changed, for what is no report of a prefill rank.
        """
        manifest = wire.decode(hello.manifest)
        if manifest.side is not Side.PREFILL:
            raise MessageError(f"{manifest.label} is no prefill rank")
        if manifest.incarnation != hello.incarnation:
            raise MessageError(f"{manifest.label}: the manifest is of another start of the process than the message")
        if hello.incarnation in self._replaced:
            raise MessageError(f"{manifest.label}: a newer process has taken this rank's place")
        new = _Reported(manifest, RankEntry(hello.manifest, hello.host, hello.port, hello.session), identity)
        where = manifest.coordinates
        place = (where.pp_rank, where.tp_rank)
        replica = self._replicas.get(where.dp_rank, {})
        gone = [at for at, other in replica.items() if at == place or other.sizes != new.sizes]
        change = len(hello.manifest) - sum(len(replica[at].entry.manifest) for at in gone)
        if self._nbytes + change > MAX_HELD_BYTES or len(replica) - len(gone) >= limits.MAX_RANKS:
            raise MessageError(f"{manifest.label}: too many ranks have reported already")
        if replica.get(place) == new:
            return manifest, False
        for at in gone:
            self._forget(replica.pop(at), new)
        replica[place] = new
        self._replicas[where.dp_rank] = replica
        self._names.clear()
        self._nbytes += change
        return manifest, True

    def _forget(self, old: _Reported, new: _Reported) -> None:
        self._away.discard(old.identity)
        if old.manifest.incarnation != new.manifest.incarnation:
            self._replaced[old.manifest.incarnation] = None
            while len(self._replaced) > MAX_REPLACED:
                self._replaced.popitem(last=False)

    def knows(self, identity: bytes, incarnation: str) -> bool:
        """Whether this is a prefill rank that has reported."""
        return any(
            rank.identity == identity and rank.manifest.incarnation == incarnation
            for replica in self._replicas.values()
            for rank in replica.values()
        )

    def identities(self, dp_rank: int) -> list[bytes]:
        """Of the replica's ranks that have reported."""
        return [rank.identity for rank in self._replicas.get(dp_rank, {}).values()]

    def connected(self) -> list[bytes]:
        """Identities of all ranks that have reported and are not away."""
        return [each for dp_rank in self._replicas for each in self.identities(dp_rank) if each not in self._away]

    def left(self, identity: bytes) -> str:
        """A rank's connection is broken: its replica is incomplete until it is `back`. Its name, empty for no rank."""
        for replica in self._replicas.values():
            for rank in replica.values():
                if rank.identity == identity:
                    self._away.add(identity)
                    self._names.clear()
                    return rank.manifest.label
        return ""

    def back(self, identity: bytes) -> bool:
        """A rank says something; whether it had been away."""
        if identity not in self._away:
            return False
        self._away.discard(identity)
        self._names.clear()
        return True

    def names(self) -> tuple[tuple[int, str], ...]:
        """Of each replica's topology, by dp_rank; empty for one that is incomplete."""
        return tuple((dp_rank, self._name(dp_rank)) for dp_rank in sorted(self._replicas))

    def _name(self, dp_rank: int) -> str:
        if dp_rank not in self._names:
            replica = self._replicas[dp_rank]
            missing = self._missing(dp_rank)
            self._names[dp_rank] = (
                "" if missing else _digest([replica[place].entry.manifest for place in sorted(replica)])
            )
        return self._names[dp_rank]

    def topology(self, dp_rank: int) -> Topology:
        """The replica's ranks once all have reported, else what is missing."""
        replica = self._replicas.get(dp_rank, {})
        reason = self._missing(dp_rank)
        if reason:
            return Topology(incarnation=self._incarnation, dp_rank=dp_rank, reason=printable(reason))
        ordered = [replica[place].entry for place in sorted(replica)]
        return Topology(
            incarnation=self._incarnation,
            dp_rank=dp_rank,
            ready=True,
            topology=self._name(dp_rank),
            ranks=tuple(ordered),
        )

    def _missing(self, dp_rank: int) -> str:
        replica = self._replicas.get(dp_rank)
        if not replica:
            return f"no rank of prefill replica {dp_rank} has reported yet"
        tp_size, pp_size, _ = next(iter(replica.values())).sizes
        expected = tp_size * pp_size
        away = [rank.manifest.label for rank in replica.values() if rank.identity in self._away]
        if len(replica) == expected and away:
            named, more = ", ".join(away[:MAX_NAMED]), len(away) - MAX_NAMED
            return f"the connection to {named}{f' and {more} more' if more > 0 else ''} is broken"
        if len(replica) == expected:
            nbytes = sum(len(rank.entry.manifest) for rank in replica.values())
            too_large = nbytes + expected * _ENTRY_BYTES > MAX_TOPOLOGY_BYTES
            return f"the {expected} manifests of prefill replica {dp_rank} take {nbytes} bytes" if too_large else ""
        places = ((pp, tp) for pp in range(pp_size) for tp in range(tp_size))
        absent = (place for place in places if place not in replica)
        missing = [f"PP{pp} TP{tp}" for pp, tp in islice(absent, MAX_NAMED)]
        more = expected - len(replica) - len(missing)
        return (
            f"{len(replica)} of {expected} ranks of prefill replica {dp_rank} have reported; missing: "
            + ", ".join(missing)
            + (f" and {more} more" if more else "")
        )


def _digest(manifests: list[bytes]) -> str:
    """Name of a topology: another one once any rank has been started again, as a manifest tells its incarnation."""
    total = hashlib.blake2b(digest_size=16)
    for manifest in manifests:
        # A digest each, so that where one ends and the next begins counts too.
        total.update(hashlib.blake2b(manifest).digest())
    return total.hexdigest()
