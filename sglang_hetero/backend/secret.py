"""The token that both sides share, from its file (docs/security.md)."""

from sglang_hetero.errors import OptionError
from sglang_hetero.secret_file import MAX_SECRET_BYTES, read_secret
from sglang_hetero.transfer.seal import TOKEN_OPTION, Seal

MIN_TOKEN_BYTES = 32
"""A message and its seal are all that it takes to try tokens, so it must be a random one: 16 bytes in hexadecimal."""
MAX_TOKEN_BYTES = MAX_SECRET_BYTES


def seal_of(path: str | None) -> Seal:
    """A new Seal with the token in this file, or without one. Raises OptionError where the file cannot serve."""
    if path is None:
        return Seal()
    what = f"{TOKEN_OPTION}={path!r}"
    token = read_secret(path, what)
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise OptionError(
            f"{what}: the token has {len(token)} bytes, must be {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}; make one with "
            "openssl rand -hex 32"
        )
    return Seal(token)
