"""Peers that say anything at all, in well-formed messages: no byte outside staging, no dead thread, bounded memory.

They know the token, as it were, and all names; what they say is taken from what was really said, and changed.
"""

import random
import time
from collections.abc import Sized

import msgspec
import pytest
from msgspec.structs import replace

from sglang_hetero.errors import MessageError
from sglang_hetero.layout import wire
from sglang_hetero.transfer import dispatch, messages, outbox, prefill
from sglang_hetero.transfer.engine.loopback import LoopbackEngine
from sglang_hetero.transfer.messages import Abort, Ack, AnnouncedPiece, Bind, FirstGeneration, Ready, Register
from sglang_hetero.transfer.pieces import StateMode
from sglang_hetero.transfer.reception import Progress
from tests.faults import fuzz
from tests.reshard_oracle import mutate
from tests.unit.transfer.test_messages import body, framed

from .models import FOUR, SIX
from .network import of_kind
from .nodes import STAGING_POISON, aligned_bytes
from .world import World

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 100))]
ROUNDS = 60
"""Steps of a world; some messages are forged at each."""
FORGED = 8
ROOMS = 9
KEY = ("room", "epoch", "incarnation")


class Forger:
    """Changes what was said, and says it to anybody; registers decode ranks of its own that claim any memory."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.said = 0
        self.lied: set[int] = set()
        """Requests of which one side was told, in the name of the other, what may not be so (that bytes have arrived,
        that a unit has been merged, into which units to write): what lies in their own pages may be anything."""
        # Memory of a peer that does not keep to the rules: it may be written over, but nothing else may.
        self.arena = aligned_bytes(1 << 20, STAGING_POISON)
        self.engine = LoopbackEngine(f"forger-{world.tag}", world.fabric)
        self.engine.register([(self.arena.data_ptr(), self.arena.numel())])

    def forge(self) -> None:
        """Say one thing to one rank."""
        sent = self.world.network.log
        if not sent:
            return
        one = self.rng.choice(sent[-200:])
        message = one.message
        if isinstance(message, Register) and self.rng.random() < 0.7:
            message = self._register(message)
        if self.rng.random() < 0.8:
            message = self._changed(message)
        if message is None:
            return
        everybody = [node.name for node in (*self.world.prefill, *self.world.decode)]
        receiver = one.receiver if self.rng.random() < 0.8 else self.rng.choice(everybody)
        if isinstance(message, Ready | FirstGeneration | Ack):
            self.lied.add(message.room)
        elif isinstance(message, Bind) and any(
            node.name == receiver and not node.side._epochs.late(message.incarnation, message.room, message.epoch)
            for node in self.world.prefill
        ):  # it would be believed; its units are any request's of that decode rank
            self.lied.update(self.world.requests)
        self.world.network.deliver_to(receiver, message)
        self.said += 1

    def _changed(self, message: messages.Message) -> messages.Message | None:
        tree = body(message)
        for _ in range(self.rng.randint(1, 2)):
            keep = {key: tree.pop(key, None) for key in KEY if self.rng.random() < 0.9}
            mutate.edit_tree(self.rng, tree, fuzz._of_the_same_kind)
            tree = msgspec.msgpack.decode(msgspec.msgpack.encode(tree)) | {
                k: v for k, v in keep.items() if v is not None
            }
        try:
            changed = messages.decode(framed(tree))
        except (MessageError, OverflowError):
            return None
        # Another one's session would be written to by right: who may reach an engine may write to it anyway.
        return replace(changed, session=self.engine.session) if isinstance(changed, Register) else changed

    def _register(self, message: Register) -> Register:
        """A decode rank that is none: perhaps of another layout, with an arena that may be smaller than it says."""
        manifest = wire.decode(message.manifest)
        number = self.rng.randrange(1 << 30)
        manifest = replace(manifest, incarnation=f"forged-{number}", host=f"forger-{number % 5}")
        encoded = wire.encode(manifest)
        if self.rng.random() < 0.5:
            encoded = mutate.plausible(self.rng, msgspec.msgpack.decode(encoded[mutate.HEADER :])) or encoded
        claimed = self.rng.choice([self.arena.numel(), 1, 1 << 40])
        return replace(
            message,
            manifest=encoded,
            incarnation=self.rng.choice([manifest.incarnation, message.incarnation]),
            session=self.engine.session,
            arena=self.arena.data_ptr(),
            arena_bytes=claimed,
        )

    def violations(self) -> list[str]:
        """Of memory that is not the forger's own."""
        return [one for one in self.world.fabric.violations if self.engine.session not in one]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_said_no_byte_goes_astray_and_all_comes_back(seed):
    chance = random.Random(seed)
    model, tp = chance.choice([(FOUR, (2, 1)), (FOUR, (1, 2)), (SIX, (3, 2))])
    mode = list(StateMode)[seed % len(StateMode)]
    with World(model, tp, mode=mode, window=2, capacity=4, seed=seed, verify=seed % 4 == 0) as world:
        forger = Forger(world, seed)
        rooms = iter(range(1, 100))
        for _ in range(ROUNDS):
            # Pages are not used again.
            if len(world.requests) < 3 and (room := next(rooms)) <= ROOMS:
                world.start(room, chance.randint(1, 16), 1)
            for _ in range(chance.randrange(FORGED)):
                forger.forge()
            world.step()
            for request in list(world.requests.values()):
                if ended(world, request):
                    let_go(world, forger, request)
        assert forger.said > 50
        assert not world.network.errors, world.network.errors
        # From now on nobody lies. What was under way ends, at the latest when it has stood still for too long.
        world.network.flow()
        for request in list(world.requests.values()):
            wait_for_end(world, request)
            let_go(world, forger, request)
        assert not forger.violations()
        assert not world._crashes.found
        for node in (*world.prefill, *world.decode):
            assert (difference := node.difference()) is None, difference
        assert not any(node.side.check_integrity() for node in world.decode)


def ended(world: World, request) -> bool:
    """Whether each rank's scheduler knows how the request ended there."""
    return all(request.results.get(node.name) in (Progress.COMPLETE, Progress.FAILED) for node in world.decode) and all(
        node.events.count("succeeded", request.room) or node.side.failure(request.room) is not None
        for node in world.prefill
    )


def let_go(world: World, forger: Forger, request) -> None:
    """The schedulers let go of it. Only of a request that nobody has lied about the bytes are compared."""
    if request.room in forger.lied:
        request.results = dict.fromkeys(request.results, Progress.FAILED)
    world.end(request)


def wait_for_end(world: World, request) -> None:
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
