"""What every part of a description checks in the same way."""

from collections.abc import Sequence

import msgspec

from sglang_hetero.errors import ManifestError

from . import limits


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything that goes over the wire: immutable, and nothing but the named fields."""


def check_name(value: str, what: str) -> None:
    """Raise ManifestError unless a text from a peer may be shown in a message or a log as it is."""
    if not 1 <= len(value) <= limits.MAX_NAME:
        raise ManifestError(f"{what} has {len(value)} characters, must have 1 to {limits.MAX_NAME}")
    if not value.isprintable():
        raise ManifestError(f"{what} is {value!r}, with characters that cannot be printed")


def shorten(value: object, limit: int = 80) -> str:
    """Any value from outside, printable and of bounded length, for messages."""
    shown = ascii(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}... ({len(shown)} characters)"


def short(values: Sequence[int], limit: int = 12) -> str:
    """The first few numbers of a long row, for messages."""
    shown = ", ".join(str(value) for value in values[:limit])
    return (shown + (f", ... ({len(values)})" if len(values) > limit else "")) or "none"


def require(condition: bool, message: str) -> None:
    """Raise ManifestError with that message unless the condition holds."""
    if not condition:
        raise ManifestError(message)


def within(value: int, low: int, high: int, what: str) -> None:
    """Raise ManifestError unless low <= value <= high."""
    require(low <= value <= high, f"{what} is {value}, must be {low} to {high}")
