"""What can happen in a state of a setup, and what comes of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_hetero.transfer.lifetime import ReceivingStatus, SendingStatus

from . import checks
from .machines import Machines
from .setup import Setup
from .state import (
    CONTRADICTION,
    CRASH,
    DESTINATION_CRASH,
    DUPLICATE,
    EARLY_REPETITION,
    LOSS,
    NOBODY,
    RECEIVER_ABORT,
    SOURCE_ABORT,
    WRITE_FAILURE,
    State,
)
from .world import ENDED, TO_SOURCE, World

Event = tuple[Any, ...]
"""Name, then its arguments."""

KNOWN_ALONE = ("gone",)
"""What a rank finds out by itself: no message, which could get lost or come twice."""


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

    def check_end(self, state: State) -> None:
        """Raises Violation if a final state is not how it has to end."""
        world = self.world(state)
        if self.setup.successors_succeed and world.restarted:
            checks.successors(world)

    def succeeded(self, state: State) -> bool:
        rooms = self.world(state).living()
        return all(self.machines.look(room.machine).status is ReceivingStatus.COMPLETE for room in rooms)

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
            outcomes.append((event, self.after(state, event), fault))
        if (self.setup.repeats or self.setup.timeouts) and all(fault for _, _, fault in outcomes):
            # Clocks run far slower than everything else: nothing but time can bring anything forward.
            for event in self.when_nothing_happens(state):
                following = self.after(state, event)
                if following != state:
                    outcomes.append((event, following, False))
        return outcomes

    def after(self, state: State, event: Event) -> State:
        world = self.world(state)
        self.apply(world, event)
        return world.state

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
        return message[0] not in KNOWN_ALONE and not self.waits_for_bind(state, message)

    def is_late(self, state: State, message: Event) -> bool:
        kind, request, source, destination = message[:4]
        if kind in ("bind", "replaced"):
            return True
        if kind in ("ack", "finish", "abort"):
            place = (request * self.setup.sources + source) * self.setup.destinations + destination
            machine = state.links[place].machine
            return machine != NOBODY and self.machines.look(machine).status is not SendingStatus.SENDING
        machine = state.rooms[request * self.setup.destinations + destination].machine
        return machine == NOBODY or self.machines.look(machine).status in ENDED

    def deliver(self, world: World, message: Event) -> bool:
        """Hand a message over; False if nothing came of it."""
        if message[0] in TO_SOURCE or message[0] == "replaced":
            return self.deliver_to_source(world, message)
        return self.deliver_to_destination(world, message)

    def deliver_to_source(self, world: World, message: Event) -> bool:
        kind, request, source, destination, *rest = message
        if world.dead(source):
            return False
        if kind == "bind":
            return world.bind(request, source, destination, *rest)
        if kind == "replaced":
            return world.replaced(request, source, destination)
        if kind == "abort":
            world.asked_to_stop(request, source, destination)
            return True
        place = world.link(request, source, destination)
        before = world.links[place].machine
        if before != NOBODY:
            world.tell(request, source, destination, {"ack": "acked", "finish": "finished"}[kind], *rest)
        return world.links[place].machine != before

    def deliver_to_destination(self, world: World, message: Event) -> bool:
        kind, _, source, destination, *rest = message
        request = self.addressee(world, message[1], destination)
        if kind in ("ready", "total", "first") and world.answer_late(request, source, destination):
            return True
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
        if kind == "drained" and rest[0] and not self.setup.is_reborn(request):
            # It is of the successor of the process that was bound.
            return not self.setup.rules.drained_by_the_process and world.receive(request, destination, kind, source)
        event, arguments = {
            "failed": ("peer_failed", ("aborted",)),
            "total": ("total", tuple(rest)),
            "drained": ("drained", ()),
            "gone": ("gone", ()),
        }[kind]
        return world.receive(request, destination, event, source, *arguments)

    def addressee(self, world: World, request: int, destination: int) -> int:
        """Which request a message is about for who reads it: the one with that room and epoch."""
        if world.rooms[world.room(request, destination)].machine != NOBODY:
            return request
        for other in range(self.setup.requests):
            opened = world.rooms[world.room(other, destination)].window != NOBODY
            if opened and self.setup.is_reborn(other) and self.setup.identity(other) == self.setup.identity(request):
                return other
        return request

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
        if faults[LOSS]:
            events += [(("lose", *message), True) for message in state.net if message[0] not in KNOWN_ALONE]
        if faults[EARLY_REPETITION]:
            events += [(("early", *event), True) for event in self.repetitions(state)]
        for destination, arena in enumerate(state.arenas):
            if arena.waiting and NOBODY in arena.owners and self.may_ask(state, arena.waiting[0], destination):
                events.append((("grant", arena.waiting[0], destination), False))
        events += self.at_destinations(state)
        events += self.at_sources(state)
        events += self.of_processes(state)
        return events

    def of_processes(self, state: State) -> list[tuple[Event, bool]]:
        """Processes die, their sessions are closed, others take their place, once each."""
        faults, setup = state.faults, self.setup
        events: list[tuple[Event, bool]] = [(("close", source), False) for source in state.landing]
        for source, epochs in enumerate(state.epochs):
            if faults[CRASH] and epochs != NOBODY and not state.lives[source]:
                events.append((("crash", source), True))
            if epochs == NOBODY and setup.reborn:
                events.append((("restart_source", source), False))
        if faults[DESTINATION_CRASH]:
            for destination in range(setup.destinations):
                if not state.lives[setup.sources + destination]:
                    events.append((("restart_destination", destination), True))
        return events

    def when_nothing_happens(self, state: State) -> list[Event]:
        """What is said again, and who gives up waiting."""
        events = self.repetitions(state) if self.setup.repeats else []
        if self.setup.timeouts:
            for index, room in enumerate(state.rooms):
                where = divmod(index, self.setup.destinations)
                if room.machine != NOBODY and self.may_ask(state, *where):
                    events.append(("overdue", *where))
            events += [("stalled", *divmod(index, self.setup.sources)) for index in range(len(state.prefills))]
        return events

    def repetitions(self, state: State) -> list[Event]:
        events: list[Event] = []
        for index, room in enumerate(state.rooms):
            if room.machine != NOBODY:
                events.append(("say_again", *divmod(index, self.setup.destinations)))
        for index in range(len(state.prefills)):
            if state.epochs[index % self.setup.sources] != NOBODY:
                events.append(("announce_again", *divmod(index, self.setup.sources)))
        return events

    def at_destinations(self, state: State) -> list[tuple[Event, bool]]:
        events: list[tuple[Event, bool]] = []
        setup, machines = self.setup, self.machines
        for index, room in enumerate(state.rooms):
            request, destination = divmod(index, setup.destinations)
            events += [(("end_merge", request, destination, *key), False) for key in room.running]
            ended = room.machine == NOBODY or machines.look(room.machine).status in ENDED
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
            if link.doubt and link.machine != NOBODY:
                events.append((("crash", where[1]), False))  # somebody ends the process of a write in doubt
        return events

    def may_ask(self, state: State, request: int, destination: int) -> bool:
        """A room number is used again at a destination only when its last use has ended there; what is for processes
        that take others' place waits for these."""
        if self.setup.is_reborn(request) and not self.world(state).restarted:
            return False
        if not self.setup.same_room or request == 0:
            return True
        previous = state.rooms[(request - 1) * self.setup.destinations + destination].machine
        return previous == NOBODY or self.machines.look(previous).status in ENDED

    def apply(self, world: World, event: Event) -> None:
        name, *arguments = event
        spent = {
            "duplicate": DUPLICATE,
            "contradict": CONTRADICTION,
            "receiver_abort": RECEIVER_ABORT,
            "source_abort": SOURCE_ABORT,
            "write_failed": WRITE_FAILURE,
            "lose": LOSS,
            "early": EARLY_REPETITION,
            "crash": CRASH,
            "restart_destination": DESTINATION_CRASH,
        }.get(name)
        if spent is not None:
            world.faults[spent] = max(0, world.faults[spent] - 1)
        match name:
            case "duplicate":
                self.deliver(world, tuple(arguments))
            case "contradict":
                world.net.remove(tuple(arguments))
                self.contradict(world, tuple(arguments))
            case "lose":
                world.net.remove(tuple(arguments))
            case "early":
                self.apply(world, tuple(arguments))
            case "receiver_abort" | "overdue":
                world.receive(*arguments, "fail", "aborted")
            case "source_abort":
                world.fail_prefill(*arguments)
            case "stalled":
                world.stalled(*arguments)
            case _:
                getattr(world, name)(*arguments)
