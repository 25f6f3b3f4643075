"""What must hold, about memory: who writes a unit, who reads it, whose it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hetero.transfer.lifetime import ReceivingStatus

from .machines import Violation
from .state import PULL, Link, Room

if TYPE_CHECKING:
    from .world import World


def writing(world: World, link: Link, request: int, source: int, destination: int) -> None:
    """The units that a source writes are its request's, and nothing reads them."""
    assert link.batch is not None
    if not world.meant(request, world.setup.sources + destination):
        return  # into the memory of a process that is dead
    stage, size = world.setup.stage_of[source], world.setup.window
    if world.arenas[destination].owners[link.window] != request:
        raise Violation(f"source {source} writes for request {request} into units that it does not hold")
    units = {seq % size for seq in link.batch if source in world.setup.sharing[stage, seq]}
    for reading, seq in world.rooms[world.room(request, destination)].running:
        if (reading, seq) == PULL or (reading == stage and seq % size in units):
            raise Violation(f"source {source} writes a unit of request {request} that is being read")


def content(world: World, request: int, destination: int, stage: int, seq: int) -> None:
    """What a merge reads is what all sharers wrote of this piece, and nobody is writing there."""
    size = world.setup.window
    for source in world.setup.sharing[stage, seq]:
        if world.dead(source) or not world.meant(request, source):
            continue  # its process is dead; the checks of other states cover what it wrote
        link = world.links[world.link(request, source, destination)]
        writing = link.batch is not None and any(other % size == seq % size for other in link.batch)
        lies = [other for other in range(link.wrote) if other % size == seq % size]
        own = [other for other in lies if source in world.setup.sharing[stage, other]]
        if writing or not own or own[-1] != seq:
            raise Violation(f"merge of piece {seq} of request {request}: source {source} wrote {own}, {link.batch}")


def unread(world: World, request: int, destination: int) -> None:
    running = world.rooms[world.room(request, destination)].running
    if running:
        raise Violation(f"units of request {request} come home while {sorted(running)} are read")


def complete(world: World, room: Room) -> None:
    wanted = {(stage, seq) for stage in range(len(world.setup.stages)) for seq in range(world.setup.pieces)}
    if "first" not in room.known:
        raise Violation("complete without FirstGeneration")
    if room.merged != wanted or room.running:
        raise Violation(f"complete with {sorted(room.merged)} merged of {sorted(wanted)}")


def successors(world: World) -> None:
    """What is for the processes that took others' place has ended well."""
    first = (world.setup.requests - world.setup.reborn) * world.setup.destinations
    for place, room in enumerate(world.rooms[first:], first):
        status = world.machines.look(room.machine).status
        if status is not ReceivingStatus.COMPLETE:
            request, destination = divmod(place, world.setup.destinations)
            raise Violation(f"request {request} is {status} at destination {destination}, and nothing happened to it")


def mergeable(room: Room, stage: int, seq: int) -> None:
    if "Settle" in room.ends:
        raise Violation(f"merge of piece {seq} after the end")
    if (stage, seq) in room.known:
        raise Violation(f"merge of piece {seq}, which is not the same for all of its sharers")


def acknowledged(room: Room, stage: int, upto: int) -> None:
    if any((stage, seq) not in room.merged for seq in range(upto)):
        raise Violation(f"acknowledged {upto} pieces of stage {stage}, merged are {sorted(room.merged)}")
