"""A plugin of SGLang's that a decode server of a test loads: after each merge it does to the caches what it is told.

The file $MERGE_FAULTS_ORDER says what (one object of JSON, the fields of tests/accuracy/faults.py); it may change while
no request is under way. Every request that has been met is a line in $MERGE_FAULTS_HITS. It knows these names of this
package and nothing else: `reception.merge`, the shares and the pools of an `Assembler`, and the fields of an `Inbox`.

SGLang swallows what a plugin raises, so a hook that is not in place shows in the hits that are missing: whoever asks
counts them.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ORDER, HITS = "MERGE_FAULTS_ORDER", "MERGE_FAULTS_HITS"
SCHEDULER = "sglang.srt.managers.scheduler"
"""Only the process that has loaded it has caches."""


def activate() -> None:
    """Put the hook in; SGLang calls it in each of its processes."""
    if SCHEDULER not in sys.modules:
        return
    from sglang_hetero.transfer import reception

    reception.merge = breaking(reception.merge, Path(os.environ[ORDER]), Path(os.environ[HITS]))


def breaking(merge: Callable[..., None], order: Path, hits: Path) -> Callable[..., None]:
    """`merge`, and then the fault that `order` names."""

    def merged(arena: Any, assembler: Any, inbox: Any, batch: Sequence[Any]) -> None:
        merge(arena, assembler, inbox, batch)
        fault = json.loads(order.read_text())
        touched = 0
        for arrived in batch:
            roles = ("conv", "ssm") if arrived.piece.role is None else (arrived.piece.role,)
            for role in roles:
                touched += strike(fault, assembler, inbox, arrived.piece, role)
        line = {"fault": fault["name"], "room": inbox.room, "touched": touched}
        with open(hits, "a") as file:  # one write of a short line: lines of several ranks do not mix
            file.write(json.dumps(line) + "\n")

    return merged


def strike(fault: dict[str, Any], assembler: Any, inbox: Any, piece: Any, role: str) -> int:
    """Do to one piece of one role what the fault says. Returns how many elements were zeroed or have moved."""
    shares = assembler._shares.get((role, piece.layer), [])
    if not shares or piece.layer not in (fault["layers"] or [piece.layer]):
        return 0
    place = inbox.source_set.plan.destination.coordinates
    pool = assembler._pools[role, piece.layer][0]  # [items, (token,) cut axis, the rest], integers
    component = shares[0].destination_component
    if role == "conv" and fault["conv"]:
        slot = pool[inbox.slot]
        way = permutation(fault["conv"], component.cut_axis.segments, shares, place)
        before = slot.clone()
        slot[:] = before[way]
        return int((slot != before).sum())
    if role == "ssm" and fault["heads"]:
        (segment,) = component.cut_axis.segments
        local = segment.local_heads(place.tp_size, place.tp_rank)
        mine = [head - local.start for head in fault["heads"] if head in local]
        return zero(pool[inbox.slot, head] for head in mine)
    if role in fault["zeroed"]:
        pages = inbox.pages[piece.first_page : piece.first_page + piece.pages]
        return zero(pool[page] for page in pages.tolist())
    return 0


def permutation(how: str, segments: Sequence[Any], shares: Sequence[Any], place: Any) -> list[int]:
    """Where each channel of a rank's conv window comes from, once it is wrong.

    how: `sources`, each source's block as it came, [q0, k0, v0, q1, k1, v1]; or the names of the segments in a wrong
    order, such as `qvk`.
    """
    if how == "sources":
        blocks = [block for share in sorted(shares, key=lambda share: share.source) for block in share.blocks]
        return [channel for block in blocks for channel in range(block.destination, block.destination + block.size)]
    starts: dict[str, range] = {}
    begin = 0
    for segment in segments:
        size = segment.local_size(place.tp_size, place.tp_rank)
        starts[segment.name] = range(begin, begin + size)
        begin += size
    return [channel for name in how for channel in starts[name]]


def zero(views: Iterator[Any]) -> int:
    """Make everything 0; returns how many elements were not."""
    touched = 0
    for view in views:
        touched += int((view != 0).sum())
        view.zero_()
    return touched
