"""The folder in which the processes of one server leave their reports for its HTTP process.

The process that launches the server makes it; the others find it by an environment variable, which they inherit. It is
removed when that process ends. SGLang may end it by SIGKILL, so that a later server on the same host removes what is
left: whoever is alive holds a lock on its own folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from multiprocessing.util import Finalize
from pathlib import Path

from sglang_hetero.errors import StateError

from .report import Report, decode_report, encode

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_HETERO_REPORTS"
"""Set by the launching process for its children; whatever it was before. Empty if it could make no folder."""
PREFIX = "sglang-hetero-reports-"
UNFINISHED = ".new-"
"""In front of the name until the lock is held."""
LOCK = "owner"
SUFFIX = ".json"
MAX_REPORTS = 1024
"""Ranks of one host. What is beyond is not read."""
RANK_SUFFIX = ".rank"
"""What a rank is, which it tells once (discovery/ranks.py)."""
MAX_BYTES = 1 << 20
"""Of one report: a kilobyte or two, and a line per request in doubt."""

_locks: list[int] = []
"""Descriptors that hold this process's locks until it ends."""


def make(environ: MutableMapping[str, str]) -> Path:
    """Make this server's folder in the temporary folder (TMPDIR), only for this user, and name it to the children.

    Raises StateError if it cannot be made; then the children are told that there is none.
    """
    environ[VARIABLE] = ""
    parent = unfinished = None
    try:
        parent = Path(tempfile.gettempdir())  # looks for one that can be written
        _sweep(parent)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{PREFIX}", dir=parent))  # mode 0700
        _locks.append(os.open(unfinished / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        fcntl.flock(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = unfinished.rename(parent / unfinished.name.removeprefix(UNFINISHED))
    except OSError as error:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        where = "any temporary folder" if parent is None else parent
        raise StateError(f"no folder for the reports of ranks can be made in {where}: {error}; set TMPDIR") from None
    environ[VARIABLE] = str(folder)
    # At the end of this process, also of one that multiprocessing has started, where atexit is not heard; below 0:
    # after its own children.
    Finalize(None, _remove, args=(folder, os.getpid()), exitpriority=-1)
    return folder


def given(environ: Mapping[str, str]) -> Path | None:
    """The folder of the server that this process belongs to; None where nobody would read it, as with sglang.Engine."""
    name = environ.get(VARIABLE)
    return Path(name) if name else None


def write(folder: Path, report: Report) -> None:
    """Leave a report there, in the place of this process's last one; readers see one or the other. Raises OSError."""
    path = folder / f"{report.pid}{SUFFIX}"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(encode(report))
    unfinished.replace(path)


def write_rank(folder: Path, pid: int, data: bytes) -> None:
    """Leave there what a rank is. Raises OSError."""
    path = folder / f"{pid}{RANK_SUFFIX}"
    unfinished = path.with_suffix(f"{RANK_SUFFIX}.tmp")
    unfinished.write_bytes(data)
    unfinished.replace(path)


def read_ranks(folder: Path) -> tuple[list[bytes], list[str]]:
    """What all ranks have said that they are, and what kept others from being read, one line each."""
    found, problems = [], []
    for path in sorted(folder.glob(f"*{RANK_SUFFIX}"))[:MAX_REPORTS]:
        try:
            with path.open("rb") as file:
                found.append(file.read(MAX_BYTES))
        except OSError as error:
            problems.append(f"{path.name} cannot be read: {error}")
    return found, problems


def unwritable(folder: Path) -> str:
    """Why no rank can leave a report there now: this process tries it, with one as large as the largest that is there.
    An empty text if it can."""
    trial = folder / f"{os.getpid()}.trial"
    try:
        size = max((path.stat().st_size for path in folder.glob(f"*{SUFFIX}")), default=1)
        try:
            trial.write_bytes(bytes(min(size, MAX_BYTES)))
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return str(error)
    return ""


def read(folder: Path) -> tuple[list[Report], list[str]]:
    """All reports, and what kept others from being read, one line each."""
    reports, problems = [], []
    try:
        paths = sorted(folder.glob(f"*{SUFFIX}"))[:MAX_REPORTS]
    except OSError as error:
        return [], [f"the reports of the ranks cannot be read: {error}"]
    if not folder.is_dir():
        return [], [f"the folder with the reports of the ranks is gone ({folder}), until a restart"]
    for path in paths:
        try:
            with path.open("rb") as file:
                reports.append(decode_report(file.read(MAX_BYTES)))
        except (OSError, StateError) as error:
            problems.append(f"the report {path.name} cannot be read: {error}")
    return reports, problems


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove folders of this user's servers that have ended without doing so. Never raises."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
