"""Requests that must arrive, byte for byte, whatever the TP sizes, modes, chunks and the order of messages."""

import pytest

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.pieces import StateMode
from tests.reshard_oracle.rank import WINDOW_FIRST, Role, Shape

from .models import FOUR, MLA, PLAIN, SIX, TWO
from .network import of_kind
from .world import World

PAIRS = {
    "P2D1": (FOUR, (2, 1), 1),
    "P1D2_packed": (FOUR, (1, 2), 1),
    "P3D2": (SIX, (3, 2), 1),
    "P2D3": (SIX, (2, 3), 1),
    "PP2_P2D1": (FOUR, (2, 1), 2),
    "PP2_P1D2": (FOUR, (1, 2), 2),
    "replicas_P4D1": (TWO, (4, 1), 1),
    "replicas_P4D2": (PLAIN, (4, 2), 1),
    "plain_P2D1": (PLAIN, (2, 1), 1),
    "plain_P1D2": (PLAIN, (1, 2), 1),
    "mla_P2D1": (MLA, (2, 1), 1),
    "equal_P2D2": (FOUR, (2, 2), 1),
}


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs(pair, mode):
    model, tp, stages = PAIRS[pair]
    with World(model, tp, stages=stages, mode=mode, window=2, times_least=1.0) as world:
        world.serve(world.start(1, 27, 2, 5), world.start(2, 4))
        world.serve(world.start(3, 13, 3), world.start(4, 1))
        world.check()


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("times_least", [1.0, 4.0])
def test_windows(window, times_least):
    with World(SIX, (3, 2), window=window, times_least=times_least) as world:
        world.serve(world.start(1, 33, 3, 4, 8))
        world.check()


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
def test_empty_last_chunk(tp, mode):
    with World(FOUR, tp, mode=mode) as world:
        world.serve(world.start(1, 16, 2, 4), world.start(2, 8, 2))
        world.check()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 9])
def test_page_tails(tokens):
    with World(FOUR, (2, 1)) as world:
        world.serve(world.start(1, tokens))
        world.check()


def test_window_first_conv():
    shapes = [Shape(4, 20, 6, {Role.CONV: layout}) for layout in (WINDOW_FIRST, WINDOW_FIRST)]
    with World(FOUR, (2, 1), shapes=(shapes[0], shapes[1])) as world:
        world.serve(world.start(1, 9, 1))
        world.check()


@pytest.mark.parametrize("mode", StateMode)
def test_many_requests_and_a_small_arena(mode):
    with World(FOUR, (2, 2), capacity=1, pages=60, mode=mode) as world:
        requests = [world.start(room, 5 + room, 1) for room in range(1, 11)]
        assert all(node.side.state["waiting"] == 9 for node in world.decode)
        world.serve(*requests)
        binds = [one.message.room for one in world.network.sent(messages.Bind) if one.sender == world.decode[0].name]
        assert list(dict.fromkeys(binds)) == list(range(1, 11)), "units are not given in the order of asking"
        world.check()


def test_a_chunk_that_is_ready_later():
    ready = []
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, 20, 2, 3, gate=lambda: len(ready) > 3)
        other = world.start(2, 9)
        world.until(lambda: request.sent == 3 and world.complete(other))
        world.rounds()
        assert not world.network.sent(messages.Ready, room=1)
        ready.extend(range(4))
        world.serve(request, other)
        world.check()


def test_chunks_that_become_ready_in_the_wrong_order():
    """The second chunk's event fires first: its pieces still come behind those of the first."""
    fired = {0: False, 1: True}
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, 12, 2)
        world.until(lambda: world.is_bound(request), send=False)
        world.send_chunk(request, ready=lambda: fired[0])
        world.send_chunk(request, ready=lambda: fired[1])
        world.rounds()
        fired[0] = True
        world.serve(request)
        world.check()


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("seed", range(2))
def test_every_message_twice(seed, mode):
    with World(SIX, (3, 2), seed=seed, mode=mode) as world:
        world.network.duplicates = 1.0
        world.serve(world.start(1, 22, 2), world.start(2, 9))
        world.check()


def test_bind_before_the_topology():
    with World(FOUR, (2, 1), announce=False) as world:
        request = world.start(1, 9)
        world.rounds()
        assert not any(node.side.owns(1) for node in world.prefill)
        world.prefill[1].side.topology(world.topology)
        world.rounds()
        world.announce()
        world.serve(request)
        world.check()


def test_bind_overtakes_the_registration():
    with World(FOUR, (2, 1)) as world:
        held = world.network.hold(of_kind(messages.Register))
        request = world.start(1, 9)
        world.rounds()
        world.network.let_go(held)
        world.serve(request)
        world.check()


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("late", [messages.FirstGeneration, messages.Ready], ids=lambda kind: kind.__name__)
def test_first_generation_before_or_after_the_pieces(late, mode):
    with World(FOUR, (2, 1), mode=mode, window=64) as world:
        held = world.network.hold(of_kind(late))
        request = world.start(1, 9)
        world.until(lambda: request.sent == 1 and bool(held))
        world.rounds()
        assert not world.complete(request)
        world.network.let_go(held)
        world.serve(request)
        world.check()


def test_the_first_ack_of_all_comes_last():
    """Old acknowledgements are overtaken by new ones, on every link."""
    with World(FOUR, (2, 1), window=4) as world:
        held = world.network.hold(of_kind(messages.Ack))
        request = world.start(1, 40, 3)
        for _ in range(200):
            if world.complete(request):
                break
            world.rounds(3)
            late, held[:] = list(reversed(held)), []
            for one in late:
                world.network.deliver(one)
        world.serve(request)
        world.check()


@pytest.mark.parametrize("mode", StateMode)
def test_verification_mode(mode):
    with World(SIX, (3, 2), verify=True, mode=mode) as world:
        world.serve(world.start(1, 22, 2), world.start(2, 9))
        assert all(node.side.counters.snapshot()["verified"] for node in world.decode)
        world.check()


def test_one_reader_at_a_time():
    with World(FOUR, (2, 1), mode=StateMode.PULL, parallel=False) as world:
        world.serve(world.start(1, 22, 2), world.start(2, 9))
        world.check()
