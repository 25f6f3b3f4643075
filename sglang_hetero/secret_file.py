"""Files with a secret in them: who else may read them, and how long they may be."""

import os
import stat

from sglang_hetero.errors import OptionError

MAX_SECRET_BYTES = 4096
_FORBIDDEN = stat.S_IWGRP | stat.S_IRWXO
"""Who may not: others anything, and the group write. It may read: a mounted secret belongs to a group."""


def read_secret(path: str, what: str) -> bytes:
    """What is in the file, without white space around it, cut behind MAX_SECRET_BYTES + 1.

    what: how the option is called. Raises OptionError where the file cannot be read, or others can read or write it.
    """
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
            return file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise OptionError(f"{what}: {error.strerror or error}") from None
