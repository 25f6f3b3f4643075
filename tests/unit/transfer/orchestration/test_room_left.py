"""What a use of a room leaves behind at prefill: nothing that the next one, or its own messages, could stumble over."""

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.dispatch import SWEEP_SECONDS
from sglang_hetero.transfer.reception import Progress

from .models import FOUR
from .world import World

ROOM, TOKENS = 5, 22
ENOUGH = 90
"""Seconds after which a room that nobody has claimed is forgotten, with a repetition of decode's behind it."""


class Sender:
    """In the place of SGLang's sender of a request."""


def give_up(world: World, request) -> None:
    """Decode lets go, before prefill has heard of the request."""
    for node, place in zip(world.decode, request.places, strict=True):
        node.side.fail(ROOM, "the client has gone")
        node.side.settle(ROOM)
        node.rank.scrub(place)
    del world.requests[ROOM]


def test_a_bind_that_waits_does_not_take_the_acknowledgements_of_its_repetition():
    with World(FOUR, (2, 1)) as world:
        first = world.open(world.request(ROOM, TOKENS, 2))
        world.until(lambda: world.is_bound(first), send=False)
        give_up(world, first)
        world.network.pump()
        second = world.open(world.request(ROOM, TOKENS, 2))
        inbox = world.decode[0].side._current[ROOM]
        for _ in range(ENOUGH):  # until the first use is forgotten, and the second one has been bound
            inbox.progress = world.clock.now  # as if decode had waited for units
            world.clock.now += 1.0
            world.step(send=False)
            if world.is_bound(second):
                break
            inbox.repetition._last = float("-inf")
        for node in world.prefill:
            node.side.claim(ROOM)
        world.serve(second)
        world.check()


def test_a_room_that_sglang_has_let_go_of_before_it_was_bound_is_refused_at_once():
    with World(FOUR, (1, 1)) as world:
        node = world.prefill[0]
        stranger = messages.Abort(room=ROOM, epoch=9, incarnation="another decode", use="1", reason="it has failed")
        world.network.deliver_to(node.name, stranger)
        node.side.claim(ROOM)
        assert node.side.failure(ROOM)
        node.side.release(ROOM)  # as SGLang does when it has seen that
        request = world.open(world.request(ROOM, TOKENS, 2))
        world.until(lambda: bool(request.reasons), send=False)
        assert "before it was bound" in request.reasons[world.decode[0].name]
        world.end(request)
        world.check()


def test_sglang_hears_of_a_failure_when_decode_has():
    """Else it lets go on other ranks, and what they say of that is what decode hears first."""
    with World(FOUR, (2, 1)) as world:
        request = world.start(ROOM, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        side, known = world.prefill[0].side, []
        post = side._post
        side._post = lambda endpoint, payload: (known.append(side.failure(ROOM)), post(endpoint, payload))
        side.fail(ROOM, "a write has failed")
        assert known and set(known) == {None}
        assert side.failure(ROOM) == "a write has failed"
        side._post = post
        world.until(lambda: world.failed(request), send=False)
        assert "a write has failed" in request.reasons[world.decode[0].name]
        world.end(request)
        world.check()


def test_a_sender_that_is_gone_without_a_word_leaves_the_room_to_the_next_one():
    with World(FOUR, (2, 1)) as world:
        owners = [Sender() for _ in world.prefill]
        for node, owner in zip(world.prefill, owners, strict=True):
            node.side.claim(ROOM, owner)
        first = world.open(world.request(ROOM, TOKENS, 2))
        world.until(lambda: world.is_bound(first), send=False)
        world.send_chunk(first)
        for node in world.prefill:
            node.side.fail(ROOM, "the client gave the request up between two chunks")
        world.until(lambda: first.results.get(world.decode[0].name) is Progress.FAILED, send=False)
        give_up(world, first)
        del owner, owners[:]
        for node in world.prefill:
            node.side.retire(ROOM)
            assert node.events.count("forgotten", ROOM) == 1
        second = world.start(ROOM, TOKENS, 2)
        world.serve(second)
        world.check()


def test_a_sender_that_is_there_keeps_its_room():
    with World(FOUR, (2, 1)) as world:
        request = world.start(ROOM, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        for node in world.prefill:
            node.side.retire(ROOM)
        world.serve(request)
        world.check()


def test_what_a_later_request_has_brought_outlives_the_end_of_a_sender_without_a_word():
    with World(FOUR, (2, 1)) as world:
        owners = [Sender() for _ in world.prefill]
        for node, owner in zip(world.prefill, owners, strict=True):
            node.side.claim(ROOM, owner)  # and nothing is ever bound to it
        del owner, owners[:]
        request = world.open(world.request(ROOM, TOKENS, 2))
        world.until(lambda: world.is_bound(request), send=False)
        for node in world.prefill:
            node.side.retire(ROOM)
            assert node.events.count("forgotten", ROOM) == 1, "the former sender may have failed the room at SGLang"
            bound = node.events.count("bound", ROOM)
            node.side.claim(ROOM)
            assert node.events.count("bound", ROOM) == bound + 1
        world.serve(request)
        world.check()


def test_a_sender_that_has_just_come_is_not_forgotten_with_the_former_one():
    """SGLang's scheduler makes it while the end of the former one is told."""
    with World(FOUR, (2, 1)) as world:
        side, events = world.prefill[0].side, world.prefill[0].events
        owner = Sender()
        side.claim(ROOM, owner)
        first = world.open(world.request(ROOM, TOKENS, 2))
        world.until(lambda: world.is_bound(first), send=False)
        outbox, claim, later = side._rooms[ROOM], side._claimed[ROOM], Sender()
        del owner
        side.claim(ROOM, later)
        side._leave(ROOM, outbox, claim, False, said=False)
        assert events.count("forgotten", ROOM) == 0 and side._claimed[ROOM]() is later
        give_up(world, first)
        for node in world.prefill:
            node.side.release(ROOM)
        world.check()


def test_sglang_forgets_a_sender_that_is_gone_and_never_had_a_request():
    with World(FOUR, (2, 1)) as world:
        side, events = world.prefill[0].side, world.prefill[0].events
        owner = Sender()
        side.claim(ROOM, owner)
        del owner
        world.clock.now += SWEEP_SECONDS
        side.claim(ROOM + 1)
        assert events.count("forgotten", ROOM) == 1
        side.release(ROOM + 1)


def test_a_bind_that_has_waited_is_no_sign_of_life():
    with World(FOUR, (2, 1), announce=False) as world:
        request = world.open(world.request(ROOM, TOKENS, 2))
        world.network.pump()
        side, incarnation = world.prefill[0].side, world.decode[0].rank.manifest.incarnation
        assert [key[0] for key in side._parked] == [incarnation]
        side.gone(frozenset({incarnation}), "has ended")
        world.prefill[0].side.topology(world.topology)
        assert incarnation not in side._peers and not side._rooms
        world.prefill[1].side.topology(world.topology)
        world.decode[0].side.fail(ROOM, "enough")
        world.until(lambda: bool(request.reasons), send=False)
        world.end(request)
        world.check()


def test_each_rank_of_prefill_can_say_whom_a_request_waited_for():
    with World(FOUR, (2, 1)) as world:
        request = world.start(ROOM, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        first, second = (node.side for node in world.prefill)
        for side in (first, second):
            assert "another rank of this prefill server" in side.explain(ROOM)
            assert f"waited for {world.decode[0].rank.manifest.label}" in side.explain(ROOM)
        first.fail(ROOM, "a write has failed")
        assert first.explain(ROOM) == "a write has failed"
        world.until(lambda: world.failed(request), send=False)
        world.end(request)
        world.check()
