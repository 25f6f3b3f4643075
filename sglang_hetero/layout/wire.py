"""Manifests as bytes. Whatever arrives is untrusted: bytes that are no sound manifest raise a ManifestError, or the
TopologyError of a TP size that cannot shard the heads, and nothing else."""

import msgspec

from sglang_hetero.errors import HeteroError, ManifestError

from . import limits
from .checks import Struct
from .manifest import Manifest

MAGIC = b"SGHM"
VERSION = 3
"""Raised with every change of a struct's fields or of what one of them means."""
_HEADER = len(MAGIC) + 1
MAX_REASON = 300
"""Characters of msgspec's reason that a message shows."""


class _Envelope(Struct, frozen=True):
    """layout: the sender's own fingerprint of the manifest; builds that disagree about it are told apart by it."""

    layout: str
    manifest: Manifest


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Envelope, strict=True)


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes. Raises ManifestError if it is too large to be sent."""
    data = MAGIC + bytes([VERSION]) + _ENCODER.encode(_Envelope(manifest.fingerprint, manifest))
    _check_size(len(data))
    return data


def decode(data: bytes | bytearray | memoryview) -> Manifest:
    """The manifest in these bytes, checked. Raises ManifestError, or TopologyError for heads that cannot be sharded."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ManifestError(f"a manifest comes as bytes, not as {type(data).__name__}")
    _check_size(memoryview(data).nbytes)
    data = bytes(data)
    if data[: len(MAGIC)] != MAGIC:
        raise ManifestError(f"these {len(data)} bytes are no manifest: they do not begin with {MAGIC!r}")
    if len(data) < _HEADER or data[len(MAGIC)] != VERSION:
        found = data[len(MAGIC)] if len(data) >= _HEADER else "missing"
        raise ManifestError(
            f"the peer's manifest has version {found}, this build reads version {VERSION}; "
            "install the same version of sglang-hetero on both sides"
        )
    try:
        envelope = _DECODER.decode(data[_HEADER:])
    except HeteroError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError) as error:
        # msgspec repeats a wrong value in its message, however long.
        raise ManifestError(f"the peer's manifest cannot be read: {ascii(str(error))[:MAX_REASON]}") from None
    computed = envelope.manifest.fingerprint
    if envelope.layout != computed:
        raise ManifestError(
            f"{envelope.manifest.label}: it calls its layout {envelope.layout[: len(computed)]!r}, this build computes "
            f"{computed}; install the same version of sglang-hetero on both sides"
        )
    return envelope.manifest


def _check_size(nbytes: int) -> None:
    if nbytes > limits.MAX_MANIFEST_BYTES:
        raise ManifestError(f"a manifest of {nbytes} bytes is larger than {limits.MAX_MANIFEST_BYTES}")
