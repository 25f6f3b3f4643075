"""What a decode rank says that is late, foreign or wrong: one request fails, or nothing happens."""

import pytest
from msgspec.structs import replace

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.messages import Abort, Ack, Bind, Finish, Register

from .models import FOUR
from .network import of_kind
from .world import World


def started(world: World, *, chunks: int):
    """A request of three chunks of which so many have been handed over; decode does not hear of it."""
    world.network.hold(of_kind(messages.Ready))
    victim = world.start(1, 22, 2, 3)
    world.until(lambda: world.is_bound(victim), send=False)
    for _ in range(chunks):
        world.send_chunk(victim)
    world.rounds(5, send=False)
    return victim


def fails(world: World, victim) -> None:
    world.until(lambda: world.failed(victim), what="failure on both sides", send=False)
    assert all(victim.reasons.values())
    world.end(victim)
    world.network.flow()
    world.serve(world.start(2, 9, 1))
    world.check()


@pytest.mark.parametrize("upto", [100, 1 << 40])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
def test_an_ack_of_what_was_never_sent(chunks, upto):
    """Whenever it comes; it must not get into SGLang's scheduler as an exception either."""
    with World(FOUR, (2, 1)) as world:
        victim = started(world, chunks=chunks)
        world.network.deliver_to(world.prefill[0].name, Ack(**world.ids(world.decode[0], 1), upto=upto))
        for _ in range(3 - chunks):
            world.send_chunk(victim)
        for node in world.prefill:
            node.side.check(1)
        fails(world, victim)


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_finish_too_early(chunks):
    with World(FOUR, (2, 1), window=1) as world:
        victim = started(world, chunks=chunks)
        world.network.deliver_to(world.prefill[0].name, Finish(**world.ids(world.decode[0], 1)))
        fails(world, victim)


BAD_BIND = {
    "fingerprint": {"fingerprint": "another plan"},
    "outside_the_arena": {"units": (1 << 40,)},
    "no_units": {"units": ()},
    "area_too_small": {"area_bytes": 64},
    "no_pages_per_piece": {"pages_per_piece": {}},
    "ranks": {"rank": 1, "ranks": 3},
}


@pytest.mark.parametrize("which", BAD_BIND)
def test_a_bind_that_does_not_fit(which):
    with World(FOUR, (2, 2)) as world:
        held = world.network.hold(of_kind(Bind, sender=world.decode[1].name))
        victim = world.start(1, 22, 2)
        world.rounds(5)
        for one in held:
            world.network.deliver_to(one.receiver, replace(one.message, **BAD_BIND[which]))
        fails(world, victim)


@pytest.mark.parametrize("which", [which for which in BAD_BIND if which != "ranks"])
def test_a_bind_of_the_only_decode_rank_that_does_not_fit(which):
    """Nobody else has bound the request, and prefill's scheduler must learn all the same that it will not be."""
    with World(FOUR, (2, 1)) as world:
        held = world.network.hold(of_kind(Bind))
        victim = world.start(1, 22, 2)
        world.rounds(5)
        for one in held:
            world.network.deliver_to(one.receiver, replace(one.message, **BAD_BIND[which]))
        fails(world, victim)


def _foreign(world: World, make):
    right = world.ids(world.decode[0], 1)
    yield make(**{**right, "epoch": right["epoch"] + 7})
    yield make(**{**right, "epoch": 0})
    yield make(**{**right, "room": 77})
    yield make(**{**right, "incarnation": "somebody else"})


@pytest.mark.parametrize("kind", [Ack, Finish, Abort], ids=lambda kind: kind.__name__)
def test_messages_that_are_somebody_elses(kind):
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, 22, 2)
        world.until(lambda: world.is_bound(request), send=False)
        for message in _foreign(world, lambda **f: kind(**f, **({"upto": 50} if kind is Ack else {}))):
            for node in world.prefill:
                world.network.deliver_to(node.name, message)
        world.serve(request)
        for wrong_way in (messages.Ready(incarnation="x"), messages.Drained(incarnation="x")):
            world.network.deliver_to(world.prefill[0].name, wrong_way)
        world.check()


def test_old_messages_of_a_room_that_is_used_again():
    with World(FOUR, (2, 2)) as world:
        world.serve(world.start(1, 22, 2))
        old = [one for one in world.network.log if one.receiver in {node.name for node in world.prefill}]
        request = world.start(1, 15, 1, seed=9)
        world.until(lambda: world.is_bound(request), send=False)
        for one in old:
            world.network.deliver(one)
        world.serve(request)
        world.check()


def test_a_registration_that_is_nonsense():
    with World(FOUR, (2, 1)) as world:
        world.serve(world.start(1, 9))
        node = world.prefill[0]
        (right, *_) = [one.message for one in world.network.sent(Register) if one.receiver == node.name]
        for changes in (
            {"manifest": b"nonsense"},
            {"incarnation": "another"},
            {"arena": 0, "arena_bytes": 1},
        ):
            world.network.deliver_to(node.name, replace(right, **changes))
        world.serve(world.start(2, 9))
        world.check()


def test_a_late_registration_of_a_process_that_was_replaced():
    """It must not take the place of its successor."""
    with World(FOUR, (2, 1)) as world:
        world.serve(world.start(1, 9))
        world.restart_decode(0)
        request = world.start(2, 22, 2)
        world.until(lambda: world.is_bound(request), send=False)
        for one in world.network.sent(Register):
            if one.message.incarnation != world.decode[0].rank.manifest.incarnation:
                world.network.deliver(one)
        world.serve(request)
        world.serve(world.start(3, 9))
        world.check()


def test_a_bind_again_with_a_newer_epoch_fails_the_request_in_the_open():
    """The scheduler of the former use has to learn that it failed: the room's new use must not hide it."""
    with World(FOUR, (2, 1)) as world:
        victim = started(world, chunks=1)
        for one in world.network.sent(Bind, room=1):
            world.network.deliver_to(one.receiver, replace(one.message, epoch=one.message.epoch + 5))
        for node in world.prefill:
            assert node.side.failure(1), "the scheduler goes on with a request that has failed"
        for one in world.network.sent(Bind, room=1):
            abort = Abort(room=1, epoch=one.message.epoch + 5, incarnation=one.message.incarnation)
            world.network.deliver_to(one.receiver, abort)
        fails(world, victim)
