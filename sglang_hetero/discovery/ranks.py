"""From what the ranks of a server say of themselves to what the server is. Pure: no SGLang, no files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from sglang_hetero.errors import HeteroError, RecordError
from sglang_hetero.layout import limits
from sglang_hetero.layout.manifest import Coordinates
from sglang_hetero.layout.wire import decode as decode_manifest
from sglang_hetero.transfer.messages import printable

from .record import MAX_MANIFESTS, MAX_NOTES, MAX_TEXT, Description, Instance, fingerprint_of

NODES = "ranks of other nodes cannot tell it here, and ranks without room in TMPDIR could not (docs/discovery.md)"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. pid, parents: its process, and those above it when it was started. manifest: as layout.wire encodes it;
    empty if its caches cannot be described. unsupported: why it takes SGLang's own path only. requests, tokens: how
    many its attention-DP replica can have at a time, as this rank sees it."""

    pid: int
    parents: tuple[int, ...] = ()
    place: Coordinates
    manifest: bytes = b""
    unsupported: tuple[str, ...] = ()
    requests: int = 0
    tokens: int = 0


def encode_told(told: Told) -> bytes:
    """For the server's folder."""
    return msgspec.msgpack.encode(told)


def decode_told(data: bytes) -> Told:
    """Raises RecordError for what is none."""
    try:
        return msgspec.msgpack.decode(data, type=Told)
    except (HeteroError, msgspec.MsgspecError, ValueError) as error:
        raise RecordError(f"a rank has not said what it is: {error}") from None


def describe(
    server: Instance, mode: str, backend: str, ranks: Iterable[Told], notes: Sequence[str] = (), *, nodes: int = 1
) -> tuple[Description, bool]:
    """The server with what its ranks say, and whether all of them have said it.

    server: what is known without them. notes: what kept ranks from being read. nodes: how many machines the server is
    on, of which the ranks of the first can tell. Manifests, and with them a fingerprint, are there only if every rank
    has one: a part of them would pair what does not go together.
    """
    by_place = {one.place: one for one in ranks}
    notes = list(notes)
    sizes = {(place.tp_size, place.pp_size, place.dp_size) for place in by_place}
    if len(sizes) != 1 or math.prod(next(iter(sizes))) > limits.MAX_RANKS:
        notes.append(f"no rank has told what it is: {NODES}" if not sizes else "ranks do not agree how many they are")
        return Description(instance=server, mode=mode, backend=backend, notes=_lines(notes)), False
    ((tp, pp, dp),) = sizes
    missing = [
        f"{Coordinates(tp_rank=t, tp_size=tp, pp_rank=p, pp_size=pp, dp_rank=d, dp_size=dp)}"
        for d, p, t in itertools.product(range(dp), range(pp), range(tp))
        if Coordinates(tp_rank=t, tp_size=tp, pp_rank=p, pp_size=pp, dp_rank=d, dp_size=dp) not in by_place
    ]
    if missing:
        notes.append(f"{len(missing)} of {tp * pp * dp} ranks have not told what they are ({missing[0]}, ...): {NODES}")
    found = [by_place[place] for place in sorted(by_place, key=lambda at: (at.dp_rank, at.pp_rank, at.tp_rank))]
    whole = not missing and all(one.manifest for one in found) and len(found) <= MAX_MANIFESTS
    manifests = tuple(one.manifest for one in found) if whole else ()
    unsupported = _lines(sorted({text for one in found for text in one.unsupported}))
    fingerprint = ""
    if whole:
        read = [decode_manifest(data) for data in manifests]
        fingerprint = fingerprint_of(server.role, mode, backend, read, unsupported)
    replicas = [[one for one in found if one.place.dp_rank == rank] for rank in range(dp)]
    instance = replace(
        server,
        tp_size=tp,
        pp_size=pp,
        dp_size=dp,
        fingerprint=fingerprint,
        requests=sum(min((one.requests for one in replica), default=0) for replica in replicas),
        tokens=sum(min((one.tokens for one in replica), default=0) for replica in replicas),
    )
    description = Description(
        instance=instance,
        mode=mode,
        backend=backend,
        manifests=manifests,
        unsupported=unsupported,
        notes=_lines(notes),
        final=len(found) * nodes >= tp * pp * dp,
    )
    return description, not missing


def _lines(texts: Iterable[str]) -> tuple[str, ...]:
    """As many and as long as a Description takes them."""
    return tuple(printable(text, MAX_TEXT) for text in itertools.islice(texts, MAX_NOTES))
