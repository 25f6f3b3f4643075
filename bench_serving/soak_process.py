"""Memory, threads and sockets of a running process, as the kernel tells them (proc(5))."""

import os
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """Resident bytes, threads (native ones included) and open sockets."""

    rss: int
    threads: int
    sockets: int


def look(pid: int) -> Process | None:
    """None once it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        resident = int((folder / "statm").read_text().split()[1]) * PAGE
        return Process(resident, len(os.listdir(folder / "task")), _sockets(folder / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def _sockets(folder: Path) -> int:
    found = 0
    for name in os.listdir(folder):
        try:
            found += os.readlink(folder / name).startswith("socket:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
