"""The token that both sides share, from its file (docs/security.md)."""

import os
import stat

from sglang_hetero.errors import OptionError
from sglang_hetero.transfer.seal import TOKEN_OPTION, Seal

MIN_TOKEN_BYTES = 32
"""A message and its seal are all that it takes to try tokens, so it must be a random one: 16 bytes in hexadecimal."""
MAX_TOKEN_BYTES = 4096
_FORBIDDEN = stat.S_IWGRP | stat.S_IRWXO
"""Who may not: others anything, and the group write. It may read: a mounted secret belongs to a group."""


def seal_of(path: str | None) -> Seal:
    """A new Seal with the token in this file, or without one. Raises OptionError where the file cannot serve."""
    if path is None:
        return Seal()
    what = f"{TOKEN_OPTION}={path!r}"
    try:
        # Not blocking: a pipe would be waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OptionError(f"{what}: it is no file")
            if status.st_mode & _FORBIDDEN:
                raise OptionError(
                    f"{what}: its mode is {stat.S_IMODE(status.st_mode):03o}, so that others can read or write it; "
                    f"chmod 600 {path}"
                )
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise OptionError(f"{what}: {error.strerror or error}") from None
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise OptionError(
            f"{what}: the token has {len(token)} bytes, must be {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}; make one with "
            "openssl rand -hex 32"
        )
    return Seal(token)
