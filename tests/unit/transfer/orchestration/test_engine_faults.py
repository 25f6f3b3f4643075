"""Engines that fail, merges that raise, peers that cannot be reached: who learns it, and where the units are then."""

import numpy as np
import pytest

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fault, Operation
from sglang_hetero.transfer.pieces import StateMode

from .models import FOUR
from .network import of_kind
from .world import World

TOKENS = 22


class Raising:
    """An assembler whose merges fail."""

    def __init__(self, inner, error, what):
        self.inner, self.error, self.what = inner, error, what

    def merge_batch(self, arena, pieces):
        if any(self.inner.item(piece.role, piece.layer) == self.what for piece in pieces):
            raise self.error
        self.inner.merge_batch(arena, pieces)


def quarantined(world: World) -> int:
    return sum(node.side.state["units_quarantined"] for node in world.decode)


def goes_on(world: World, room: int = 50) -> None:
    world.serve(world.start(room, 15, 1))
    world.check()


@pytest.mark.parametrize("nth", [0, 2, 5])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
def test_a_write_that_fails_and_is_settled(tp, nth):
    with World(FOUR, tp) as world:
        script = world.prefill[-1].engine.script
        script.next(*[Fault()] * nth, Fault(error="reset", lands=1))
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(victim), what="failure on both sides")
        assert any("reset" in reason and world.prefill[-1].name in reason for reason in victim.reasons.values())
        world.end(victim)
        world.until(lambda: world.idle, what="units back")
        assert not script.unused
        goes_on(world)


@pytest.mark.parametrize("released", ["before_the_abort", "after_the_abort"])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
def test_a_write_in_doubt(tp, released):
    """Its units stay apart until the source is gone, whenever SGLang lets go of the request on the prefill side."""
    with World(FOUR, tp) as world:
        source = world.prefill[-1]
        source.engine.script.next(Fault(error="timeout", late=True))
        held = world.network.hold(of_kind(messages.Abort))
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: bool(source.side.failure(1) and victim.reasons), what="failure on both sides")
        world.rounds()
        if released == "after_the_abort":
            world.network.let_go(held)
            world.rounds()
        world.end(victim)
        if released == "before_the_abort":
            world.network.let_go(held)
        world.rounds()
        assert source.engine.script.late == 1
        assert quarantined(world), "units that a late write may hit were given back"
        other = world.start(2, 15, 1)
        world.serve(other)
        source.engine.script.land_late()
        for node in world.decode:
            node.side.gone(frozenset({source.rank.manifest.incarnation}))
        assert not quarantined(world)
        goes_on(world)


@pytest.mark.parametrize("nth", [0, 1])
def test_a_read_that_fails_and_is_settled(nth):
    with World(FOUR, (2, 1), mode=StateMode.PULL) as world:
        script = world.decode[0].engine.script
        script.next(*[Fault()] * nth, Fault(error="reset"), operation=Operation.READ)
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(victim), what="failure on both sides")
        assert "reset" in victim.reasons[world.decode[0].name]
        assert any(node.name in victim.reasons[world.decode[0].name] for node in world.prefill)
        world.end(victim)
        goes_on(world)


def test_a_read_in_doubt():
    """What it may still bring goes to the request's units: they must stay apart until the source is gone."""
    with World(FOUR, (2, 1), mode=StateMode.PULL) as world:
        script = world.decode[0].engine.script
        script.next(Fault(error="timeout", settled=False), operation=Operation.READ)
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(victim), what="failure on both sides")
        world.end(victim)
        world.rounds()
        assert quarantined(world), "units into which a read may still bring bytes were given back"
        world.decode[0].side.gone(frozenset(node.rank.manifest.incarnation for node in world.prefill))
        assert not quarantined(world)
        goes_on(world)


@pytest.mark.parametrize("mode", [StateMode.PREPUSH, StateMode.PULL])
@pytest.mark.parametrize("what", ["page", "slot"])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), AssertionError()], ids=lambda e: type(e).__name__)
def test_a_merge_that_raises(what, error, mode):
    with World(FOUR, (2, 2), mode=mode) as world:
        known = world.sets[1]
        inner, known.assembler = known.assembler, Raising(known.assembler, error, what)
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: all(n.side.failure(1) for n in world.prefill), what="failure on both sides")
        world.until(lambda: world.decode[1].name in victim.reasons)
        assert type(error).__name__ in victim.reasons[world.decode[1].name]
        world.end(victim)
        known.assembler = inner
        goes_on(world)


@pytest.mark.parametrize("times", [1, 1 << 30], ids=["once", "for_good"])
@pytest.mark.parametrize("kind", [messages.Register, messages.Bind, messages.Ack], ids=lambda kind: kind.__name__)
def test_decode_cannot_reach_a_source(kind, times):
    """A link that fails once must cost one request, and no unit."""
    with World(FOUR, (2, 1), window=2) as world:
        world.network.cut(of_kind(kind, receiver=world.prefill[1].name), times)
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.decode[0].name in victim.reasons, what="failure at decode")
        assert world.prefill[1].name in victim.reasons[world.decode[0].name]
        world.end(victim)
        world.network.flow()
        world.until(lambda: world.idle, what="units back")
        goes_on(world)


@pytest.mark.parametrize("kind", [messages.Abort, messages.Finish], ids=lambda kind: kind.__name__)
def test_decode_cannot_say_the_last_word(kind):
    """What ends a request is lost once: the units must come back nevertheless, and prefill must not hang."""
    with World(FOUR, (2, 1)) as world:
        world.network.cut(of_kind(kind, receiver=world.prefill[1].name), 1)
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.is_bound(victim))
        if kind is messages.Abort:
            world.decode[0].side.fail(1, "enough")
        else:
            world.until(lambda: bool(world.network.sent(messages.Finish)))
        world.rounds()
        world.clock.now += 31
        world.rounds()
        ended = [n.events.count("failed", 1) + n.events.count("succeeded", 1) for n in world.prefill]
        world.end(victim)
        if kind is messages.Finish:
            assert ended == [1, 1], "prefill waits for good"
        world.until(lambda: world.idle, what="units back")
        goes_on(world)


@pytest.mark.parametrize("kind", [messages.Ready, messages.Failed, messages.Drained], ids=lambda kind: kind.__name__)
def test_a_source_cannot_reach_decode(kind):
    with World(FOUR, (2, 1)) as world:
        world.network.cut(of_kind(kind, sender=world.prefill[1].name), 1)
        if kind is not messages.Ready:
            world.prefill[1].engine.script.next(Fault(error="reset"))
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: victim.sent == 2 or victim.reasons != {})
        world.rounds(40)
        world.clock.now += 31
        world.until(lambda: world.failed(victim), what="failure on both sides")
        world.end(victim)
        world.until(lambda: world.idle, what="units back")
        goes_on(world)


def test_a_control_service_that_cannot_be_reached():
    """FirstGeneration cannot be sent: the request fails on both sides, and SGLang's scheduler sees no exception."""
    with World(FOUR, (2, 1)) as world:
        world.network.cut(of_kind(messages.FirstGeneration), 1)
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: victim.sent == 2)
        world.rounds()
        world.clock.now += 31
        world.until(lambda: world.failed(victim), what="failure on both sides")
        world.end(victim)
        goes_on(world)


@pytest.mark.parametrize("wrong", [{"slot": -1}, {"slot": 999}], ids=str)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
def test_a_slot_that_does_not_exist_costs_its_request_only(tp, wrong):
    """With packed shares in the same batch: the buffers into which they are gathered come back too."""
    with World(FOUR, tp, window=16, packs=1) as world:
        for room in range(1, 4):
            victim = world.start(room, TOKENS)
            world.until(lambda v=victim: world.is_bound(v), send=False)
            world.send_chunk(victim, **wrong)
            world.until(lambda v=victim: world.failed(v), what="failure on both sides")
            world.end(victim)
        goes_on(world)


def test_pages_that_do_not_exist_cost_their_request_only():
    with World(FOUR, (1, 2), window=64, packs=1, times_least=1.0, pages=60) as world:
        for room in range(1, 4):
            victim = world.start(room, 40)
            world.until(lambda v=victim: world.is_bound(v), send=False)
            world.send_chunk(victim, pages=np.array([*victim.source.pages[:9], 9999]))
            world.until(lambda v=victim: world.failed(v), what="failure on both sides")
            world.end(victim)
        goes_on(world)


def test_a_pack_buffer_that_is_smaller_than_a_page():
    """SGLANG_HETERO_UNIT_KB of prefill decides its size: a request fails with the reason, the mover does not spin."""
    with World(FOUR, (1, 2), pack_bytes=8) as world:
        victim = world.start(1, 9)
        try:
            world.until(lambda: world.failed(victim), what="failure on both sides")
        finally:
            world.prefill[0].packs.buffer_bytes = 1 << 20  # ends a loop that would slow all other tests down
        world.end(victim)
        world.until(lambda: world.idle, what="units back")
