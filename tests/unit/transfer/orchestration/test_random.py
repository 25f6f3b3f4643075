"""Random scenarios with a seed: pairs, modes, windows, requests, faults of messages and engines, aborts at any time."""

import random

import pytest

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fault
from sglang_hetero.transfer.pieces import StateMode

from .models import FOUR, MLA, PLAIN, SIX, TWO
from .parts import Request
from .world import World

PAIRS = [
    (FOUR, (2, 1), 1),
    (FOUR, (1, 2), 1),
    (SIX, (3, 2), 1),
    (SIX, (2, 3), 1),
    (FOUR, (2, 1), 2),
    (TWO, (4, 1), 1),
    (PLAIN, (1, 2), 1),
    (MLA, (2, 1), 1),
]
SCENARIOS, BLOCKS = 200, 20


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_scenarios(block):
    for seed in range(block * SCENARIOS // BLOCKS, (block + 1) * SCENARIOS // BLOCKS):
        try:
            scenario(seed)
        except AssertionError as error:
            raise AssertionError(f"scenario {seed}: {error}") from error


def scenario(seed: int) -> None:
    chance = random.Random(seed)
    model, tp, stages = chance.choice(PAIRS)
    with World(
        model,
        tp,
        stages=stages,
        mode=chance.choice(list(StateMode)),
        window=chance.randint(1, 5),
        times_least=chance.choice([1.0, 1.0, 2.0]),
        capacity=chance.randint(1, 3),
        verify=chance.random() < 0.25,
        seed=seed,
    ) as world:
        world.network.duplicates = chance.choice([0.0, 0.0, 0.3])
        requests = [_start(world, chance, room) for room in range(1, chance.randint(2, 5))]
        for node in world.prefill:
            if chance.random() < 0.3:
                faults = [Fault(shuffle=seed)] * chance.randint(0, 6)
                node.engine.script.next(*faults, Fault(error="reset", lands=chance.choice([0, 1, None])))
        for _ in range(chance.randint(0, 12)):
            world.step(send=chance.random() < 0.7)
        for request in requests:
            if chance.random() < 0.3:
                _abort(world, chance, request)
        world.until(lambda: all(_over(world, request) for request in requests), what="an end of every request")
        for request in requests:
            _after(world, chance, request)
        for node in world.prefill:
            node.engine.script._planned.clear()  # faults that no write has met
        rooms = [request.room for request in requests]
        world.until(lambda: world.idle, what="everything free again")
        world.network.duplicates = 0.0
        world.serve(*[world.start(room, chance.randint(1, 15), seed=90 + room) for room in rooms])
        world.check()


def _start(world: World, chance: random.Random, room: int) -> Request:
    pages = chance.randint(1, 4)
    tokens = (pages - 1) * 4 + chance.randint(1, 4)
    full = tokens // 4
    cuts = sorted(chance.randint(0, full) for _ in range(chance.randint(0, 2)))
    return world.start(room, tokens, *cuts)


def _abort(world: World, chance: random.Random, request: Request) -> None:
    sides = [*world.decode, *(node for node in world.prefill if node.side.owns(request.room))]
    for node in chance.sample(sides, chance.randint(1, len(sides))):
        node.side.fail(request.room, f"abort of {node.name}")


def _over(world: World, request: Request) -> bool:
    """Every rank has an end, and, as one failure is a failure of all, the schedulers have made it common."""
    if len(request.reasons):  # the all-reduced poll of decode's ranks
        for node in world.decode:
            if node.name not in request.reasons:
                node.side.fail(request.room, "another rank has failed")
    ours = all(node.name in request.reasons or request.results.get(node.name) is not None for node in world.decode)
    ended = all(
        request.results.get(node.name) and request.results[node.name].name in ("COMPLETE", "FAILED")
        for node in world.decode
    )
    source = [node.side.failure(request.room) or node.events.count("succeeded", request.room) for node in world.prefill]
    return ours and ended and (all(source) or bool(request.reasons))


def _after(world: World, chance: random.Random, request: Request) -> None:
    assert request.reasons or not any(node.side.failure(request.room) for node in world.prefill)
    world.end(request)
    if chance.random() < 0.3:
        for one in world.network.sent(messages.Ready, messages.Ack, messages.Bind, messages.Abort, room=request.room):
            world.network.deliver(one)  # everything once more, late
