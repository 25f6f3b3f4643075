"""Do the books of a side agree with each other? Looks only, changes nothing; the side's lock must be held.

Each rule holds whenever the lock is free. A text that comes out of here is a fault of ours, never of a peer. It says
what is wrong without figures that change from look to look, so that the same fault reads the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sglang_hetero.errors import StagingError

from .inbox import Inbox
from .lifetime import ReceivingStatus, SendingStatus
from .outbox import Destination, Outbox, Peer
from .staging import Arena

Key = tuple[str, int, int]
"""Incarnation of a decode process, room, epoch."""


def receiving(arena: Arena, inboxes: Mapping[tuple[int, int], Inbox], current: Mapping[int, Inbox]) -> list[str]:
    """What is wrong at a decode rank. inboxes: by room and epoch, until their units are home; current: by room, until
    SGLang lets go."""
    return [*_arena(arena), *_owners(arena, inboxes), *_inboxes(arena, inboxes, current), *_current(inboxes, current)]


def sending(
    peers: Mapping[str, Peer], rooms: Mapping[int, Outbox], destinations: Mapping[Key, Destination]
) -> list[str]:
    """What is wrong at a prefill rank. peers: by incarnation."""
    return [*_destinations(peers, rooms, destinations), *_rooms(peers, rooms, destinations)]


def _arena(arena: Arena) -> Iterator[str]:
    try:
        arena.check()
    except StagingError as error:
        yield f"staging: {error}"


def _owners(arena: Arena, inboxes: Mapping[tuple[int, int], Inbox]) -> Iterator[str]:
    for what, owners in (("holds", arena.holders), ("waits for", arena.queue), ("quarantines", arena.in_doubt)):
        for owner in owners:
            if owner not in inboxes:
                yield f"{_named(owner)} {what} units of staging, but there is no such request"


def _inboxes(arena: Arena, inboxes: Mapping[tuple[int, int], Inbox], current: Mapping[int, Inbox]) -> Iterator[str]:
    holders, queue, in_doubt = arena.holders, arena.queue, arena.in_doubt
    for key, inbox in inboxes.items():
        name, status = _named(key), inbox.machine.status
        if key != (inbox.room, inbox.epoch):
            yield f"{name} is kept for {_named((inbox.room, inbox.epoch))}"
            continue
        units = tuple(unit for stage in inbox.units for unit in stage)
        if status is ReceivingStatus.QUEUED and key not in queue:
            yield f"{name} waits for units of staging, but is in no queue"
        elif status is ReceivingStatus.OPEN and (not units or holders.get(key) != units):
            yield f"{name} works with units of staging that are not its own"
        elif status is ReceivingStatus.FAILED and key not in in_doubt:
            yield f"{name} has failed, and its units of staging are neither free nor quarantined"
        elif status is ReceivingStatus.COMPLETE:
            yield f"{name} is complete and has not given its units of staging back"
        if status in (ReceivingStatus.QUEUED, ReceivingStatus.OPEN) and current.get(inbox.room) is not inbox:
            yield f"{name} is {status}, but SGLang has let go of it"
        if inbox.machine.units_home:
            yield f"{name} has given its units of staging back, and is kept"


def _current(inboxes: Mapping[tuple[int, int], Inbox], current: Mapping[int, Inbox]) -> Iterator[str]:
    for room, inbox in current.items():
        key = (inbox.room, inbox.epoch)
        if room != inbox.room:
            yield f"room {room} is kept for {_named(key)}"
        status = inbox.machine.status
        if status in (ReceivingStatus.QUEUED, ReceivingStatus.OPEN) and inboxes.get(key) is not inbox:
            yield f"{_named(key)} is {status}, but is not among the requests"
    for inbox in {id(each): each for each in (*inboxes.values(), *current.values())}.values():
        for what, count in (("merges", inbox.running), ("reads", inbox.reading), ("pieces read", inbox.unmerged)):
            if count < 0:
                yield f"{_named((inbox.room, inbox.epoch))}: more {what} have ended than were begun"


def _destinations(
    peers: Mapping[str, Peer], rooms: Mapping[int, Outbox], destinations: Mapping[Key, Destination]
) -> Iterator[str]:
    for key, each in destinations.items():
        name, active = _sent(each), each.sending.status is SendingStatus.SENDING
        if key != (each.peer.incarnation, each.room, each.epoch):
            yield f"{name} is kept under another name"
            continue
        if active and peers.get(each.peer.incarnation) is not each.peer:
            yield f"{name} is being sent to a process that another one has replaced"
        outbox = rooms.get(each.room)
        current = outbox is not None and outbox.destinations.get(each.rank) is each
        if active and not current:
            yield f"{name} is being sent, but SGLang has let go of the request"
        if active and current:
            yield from _books(each)


def _books(each: Destination) -> Iterator[str]:
    """Of a destination of its room's present request that is being sent."""
    name, machine, mover = _sent(each), each.sending, each.peer.mover
    pieces = len(each.sequence)
    if machine.taken > pieces:
        yield f"{name}: more pieces have been taken than there are"
    if machine.total is not None and machine.total != pieces:
        yield f"{name}: the number of its pieces is not what has been told"
    if each.total_told and machine.total is None:
        yield f"{name}: the number of its pieces has been told, and is not known"
    if each.queued and mover is not None and not mover.has(each):
        yield f"{name} is said to be on the list of the thread that writes, and is not"
    if machine.in_flight and (mover is None or not mover.has(each)):
        yield f"{name} has a write under way that no thread does"


def _rooms(
    peers: Mapping[str, Peer], rooms: Mapping[int, Outbox], destinations: Mapping[Key, Destination]
) -> Iterator[str]:
    for room, outbox in rooms.items():
        if room != outbox.room:
            yield f"room {room} is kept for room {outbox.room}"
        if outbox.ended:
            continue
        if len(outbox.destinations) > outbox.expected:
            yield f"room {room} goes to more decode ranks than take it"
        for rank, each in outbox.destinations.items():
            if rank != each.rank or room != each.room:
                yield f"{_sent(each)} is kept for rank {rank} of room {room}"
            # One of a replaced process is taken out before its request fails.
            known = peers.get(each.peer.incarnation) is each.peer
            if known and destinations.get((each.peer.incarnation, each.room, each.epoch)) is not each:
                yield f"{_sent(each)} is being sent, and acknowledgements of it would not be found"


def _named(owner: object) -> str:
    if isinstance(owner, tuple) and len(owner) == 2:
        return f"room {owner[0]} (use {owner[1]})"
    return f"{owner}"


def _sent(destination: Destination) -> str:
    return f"room {destination.room} (use {destination.epoch}) to {destination.peer.label}"
