"""Peers that say anything at all, in well-formed messages: what they say is taken from what was really said."""

import random
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec
from msgspec.structs import replace

from sglang_hetero.errors import MessageError, SealError
from sglang_hetero.layout import wire
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import LoopbackEngine
from sglang_hetero.transfer.messages import (
    Abort,
    Ack,
    Bind,
    Drained,
    Failed,
    Finish,
    FirstGeneration,
    Ready,
    Register,
)
from sglang_hetero.transfer.seal import OVERHEAD, Purpose, Seal
from tests.faults import fuzz
from tests.reshard_oracle import mutate
from tests.unit.transfer.test_messages import body, framed

from .network import Envelope, Network
from .nodes import STAGING_POISON, aligned_bytes
from .world import World

FORGED = 8
"""Messages that are forged at a step, less one, at most."""
RECENT = (10, 200)
"""What is forged is taken from so many messages, those sent last: they may be on their way, or long over."""
KEY = ("room", "epoch", "incarnation")
PREFILL_TAKES = (Register, Bind, Ack, Finish, Abort)


class Manner(Enum):
    """What the forgers of a world know, and so what must come of their messages."""

    LIARS = "liars"
    """The names of all who are there: they are believed. What they lie about may be wrong, and nothing else."""
    STRANGERS = "strangers"
    """What was said, which they say again at any time to anybody, and names, of which one is wrong in all that they
    make up. Nothing comes of it: every request arrives."""
    TOKENLESS = "tokenless"
    """Everything but the token of the others. Nothing comes of it."""


class Forger:
    """Says something to somebody; registers decode ranks of its own that claim any memory."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.said = 0
        self.lied: set[int] = set()
        """Requests of which one side was told, in the name of the other, what may not be so (that bytes have arrived,
        that a unit has been merged, into which units to write): what lies in their own pages may be anything."""
        self._bound = False
        # Memory of a peer that does not keep to the rules: it may be written over, but nothing else may.
        self.arena = aligned_bytes(1 << 20, STAGING_POISON)
        self.engine = LoopbackEngine(f"forger-{world.tag}", world.fabric)
        self.engine.register([(self.arena.data_ptr(), self.arena.numel())])

    def turn(self) -> None:
        """Say a few things."""
        for _ in range(self.rng.randrange(FORGED)):
            recent = self.world.network.log[-self.rng.choice(RECENT) :]
            if recent:
                self.forge(self.rng.choice(recent))

    def forge(self, one: Envelope) -> None:
        """Say one thing to one rank."""
        raise NotImplementedError

    def is_lied_about(self, room: int) -> bool:
        return self._bound or room in self.lied

    def violations(self) -> list[str]:
        """Of memory that is not the forger's own."""
        return [one for one in self.world.fabric.violations if self.engine.session not in one]

    def say(self, receiver: str, message: messages.Message) -> None:
        self.world.network.deliver_to(receiver, message)
        self.said += 1

    def _receiver(self, one: Envelope) -> str:
        nodes = (*self.world.prefill, *self.world.decode)
        return one.receiver if self.rng.random() < 0.8 else self.rng.choice([node.name for node in nodes])

    def _note(self, receiver: str, message: messages.Message) -> None:
        """Keep what it may do to bytes, if it is believed."""
        if message in [one.message for one in self.world.network.log]:
            return  # said again
        if isinstance(message, Ready | FirstGeneration | Ack):
            self.lied.add(message.room)
        elif isinstance(message, Bind) and any(
            node.name == receiver
            and node.rank.manifest.incarnation == message.source
            and not node.side._epochs.late(message.incarnation, message.room, message.epoch)
            for node in self.world.prefill
        ):  # from now on it may write into units that are any request's of that decode rank
            self._bound = True

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


class Liar(Forger):
    """Knows all names and the token, as it were."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        # Who lies about bytes all the time leaves nothing to compare.
        self._lies = self.rng.choice([0.02, 0.1, 1.0])

    def forge(self, one: Envelope) -> None:
        message: messages.Message | None = one.message
        if isinstance(message, Register) and self.rng.random() < 0.7:
            message = self._register(message)
        about_bytes = isinstance(message, Ready | FirstGeneration | Ack | Bind)
        if self.rng.random() < (0.8 * self._lies if about_bytes else 0.8):
            message = self._changed(message)
        if message is not None:
            receiver = self._receiver(one)
            self._note(receiver, message)
            self.say(receiver, message)


class Stranger(Forger):
    """Says again what was said, and makes up what has one wrong name in it."""

    def forge(self, one: Envelope) -> None:
        message: messages.Message | None = one.message
        receiver = self._receiver(one)
        if isinstance(message, Register) and self.rng.random() < 0.7:
            message = self._register(message)
        elif self.rng.random() < 0.6:
            message = self._by_nobody(message, one.receiver)
            if isinstance(message, Bind | Abort):
                receiver = one.receiver  # it may be for the other one by now
        if message is not None:
            self.say(receiver, message)

    def _by_nobody(self, message: messages.Message, receiver: str) -> messages.Message | None:
        """In the name of no room, epoch or process that could say so to the receiver. None: there is no such message.

        A Bind or an Abort may be the first that a source hears of a room, so there it is the process that is unknown,
        or the one that it is for; of a first token that process which is no source.
        """
        if isinstance(message, Register):
            return None
        ids = {"room": message.room, "epoch": message.epoch, "incarnation": message.incarnation}
        if isinstance(message, Ready | Bind):
            ids["source"] = message.source
        message = self._any(message, ids)
        if isinstance(message, Ready):
            message = self.rng.choice([message, Drained(**ids), Failed(**ids)])
        elif isinstance(message, Ack):
            message = self.rng.choice([message, Finish(**ids), Abort(**ids)])
        unknown = f"nobody-{self.rng.randrange(9)}"
        wrong: dict[str, Callable[[], object]] = {"incarnation": lambda: unknown}
        if isinstance(message, Bind | Abort):
            others = [node.rank.manifest.incarnation for node in self.world.prefill if node.name != receiver]
            wrong["source"] = lambda: self.rng.choice([unknown, *others])
        elif isinstance(message, FirstGeneration):
            wrong["incarnation"] = lambda: self.rng.choice([unknown, self.world.decode[0].rank.manifest.incarnation])
        else:
            wrong["room"] = lambda: message.room + self.rng.choice([-1, 1, 1 << 40])
            wrong["epoch"] = lambda: message.epoch + self.rng.choice([-1, 1, 1 << 40])
            wrong["incarnation"] = lambda: self.rng.choice([unknown, *self._others(message.incarnation)])
            if isinstance(message, Ready | Drained | Failed):
                wrong["source"] = lambda: message.source + self.rng.choice([-1, 1, 99])
        name = self.rng.choice(list(wrong))
        try:
            made = replace(message, **{name: wrong[name]()})
            messages.encode(made)
        except MessageError:
            return None
        return made

    def _any(self, message: messages.Message, ids: dict[str, Any]) -> messages.Message:
        """Whatever may be in it beside these names."""
        changed = self._changed(message)
        return replace(changed, **ids) if type(changed) is type(message) else message

    def _others(self, incarnation: str) -> list[str]:
        """Of those that say such things, too."""
        nodes = next(
            nodes
            for nodes in (self.world.prefill, self.world.decode)
            if any(node.rank.manifest.incarnation == incarnation for node in nodes)
        )
        return [node.rank.manifest.incarnation for node in nodes if node.rank.manifest.incarnation != incarnation]


class SealedNetwork(Network):
    """Every rank and the control service have the same token."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.sealed: list[tuple[str, Purpose, bytes]] = []
        """All that was sent: to whom, which way, and the bytes."""
        self.refused = 0
        self.tap: Callable[[], None] = lambda: None
        """Called when a message is on its way; it is the last of `sealed`."""
        self._seals: dict[str, Seal] = {}

    def seal_of(self, name: str) -> Seal:
        return self._seals.setdefault(name, Seal(b"the token of all"))

    def deliver(self, one: Envelope) -> None:
        purpose = Purpose.TO_PREFILL if isinstance(one.message, PREFILL_TAKES) else Purpose.TO_DECODE
        data = self.seal_of(one.sender).seal(messages.encode(one.message), purpose, one.receiver.encode())
        self.sealed.append((one.receiver, purpose, data))
        self.tap()
        self.arrive(one.receiver, purpose, data)

    def arrive(self, receiver: str, purpose: Purpose, data: bytes) -> None:
        """Bytes come to a rank on the port for messages that go this way."""
        try:
            payload = self.seal_of(receiver).open(data, purpose, receiver.encode())
        except SealError:
            self.refused += 1
            return
        super().deliver(Envelope("whoever has the token", receiver, messages.decode(payload)))


class Tokenless(Forger):
    """Sees and changes all bytes, and has a token that is not the others'."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        assert isinstance(world.network, SealedNetwork)
        self.network = world.network
        self.network.tap = self._overtake
        self._seal = Seal(b"another token")

    def forge(self, one: Envelope) -> None:
        if self.network.sealed:
            _, purpose, data = self.rng.choice(self.network.sealed[-self.rng.choice(RECENT) :])
            receiver = self._receiver(one)
            self._send(receiver, purpose, self.rng.choice([data, *self._forged(receiver, purpose, data)]))

    def _overtake(self) -> None:
        """Come before a message that is on its way, with something else under its seal."""
        receiver, purpose, data = self.network.sealed[-1]
        if self.rng.random() < 0.2:
            self._send(receiver, purpose, self.rng.choice(self._forged(receiver, purpose, data)))

    def _forged(self, receiver: str, purpose: Purpose, data: bytes) -> list[bytes]:
        stamp, message = data[:OVERHEAD], messages.decode(data[OVERHEAD:])
        payload = messages.encode(self._changed(message) or message)
        forged = [
            payload,
            self._seal.seal(payload, purpose, receiver.encode()),
            stamp + payload,
            self.rng.choice(mutate.BYTE_LEVEL)(self.rng, data),
        ]
        return [one for one in forged if one != data]

    def _send(self, receiver: str, purpose: Purpose, data: bytes) -> None:
        self.network.arrive(receiver, self.rng.choice([purpose, *Purpose]), data)
        self.said += 1


FORGERS: dict[Manner, type[Forger]] = {
    Manner.LIARS: Liar,
    Manner.STRANGERS: Stranger,
    Manner.TOKENLESS: Tokenless,
}
