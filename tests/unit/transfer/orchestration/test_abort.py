"""A request is given up at any step, by either side: pages are untouched after settle, everything comes home."""

import threading
import time

import pytest

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fault, Gate, Operation
from sglang_hetero.transfer.pieces import StateMode
from sglang_hetero.transfer.reception import Progress

from .gates import gated_merge
from .models import FOUR
from .network import of_kind
from .world import World

TOKENS = 22
SEVERAL, WIDE = 3, 8
"""Pieces in a batch, and units of a window in which twice as many find room."""


def by_decode(world: World, request) -> None:
    world.decode[0].side.fail(request.room, "the client gave up")


def by_prefill(world: World, request) -> None:
    world.prefill[-1].side.fail(request.room, "the client gave up")


def by_both(world: World, request) -> None:
    for node in (*world.prefill, *world.decode):
        node.side.fail(request.room, "the client gave up")


WHO = {"decode": by_decode, "prefill": by_prefill, "both": by_both}


def announced(world: World) -> int:
    """Pieces of pages that each source has announced at least."""
    sent = [(one.sender, piece) for one in world.network.sent(messages.Ready) for piece in one.message.pieces]
    return min(sum(sender == node.name and piece.role is not None for sender, piece in sent) for node in world.prefill)


def again(world: World, room: int) -> None:
    """The same room at once, then another one."""
    world.serve(world.start(room, 15, 1, seed=31))
    world.serve(world.start(60, 9))
    world.check()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("mode", [StateMode.PREPUSH, StateMode.PULL])
@pytest.mark.parametrize("step", ["opened", "delivered", "bound", "chunk_1", "chunk_2", "all"])
def test_at_every_step(step, who, mode):
    with World(FOUR, (2, 2), mode=mode, window=2) as world:
        request = world.start(1, TOKENS, 2, 3)
        if step == "delivered":
            world.network.pump()
        elif step != "opened":
            world.until(lambda: world.is_bound(request), send=False)
            for _ in range({"bound": 0, "chunk_1": 1, "chunk_2": 2, "all": 3}[step]):
                world.send_chunk(request)
        WHO[who](world, request)
        if step == "opened" and who == "prefill":
            world.rounds(send=False)
            world.end(request)  # nobody had bound it: prefill's part is over before it begins
        else:
            world.until(lambda: world.failed(request), send=False, what="failure on both sides")
            assert all(request.reasons.values())
            world.end(request)
        again(world, 1)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("moved", ["before", "after"])
@pytest.mark.parametrize("ends", ["well", "failing", "in_doubt"])
def test_in_the_middle_of_a_write(tp, who, moved, ends):
    with World(FOUR, tp) as world:
        source, gate = world.prefill[-1], Gate()
        how = {"well": {}, "failing": {"error": "reset"}, "in_doubt": {"error": "timeout", "late": True}}[ends]
        source.engine.script.next(Fault(**{"gate" if moved == "before" else "gate_after": gate}, **how))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: gate.wait_reached(0))
        WHO[who](world, request)
        world.until(lambda: world.failed(request), what="failure on both sides")
        world.end(request)
        world.rounds()
        assert sum(n.side.state["units_quarantined"] for n in world.decode), "a write is under way"
        gate.open()
        world.until(lambda: not source.side.state["in_flight"])
        if ends == "in_doubt":
            world.rounds()
            assert sum(n.side.state["units_quarantined"] for n in world.decode), "a write is in doubt"
            source.engine.script.land_late()
            for node in world.decode:
                node.side.gone(frozenset({source.rank.manifest.incarnation}))
        again(world, 1)


@pytest.mark.parametrize("ends", ["well", "failing"])
def test_the_room_is_used_again_while_an_old_write_is_under_way(ends):
    """How the old write ends is nobody's business by then."""
    with World(FOUR, (2, 1)) as world:
        source, gate = world.prefill[1], Gate()
        source.engine.script.next(Fault(gate=gate, error="reset" if ends == "failing" else ""))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: gate.wait_reached(0))
        world.decode[0].side.fail(1, "the client gave up")
        world.until(lambda: world.failed(request))
        world.end(request)
        new = world.start(1, 15, 1, seed=31)
        world.until(lambda: world.is_bound(new), send=False)
        gate.open()
        world.until(lambda: not source.side.state["in_flight"], send=False)
        world.rounds(send=False)
        world.serve(new)
        world.check()


def test_the_room_is_used_again_before_prefill_has_let_go():
    """SGLang's sender of the former use is released late: that is not the end of the new use."""
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        world.decode[0].side.fail(1, "the client gave up")
        world.until(lambda: world.failed(request), send=False)
        world.decode[0].side.settle(1)
        world.decode[0].rank.scrub(request.places[0])
        new = world.request(1, 15, 1, seed=31)
        world.open(new)
        world.rounds(send=False)
        assert all(node.side.failure(1) for node in world.prefill), "the former use's scheduler does not see its end"
        for node in world.prefill:
            node.side.release(1)
        world.serve(new)
        world.check()


@pytest.mark.parametrize("before", [True, False], ids=["before_the_bytes", "after_the_bytes"])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("nth", "least"), [(0, 1), (3, 1), (0, SEVERAL)], ids=["first", "fourth", "several"])
def test_settle_waits_for_a_running_merge(nth, least, who, before):
    window = WIDE if least > 1 else 3
    with World(FOUR, (2, 1), window=window) as world, gated_merge(world.sets[0], nth, before, least) as gate:
        request, gated = world.start(1, TOKENS, 2), world.sets[0].assembler
        if least > 1:
            # The first merge may have fewer: it waits until behind it, too, there are several.
            world.until(lambda: announced(world) >= 2 * least - 1)
            world.step()  # the last of them are delivered
            gated.collected.set()
        world.until(lambda: gate.wait_reached(0))
        assert gated.pieces >= least
        WHO[who](world, request)
        world.until(lambda: world.failed(request), what="failure on both sides")
        settled = threading.Event()

        def settle() -> None:
            world.decode[0].side.settle(1)
            world.decode[0].rank.scrub(request.places[0])
            settled.set()

        thread = threading.Thread(target=settle)
        thread.start()
        for _ in range(20):  # messages go on meanwhile
            world.network.pump()
            time.sleep(0.001)
        assert not settled.is_set(), "settle returned while a merge was running"
        gate.open()
        thread.join(5)
        assert settled.is_set()
        world.end(request)
        again(world, 1)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("after", [False, True])
def test_in_the_middle_of_a_read(who, after):
    with World(FOUR, (2, 2), mode=StateMode.PULL, window=1) as world:
        gate, script = Gate(), world.decode[0].engine.script
        script.next(Fault(**{"gate_after" if after else "gate": gate}), operation=Operation.READ)
        request = world.start(1, TOKENS, 2)
        world.until(lambda: gate.wait_reached(0))
        WHO[who](world, request)  # the other decode rank may have everything already
        world.until(lambda: world.decode[0].name in request.reasons, what="failure at decode")
        world.end(request)
        assert world.decode[0].side.state["units_free"] < world.units
        gate.open()
        again(world, 1)


def test_abort_overtakes_bind():
    with World(FOUR, (2, 1)) as world:
        held = world.network.hold(of_kind(messages.Bind))
        request = world.start(1, TOKENS, 2)
        world.decode[0].side.fail(1, "the client gave up")
        world.rounds()
        world.network.let_go(held)
        world.rounds()
        assert not any(node.events.count("bound", 1) for node in world.prefill)
        world.end(request)
        again(world, 1)


def test_settle_without_an_abort_and_twice():
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, TOKENS, 2)
        world.until(lambda: request.sent == 1)
        world.end(request)
        world.decode[0].side.settle(1)
        world.prefill[0].side.release(1)
        world.decode[0].side.fail(1, "too late")
        world.prefill[0].side.fail(1, "too late")
        again(world, 1)


def test_a_request_that_waits_for_units_is_given_up():
    with World(FOUR, (2, 1), capacity=1) as world:
        first, second, third = (world.start(room, 9) for room in (1, 2, 3))
        world.decode[0].side.fail(2, "the client gave up")
        world.end(second)
        world.serve(first, third)
        again(world, 2)


def test_abort_before_bind_then_the_room_again():
    """What is remembered of a request that was never bound must not stand in the way of the room's next use."""
    with World(FOUR, (2, 2)) as world:
        held = world.network.hold(of_kind(messages.Bind))
        request = world.start(1, TOKENS, 2)
        for node in world.decode:
            node.side.fail(1, "the client gave up")
        world.end(request)  # prefill has released before the aborts arrive
        world.rounds()
        world.network.let_go(held)
        again(world, 1)


def test_prefill_gives_a_pulled_request_up_that_decode_has_just_completed():
    """Decode reads no more, and has said so: the pages need not be kept for the time that a reader could take."""
    with World(FOUR, (2, 1), mode=StateMode.PULL) as world:
        held = world.network.hold(of_kind(messages.Finish))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: request.results.get(world.decode[0].name) is Progress.COMPLETE)
        for node in world.prefill:
            node.side.fail(1, "the client left")
            assert not node.side.may_free(1)
        world.network.let_go(held)
        world.until(lambda: all(node.side.may_free(1) for node in world.prefill), what="pages that may be freed")
        world.end(request)
        world.check()
