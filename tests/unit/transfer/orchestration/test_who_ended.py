"""Whom requests wait for, and what becomes of them when that process is known to have ended (backend/doubts.py)."""

from sglang_hetero.transfer import decode as decode_module
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fault
from sglang_hetero.transfer.lifetime.repetition import MOST_SECONDS
from sglang_hetero.transfer.prefill import STILL_SECONDS

from .models import FOUR
from .network import of_kind
from .world import World

TOKENS = 22


def test_prefill_learns_that_a_decode_process_has_ended():
    with World(FOUR, (2, 1)) as world:
        (decode,) = world.decode
        old = decode.rank.manifest.incarnation
        world.serve(world.start(1, 9))
        request = world.start(2, TOKENS, 2)
        world.until(lambda: request.sent == 1)
        side = world.prefill[0].side
        assert side.awaited() == {}, "a request that goes on is waited for by nobody"
        world.clock.now += STILL_SECONDS + 1
        (awaited,) = side.awaited().values()
        assert set(side.awaited()) == {old}
        assert (awaited.label, awaited.session) == (decode.rank.manifest.label, decode.engine.session)
        assert awaited.endpoint == decode.side._identity.endpoint
        assert awaited.address == str(awaited.endpoint)
        for node in world.prefill:
            node.side.gone(frozenset(("nobody", old)), "has ended (server x)")
            assert node.side.failure(2) == f"{decode.rank.manifest.label} has ended (server x)"
            node.side.release(2)
            assert node.side.awaited() == {}
            assert node.side.state["peers"] == 0
            node.side.gone(frozenset((old,)), "has ended")


def test_decode_says_whom_units_are_kept_for():
    with World(FOUR, (2, 1)) as world:
        side = world.decode[0].side
        first, second = world.prefill
        assert side.awaited() == {}
        first.engine.script.next(Fault(error="timeout", late=True))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        everybody = side.awaited()
        assert {each.session for each in everybody.values()} == {first.engine.session, second.engine.session}
        assert {each.units for each in everybody.values()} == {0}
        world.until(lambda: world.failed(request))
        world.end(request)
        world.rounds(20, send=False)
        (kept,) = side.awaited().values()
        assert (kept.label, kept.session) == (first.rank.manifest.label, first.engine.session)
        assert kept.endpoint == first.endpoint
        assert kept.units == side.state["units_quarantined"] > 0
        side.gone(frozenset((first.rank.manifest.incarnation,)), "has ended")
        assert side.awaited() == {}
        assert side.state["units_quarantined"] == 0


def test_whom_many_requests_have_to_do_with_is_made_once(monkeypatch):
    """It is asked for twice a second, with the books locked."""
    with World(FOUR, (2, 1), capacity=1) as world:
        side, made = world.decode[0].side, []
        real = decode_module.Awaited
        monkeypatch.setattr(decode_module, "Awaited", lambda *fields: made.append(real(*fields)) or made[-1])
        world.prefill[0].engine.script.next(Fault(error="timeout", late=True))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(request))
        world.end(request)
        world.until(lambda: not world.prefill[1].side.state["in_flight"], what="the end of the other source's write")
        for room in range(2, 7):
            world.open(world.request(room, 9))
        world.network.pump()
        found = side.awaited()
        assert len(made) == len(world.prefill)
        assert {each.label: each.units for each in found.values()} == {
            world.prefill[0].rank.manifest.label: side.state["units_quarantined"],
            world.prefill[1].rank.manifest.label: 0,
        }


def test_a_decode_rank_that_was_taken_for_dead_is_known_again():
    """Its requests have failed; the next one arrives, without a second registration or a pause."""
    with World(FOUR, (2, 1)) as world:
        (decode,) = world.decode
        old = decode.rank.manifest.incarnation
        world.serve(world.start(1, 9))
        request = world.start(2, TOKENS, 2)
        world.until(lambda: request.sent == 1)
        for node in world.prefill:
            node.side.gone(frozenset((old,)), "has ended (server x)")
            assert node.side.state["peers"] == 0
        world.until(lambda: world.failed(request), send=False)
        assert "has ended (server x)" in request.reasons[decode.name]
        world.end(request)
        world.until(lambda: world.idle, what="units back")
        registrations = len(world.network.sent(messages.Register))
        world.serve(world.start(3, TOKENS, 2), world.start(4, 9))
        assert len(world.network.sent(messages.Register)) == registrations
        assert all(node.side.state["peers"] == 1 for node in world.prefill)
        assert all(not node.side._former for node in world.prefill)
        world.check()


def test_one_that_was_taken_for_dead_is_not_told_that_nothing_is_under_way():
    """A write to it may still arrive: units must not be used again, however often it asks."""
    with World(FOUR, (2, 1)) as world:
        (decode,) = world.decode
        first = world.prefill[0]
        first.engine.script.next(Fault(error="timeout", late=True))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: world.failed(request))
        world.end(request)
        for node in world.prefill:
            node.side.gone(frozenset((decode.rank.manifest.incarnation,)), "has ended")
        (former,) = first.side._former.values()
        assert [each.sequence for each in former.undrained] == [[]], "what grows with the prompt is not kept"
        asked = len(world.network.sent(messages.Abort))
        for _ in range(3):
            world.clock.now += MOST_SECONDS
            decode.side.remind()
            world.rounds(20, send=False)
        assert len(world.network.sent(messages.Abort)) > asked
        assert first.side.state["peers"] == 1, "it is known again"
        assert decode.side.state["units_quarantined"] > 0
        first.engine.script.land_late()
        decode.side.gone(frozenset((first.rank.manifest.incarnation,)), "has ended")
        assert decode.side.state["units_quarantined"] == 0
        world.serve(world.start(2, TOKENS, 2))


def test_when_somebody_was_heard():
    with World(FOUR, (2, 1)) as world:
        (decode,) = world.decode
        world.serve(world.start(1, 9))
        registered = world.clock.now
        world.clock.now += 1
        world.network.hold(of_kind(messages.Ready))
        request = world.start(2, TOKENS, 2)
        world.until(lambda: world.is_bound(request), send=False)
        bound = world.clock.now
        assert {each.heard for each in decode.side.awaited().values()} == {registered}
        world.rounds(20)
        world.clock.now += STILL_SECONDS + 1
        assert {each.heard for node in world.prefill for each in node.side.awaited().values()} == {bound}
        asked = world.clock.now
        world.network.flow()
        seen: set[float] = set()

        def heard() -> bool:
            seen.update(each.heard for each in decode.side.awaited().values())
            return asked in seen

        world.until(heard)
        assert seen <= {registered, bound, asked}
        world.serve(request)
