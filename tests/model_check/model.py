"""What can happen in a state of a setup, and what comes of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_hetero.transfer.lifetime import ReceivingStatus, SendingStatus

from .machines import Machines
from .setup import Setup
from .state import NOBODY, State
from .world import World

Event = tuple[Any, ...]
"""Name, then its arguments."""

RECEIVER_ABORT, SOURCE_ABORT, WRITE_FAILURE, DUPLICATE, CRASH, CONTRADICTION = range(6)
ENDED = (ReceivingStatus.COMPLETE, ReceivingStatus.FAILED)


class Totals(Mapping[int, int]):
    """What FirstGeneration says, as an argument that can be hashed."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __getitem__(self, stage: int) -> int:
        return self._setup.pieces

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._setup.stages)

    __hash__ = object.__hash__


class Model:
    """The events of a setup. An event is a fault if nobody may rely on it to go on."""

    def __init__(self, setup: Setup, ordered: bool = False) -> None:
        """ordered: messages come in a fixed order, so that a choice by chance can be made again."""
        self.setup = setup
        self.ordered = ordered
        self.machines = Machines()
        self.initial = World.initial(setup, self.machines)
        self.totals = Totals(setup)

    def final(self, state: State) -> bool:
        return not state.net and World.of(self.setup, self.machines, state).final()

    def succeeded(self, state: State) -> bool:
        return all(self.machines.look(room.machine).status is ReceivingStatus.COMPLETE for room in state.rooms)

    def events(self, state: State) -> list[tuple[Event, State, bool]]:
        """Event, state after it, and whether it is a fault, for all that can happen.

        A message that changes nothing is delivered first and alone. Its receiver has ended, or knows a newer epoch, and
        will never take it; so what it is delivered before or after makes no difference.
        """
        outcomes: list[tuple[Event, State, bool]] = []
        for message in sorted(state.net, key=repr) if self.ordered else state.net:
            if self.waits_for_bind(state, message):
                continue
            world = self.world(state)
            world.net.remove(message)
            changed = self.deliver(world, message)
            outcome = (("deliver", *message), world.state, False)
            if not changed and self.is_late(state, message):
                return [outcome]
            outcomes.append(outcome)
        for event, fault in self.enabled(state):
            world = self.world(state)
            self.apply(world, event)
            outcomes.append((event, world.state, fault))
        return outcomes

    def world(self, state: State) -> World:
        return World.of(self.setup, self.machines, state)

    def waits_for_bind(self, state: State, message: Event) -> bool:
        """An Ack travels behind its Bind, if they are sent the same way."""
        return (
            message[0] == "ack"
            and not self.setup.ack_overtakes_bind
            and any(other[0] == "bind" and other[1:4] == message[1:4] for other in state.net)
        )

    def may_repeat(self, state: State, message: Event) -> bool:
        return message[0] != "gone" and not self.waits_for_bind(state, message)

    def is_late(self, state: State, message: Event) -> bool:
        kind, request, source, destination = message[:4]
        if kind == "bind":
            return True
        if kind in ("ack", "finish", "abort"):
            place = (request * self.setup.sources + source) * self.setup.destinations + destination
            machine = state.links[place].machine
            return machine != NOBODY and self.machines.look(machine).status is not SendingStatus.SENDING
        machine = state.rooms[request * self.setup.destinations + destination].machine
        return self.machines.look(machine).status in ENDED

    def deliver(self, world: World, message: Event) -> bool:
        """Hand a message over; False if nothing came of it."""
        kind, request, source, destination, *rest = message
        place = world.link(request, source, destination)
        if kind == "bind":
            return world.bind(request, source, destination, *rest)
        if kind == "abort":
            world.asked_to_stop(request, source, destination)
            return True
        if kind in ("ack", "finish"):
            before = world.links[place].machine
            if before != NOBODY:
                world.tell(request, source, destination, {"ack": "acked", "finish": "finished"}[kind], *rest)
            return world.links[place].machine != before
        if kind == "ready":
            news = [self.announce(world, (request, source, destination), seq, str(seq)) for seq in rest[0]]
            if rest[1] is not None:
                news.append(world.receive(request, destination, "total", source, rest[1]))
                if source == 0:
                    world.know(request, destination, "first")
                    news.append(world.receive(request, destination, "first_generation", self.totals))
            return any(news)
        if kind == "first":
            world.know(request, destination, "first")
            return world.receive(request, destination, "first_generation", self.totals)
        event = {"total": "total", "drained": "drained", "gone": "gone", "failed": "peer_failed"}[kind]
        arguments = ("aborted",) if kind == "failed" else rest
        return world.receive(request, destination, event, source, *arguments)

    def announce(self, world: World, place: tuple[int, int, int], seq: int, piece: str) -> bool:
        request, source, destination = place
        sharers = self.setup.sharing[self.setup.stage_of[source], seq]
        return world.receive(request, destination, "ready", source, seq, piece, sharers)

    def contradict(self, world: World, message: Event) -> None:
        """A source's announcement is about other pieces than those that its message should have named."""
        _, request, source, destination, seqs, _ = message
        for seq in seqs:
            world.know(request, destination, (self.setup.stage_of[source], seq))
            self.announce(world, (request, source, destination), seq, f"not {seq}")

    def enabled(self, state: State) -> list[tuple[Event, bool]]:
        """All events but the delivery of a message, and whether they are faults."""
        events: list[tuple[Event, bool]] = []
        faults = state.faults
        if faults[DUPLICATE]:
            events += [(("duplicate", *message), True) for message in state.net if self.may_repeat(state, message)]
        if faults[CONTRADICTION]:
            events += [(("contradict", *message), True) for message in state.net if message[0] == "ready"]
        for destination, arena in enumerate(state.arenas):
            if arena.waiting and NOBODY in arena.owners and self.may_ask(state, arena.waiting[0], destination):
                events.append((("grant", arena.waiting[0], destination), False))
        events += self.at_destinations(state)
        events += self.at_sources(state)
        if faults[CRASH]:
            events += [(("crash", source), True) for source, alive in enumerate(state.epochs) if alive != NOBODY]
        return events

    def at_destinations(self, state: State) -> list[tuple[Event, bool]]:
        events: list[tuple[Event, bool]] = []
        setup, machines = self.setup, self.machines
        for index, room in enumerate(state.rooms):
            request, destination = divmod(index, setup.destinations)
            events += [(("end_merge", request, destination, *key), False) for key in room.running]
            ended = machines.look(room.machine).status in ENDED
            if state.faults[RECEIVER_ABORT] and not ended and self.may_ask(state, request, destination):
                events.append((("receiver_abort", request, destination), True))
        return events

    def at_sources(self, state: State) -> list[tuple[Event, bool]]:
        events: list[tuple[Event, bool]] = []
        setup, machines, faults = self.setup, self.machines, state.faults
        for index, prefill in enumerate(state.prefills):
            request, source = divmod(index, setup.sources)
            if state.epochs[source] == NOBODY:
                continue
            if faults[SOURCE_ABORT] and not prefill.failed:
                events.append((("source_abort", request, source), True))
            if not setup.eager and self.world(state).can_produce(request, source):
                events.append((("produce", request, source), False))
        for index, link in enumerate(state.links):
            pair, destination = divmod(index, setup.destinations)
            where = (*divmod(pair, setup.sources), destination)
            if link.batch is not None:
                events.append((("wrote", *where), False))
                if faults[WRITE_FAILURE]:
                    events.append((("write_failed", *where), True))
            elif link.machine != NOBODY and machines.look(link.machine).runnable:
                events.append((("take", *where), False))
            if link.doubt:
                events.append((("crash", where[1]), False))  # somebody closes the session of a write in doubt
        return events

    def may_ask(self, state: State, request: int, destination: int) -> bool:
        """A room number is used again at a destination only when its last use has ended there."""
        if not self.setup.same_room or request == 0:
            return True
        previous = state.rooms[(request - 1) * self.setup.destinations + destination].machine
        return self.machines.look(previous).status in ENDED

    def apply(self, world: World, event: Event) -> None:
        name, *arguments = event
        match name:
            case "duplicate":
                world.faults[DUPLICATE] -= 1
                self.deliver(world, tuple(arguments))
            case "contradict":
                world.faults[CONTRADICTION] -= 1
                world.net.remove(tuple(arguments))
                self.contradict(world, tuple(arguments))
            case "receiver_abort":
                world.faults[RECEIVER_ABORT] -= 1
                world.receive(*arguments, "fail", "aborted")
            case "source_abort":
                world.faults[SOURCE_ABORT] -= 1
                world.fail_prefill(*arguments)
            case "write_failed":
                world.faults[WRITE_FAILURE] -= 1
                world.write_failed(*arguments)
            case "crash":
                world.faults[CRASH] = max(0, world.faults[CRASH] - 1)
                world.crash(*arguments)
            case _:
                getattr(world, name)(*arguments)
