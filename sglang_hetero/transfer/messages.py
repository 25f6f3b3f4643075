"""What ranks tell each other about requests, as bytes and back.

On the wire a message is a magic word, a version byte and msgpack. Whatever arrives is untrusted: `decode` raises
MessageError and nothing else, and what it returns keeps every range that is written here, so a reader need not check
types and ranges again. What depends on anything but the message itself (is this room known, does this unit lie in the
arena that was registered, may this peer say so now) is for the reader to check.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from sglang_hetero.errors import HeteroError, MessageError
from sglang_hetero.layout import Role, limits
from sglang_hetero.layout.checks import Struct, shorten

from .fields import (
    INT64_MAX,
    MAX_AUX_BYTES,
    MAX_AUX_ROWS,
    MAX_CHUNKS,
    MAX_IDENTITY,
    MAX_MESSAGE_BYTES,
    MAX_PAGES,
    MAX_PIECES,
    MAX_REASON,
    MAX_TARGETS,
    MAX_TOPOLOGY_BYTES,
    PAGE_ID,
    Bytes,
    Count,
    Digest,
    Identity,
    ItemId,
    Layer,
    ManifestBytes,
    Name,
    NameOrNone,
    Pages,
    PagesPerPiece,
    Port,
    Rank,
    Ranks,
    Reason,
    Seq,
    Token,
    Tokens,
    Total,
)
from .pieces import StateMode

MAGIC = b"SGHT"
VERSION = 3
"""Raised with every change of a message's fields or of what one of them means."""
_HEADER = len(MAGIC) + 1

_SLOT_ROLES = (Role.CONV, Role.SSM)


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise MessageError(text)


class AnnouncedPiece(NamedTuple):
    """A piece that has been written. role: None for one layer's linear state, which has no pages and no tokens."""

    seq: Seq
    role: Role | None
    layer: Layer
    first_page: Pages = 0
    pages: Pages = 0
    tokens: Tokens = 0


class Target(NamedTuple):
    """A decode rank, by the identity of its control client, and the epoch of the room over there."""

    identity: Identity
    epoch: Count


class RankEntry(NamedTuple):
    """A prefill rank: its manifest, encoded, where it takes messages, and the session of its transfer engine."""

    manifest: ManifestBytes
    host: Name
    port: Port
    session: Name


class BaseMessage(Struct, frozen=True, kw_only=True, tag=True):
    """room: SGLang's number of the request, 0 where none is meant. epoch: tells uses of one room apart.
    incarnation: differs for each start of the sender's process."""

    room: Count = 0
    epoch: Count = 0
    incarnation: Name = ""

    def check(self) -> None:
        """Raise MessageError where fields contradict each other; the range of each is in its type."""


# --- decode rank -> prefill rank


class Register(BaseMessage, frozen=True, kw_only=True):
    """Once per peer. source: as in Bind. session: of the transfer engine. host, port: where the sender takes messages.
    arena: address of its staging. control: its identity at the control service.

    What it says is about the sender alone, and true for whoever hears it. But who registers displaces who has the same
    place: a late one, for a prefill process and of a decode process that are both no more, would displace the latter's
    successor at the former's.
    """

    source: Name = ""
    manifest: ManifestBytes = b""
    session: Name = ""
    host: Name = ""
    port: Port = 0
    arena: Count = 0
    arena_bytes: Bytes = 0
    control: Identity = b""

    def check(self) -> None:
        _require(self.arena <= INT64_MAX - self.arena_bytes, "the arena ends beyond the address space")
        _check_identity(self.control)


class Bind(BaseMessage, frozen=True, kw_only=True):
    """A request's window at one decode rank, for one source.

    source: incarnation of the process that it is for; one that has taken that one's endpoint does not take it. use:
    names this use of the room; it is the same at all ranks of the decode server. rank, ranks: decode's attention-TP
    rank and size. pages: that decode has for the request. fingerprint: of the plan. units: offsets in the arena of the
    stage's units. area_offset, area_bytes: the source's area in each unit, (0, 0) for a source without a share.
    verify: announce digests too.
    """

    source: Name = ""
    use: Name = ""
    rank: Rank = 0
    ranks: Ranks = 1
    tokens_max: Tokens = 0
    pages: Pages = 0
    mode: StateMode = StateMode.PREPUSH
    fingerprint: Name = ""
    units: Annotated[tuple[Bytes, ...], Meta(max_length=MAX_PIECES)] = ()
    area_offset: Bytes = 0
    area_bytes: Bytes = 0
    pages_per_piece: PagesPerPiece = msgspec.field(default_factory=dict)
    verify: bool = False

    def check(self) -> None:
        _require(self.rank < self.ranks, f"rank {self.rank} of {self.ranks}")
        _require(not set(_SLOT_ROLES) & set(self.pages_per_piece), "conv and SSM have no pages per piece")
        end = self.area_offset + self.area_bytes
        _require(all(unit + end <= limits.MAX_BYTES for unit in self.units), "an area ends beyond any arena")
        # One byte apart at least: a unit that comes twice would be written twice.
        apart = max(self.area_bytes, 1)
        _require(all(b - a >= apart for a, b in pairwise(sorted(self.units))), "areas of two units overlap")


class Ack(BaseMessage, frozen=True, kw_only=True):
    """All pieces below `upto` of the stage have been merged.

    Names no process, nor does Finish: it is taken for a Bind with its incarnation, room and epoch alone, and that does.
    """

    stage: Rank = 0
    upto: Seq = 0


class Finish(BaseMessage, frozen=True, kw_only=True):
    """The sender has all of the request and needs the source's pages and slot no more."""


class Abort(BaseMessage, frozen=True, kw_only=True):
    """The sender has given the request up; the source stops and answers Drained.

    source: as in Bind: the room may be another request's at the process that has taken that one's endpoint. Empty if
    decode knows only where the ranks are; then it is for whoever is there. use: as in Bind, empty if no Bind was ever
    made.
    """

    source: NameOrNone = ""
    use: NameOrNone = ""
    reason: Reason = ""


# --- prefill rank -> decode rank


class Ready(BaseMessage, frozen=True, kw_only=True):
    """Pieces that source `source` has written, ascending.

    total: pieces of the stage's whole sequence, -1 while not known. digests: none, or one per piece. reads: nothing was
    written: these are digests of what decode will read itself. place: with the total, `place_of` the request at the
    source, if decode will read there.
    """

    source: Rank = 0
    pieces: Annotated[tuple[AnnouncedPiece, ...], Meta(max_length=MAX_PIECES)] = ()
    total: Total = -1
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_PIECES)] = ()
    reads: bool = False
    place: NameOrNone = ""

    def check(self) -> None:
        for seq, role, _, first_page, pages, tokens in self.pieces:
            if role is None:
                _require(not (first_page or pages or tokens), f"piece {seq}: linear state has no pages or tokens")
            else:
                _require(role not in _SLOT_ROLES, f"piece {seq}: {role} is no role of its own, state travels whole")
                _require(1 <= pages <= tokens, f"piece {seq}: {tokens} tokens in {pages} pages")
                _require(first_page + pages <= MAX_PAGES, f"piece {seq} ends beyond page {MAX_PAGES}")
        _require(all(a.seq < b.seq for a, b in pairwise(self.pieces)), "pieces are not in ascending order")
        if self.pieces and self.total >= 0:
            _require(self.pieces[-1].seq < self.total, f"piece {self.pieces[-1].seq} of {self.total}")
        wanted = (len(self.pieces),) if self.reads else (0, len(self.pieces))
        _require(len(self.digests) in wanted, "neither no digest nor one per piece")
        _require(not self.reads or self.total < 0, "what decode reads has no number in the sequence")


class Drained(BaseMessage, frozen=True, kw_only=True):
    """The source has stopped and none of its writes of the request is under way."""

    source: Rank = 0


class Failed(BaseMessage, frozen=True, kw_only=True):
    """The source cannot go on with the request."""

    source: Rank = 0
    reason: Reason = ""


# --- by the control service


class FirstGeneration(BaseMessage, frozen=True, kw_only=True):
    """Prefill has run. To the control service with all targets, from it to each with itself as the only one, and with
    that one's epoch.

    token: the first one. topology: digest of the prefill replica. tokens: of the prompt. slot: linear state at
    prefill, -1 without. pages: ids at prefill, as `pack_ids` writes them. chunks: for each, how many of the pages there
    are once it is through. aux: rows of the engine's metadata, as they are.
    """

    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=MAX_TARGETS)] = ()
    token: Token = 0
    topology: Name = ""
    tokens: Tokens = 0
    slot: ItemId = -1
    pages: Annotated[bytes, Meta(max_length=MAX_PAGES * PAGE_ID.itemsize)] = b""
    chunks: Annotated[tuple[Pages, ...], Meta(min_length=1, max_length=MAX_CHUNKS)] = ()
    aux: Annotated[tuple[Annotated[bytes, Meta(max_length=MAX_AUX_BYTES)], ...], Meta(max_length=MAX_AUX_ROWS)] = ()

    def check(self) -> None:
        for target in self.targets:
            _check_identity(target.identity)
        _require(len(self.pages) % PAGE_ID.itemsize == 0, f"{len(self.pages)} bytes are no row of page ids")
        ids = self.page_ids
        _require(not len(ids) or int(ids.min()) >= 0, "a page id is negative")
        _require(len(ids) <= self.tokens, f"{self.tokens} tokens in {len(ids)} pages")
        _require(all(a <= b for a, b in pairwise(self.chunks)), "chunks end out of order")
        _require(self.chunks[-1] == len(ids), f"the last chunk ends at page {self.chunks[-1]} of {len(ids)}")
        _require(sum(map(len, self.aux)) <= MAX_AUX_BYTES, f"rows of more than {MAX_AUX_BYTES} bytes")

    @property
    def page_ids(self) -> np.ndarray:
        """int32 [pages], not to be written to."""
        return np.frombuffer(self.pages, PAGE_ID)


class Hello(BaseMessage, frozen=True, kw_only=True):
    """A prefill rank to the control service; the fields are those of RankEntry."""

    manifest: ManifestBytes = b""
    host: Name = ""
    port: Port = 0
    session: Name = ""


class TopologyRequest(BaseMessage, frozen=True, kw_only=True):
    """To the control service, which answers with the Topology of that attention-DP replica."""

    dp_rank: Rank = 0


class Topology(BaseMessage, frozen=True, kw_only=True):
    """All ranks of a prefill replica, ordered by pp_rank, tp_rank. Unless ready: none, and the reason."""

    ready: bool = False
    dp_rank: Rank = 0
    topology: NameOrNone = ""
    ranks: Annotated[tuple[RankEntry, ...], Meta(max_length=limits.MAX_RANKS)] = ()
    reason: Reason = ""

    def check(self) -> None:
        complete = bool(self.topology and self.ranks)
        _require(self.ready == complete, "a topology is ready if it has a name and ranks, and only then")
        _require(self.ready or not self.ranks, "a topology that is not ready has no ranks")


class Ping(BaseMessage, frozen=True, kw_only=True):
    """To the control service, which answers with Pong: still there, and able to take what has been parked."""


class Pong(BaseMessage, frozen=True, kw_only=True):
    """By the control service; incarnation is its own. known: whether it knows the receiver as a prefill rank.
    topologies: the name of every attention-DP replica of which ranks have reported, empty while ranks are missing."""

    known: bool = False
    topologies: Annotated[tuple[tuple[Rank, NameOrNone], ...], Meta(max_length=limits.MAX_RANKS)] = ()

    def check(self) -> None:
        _require(all(a < b for (a, _), (b, _) in pairwise(self.topologies)), "replicas are not in ascending order")


Message = (
    Register
    | Bind
    | Ack
    | Finish
    | Abort
    | Ready
    | Drained
    | Failed
    | FirstGeneration
    | Hello
    | TopologyRequest
    | Topology
    | Ping
    | Pong
)


def _unset(kind: type[Message]) -> tuple[tuple[str, object], ...]:
    """The fields whose default is out of their range, with the default: msgspec looks at values only, not at defaults
    that stand for missing ones."""
    found = []
    for field in msgspec.structs.fields(kind):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        try:
            msgspec.convert(default, field.type)
        except msgspec.ValidationError:
            found.append((field.name, default))
    return tuple(found)


_UNSET: dict[type[Message], tuple[tuple[str, object], ...]] = {kind: _unset(kind) for kind in Message.__args__}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, strict=True)


def encode(message: Message) -> bytes:
    """The message as bytes. A reason of any length and any characters is cut to what may be sent: a failure is reported
    in any case. Raises MessageError for anything else that `decode` would not take."""
    if isinstance(message, Abort | Failed):
        message = replace(message, reason=printable(message.reason))
    try:
        data = MAGIC + bytes([VERSION]) + _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{type(message).__name__} cannot be sent: {shorten(str(error), MAX_REASON)}") from None
    # Ranges are in the types of the fields, which only decoding looks at.
    decode(data, limit=MAX_TOPOLOGY_BYTES if isinstance(message, Topology) else MAX_MESSAGE_BYTES)
    return data


def decode(payload: bytes | bytearray | memoryview, *, limit: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in these bytes, with all ranges kept. Raises MessageError.

    limit: bytes; MAX_TOPOLOGY_BYTES for who asks for a Topology.
    """
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise MessageError(f"a message comes as bytes, not as {type(payload).__name__}")
    size = memoryview(payload).nbytes
    if size > limit:
        raise MessageError(f"a message of {size} bytes is larger than {limit}")
    data = bytes(payload)
    if data[: len(MAGIC)] != MAGIC:
        raise MessageError(f"these {size} bytes are no message: they do not begin with {MAGIC!r}")
    if size < _HEADER or data[len(MAGIC)] != VERSION:
        found = data[len(MAGIC)] if size >= _HEADER else "missing"
        raise MessageError(
            f"the peer's messages have version {found}, this build reads version {VERSION}; "
            "install the same version of sglang-hetero on both sides"
        )
    try:
        message = _DECODER.decode(memoryview(data)[_HEADER:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError) as error:
        # msgspec repeats a wrong value in its message, however long.
        raise MessageError(f"the message cannot be read: {shorten(str(error), MAX_REASON)}") from None
    try:
        for name, default in _UNSET[type(message)]:
            _require(getattr(message, name) != default, f"{name} is missing")
        message.check()
    except HeteroError as error:
        raise MessageError(f"{type(message).__name__} of room {message.room}: {error}") from None
    return message


def find(frames: Sequence[bytes]) -> bytes | None:
    """The payload of ours at the end of a multipart message, or None. Ours is always the last frame: what else begins
    with the magic word, say packed addresses, does so by accident."""
    return frames[-1] if frames and frames[-1].startswith(MAGIC) else None


def control_identity(side: str, host: str, rank: str, incarnation: str) -> bytes:
    """Identity of a rank's control client: differs for every process. rank: for example `TP1/2`.
    Readable as far as it fits, for a person with a packet dump."""
    # What must tell identities apart comes first, the readable rest is cut.
    return f"{incarnation} {side} {rank} {host}".encode()[:MAX_IDENTITY]


def pack_ids(ids: Iterable[int] | np.ndarray) -> bytes:
    """Page ids as FirstGeneration carries them: int32, little endian. Raises MessageError for what is no page id."""
    numbers = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
    if numbers.ndim != 1 or (len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 31):
        raise MessageError(f"{shorten(numbers.tolist())} is no row of page ids")
    return numbers.astype(PAGE_ID).tobytes()


def place_of(pages: np.ndarray, slot: int) -> str:
    """Digest of where a request lies in a rank's pools: page ids and linear-state slot."""
    return hashlib.blake2b(
        np.asarray(pages, dtype=PAGE_ID).tobytes() + slot.to_bytes(8, "little", signed=True), digest_size=16
    ).hexdigest()


def printable(text: str, size: int = MAX_REASON) -> str:
    """Any text on one line in printable ASCII, at most `size` characters."""
    return ascii(text)[1:-1][:size]


def attributed(label: str, reason: str) -> str:
    """A reason with whose it is, once. label: of the rank that says it."""
    return reason if label in reason else f"{label}: {reason}"


def _check_identity(identity: bytes) -> None:
    _require(identity[:1] != b"\0", "an identity begins with a zero byte, which ZeroMQ keeps for its own")
