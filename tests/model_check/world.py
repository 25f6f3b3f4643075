"""One moment of everything: machines, engine writes, units, messages under way. And what the code around them does.

The callers are the simplest that keep to the design: a rank carries out actions at once and in order; a request that
fails at a source fails for all of its destinations; a source answers Abort when it has drained. Messages may be
delivered in any order.
"""

from dataclasses import dataclass
from typing import Any

from sglang_hetero.transfer.lifetime import (
    Ack,
    Merge,
    Pull,
    ReceivingStatus,
    ReturnUnits,
    SendingStatus,
    Settle,
    Stage,
)

from . import checks
from .machines import Machines, Refused, Violation
from .setup import ROOMS_KEPT, Setup
from .state import CRASH, DESTINATION_CRASH, INCARNATION, NOBODY, PULL, Arena, Link, Message, Prefill, Room, State

TO_SOURCE = ("bind", "ack", "finish", "abort")
ENDED = (ReceivingStatus.COMPLETE, ReceivingStatus.FAILED)


@dataclass
class World:
    """A state that can be changed."""

    setup: Setup
    machines: Machines
    rooms: list[Room]
    links: list[Link]
    prefills: list[Prefill]
    epochs: list[int]
    arenas: list[Arena]
    lives: list[int]
    landing: set[int]
    net: set[Message]
    faults: list[int]

    @classmethod
    def of(cls, setup: Setup, machines: Machines, state: State) -> "World":
        rooms, links, prefills, epochs, arenas, lives, landing, net, faults = state
        return cls(
            setup,
            machines,
            [*rooms],
            [*links],
            [*prefills],
            [*epochs],
            [*arenas],
            [*lives],
            {*landing},
            {*net},
            [*faults],
        )

    @classmethod
    def initial(cls, setup: Setup, machines: Machines) -> State:
        stages = tuple(Stage(sources, setup.window) for sources in setup.stages)
        receiving = machines.add(setup.make_receiving(stages, setup.pulls))
        budget = setup.budget
        return State(
            (Room(receiving),) * (setup.requests * setup.destinations),
            (Link(),) * (setup.requests * setup.sources * setup.destinations),
            (Prefill(),) * (setup.requests * setup.sources),
            (machines.add(setup.make_epochs(ROOMS_KEPT)),) * setup.sources,
            tuple(Arena((NOBODY,) * setup.windows, setup.order(place)) for place in range(setup.destinations)),
            (0,) * (setup.sources + setup.destinations),
            frozenset(),
            frozenset(),
            (
                budget.receiver_aborts,
                budget.source_aborts,
                budget.write_failures,
                budget.duplicates,
                budget.crashes,
                budget.contradictions,
                budget.destination_crashes,
                budget.losses,
                budget.early_repetitions,
            ),
        )

    @property
    def state(self) -> State:
        return State(
            tuple(self.rooms),
            tuple(self.links),
            tuple(self.prefills),
            tuple(self.epochs),
            tuple(self.arenas),
            tuple(self.lives),
            frozenset(self.landing),
            frozenset(self.net),
            tuple(self.faults),
        )

    def room(self, request: int, destination: int) -> int:
        return request * self.setup.destinations + destination

    def link(self, request: int, source: int, destination: int) -> int:
        return (request * self.setup.sources + source) * self.setup.destinations + destination

    def prefill(self, request: int, source: int) -> int:
        return request * self.setup.sources + source

    def dead(self, source: int) -> bool:
        """Whether a source's process is dead and no other one has taken its place."""
        return self.epochs[source] == NOBODY

    def life(self, destination: int) -> int:
        """How often a destination was started again."""
        return self.lives[self.setup.sources + destination]

    def meant(self, request: int, process: int) -> bool:
        """Whether a request is for the present life of a process: sources are counted first, then destinations."""
        return not self.lives[process] or self.setup.is_reborn(request)

    def send(self, kind: str, request: int, source: int, destination: int, *rest: Any) -> None:
        """Put a message on its way; to a dead source there is none."""
        if kind in TO_SOURCE and self.dead(source):
            return
        self.net.add((kind, request, source, destination, *rest))

    # At a destination

    def grant(self, request: int, destination: int) -> None:
        """The first in the queue gets a window and tells its sources."""
        owners, waiting = self.arenas[destination]
        window = owners.index(NOBODY)
        self.arenas[destination] = Arena(
            (*owners[:window], request, *owners[window + 1 :]), tuple(other for other in waiting if other != request)
        )
        place = self.room(request, destination)
        self.rooms[place] = self.rooms[place]._replace(window=window)
        self.receive(request, destination, "bound")
        for source in range(self.setup.sources):
            self.send("bind", request, source, destination, window)

    def receive(self, request: int, destination: int, event: str, *arguments: Any) -> bool:
        """Give an event to a Receiving and carry out its actions; True if anything came of it."""
        place = self.room(request, destination)
        before = self.rooms[place].machine
        if before == NOBODY:
            return False  # that process is dead
        try:
            machine, actions = self.machines.call(before, event, *arguments)
        except Refused:
            if not self.setup.budget.contradictions:
                raise
            machine, actions = self.machines.call(before, "fail", "refused")
        self.rooms[place] = self.rooms[place]._replace(machine=machine)
        for action in actions:
            self.carry_out(action, request, destination)
        return machine != before or bool(actions)

    def know(self, request: int, destination: int, what: object) -> None:
        """Remember for the checks that a room was told something; of no use once it has ended."""
        place = self.room(request, destination)
        if not self.rooms[place].ends:
            self.rooms[place] = self.rooms[place]._replace(known=self.rooms[place].known | {what})

    def carry_out(self, action: Any, request: int, destination: int) -> None:
        place = self.room(request, destination)
        room, sources = self.rooms[place], range(self.setup.sources)
        match action:
            case Merge(stage, seq, _):
                checks.content(self, request, destination, stage, seq)
                checks.mergeable(room, stage, seq)
                self.rooms[place] = room._replace(running=room.running | {(stage, seq)})
                if not self.setup.merges_take_time:
                    self.end_merge(request, destination, stage, seq)
                return
            case Pull():
                self.rooms[place] = room._replace(running=room.running | {PULL})
                return
            case Ack(stage, upto):
                checks.acknowledged(room, stage, upto)
                for source in self.setup.stages[stage]:
                    self.send("ack", request, source, destination, upto)
                return
            case Settle(reason):
                if reason is None:
                    checks.complete(self, room)
                for source in sources:
                    self.send("finish" if reason is None else "abort", request, source, destination)
            case ReturnUnits():
                self.return_units(request, destination)
        name = type(action).__name__
        ends = room.ends | {name}
        if name in room.ends:
            raise Violation(f"{name} after {sorted(room.ends)}")
        self.rooms[place] = room._replace(ends=ends, merged=frozenset(), known=frozenset())

    def return_units(self, request: int, destination: int) -> None:
        checks.unread(self, request, destination)
        for source in range(self.setup.sources):
            link = self.links[self.link(request, source, destination)]
            if link.batch is not None or link.doubt:
                raise Violation(f"units of request {request} come home while source {source} writes")
        owners, waiting = self.arenas[destination]
        self.arenas[destination] = Arena(
            tuple(NOBODY if owner == request else owner for owner in owners),
            tuple(other for other in waiting if other != request),
        )

    def end_merge(self, request: int, destination: int, stage: int, seq: int) -> None:
        """A merge, or the read, has ended."""
        place = self.room(request, destination)
        room = self.rooms[place]
        key = (stage, seq)
        merged = room.merged if room.ends or key == PULL else room.merged | {key}
        self.rooms[place] = room._replace(running=room.running - {key}, merged=merged)
        if key == PULL:
            self.receive(request, destination, "pulled")
            return
        checks.content(self, request, destination, stage, seq)
        self.receive(request, destination, "merged", stage, seq)

    def say_again(self, request: int, destination: int) -> None:
        """Nothing new has been heard for a while: where an open request goes and how far it is, or that it failed."""
        room = self.rooms[self.room(request, destination)]
        machine = self.machines.look(room.machine)
        if machine.status is ReceivingStatus.OPEN:
            for source in range(self.setup.sources):
                self.send("bind", request, source, destination, room.window)
                upto = machine.acknowledged[self.setup.stage_of[source]]
                if upto:
                    self.send("ack", request, source, destination, upto)
                if not self.setup.rules.repetition_may_fail:
                    self.receive(request, destination, "drained", source)
        elif machine.status is ReceivingStatus.FAILED and self.setup.rules.aborts_repeated:
            for source in machine.may_write:
                self.send("abort", request, source, destination)

    def answer_late(self, request: int, source: int, destination: int) -> bool:
        """A source still sends a request that is over here: say how it ended. False: it is not over."""
        machine = self.rooms[self.room(request, destination)].machine
        if machine == NOBODY or not self.setup.rules.ends_remembered or not self.machines.look(machine).units_home:
            return False
        complete = self.machines.look(machine).status is ReceivingStatus.COMPLETE
        self.send("finish" if complete else "abort", request, source, destination)
        return True

    # At a source

    def bind(self, request: int, source: int, destination: int, window: int) -> bool:
        room, epoch = self.setup.identity(request)
        incarnation = self.incarnation(request, destination)
        if incarnation is None or (self.setup.rules.binds_name_the_process and not self.meant(request, source)):
            return False
        self.epochs[source], opens = self.machines.call(self.epochs[source], "open", incarnation, room, epoch)
        if not opens:
            return self.answer_bind(request, source, destination)
        place = self.link(request, source, destination)
        self.links[place] = Link(self.machines.add(self.setup.make_sending(self.setup.window)), window)
        prefill = self.prefills[self.prefill(request, source)]
        if prefill.failed:
            self.fail_link(request, source, destination)
        elif self.setup.eager and self.can_produce(request, source):
            for _ in self.setup.chunks:
                self.produce(request, source)
        return True

    def incarnation(self, request: int, destination: int) -> str | None:
        """Name of the process that a request is for; None if a source knows by now that another has its place."""
        life = self.life(destination)
        if life and not self.setup.is_reborn(request):
            return None
        return INCARNATION.format(destination, life)

    def answer_bind(self, request: int, source: int, destination: int) -> bool:
        """A Bind that opens nothing: said again, or overtaken. Say so if the request has ended; False if it has not."""
        link = self.links[self.link(request, source, destination)]
        machine = None if link.machine == NOBODY else self.machines.look(link.machine)
        if machine is not None and machine.status is not SendingStatus.FAILED:
            return False
        if machine is not None:
            self.send("failed", request, source, destination)
        if machine is None or machine.drained:
            self.send("drained", request, source, destination, self.lives[source])
        return True

    def can_produce(self, request: int, source: int) -> bool:
        """Prefill runs a request once all destinations have bound it."""
        prefill = self.prefills[self.prefill(request, source)]
        first = self.link(request, source, 0)
        return (
            not prefill.failed
            and not self.dead(source)
            and (self.meant(request, source) or not self.setup.rules.binds_name_the_process)
            and prefill.chunks < len(self.setup.chunks)
            and all(link.machine != NOBODY for link in self.links[first : first + self.setup.destinations])
        )

    def produce(self, request: int, source: int) -> None:
        """Prefill's next chunk; the totals go out with the last one, and FirstGeneration from one source."""
        index = self.prefill(request, source)
        chunks = self.prefills[index].chunks
        stage = self.setup.stage_of[source]
        first, count = sum(self.setup.chunks[:chunks]), self.setup.chunks[chunks]
        skipped = tuple(at for at in range(count) if source not in self.setup.sharing[stage, first + at])
        last = chunks + 1 == len(self.setup.chunks)
        self.prefills[index] = Prefill(chunks + 1)
        for destination in range(self.setup.destinations):
            self.tell(request, source, destination, "produced", count, skipped)
            if last:
                self.tell(request, source, destination, "close")
                if self.setup.joined_totals:
                    continue
                self.send("total", request, source, destination, self.setup.pieces)
                if source == 0:
                    self.send("first", request, source, destination)

    def tell(self, request: int, source: int, destination: int, event: str, *arguments: Any) -> Any:
        """Give an event to a Sending."""
        place = self.link(request, source, destination)
        machine, result = self.machines.call(self.links[place].machine, event, *arguments)
        self.links[place] = self.links[place]._replace(machine=machine)
        return result

    def announce_again(self, request: int, source: int) -> None:
        """Nothing new has been heard for a while: what is written and not acknowledged, the total, the first token."""
        closed = self.prefills[self.prefill(request, source)].chunks == len(self.setup.chunks)
        stage, rules = self.setup.stage_of[source], self.setup.rules
        for destination in range(self.setup.destinations):
            place = self.link(request, source, destination)
            if self.links[place].machine == NOBODY:
                continue
            machine = self.machines.look(self.links[place].machine)
            if machine.status is not SendingStatus.SENDING:
                continue
            told = closed and machine.taken == self.setup.pieces and not machine.in_flight
            own = tuple(seq for seq in machine.announced if source in self.setup.sharing[stage, seq])
            if rules.announcements_repeated:
                if self.setup.joined_totals:
                    if own or told:
                        self.send("ready", request, source, destination, own, self.setup.pieces if told else None)
                else:
                    if own:
                        self.send("ready", request, source, destination, own, None)
                    if closed:
                        self.send("total", request, source, destination, self.setup.pieces)
            if source == 0 and closed and not self.setup.joined_totals and rules.first_repeated:
                self.send("first", request, source, destination)

    def take(self, request: int, source: int, destination: int) -> None:
        """Begin a write; what the source has no share of is passed over at once."""
        batch = self.tell(request, source, destination, "take", self.setup.batch)
        place = self.link(request, source, destination)
        own = [seq for seq in batch if source in self.setup.sharing[self.setup.stage_of[source], seq]]
        self.links[place] = self.links[place]._replace(batch=batch)
        if own:
            checks.writing(self, self.links[place], request, source, destination)
        else:
            self.wrote(request, source, destination)

    def wrote(self, request: int, source: int, destination: int) -> None:
        """A write is over: announce it, if anybody still wants to know."""
        self.tell(request, source, destination, "wrote")
        place = self.link(request, source, destination)
        link = self.links[place]
        assert link.batch is not None
        self.links[place] = link._replace(batch=None, wrote=link.batch.stop)
        stage = self.setup.stage_of[source]
        own = tuple(seq for seq in link.batch if source in self.setup.sharing[stage, seq])
        if own:
            checks.writing(self, link, request, source, destination)
        total = self.setup.pieces if self.setup.joined_totals and link.batch.stop == self.setup.pieces else None
        if (own or total is not None) and self.machines.look(link.machine).status is SendingStatus.SENDING:
            self.send("ready", request, source, destination, own, total)
        self.answer(request, source, destination)

    def write_failed(self, request: int, source: int, destination: int) -> None:
        doubt = self.setup.budget.in_doubt
        self.tell(request, source, destination, "write_failed", "engine", doubt)
        place = self.link(request, source, destination)
        self.links[place] = self.links[place]._replace(batch=None, doubt=doubt)
        self.send("failed", request, source, destination)
        self.answer(request, source, destination)
        self.fail_prefill(request, source)

    def fail_prefill(self, request: int, source: int) -> None:
        """The request is given up at a source, for whatever reason: all of its destinations learn it."""
        index = self.prefill(request, source)
        if self.prefills[index].failed:
            return
        self.prefills[index] = self.prefills[index]._replace(failed=True)
        for destination in range(self.setup.destinations):
            self.fail_link(request, source, destination)

    def stalled(self, request: int, source: int) -> None:
        """A request stands still at a source."""
        if not self.dead(source) and self.meant(request, source):
            self.fail_prefill(request, source)

    def fail_link(self, request: int, source: int, destination: int) -> None:
        link = self.links[self.link(request, source, destination)]
        if link.machine == NOBODY or self.machines.look(link.machine).status is not SendingStatus.SENDING:
            return
        self.tell(request, source, destination, "abort", "aborted")
        self.send("failed", request, source, destination)

    def asked_to_stop(self, request: int, source: int, destination: int) -> None:
        """Abort of a destination has come, perhaps before its Bind, perhaps again, perhaps to another process."""
        room, epoch = self.setup.identity(request)
        incarnation = self.incarnation(request, destination)
        if not self.meant(request, source):
            if self.setup.rules.aborts_name_the_process:
                return
            if incarnation is not None:
                self.end_unbound(room, source)
        if incarnation is not None:
            self.epochs[source], _ = self.machines.call(self.epochs[source], "end", incarnation, room, epoch)
        place = self.link(request, source, destination)
        bound = self.links[place].machine != NOBODY
        if bound:
            self.tell(request, source, destination, "abort", "aborted")
        self.links[place] = self.links[place]._replace(asked=True)
        self.answer(request, source, destination)
        if bound or self.setup.aborts_reach_requests:
            self.fail_prefill(request, source)

    def end_unbound(self, room: int, source: int) -> None:
        """A room is given up at a source's successor, where a request may wait for its Bind."""
        for other in range(self.setup.requests):
            first = self.link(other, source, 0)
            bound = any(link.machine != NOBODY for link in self.links[first : first + self.setup.destinations])
            if self.setup.is_reborn(other) and self.setup.identity(other)[0] == room and not bound:
                self.fail_prefill(other, source)

    def answer(self, request: int, source: int, destination: int) -> None:
        """Say Drained, if that was asked and is true."""
        place = self.link(request, source, destination)
        link = self.links[place]
        if link.asked and (link.machine == NOBODY or self.machines.look(link.machine).drained):
            self.links[place] = link._replace(asked=False)
            self.send("drained", request, source, destination, self.lives[source])

    # Processes

    def crash(self, source: int) -> None:
        """A source's process is dead. What its engine had begun may still arrive."""
        self.epochs[source] = NOBODY
        self.landing.add(source)
        for request in range(self.setup.requests):
            for destination in range(self.setup.destinations):
                place = self.link(request, source, destination)
                link = self.links[place]
                lands = link.doubt or link.batch is not None
                self.links[place] = Link(window=link.window, doubt=True) if lands else Link()
        if not self.setup.rules.gone_when_closed:
            self.say_gone(source)

    def close(self, source: int) -> None:
        """Nothing of a dead source's process can arrive any more; each destination hears of it some time."""
        self.landing.remove(source)
        for place in range(len(self.links)):
            if place // self.setup.destinations % self.setup.sources == source and self.links[place].machine == NOBODY:
                self.links[place] = self.links[place]._replace(doubt=False)
        self.say_gone(source)

    def say_gone(self, source: int) -> None:
        for request in range(self.setup.requests - self.setup.reborn):
            for destination in range(self.setup.destinations):
                self.send("gone", request, source, destination)

    def restart_source(self, source: int) -> None:
        """Another process has taken a dead source's place, perhaps before the former one's writes are over."""
        self.lives[source] += 1
        self.epochs[source] = self.machines.add(self.setup.make_epochs(ROOMS_KEPT))

    def restart_destination(self, destination: int) -> None:
        """A destination's process is dead and another one has its place: new memory, and all sources hear of it."""
        setup = self.setup
        self.lives[setup.sources + destination] += 1
        for request in range(setup.requests - setup.reborn):
            self.rooms[self.room(request, destination)] = Room(NOBODY)
            for source in range(setup.sources):
                self.send("replaced", request, source, destination)
        waiting = tuple(request for request in setup.order(destination) if setup.is_reborn(request))
        self.arenas[destination] = Arena((NOBODY,) * setup.windows, waiting)

    def replaced(self, request: int, source: int, destination: int) -> bool:
        """A destination's successor has registered: what was under way to the former process has failed."""
        before = self.prefills[self.prefill(request, source)].failed
        if not self.dead(source) and self.meant(request, source):
            self.fail_prefill(request, source)
        return not before

    @property
    def restarted(self) -> bool:
        """Whether all has crashed that may, and what is for the successors begins."""
        return any(self.lives) and not (self.faults[CRASH] or self.faults[DESTINATION_CRASH])

    def living(self) -> list[Room]:
        """What has to come to an end: not what died with its process, nor what waits for one that has not died."""
        begun = self.setup.requests - (0 if self.restarted else self.setup.reborn)
        return [room for room in self.rooms[: begun * self.setup.destinations] if room.machine != NOBODY]

    def final(self) -> bool:
        """Whether everything has ended and is where it belongs."""
        if self.net or any(set(arena.owners) != {NOBODY} for arena in self.arenas):
            return False
        if self.landing:
            return False
        for room in self.living():
            machine = self.machines.look(room.machine)
            if machine.status not in ENDED or not machine.units_home or room.running:
                return False
        return all(
            not link.asked and not link.doubt and (link.machine == NOBODY or self.machines.look(link.machine).drained)
            for link in self.links
        )
