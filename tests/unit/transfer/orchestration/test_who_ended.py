"""Whom requests wait for, and what becomes of them when that process is known to have ended (backend/doubts.py)."""

from sglang_hetero.transfer.engine.loopback import Fault
from sglang_hetero.transfer.prefill import STILL_SECONDS

from .models import FOUR
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
        assert awaited.address == str(decode.side._identity.endpoint)
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
        assert kept.units == side.state["units_quarantined"] > 0
        side.gone(frozenset((first.rank.manifest.incarnation,)), "has ended")
        assert side.awaited() == {}
        assert side.state["units_quarantined"] == 0
