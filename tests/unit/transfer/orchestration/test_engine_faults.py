"""Engines that fail, merges that raise, peers that cannot be reached: who learns it, and where the units are then."""

from types import SimpleNamespace

import numpy as np
import pytest

from sglang_hetero.transfer import messages, reception
from sglang_hetero.transfer.engine.asked import Unfinished
from sglang_hetero.transfer.engine.loopback import Fault, Operation
from sglang_hetero.transfer.lifetime import Receiving
from sglang_hetero.transfer.pieces import Coverage, StateMode

from .models import FOUR
from .network import of_kind
from .world import World

FAULT = "a fault of ours"
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


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
def test_a_write_whose_end_is_known_later(tp, released, settled):
    """Its units come home when the engine has said that all of it has landed, while the source lives."""
    with World(FOUR, tp) as world:
        source, unfinished = world.prefill[-1], Unfinished()
        source.engine.script.next(Fault(error="timeout", late=True, unfinished=unfinished))
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(victim), what="failure on both sides")
        if released:
            world.end(victim)
        world.rounds()
        assert quarantined(world), "units that a late write may hit were given back"
        source.engine.script.land_late()
        unfinished.end(settled)
        world.rounds()
        if not settled:
            assert quarantined(world), "not all has landed: the rest may still arrive"
            for node in world.decode:
                node.side.gone(frozenset({source.rank.manifest.incarnation}))
        assert not quarantined(world)
        if not released:
            world.end(victim)
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


class Ended(BaseException):
    """As SystemExit, which no `except Exception` catches."""


def test_a_merge_that_raises_what_nobody_catches():
    with World(FOUR, (2, 1)) as world:
        known = world.sets[0]
        inner, known.assembler = known.assembler, Raising(known.assembler, Ended(), "page")
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(victim), what="failure on both sides")
        assert "Ended" in victim.reasons[world.decode[0].name]
        inbox = world.decode[0].side._current[1]
        world.until(lambda: not inbox.running, what="the end of the merge, which SGLang waits for")
        world.end(victim)
        known.assembler = inner
        goes_on(world)


def first_raises(real):
    """A function that does its work and raises then, the first time."""
    calls = []

    def wrapped(*arguments):
        result = real(*arguments)
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError(FAULT)
        return result

    return wrapped


@pytest.mark.parametrize("what", [(Coverage, "add"), (Receiving, "merged")], ids=lambda what: what[1])
@pytest.mark.parametrize("mode", [StateMode.PREPUSH, StateMode.PULL])
def test_books_of_a_merge_that_raise(what, mode, monkeypatch):
    """The other pieces of the batch have ended nevertheless: nothing waits for them."""
    with World(FOUR, (2, 1), mode=mode, window=16) as world:
        with monkeypatch.context() as patch:
            patch.setattr(*what, first_raises(getattr(*what)))
            victim = world.start(1, TOKENS, 2)
            world.until(lambda: world.failed(victim), what="failure on both sides")
            assert FAULT in victim.reasons[world.decode[0].name]
            world.end(victim)
            world.until(lambda: world.idle, what="units back")
        goes_on(world)


@pytest.mark.parametrize("what", ["pieces_to_read", "next_batch", "reads_of"])
def test_books_of_a_read_that_raise(what, monkeypatch):
    with World(FOUR, (2, 1), mode=StateMode.PULL) as world:
        with monkeypatch.context() as patch:
            patch.setattr(reception, what, first_raises(getattr(reception, what)))
            victim = world.start(1, TOKENS, 2)
            world.until(lambda: world.failed(victim), what="failure on both sides")
            assert FAULT in victim.reasons[world.decode[0].name]
            world.end(victim)
            world.until(lambda: world.idle, what="units back")
        goes_on(world)


def test_a_metrics_page_that_fails_costs_nothing():
    with World(FOUR, (2, 1), mode=StateMode.PULL) as world:

        def broken(*_):
            raise RuntimeError(FAULT)

        for node in world.decode:
            node.side.counters._observe = broken
        goes_on(world)


class Exhausted:
    """An executor that cannot start a thread for its `nth` task: as CPython's it has put it on its list by then."""

    def __init__(self, inner, nth):
        self.inner, self.nth, self.listed, self.shutdown = inner, nth, [], inner.shutdown

    def submit(self, *task):
        self.nth -= 1
        if self.nth == -1:
            self.listed.append(task)
            raise RuntimeError("can't start new thread")
        return self.inner.submit(*task)


@pytest.mark.parametrize("nth", [0, 1])
def test_a_read_that_cannot_be_begun(nth):
    with World(FOUR, (2, 1), mode=StateMode.PULL) as world:
        puller = world.decode[0].side._puller
        executor = puller._executor = Exhausted(puller._executor, nth)
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(victim), what="failure on both sides")
        assert "can't start new thread" in victim.reasons[world.decode[0].name]
        world.end(victim)
        world.until(lambda: world.idle, what="units back")
        reads = []
        puller._engine, engine = SimpleNamespace(read=lambda *_: reads.append(True)), puller._engine
        ((run, *arguments),) = executor.listed
        run(*arguments)
        assert not reads, "bytes come into units that are somebody else's"
        puller._engine = engine
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
