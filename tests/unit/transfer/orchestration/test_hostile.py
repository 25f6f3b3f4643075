"""Peers that say anything at all, in well-formed messages: no byte outside staging, no dead thread, bounded memory.

Who knows all names can make a request fail, or its own bytes wrong; who does not can do nothing: every request arrives.
"""

import itertools
import random
import time
from collections.abc import Sequence, Sized

import pytest
from msgspec.structs import replace

from sglang_hetero.layout import wire
from sglang_hetero.transfer import dispatch, messages, outbox, prefill
from sglang_hetero.transfer.messages import Abort, AnnouncedPiece, Bind, Ready, Register
from sglang_hetero.transfer.pieces import StateMode
from sglang_hetero.transfer.reception import Progress

from .hostile import FORGERS, Forger, Manner, SealedNetwork
from .models import FOUR, SIX
from .network import Network, of_kind
from .nodes import DecodeNode
from .parts import Request
from .world import World

PAGE_SIZE = 4
"""Tokens, of a world that is not asked for another one."""
SEEDS: dict[Manner, Sequence[int]] = {
    Manner.LIARS: range(100),
    Manner.STRANGERS: range(60),
    Manner.TOKENLESS: range(30),
}
FEW = 3
"""Worlds of each manner that are always looked at."""
WORLDS = [
    pytest.param(manner, seed, id=f"{manner.value}-{seed}", marks=[pytest.mark.full] * (seed >= FEW))
    for manner, seeds in SEEDS.items()
    for seed in seeds
]
ROUNDS = 60
"""Steps of a world, at least; some messages are forged at each."""
ROOMS = 9
GIVEN_UP = 2
"""Of these, by clients, so that ends are said, too, and can be said again."""


@pytest.mark.parametrize(("manner", "seed"), WORLDS)
def test_whatever_is_said_no_byte_goes_astray_and_all_comes_back(manner, seed):
    chance = random.Random(seed)
    model, tp = chance.choice([(FOUR, (2, 1)), (FOUR, (1, 2)), (SIX, (3, 2))])
    mode = list(StateMode)[seed % len(StateMode)]
    network = SealedNetwork if manner is Manner.TOKENLESS else Network
    with World(model, tp, mode=mode, window=2, capacity=4, seed=seed, verify=seed % 4 == 0, network=network) as world:
        forger = FORGERS[manner](world, seed)
        rooms, turns = iter(range(1, ROOMS + 1)), itertools.count(1)
        given_up = set(chance.sample(range(1, ROOMS + 1), GIVEN_UP))
        compared: set[int] = set()

        def is_over() -> bool:
            for request in list(world.requests.values()):
                if request.room in given_up and chance.random() < 0.2:
                    chance.choice([*world.prefill, *world.decode]).side.fail(request.room, "the client gave up")
                if ended(world, request):
                    compared.update(let_go(world, forger, request))
            # Pages are not used again.
            room = next(rooms, None) if len(world.requests) < 3 else None
            if room is not None:
                tokens = chance.randint(1, 16)
                world.start(room, tokens, *(1,) * (tokens >= PAGE_SIZE))
            forger.turn()
            return next(turns) >= ROUNDS and (manner is Manner.LIARS or not world.requests)

        world.until(is_over, what="the end of all requests")
        assert forger.said > 50
        assert not world.network.errors, world.network.errors
        # From now on nobody forges. What was under way ends, at the latest when it has stood still for too long.
        world.network.flow()
        for request in list(world.requests.values()):
            wait_for_end(world, request)
            compared.update(let_go(world, forger, request))
        print(f"{manner.value} {seed}: {len(compared)} of {ROOMS} requests compared, {forger.said} messages forged")
        assert not forger.violations()
        assert not world._crashes.found
        for node in (*world.prefill, *world.decode):
            assert (difference := node.difference()) is None, difference
        assert not any(node.side.check_integrity() for node in (*world.prefill, *world.decode))
        if manner is not Manner.LIARS:
            assert compared | given_up == set(range(1, ROOMS + 1)), f"not all have arrived: {reasons(world)}"
            world.until(lambda: all(home(node) for node in world.decode), what="all units at home")
        if isinstance(world.network, SealedNetwork):
            assert world.network.refused == forger.said


def reasons(world: World) -> list[str]:
    """Why requests have failed at prefill."""
    return [f"{node.name} {room}: {reason}" for node in world.prefill for room, reason in node.events.reasons.items()]


def home(node: DecodeNode) -> bool:
    state = node.side.state
    return state["units_free"] == state["units"] and state["rooms"] == state["inboxes"] == 0


def ended(world: World, request: Request) -> bool:
    """Whether each rank's scheduler knows how the request ended there."""
    return all(request.results.get(node.name) in (Progress.COMPLETE, Progress.FAILED) for node in world.decode) and all(
        node.events.count("succeeded", request.room) or node.side.failure(request.room) is not None
        for node in world.prefill
    )


def let_go(world: World, forger: Forger, request: Request) -> set[int]:
    """The schedulers let go of it. Its room, if its bytes are compared everywhere: only of one that nobody has lied
    about."""
    if forger.is_lied_about(request.room):
        request.results = dict.fromkeys(request.results, Progress.FAILED)
    arrived = set(request.results.values()) == {Progress.COMPLETE}
    world.end(request)
    return {request.room} if arrived else set()


def wait_for_end(world: World, request: Request) -> None:
    """With a clock that runs."""
    for _ in range(200):
        if ended(world, request):
            return
        world.step()
        world.clock.now += 1.0
        time.sleep(0.001)  # for the threads: the clock runs faster than they do
    raise AssertionError(f"room {request.room} hangs: {world.describe()}")


def sizes(side) -> dict[str, int]:
    """Of all books of a side."""
    return {
        name: len(value)
        for name, value in vars(side).items()
        if isinstance(value, Sized) and not isinstance(value, str)
    }


LIMIT = 20
FLOOD = 15 * LIMIT


@pytest.fixture
def small_limits(monkeypatch):
    for name in ("MAX_PEERS", "MAX_OPEN", "MAX_PARKED", "MAX_LET_GO", "MAX_FORMER", "MAX_ROOMS"):
        for module in (dispatch, prefill):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, LIMIT)
    monkeypatch.setattr(outbox, "MAX_PROGRAMS", 3)


def test_floods_fill_no_book_of_prefill(small_limits):
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, 22, 2)
        world.until(lambda: world.is_bound(request), send=False)
        node = world.prefill[0]
        register = next(one.message for one in world.network.sent(Register) if one.receiver == node.name)
        bind = next(one.message for one in world.network.sent(Bind) if one.receiver == node.name)
        manifest = wire.decode(register.manifest)
        for number in range(FLOOD):
            name = f"flood-{number}"
            other = replace(manifest, incarnation=name, host=name)
            stranger = replace(register, incarnation=name, manifest=wire.encode(other))
            say = [
                stranger,
                replace(bind, room=1000 + number, incarnation=name),
                replace(bind, room=5000 + number, incarnation="nobody"),
                replace(bind, room=9000 + number, epoch=99),
                Abort(room=20_000 + number, epoch=1, incarnation="nobody", reason="x"),
                messages.Ack(room=5000 + number, epoch=bind.epoch, incarnation="nobody", upto=3),
            ]
            for message in say:
                world.network.deliver_to(node.name, message)
        assert not world.network.errors, world.network.errors
        assert max(sizes(node.side).values()) <= 2 * LIMIT, sizes(node.side)
        assert len(node.side._epochs._newest) <= dispatch.MAX_ROOMS
        assert node.side.state["peers"] <= LIMIT
        # The decode rank that has a request under way was not displaced, and its request arrives.
        world.until(lambda: world.complete(request))
        world.end(request)


def test_windows_cut_in_many_ways_are_not_all_remembered(small_limits):
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, 22, 2)
        world.until(lambda: world.is_bound(request), send=False)
        node = world.prefill[0]
        bind = next(one.message for one in world.network.sent(Bind) if one.receiver == node.name)
        for number in range(1, 9):
            pages = {role: count + number for role, count in bind.pages_per_piece.items()}
            forged = replace(bind, room=100 + number, pages_per_piece=pages, units=(0,), area_bytes=1)
            (peer,) = node.side._peers.values()
            peer.plan and peer.program(0, pages, bind.mode)
            world.network.deliver_to(node.name, forged)
        assert len(peer.programs) <= 3
        world.serve(request)


def test_digests_that_nobody_asked_for_are_not_kept():
    with World(FOUR, (2, 1)) as world:
        held = world.network.hold(of_kind(Ready))
        request = world.start(1, 22, 2)
        world.until(lambda: request.sent == 2)
        decode, source = world.decode[0], world.prefill[0]
        for number in range(100):
            pieces = tuple(AnnouncedPiece(100 * number + each, None, 0) for each in range(10))
            message = Ready(**world.ids(source, 1), source=0, pieces=pieces, digests=(b"x" * 1000,) * 10, reads=True)
            world.network.deliver_to(decode.name, message)
        (inbox,) = decode.side._inboxes.values()
        assert not inbox.digests
        world.network.let_go(held)
        world.serve(request)
        world.check()
