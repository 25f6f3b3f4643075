"""This process, as the kernel sees it."""

import contextlib
import os
import threading
from pathlib import Path

OURS = "hetero-"
"""Names of this package's threads begin so."""
_SELF = Path("/proc/self")


def figures() -> dict[str, int]:
    """threads: native ones included; sockets: open ones, of any kind; files: open descriptors; rss_bytes: memory that
    is resident. What the kernel does not tell is left out."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        found["threads"] = len(os.listdir(_SELF / "task"))
    with contextlib.suppress(OSError):
        links = [_link(name) for name in os.listdir(_SELF / "fd")]
        found["sockets"] = sum(link.startswith("socket:") for link in links)
        found["files"] = sum(bool(link) for link in links)
    with contextlib.suppress(OSError, ValueError, IndexError):
        found["rss_bytes"] = int((_SELF / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


def threads() -> list[str]:
    """Names of this package's threads that run."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(OURS))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to notice does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name is in parentheses and may hold anything.
    return text.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])


def parents(pid: int) -> list[int]:
    """The processes above one, the nearest first, as far as the kernel tells."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.append(pid)
    return found


def _link(name: str) -> str:
    try:
        return os.readlink(_SELF / "fd" / name)
    except OSError:
        return ""  # closed since
