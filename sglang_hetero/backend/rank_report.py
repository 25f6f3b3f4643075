"""What a rank's watch looks at: our books, threads and counters, and how full SGLang's pools are."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from sglang_hetero.state import process
from sglang_hetero.state.report import Report
from sglang_hetero.transfer.reception import Doubt

from .figures import figures_of


def report_of(manager: Any) -> Report:
    """Of one of our managers, made from another thread than the scheduler's; takes milliseconds."""
    rank, side = manager.hetero_rank, manager.hetero_decode
    manifest = rank.manifest
    place = {} if manifest is None else {name: getattr(manifest.coordinates, name) for name in _PLACE}
    state = manager.hetero_state()
    doubts = [] if side is None else side.doubts()
    faults = manager.hetero_integrity()
    if state.get("units") and state["units_quarantined"] == state["units"]:
        faults.append(all_quarantined(state["units"], doubts))
    return Report(
        side=str(rank.side),
        rank=rank.name,
        pid=os.getpid(),
        host="" if manifest is None else manifest.host,
        incarnation="" if manifest is None else manifest.incarnation,
        ours=state,
        in_doubt=[str(doubt) for doubt in doubts],
        sglang=figures_of(rank.scheduler),
        process=process.figures(),
        threads=process.threads(),
        counters=manager.hetero_counters,
        notes=[f"takes SGLang's own path only: {reason}" for reason in rank.here.unsupported],
        faults=faults,
        **place,
    )


_PLACE = ("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank", "dp_size")


def all_quarantined(units: int, doubts: Sequence[Doubt]) -> str:
    """A rank without a unit that it could give to a request. The same text as long as it waits for the same."""
    writers = sorted({writer.label for doubt in doubts for writer in doubt.writers})
    return (
        f"all {units} units of staging are quarantined, so that this rank can take no request until these sources have "
        f"drained or their processes are known to be gone: {', '.join(writers) or 'none, a merge or a read of its own'}"
    )


def receiver_fault(thread: threading.Thread | None, *, stopped: bool) -> str:
    """Whether SGLang's thread that receives messages, ours among them, has ended; else an empty text.

    thread: the one that was seen last; stopped: whether SGLang has told it to end.
    """
    if thread is None or stopped or thread.is_alive():
        return ""
    return f"SGLang's thread {thread.name}, which receives the messages of peers, has ended; its log says why"
