"""What decode says to a prefill process that is no more, and its successor at the same endpoint hears."""

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.lifetime.repetition import MOST_SECONDS

from .models import FOUR
from .network import of_kind
from .world import World

ROOM, TOKENS = 5, 22


def test_an_abort_for_a_process_that_is_no_more_does_not_end_the_room_at_its_successor():
    with World(FOUR, (2, 1)) as world:
        former = world.prefill[0]
        first = world.start(ROOM, TOKENS, 2)
        world.until(lambda: world.is_bound(first), send=False)
        held = world.network.hold(of_kind(messages.Abort, receiver=former.name))
        world.restart_prefill(0)  # decode learns it, and tells all sources that it has given up
        world.until(lambda: bool(first.reasons), send=False)
        world.end(first)
        assert [one.message.source for one in held] == [former.rank.manifest.incarnation]
        for node in world.prefill:
            node.side.claim(ROOM)  # the room is used again
        world.network.let_go(held)
        assert world.prefill[0].side.failure(ROOM) is None
        assert world.prefill[0].side.counters.snapshot()["dropped"] == 1
        second = world.open(world.request(ROOM, TOKENS, 2))
        world.serve(second)
        world.check()


def test_a_registration_with_a_process_that_is_no_more_displaces_nobody_at_its_successor():
    """It is of a decode process that is no more, too, and comes late: its own successor has registered already."""
    with World(FOUR, (2, 1)) as world:
        name = world.prefill[0].name
        world.serve(world.start(1, 9))
        (late,) = [one for one in world.network.sent(messages.Register) if one.receiver == name]
        world.restart_prefill(0)
        world.restart_decode(0)
        world.serve(world.start(2, 9))
        world.network.deliver(late)
        assert set(world.prefill[0].side._peers) == {world.decode[0].rank.manifest.incarnation}
        world.serve(world.start(3, TOKENS, 2))
        world.check()


def test_an_abort_for_whoever_is_there_ends_the_room():
    """Where decode knows only where the ranks are: its server has never named them."""
    with World(FOUR, (1, 1)) as world:
        (node,) = world.prefill
        node.side.claim(ROOM)
        abort = messages.Abort(room=ROOM, epoch=1, incarnation="a decode rank", reason="its pages do not match")
        world.network.deliver_to(node.name, abort)
        assert node.side.failure(ROOM) == "its pages do not match"


def test_a_repeated_abort_names_the_process_too():
    """Decode says it again as long as the process may write; another one may listen there by then."""
    with World(FOUR, (2, 1)) as world:
        first = world.start(ROOM, TOKENS, 2)
        world.until(lambda: world.is_bound(first), send=False)
        world.network.lose(of_kind(messages.Abort))
        world.decode[0].side.fail(ROOM, "the client has gone")
        for _ in range(3):
            world.clock.now += MOST_SECONDS
            world.step(send=False)
        own = {node.name: node.rank.manifest.incarnation for node in world.prefill}
        said = world.network.sent(messages.Abort)
        assert len(said) == 8
        assert all(one.message.source == own[one.receiver] for one in said)
