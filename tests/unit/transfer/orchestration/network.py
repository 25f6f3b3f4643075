"""Messages between the sides of one test: a queue per link, delivered when the test pumps, with faults on demand."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sglang_hetero.transfer import messages
from sglang_hetero.transfer.link import Endpoint, Post

Handler = Callable[[messages.Message], None]


@dataclass(frozen=True)
class Envelope:
    """A message on its way."""

    sender: str
    receiver: str
    message: messages.Message


Which = Callable[[Envelope], bool]


def of_kind(*kinds: type, sender: str = "", receiver: str = "") -> Which:
    """Messages of these kinds, of one link if given."""
    return lambda one: isinstance(one.message, kinds) and sender in ("", one.sender) and receiver in ("", one.receiver)


class Network:
    """Links between names. Order is kept on a link; which link comes next is random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._handlers: dict[str, Handler] = {}
        self._names: dict[Endpoint, str] = {}
        self._links: dict[tuple[str, str], deque[Envelope]] = {}
        self._broken: list[tuple[Which, list[int]]] = []
        self._held: list[tuple[Which, list[Envelope]]] = []
        self._lossy: list[tuple[Which, list[int]]] = []
        self.lost: list[Envelope] = []
        """What was lost."""
        self.duplicates = 0.0
        """Chance that a message comes twice."""
        self.errors: list[BaseException] = []
        """What a `handle` raised: nothing may."""
        self.log: list[Envelope] = []
        """Everything that was sent."""

    def attach(self, name: str, endpoint: Endpoint, handler: Handler) -> None:
        """From now on `name` takes what is sent to this endpoint, whoever had it before."""
        self._names[endpoint], self._handlers[name] = name, handler

    def detach(self, name: str) -> None:
        """The process has died: what is sent to it vanishes."""
        self._handlers.pop(name, None)

    def post(self, sender: str) -> Post:
        """What a side of this name posts with."""

        def post(endpoint: Endpoint, payload: bytes) -> None:
            self.put(sender, self._names[endpoint], messages.decode(payload))

        return post

    def put(self, sender: str, receiver: str, message: messages.Message) -> None:
        """Send. Raises OSError where a test has broken the link."""
        one = Envelope(sender, receiver, message)
        for which, times in self._broken:
            if times[0] and which(one):
                times[0] -= 1
                raise OSError(f"the test cut {sender} from {receiver}")
        self.log.append(one)
        for which, times in self._lossy:
            if times[0] and which(one):
                times[0] -= 1
                self.lost.append(one)
                return
        for which, held in self._held:
            if which(one):
                held.append(one)
                return
        self._link(one).append(one)

    def cut(self, which: Which, times: int = 1 << 30) -> None:
        """Posting these raises."""
        self._broken.append((which, [times]))

    def lose(self, which: Which, times: int = 1 << 30) -> None:
        """So many of these vanish, and nobody is told."""
        self._lossy.append((which, [times]))

    def hold(self, which: Which) -> list[Envelope]:
        """Keep these back; the list fills with them. `let_go` delivers."""
        held: list[Envelope] = []
        self._held.append((which, held))
        return held

    def let_go(self, held: list[Envelope]) -> None:
        """No longer hold these; those held are delivered now, before anything else."""
        self._held = [entry for entry in self._held if entry[1] is not held]
        for one in list(held):
            self.deliver(one)

    def flow(self) -> None:
        """Nothing is held, cut or lost any more; what is held is lost."""
        self._held, self._broken, self._lossy = [], [], []

    def _link(self, one: Envelope) -> deque[Envelope]:
        return self._links.setdefault((one.sender, one.receiver), deque())

    def deliver(self, one: Envelope) -> None:
        """Hand one message over, as its receiver's thread would."""
        handler = self._handlers.get(one.receiver)
        if handler is None:
            return
        try:
            handler(one.message)
        except BaseException as error:
            self.errors.append(error)

    def deliver_to(self, receiver: str, message: messages.Message) -> None:
        """A forged message, which passes the decoder as any other."""
        self.deliver(Envelope("forger", receiver, messages.decode(messages.encode(message))))

    def pump(self) -> bool:
        """Deliver all that is under way; False if there was nothing."""
        moved = False
        while busy := [link for link in list(self._links.values()) if link]:
            one = self._random.choice(busy).popleft()
            self.deliver(one)
            if self._random.random() < self.duplicates:
                self.deliver(one)
            moved = True
        return moved

    def sent(self, *kinds: type, room: int | None = None) -> list[Envelope]:
        """What has been sent of these kinds."""
        return [one for one in list(self.log) if isinstance(one.message, kinds) and room in (None, one.message.room)]
