"""Bounded waits, processes that are started again, and bytes that were changed on the way."""

import pytest

from sglang_hetero.layout import Role
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fault
from sglang_hetero.transfer.pieces import StateMode

from .gates import gated_merge
from .models import FOUR, SIX
from .network import of_kind
from .world import World, labels

TOKENS = 22


def test_no_units():
    with World(FOUR, (2, 1), capacity=1) as world:
        world.network.hold(of_kind(messages.Ready))
        first, second = world.start(1, TOKENS), world.start(2, 9)
        world.rounds(5)
        world.clock.now += 19
        world.rounds(3)
        assert not second.reasons
        world.clock.now += 2
        world.until(lambda: bool(second.reasons))
        reason = second.reasons[world.decode[0].name]
        assert "SGLANG_HETERO_STAGING_MB" in reason and "3 of 3" in reason
        assert world.decode[0].rank.manifest.label in reason, reason
        world.end(second)
        world.decode[0].side.fail(1, "enough")
        world.until(lambda: world.failed(first))
        world.end(first)
        world.network.flow()
        world.serve(world.start(3, 9))
        world.check()


@pytest.mark.parametrize("lost", [messages.Ready, messages.FirstGeneration, messages.Ack, messages.Bind])
def test_no_progress(lost):
    with World(FOUR, (2, 1), window=2) as world:
        world.network.hold(of_kind(lost))
        request = world.start(1, TOKENS, 2)
        world.rounds(40)
        world.elapse(29)
        assert not request.reasons and not world.prefill[0].side.failure(1)
        world.elapse(2)
        world.until(lambda: bool(request.reasons))
        assert any(label in request.reasons[world.decode[0].name] for label in labels(world.prefill))
        if lost is not messages.Bind:
            world.until(lambda: world.failed(request), what="failure on both sides")
        world.end(request)
        world.network.flow()
        world.serve(world.start(2, 9))
        world.check()


def test_prefill_does_not_wait_for_a_finish_that_never_comes():
    with World(FOUR, (2, 1)) as world:
        world.network.hold(of_kind(messages.Finish))
        request = world.start(1, TOKENS, 2)
        world.rounds(60)
        world.elapse(31)
        world.until(lambda: all(node.side.failure(1) for node in world.prefill))
        assert world.decode[0].name in world.prefill[0].side.failure(1)
        world.end(request)
        world.check()


@pytest.mark.parametrize("unread", [messages.Ready, messages.Finish])
def test_a_process_that_was_stopped_reads_what_has_come_before_it_blames_a_peer(unread):
    with World(FOUR, (2, 1)) as world:
        held = world.network.hold(of_kind(unread))
        request = world.start(1, TOKENS, 2)
        world.rounds(60)
        world.clock.now += 31  # nobody looks, and nobody reads
        world.rounds(1)
        assert not request.reasons and not any(node.side.failure(1) for node in world.prefill)
        world.network.let_go(held)
        world.serve(request)
        world.check()


@pytest.mark.parametrize("when", ["idle", "waiting", "writing"])
def test_decode_is_started_again(when):
    with World(FOUR, (2, 2)) as world:
        world.serve(world.start(1, 9))
        request = world.start(2, TOKENS, 2, 3)
        if when == "idle":
            world.serve(request)
        elif when == "waiting":
            world.until(lambda: world.is_bound(request), send=False)
        else:
            world.until(lambda: request.sent == 1)
        world.restart_decode(1)
        if when != "idle":
            victim = world.requests.pop(2)
            world.decode[0].side.fail(2, "decode is started again")
        new = world.start(3, TOKENS, 2)
        world.rounds(send=False)
        if when != "idle":
            assert all(node.side.failure(2) for node in world.prefill), "prefill does not learn it"
            for node in world.prefill:
                node.side.release(2)
            world.decode[0].side.settle(2)
            world.decode[0].rank.scrub(victim.places[0])
        world.serve(new)
        assert all(node.side.state["peers"] == 2 for node in world.prefill)
        world.check()


@pytest.mark.parametrize("when", ["idle", "bound", "merging", "in_doubt"])
def test_a_prefill_rank_is_started_again(when):
    with World(FOUR, (2, 2)) as world:
        old = world.prefill[1]
        request = world.start(1, TOKENS, 2)
        if when == "idle":
            world.serve(request)
        elif when == "bound":
            world.until(lambda: world.is_bound(request), send=False)
        elif when == "merging":
            with gated_merge(world.sets[0], 1) as gate:
                world.until(lambda: gate.wait_reached(0))
        else:
            old.engine.script.next(Fault(error="timeout", late=True))
            world.until(lambda: bool(request.reasons))
        survivor = world.prefill[0]
        world.restart_prefill(1)
        if when != "idle":
            world.until(lambda: len(request.reasons) == 2 or all(map(world.complete, [request])), send=False)
            assert any(old.rank.manifest.label in reason for reason in request.reasons.values()), request.reasons
            world.until(lambda: bool(survivor.side.failure(1)), send=False)
            world.end(request)
        world.until(lambda: world.idle, what="units back")
        world.serve(world.start(2, TOKENS, 2), world.start(3, 9))
        world.check()


def test_messages_of_a_prefill_process_that_is_no_more():
    with World(FOUR, (2, 1)) as world:
        world.serve(world.start(1, 9))
        old = world.network.sent(messages.Ready, messages.FirstGeneration, messages.Drained)
        world.restart_prefill(0)
        request = world.start(1, TOKENS, 2, seed=5)
        world.until(lambda: request.sent == 1)
        for one in old:
            world.network.deliver(one)
        world.serve(request)
        world.check()


@pytest.mark.parametrize("model", [FOUR, SIX], ids=["four", "six"])
@pytest.mark.parametrize("state", [False, True], ids=["pages", "state"])
def test_a_flipped_byte_in_staging_is_found(model, state):
    """Before the merge; also in the part of a piece that one of several sources has written."""
    with World(model, (2, 1), verify=True) as world:
        flipped = []

        def flip() -> bool:
            node = world.decode[0]
            for one in held:
                (piece, *_) = [p for p in one.message.pieces if (p.role is None) == state] or [None]
                if piece is not None and not flipped:
                    bind = next(b.message for b in world.network.sent(messages.Bind) if b.receiver == one.sender)
                    at = bind.units[piece.seq % len(bind.units)] + bind.area_offset
                    node.arena[at] ^= 1
                    flipped.append(piece)
            waiting, held[:] = list(held), []
            for one in waiting:
                world.network.deliver(one)
            return world.failed(request)

        held = world.network.hold(of_kind(messages.Ready))
        request = world.start(1, TOKENS, 2)
        world.until(flip, what="failure on both sides")
        assert flipped and "differs" in request.reasons[world.decode[0].name]
        assert "prefill TP" in request.reasons[world.decode[0].name]
        world.end(request)
        world.network.flow()
        world.serve(world.start(2, 9))
        world.check()


@pytest.mark.parametrize("mode", [StateMode.PULL])
def test_a_flipped_byte_of_what_was_read_is_found_too(mode):
    """Verification is the end-to-end check: what decode reads itself is no exception."""
    with World(FOUR, (2, 1), verify=True, mode=mode) as world:
        request = world.start(1, TOKENS, 2)

        def flip(inner=world.sets[0].assembler.merge_batch):
            def merge_batch(arena, pieces):
                for piece in pieces:
                    if piece.role in (Role.CONV, Role.SSM):
                        arena[piece.areas[0]] ^= 1
                inner(arena, pieces)

            return merge_batch

        world.sets[0].assembler.merge_batch = flip()
        world.until(lambda: world.failed(request) or world.complete(request))
        assert world.failed(request), "a flipped byte of the linear state was not found"
