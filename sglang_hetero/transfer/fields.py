"""Bounds on what messages carry, and the types of their fields, which decoding checks."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from sglang_hetero.layout import Role, limits

MAX_PAGES = 1 << 20
"""Pages of one request: a million tokens with pages of one token."""
MAX_CHUNKS = 1 << 16
MAX_TARGETS = limits.MAX_RANKS
MAX_PIECES = 4096
"""Pieces that one message announces, digests that it carries, and units of a window; a batch is a part of a window."""
MAX_AUX_ROWS = limits.MAX_COLUMNS
MAX_AUX_BYTES = limits.MAX_ROW_BYTES
MAX_IDENTITY = 255
"""Bytes of a routing id; ZeroMQ's bound."""
MAX_REASON = 300
"""Characters of a reason, from a peer or of msgspec's."""
MAX_SEQ = 1 << 40
"""Pieces of a request; layers x roles x pages stay far below."""
MAX_PORT = 65_535
INT64_MAX = (1 << 63) - 1
"""SGLang draws rooms below it, and no address of a user's process is above."""
PAGE_ID = np.dtype("<i4")
"""A page id on the wire."""

MAX_MESSAGE_BYTES = 8 << 20
"""All but Topology. FirstGeneration is the largest: page ids (4 x MAX_PAGES = 4 MiB), rows (2 MiB), one end of at most
5 bytes per chunk (0.3 MiB), targets and identities (1.1 MiB). Register and Hello carry one manifest (0.5 MiB)."""
MAX_TOPOLOGY_BYTES = 32 << 20
"""Topology carries a manifest of each rank of a replica: 64 of the largest, or 300 of models with 1,024 layers."""

_PRINTABLE = r"^[ -~]*\Z"

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME, pattern=_PRINTABLE)]
NameOrNone = Annotated[str, Meta(max_length=limits.MAX_NAME, pattern=_PRINTABLE)]
Reason = Annotated[str, Meta(max_length=MAX_REASON, pattern=_PRINTABLE)]
Identity = Annotated[bytes, Meta(min_length=1, max_length=MAX_IDENTITY)]
ManifestBytes = Annotated[bytes, Meta(min_length=1, max_length=limits.MAX_MANIFEST_BYTES)]
Port = Annotated[int, Meta(ge=1, le=MAX_PORT)]
Rank = Annotated[int, Meta(ge=0, lt=limits.MAX_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=limits.MAX_RANKS)]
Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
Layer = Annotated[int, Meta(ge=0, lt=limits.MAX_LAYERS)]
Pages = Annotated[int, Meta(ge=0, le=MAX_PAGES)]
Tokens = Annotated[int, Meta(ge=0, le=limits.MAX_ELEMENTS)]
Bytes = Annotated[int, Meta(ge=0, le=limits.MAX_BYTES)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
ItemId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Total = Annotated[int, Meta(ge=-1, le=MAX_SEQ)]
PagesPerPiece = Annotated[dict[Role, Annotated[int, Meta(ge=1, le=MAX_PAGES)]], Meta(max_length=len(Role))]
Digest = Annotated[bytes, Meta(max_length=1 << 20)]
