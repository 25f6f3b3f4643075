"""check_integrity() of both sides: silent while all is right (World.check_books), and not where something is wrong."""

from collections.abc import Callable

import pytest

from sglang_hetero.transfer.pieces import StateMode

from .models import FOUR
from .parts import Request
from .world import World

ROOM = 7
SECONDS = 20.0


def opened(world: World) -> Request:
    """One request that has its units and a part of its pieces, and one that waits for units."""
    request = world.start(ROOM, 22, 2, 3)
    world.until(lambda: world.is_bound(request), send=False)
    world.send_chunk(request)
    world.until(lambda: destination(world).sending.acknowledged > 0, send=False)
    world.open(world.request(ROOM + 1, 9))
    return request


def inbox(world: World):
    return world.decode[0].side._current[ROOM]


def owner(world: World) -> tuple[int, int]:
    return ROOM, inbox(world).epoch


def destination(world: World):
    return world.prefill[0].side._rooms[ROOM].destinations[0]


def lose_a_unit(world: World) -> None:
    units = world.decode[0].side._units
    units._held[owner(world)] = units._held[owner(world)][1:]


def forget_the_request(world: World) -> None:
    del world.decode[0].side._inboxes[owner(world)]


def give_units_back(world: World) -> None:
    world.decode[0].side._units.release(owner(world))


def other_units(world: World) -> None:
    inbox(world).units = tuple(tuple(reversed(stage)) for stage in inbox(world).units)


def leave_the_queue(world: World) -> None:
    side = world.decode[0].side
    side._units.cancel((ROOM + 1, side._current[ROOM + 1].epoch))


def let_go(world: World) -> None:
    del world.decode[0].side._current[ROOM]


def fail_without_quarantine(world: World) -> None:
    key = owner(world)
    world.decode[0].side.fail(ROOM, "the client gave up")
    world.decode[0].side._units.drained(key, world.decode[0].side._inboxes[key].source_set.address)


def end_a_merge_twice(world: World) -> None:
    inbox(world).running = -1


def bring_units_home(world: World) -> None:
    inbox(world).machine._units_home = True


DECODE: dict[Callable[[World], None], str] = {
    lose_a_unit: "staging: ",
    forget_the_request: "holds units of staging, but there is no such request",
    give_units_back: "works with units of staging that are not its own",
    other_units: "works with units of staging that are not its own",
    leave_the_queue: "waits for units of staging, but is in no queue",
    let_go: "SGLang has let go of it",
    fail_without_quarantine: "neither free nor quarantined",
    end_a_merge_twice: "more merges have ended than were begun",
    bring_units_home: "has given its units of staging back, and is kept",
}


def queue_it_nowhere(world: World) -> None:
    world.until(lambda: not destination(world).queued, send=False)
    destination(world).queued = True


def write_nobody_does(world: World) -> None:
    world.until(lambda: not destination(world).queued, send=False)
    destination(world).sending._batch = range(1)


def lose_the_destination(world: World) -> None:
    each = destination(world)
    del world.prefill[0].side._destinations[each.peer.incarnation, each.room, each.epoch]


def rename_the_destination(world: World) -> None:
    destinations = world.prefill[0].side._destinations
    destinations["somebody", 1, 1] = destinations.pop(next(iter(destinations)))


def lose_the_room(world: World) -> None:
    del world.prefill[0].side._rooms[ROOM]


def lose_the_peer(world: World) -> None:
    world.prefill[0].side._peers.pop(destination(world).peer.incarnation).mover.stop()


def tell_an_unknown_total(world: World) -> None:
    destination(world).total_told = True


def take_too_much(world: World) -> None:
    destination(world).sequence.clear()


PREFILL: dict[Callable[[World], None], str] = {
    queue_it_nowhere: "is said to be on the list of the thread that writes, and is not",
    write_nobody_does: "has a write under way that no thread does",
    lose_the_destination: "acknowledgements of it would not be found",
    rename_the_destination: "is kept under another name",
    lose_the_room: "is being sent, but SGLang has let go of the request",
    lose_the_peer: "to a process that another one has replaced",
    tell_an_unknown_total: "the number of its pieces has been told, and is not known",
    take_too_much: "more pieces have been taken than there are",
}


@pytest.mark.parametrize("wrong", [*DECODE, *PREFILL], ids=lambda wrong: wrong.__name__)
def test_books_that_are_wrong(wrong):
    with World(FOUR, (2, 1), capacity=1) as world:
        opened(world)
        side = (world.decode if wrong in DECODE else world.prefill)[0].side
        assert side.check_integrity() == []
        wrong(world)
        assert any((DECODE | PREFILL)[wrong] in text for text in side.check_integrity())


def boom(*_: object) -> int:
    raise ZeroDivisionError("boom")


def end_the_mover(world: World):
    mover = destination(world).peer.mover
    mover._runnable._size = boom
    mover.wake(destination(world))
    return world.prefill[0].side, mover.worker


def end_the_merger(world: World):
    merger = world.decode[0].side._worker
    merger._todo._size = boom
    merger._todo.put(inbox(world), None)
    return world.decode[0].side, merger.worker


@pytest.mark.parametrize("end", [end_the_mover, end_the_merger], ids=lambda end: end.__name__)
def test_a_thread_that_has_ended_is_told_with_its_reason(end):
    with World(FOUR, (2, 1), capacity=1) as world:
        opened(world)
        side, worker = end(world)
        worker.thread.join(SECONDS)
        assert f"the thread {worker.name} has ended: ZeroDivisionError: boom" in side.check_integrity()


def test_a_side_that_was_closed_has_no_fault():
    with World(FOUR, (2, 1)) as world:
        world.serve(world.start(ROOM, 9))
        world.close()
        for worker in (
            world.decode[0].side._worker.worker,
            *(peer.mover.worker for peer in world.prefill[0].side._peers.values()),
        ):
            worker.thread.join(SECONDS)
            assert not worker.thread.is_alive()
        assert world.decode[0].side.check_integrity() == world.prefill[0].side.check_integrity() == []


def test_the_end_of_a_read_that_cannot_be_told_is_a_fault():
    with World(FOUR, (2, 1), mode=StateMode.PULL) as world:
        side = world.decode[0].side
        side._read_done = boom
        world.check_books = lambda: None
        world.start(ROOM, 9)
        world.until(lambda: bool(side._puller.fault))
        assert side.check_integrity() == ["the end of a read was not told: ZeroDivisionError: boom"]


def test_the_end_of_a_merge_that_cannot_be_told_is_a_fault_and_fails_its_request():
    with World(FOUR, (2, 1)) as world:
        side = world.decode[0].side
        side._worker._merge_batch = boom
        world.check_books = lambda: None
        request = world.start(ROOM, 9)
        world.until(lambda: bool(request.reasons), what="failure at decode")
        fault = "the end of a merge was not told: ZeroDivisionError: boom"
        assert fault in request.reasons[world.decode[0].name]
        assert side.check_integrity() == [fault]


@pytest.mark.parametrize("meanwhile", ["the request is given up", "another process registers"])
def test_a_bind_that_another_thread_comes_before(meanwhile):
    """Between the look whether the room is in use and the entry in the books; nothing may stay there."""
    with World(FOUR, (1, 2)) as world:
        side = world.prefill[0].side
        accept, accepted = side._accept, []

        def later(message, peer, acked):
            accepted.append(peer)
            if len(accepted) == 2 and meanwhile == "the request is given up":
                side.fail(ROOM, "the client gave up")
            elif len(accepted) == 2:
                side._forget(peer)
            accept(message, peer, acked)

        side._accept = later
        request = world.start(ROOM, 9)
        world.until(lambda: len(accepted) == 2, send=False)
        assert side.check_integrity() == [] and len(side._destinations) <= 1
        if meanwhile == "the request is given up":
            world.until(lambda: world.failed(request), send=False, what="failure on both sides")
            world.end(request)
            world.until(lambda: world.idle)
            assert side._destinations == {} and side.check_integrity() == []
