"""Messages vanish, processes are replaced, room numbers come again: what is said again, and what is never mixed up."""

import pytest

from sglang_hetero.errors import TransferRefused
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fault
from sglang_hetero.transfer.lifetime.repetition import MOST_SECONDS
from sglang_hetero.transfer.outbox import Destination
from sglang_hetero.transfer.pieces import StateMode
from sglang_hetero.transfer.reception import Progress

from .models import FOUR
from .network import Envelope, of_kind
from .world import World

TOKENS = 22
TICK = 0.02
"""Seconds of the test's clock that pass each time it goes around."""


def passing(world: World, true, *, polled: bool = False):
    """As `true`, while time passes. polled: what is said again is only when SGLang polls."""

    def look() -> bool:
        world.clock.now += TICK
        for node in world.decode[: 0 if polled else None]:
            node.side.remind()
        return true()

    return look


def serve(world: World, request) -> float:
    """The request must arrive, byte for byte; how long that took by the test's clock."""
    start = world.clock.now
    world.until(passing(world, lambda: world.complete(request)), what="completion")
    world.end(request)
    return world.clock.now - start


LOST = [
    messages.Register,
    messages.Bind,
    messages.Ready,
    messages.Ack,
    messages.FirstGeneration,
    messages.Finish,
]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.__name__)
def test_what_is_lost_is_said_again(kind, tp, times):
    with World(FOUR, tp, window=2, verify=True) as world:
        world.network.lose(of_kind(kind), times)
        assert serve(world, world.start(1, TOKENS, 2)) < world.settings.stall_seconds
        assert len(world.network.lost) == times or kind is messages.Register
        world.check()


@pytest.mark.parametrize("kind", [messages.Ready, messages.FirstGeneration, messages.Finish])
def test_what_is_lost_is_said_again_before_and_after_a_read(kind):
    with World(FOUR, (2, 1), mode=StateMode.PULL, verify=True) as world:
        world.network.lose(of_kind(kind), 2)
        serve(world, world.start(1, TOKENS, 2))
        assert len(world.network.lost) == 2
        world.check()


@pytest.mark.parametrize("begins", [0, 5, 10, 20, 40])
def test_a_network_that_breaks_for_a_while(begins):
    """Everything that is said meanwhile is lost, in every direction."""
    with World(FOUR, (2, 2), window=2) as world:
        request = world.start(1, TOKENS, 2, 3)
        world.rounds(begins)
        world.network.lose(lambda one: True)
        end = world.clock.now + 5.0
        world.until(passing(world, lambda: world.clock.now > end))
        world.network.flow()
        world.clock.now += MOST_SECONDS / 2
        serve(world, request)
        world.check()


@pytest.mark.parametrize("kind", [messages.Abort, messages.Drained, messages.Failed])
@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_units_come_home_although_the_end_was_not_heard(who, kind):
    with World(FOUR, (2, 1), window=2) as world:
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        world.network.lose(of_kind(kind, messages.Drained if kind is messages.Failed else kind), 3)
        (world.decode if who == "decode" else world.prefill)[0].side.fail(1, "the client gave up")
        world.until(passing(world, lambda: world.failed(request)), send=False, what="failure on both sides")
        world.end(request)
        world.until(passing(world, lambda: world.idle), what="units back")
        serve(world, world.start(1, 15, 1, seed=31))
        world.check()


def test_the_reason_arrives_although_it_was_lost():
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        world.network.lose(of_kind(messages.Failed, messages.Drained), 2)
        world.prefill[0].side.fail(1, "out of luck")
        world.until(passing(world, lambda: bool(request.reasons)), send=False)
        assert "out of luck" in request.reasons[world.decode[0].name]
        world.end(request)
        world.check()


def test_nothing_is_said_again_while_everything_goes_on():
    with World(FOUR, (2, 2), window=2) as world:
        for room in range(1, 4):
            serve(world, world.start(room, TOKENS, 2))
        for node in (*world.prefill, *world.decode):
            assert not node.side.counters.snapshot().get("repeated")
        world.check()


@pytest.mark.parametrize("end_is_heard", [True, False])
def test_a_repetition_keeps_nothing_alive_that_stands_still(end_is_heard):
    """Both sides say what they have to say again and again, and the first token never comes."""
    with World(FOUR, (2, 1)) as world:
        world.network.lose(of_kind(messages.FirstGeneration, *([] if end_is_heard else [messages.Abort])))
        request, begun = world.start(1, TOKENS, 2), world.clock.now
        world.until(passing(world, lambda: world.failed(request)), what="failure on both sides")
        assert world.clock.now - begun < world.settings.stall_seconds + 2
        assert "the first token is missing" in " ".join(request.reasons.values())
        repeated = [node.side.counters.snapshot()["repeated"] for node in (*world.prefill, *world.decode)]
        assert min(repeated) >= 3
        world.end(request)
        world.check()


def test_a_source_that_cannot_be_told_again_may_be_writing():
    """Its units are not free by that, and the request goes on when it can be reached."""
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        world.network.cut(of_kind(messages.Register, messages.Bind, messages.Ack))
        end = world.clock.now + 10
        world.until(passing(world, lambda: world.clock.now > end, polled=True), send=False)
        assert not request.reasons
        assert world.decode[0].side.state["units_held"]
        world.network.flow()
        serve(world, request)
        world.check()


def test_a_source_that_is_silent_about_a_request_may_have_forgotten_this_rank():
    """It has spoken about others, which are over: prefill makes room for other decode ranks. Once per look."""
    with World(FOUR, (2, 1), capacity=2) as world:
        silent, other = world.prefill
        side = world.decode[0].side
        world.serve(world.start(1, TOKENS, 2))
        world.network.lose(of_kind(messages.Register, messages.Bind, receiver=silent.name))
        requests = [world.start(room, TOKENS, 2) for room in (2, 3)]
        world.rounds()
        world.network.log.clear()
        world.clock.now += 3
        world.network.cut(of_kind(messages.Register, receiver=other.name))  # nobody doubts that it knows us
        while not world.network.sent(messages.Bind):
            world.clock.now += TICK
            side.remind()
        binds, registrations = world.network.sent(messages.Bind), world.network.sent(messages.Register)
        assert sorted(one.message.room for one in binds if one.receiver == silent.name) == [2, 3]
        assert [one.receiver for one in registrations] == [] or {one.receiver for one in registrations} == {silent.name}
        assert len(registrations) == 1
        world.network.flow()
        world.until(passing(world, lambda: all(map(world.complete, requests))), what="completion")
        for request in requests:
            world.end(request)
        world.check()


def test_a_bind_that_another_thread_has_delivered_meanwhile():
    """Posting it stands for seconds and fails; its repetition on another thread arrives, and the source may write."""
    with World(FOUR, (1, 2)) as world:
        decode, stood = world.decode[0], []

        def stands(one: Envelope) -> bool:
            if not isinstance(one.message, messages.Bind) or one.sender != decode.name or stood:
                return False
            stood.append(one)
            world.clock.now += 3
            decode.side.remind()
            return True

        world.network.cut(stands)
        aborts = world.network.hold(of_kind(messages.Abort))
        request = world.start(1, TOKENS, 2)
        assert stood and decode.side.poll(1) is Progress.FAILED
        assert [one.sender for one in world.network.sent(messages.Bind)].count(decode.name) == 1
        assert decode.side.state["units_quarantined"], "the source may be writing into units that are free"
        world.network.let_go(aborts)
        world.until(passing(world, lambda: world.failed(request)), send=False, what="failure on both sides")
        world.end(request)
        world.until(passing(world, lambda: world.idle), what="units back")
        serve(world, world.start(2, 15, 1))
        world.check()


# Processes that are replaced.


def test_a_word_for_a_former_decode_process_says_nothing_to_its_successor():
    """It has the same address, the same room, and may have as many requests behind it."""
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.complete(request))
        old = world.network.sent(messages.Ready, messages.FirstGeneration, messages.Drained, messages.Failed)
        world.requests.pop(1)
        new = world.restart_decode(0)
        for node in world.prefill:
            node.side.release(1)
        again = world.start(1, TOKENS, 2, seed=7)
        world.until(lambda: world.is_bound(again), send=False)
        for one in old:
            world.network.deliver(Envelope(one.sender, new.name, one.message))
        assert new.side.poll(1) is Progress.ARRIVING
        assert not new.side.counters.snapshot().get("pieces")
        world.serve(again)
        world.check()


def test_a_bind_for_a_former_prefill_process_opens_nothing_at_its_successor():
    """The units that it names are somebody else's by now."""
    with World(FOUR, (2, 1)) as world:
        world.serve(world.start(1, 9))
        old = [one for one in world.network.sent(messages.Bind) if one.receiver == world.prefill[0].name]
        new = world.restart_prefill(0)
        request = world.start(2, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)  # the decode rank is known there
        for one in old:
            world.network.deliver(Envelope(one.sender, new.name, one.message))
        assert not new.side.owns(1)
        assert new.side.counters.snapshot()["dropped"] == len(old)
        world.serve(request)
        world.check()


# A room number that comes again.


class Sender:
    """SGLang's, of one use of a room."""


@pytest.mark.parametrize("first", [0, 1])
def test_decode_ranks_of_two_requests_are_not_taken_for_one(first):
    """The former use is bound by one decode rank only, the next one comes from the other."""
    with World(FOUR, (2, 2)) as world:
        other = 1 - first
        lost = world.network.hold(of_kind(messages.Bind, messages.Abort, sender=world.decode[other].name))
        held = world.network.hold(of_kind(messages.Abort, sender=world.decode[first].name))
        former, later = [Sender() for _ in world.prefill], [Sender() for _ in world.prefill]
        for node, sender in zip(world.prefill, former, strict=True):
            node.side.claim(1, sender)
        request = world.open(world.request(1, TOKENS, 2))
        world.network.pump()
        for node in world.decode:
            node.side.fail(1, "the client gave up")
            node.side.settle(1)
        for node, place in zip(world.decode, request.places, strict=True):
            node.rank.scrub(place)
        del lost[:]
        world.network.flow()
        ours = world.network.hold(of_kind(messages.Bind, sender=world.decode[first].name))
        again = world.open(world.request(1, TOKENS, 2, seed=9))
        world.network.pump()
        for node, last, sender in zip(world.prefill, former, later, strict=True):
            assert not node.events.count("bound", 1), "two requests have been taken for one"
            assert "for another request" in (node.side.failure(1) or "")
            node.side.claim(1, sender)
            node.side.release(1, last)
        world.network.let_go(held)
        world.network.let_go(ours)
        world.serve(again)
        world.until(passing(world, lambda: world.idle), what="units of what was lost")
        world.check()


def test_an_old_sender_takes_nothing_of_a_newer_one_with_it():
    """SGLang lets go of a room's former sender when it has made the next one: decode has retracted the request."""
    with World(FOUR, (2, 1)) as world:
        former, later = [Sender() for _ in world.prefill], [Sender() for _ in world.prefill]
        request = world.request(1, TOKENS, 2)
        for node, sender in zip(world.prefill, former, strict=True):
            node.side.claim(1, sender)
        world.open(request)
        world.until(lambda: world.complete(request))
        node = world.decode[0]
        node.expect(request.seed, request.places[0], request.tokens)
        node.side.settle(1)
        again = world.open(world.request(1, 15, 1, seed=31))
        world.network.pump()
        for side, sender, last in zip((n.side for n in world.prefill), later, former, strict=True):
            side.claim(1, sender)
            side.release(1, last)
            side.release(1, last)  # nor with a second word
        world.until(lambda: world.is_bound(again), send=False)
        world.clock.now += 29
        for each in world.prefill:
            each.side.claim(99)
        world.serve(again)
        world.check()


def test_a_request_that_prefill_was_never_asked_for_is_forgotten_on_both_sides():
    with World(FOUR, (2, 1)) as world:
        request = world.open(world.request(1, TOKENS, 2))
        world.network.pump()
        world.clock.now += 31
        for node in world.prefill:
            node.side.claim(99)
            assert node.events.count("forgotten", 1) == 1
            assert node.side.state["rooms"] == 0
            assert not node.side._destinations, "what is kept of it grows with every request"
        world.network.pump()
        assert "prefill was never asked for it" in world.decode[0].side.reason(1)
        world.end(request)
        world.check()


def test_a_use_that_one_rank_refuses_is_counted_by_all():
    """Else the ranks would call every later use of the room by different names, and prefill would refuse them all."""
    with World(FOUR, (2, 2)) as world:
        first, second = world.decode
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.complete(request))
        for node, place in zip(world.decode, request.places, strict=True):
            node.expect(request.seed, place, request.tokens)
        for node in world.prefill:
            node.side.release(1)
            node.side.claim(1)
        second.side.settle(1)
        second.side.open(1, world.sets[1], list(request.places[1].pages), request.places[1].slot)
        with pytest.raises(TransferRefused, match="another request with room 1"):
            first.side.open(1, world.sets[0], list(request.places[0].pages), request.places[0].slot)
        for node in world.decode:
            node.side.settle(1)
        world.network.pump()
        for node in world.prefill:
            assert node.side.failure(1)
            node.side.release(1)
        del world.requests[1]
        world.until(passing(world, lambda: world.idle), what="units back")
        again = world.start(1, 15, 1, seed=31)
        names = {one.message.use for one in world.network.sent(messages.Bind)[-4:]}
        assert len(names) == 1
        serve(world, again)
        world.check()


# Units that are not free.


def test_a_poll_asks_for_whom_units_are_kept_only_when_it_says_so():
    """There may be as many of them as requests, and every request is polled between two forward passes."""
    with World(FOUR, (2, 1), capacity=1) as world:
        side, asked = world.decode[0].side, []
        world.prefill[1].engine.script.next(Fault(error="timeout", late=True))
        first = world.start(1, TOKENS)
        world.until(lambda: world.failed(first))
        world.end(first)
        doubts = side.doubts
        side.doubts = lambda: asked.append(True) or doubts()
        second = world.start(2, 9)
        world.rounds(5)
        assert second.results[world.decode[0].name] is Progress.WAITING
        assert side.state["units_quarantined"] and not asked
        world.clock.now += world.settings.window_seconds + 1
        world.until(lambda: bool(second.reasons))
        assert asked == [True]
        world.end(second)
        world.prefill[1].engine.script.land_late()
        side.gone(frozenset({world.prefill[1].rank.manifest.incarnation}))
        world.check()


def test_who_waits_for_units_is_told_whom_they_wait_for():
    with World(FOUR, (2, 1), capacity=1) as world:
        source = world.prefill[1]
        source.engine.script.next(Fault(error="timeout", late=True))
        first = world.start(1, TOKENS)
        world.until(lambda: world.failed(first))
        world.end(first)
        world.rounds(5)
        world.clock.now += 100
        (doubt,) = world.decode[0].side.doubts()
        assert (doubt.room, doubt.units, round(doubt.seconds)) == (1, world.units, 100)
        (writer,) = doubt.writers
        assert (writer.label, writer.incarnation, writer.session) == (
            source.rank.manifest.label,
            source.rank.manifest.incarnation,
            source.engine.session,
        )
        second = world.start(2, 9)
        world.clock.now += world.settings.window_seconds + 1
        world.until(lambda: bool(second.reasons))
        reason = second.reasons[world.decode[0].name]
        assert f"{world.units} units of room 1 for 121 s, for {source.rank.manifest.label}" in reason, reason
        assert world.prefill[0].rank.manifest.label not in reason
        world.end(second)
        source.engine.script.land_late()
        world.decode[0].side.gone(frozenset({source.rank.manifest.incarnation}))
        assert not world.decode[0].side.doubts()
        world.check()


# A mover's turn.


@pytest.mark.parametrize("what", ["fitting", "owes_total"])
def test_a_fault_before_a_write_fails_the_request_and_nothing_else(what, monkeypatch):
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        with monkeypatch.context() as patch:

            def broken(*_):
                raise RuntimeError("a fault of ours")

            patch.setattr(Destination, what, broken if what == "fitting" else property(broken))
            if what == "owes_total":
                patch.setattr(Destination, "runnable", True)
            world.send_chunk(request)
            world.until(lambda: bool(world.prefill[0].side.failure(1)), send=False)
            assert "a fault of ours" in world.prefill[0].side.failure(1)
        world.until(lambda: world.failed(request), send=False)
        world.end(request)
        world._crashes.found.clear()
        world.serve(world.start(1, 15, 1, seed=31))
        world.check()
