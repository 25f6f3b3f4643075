"""Messages that are lost, doubled, late or damaged, one after the other of each kind; engines and merges that fail."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang_hetero.transfer.pieces import StateMode
from tests.harness import Abort, On
from tests.harness.sabotage import At, Do, Rule

from .cases import ABORTED, NEIGHBOUR, PROMPT, STRANGER, Case, End
from .steps import Who
from .topologies import GRACE_SECONDS, P1D2, P2D1, P2D3, P3D2, STALL_SECONDS, Topology, with_mode

LATE_SECONDS = 0.4
"""By which a message is late: others of the request and of its neighbour overtake it."""
SLOW_SECONDS = 1.0
"""Of an engine call that is slow, and still within the limit for standing still."""
HUNG_SECONDS = STALL_SECONDS + 1.5
"""Of one that is not."""

BOTH = {On.PREFILL: End.ARRIVES, On.DECODE: End.ARRIVES}
NONE = {On.PREFILL: End.FAILS, On.DECODE: End.FAILS}
ARRIVES = "the request arrives"
REPEATED = "the message is said again, and the request arrives"
STILL = ("nothing has arrived", "no progress", "Bootstrapping", "prefill TP", "decode TP")
"""In the reason of a side that nobody tells anything."""

VERBS = {
    Do.LOSE: "is lost",
    Do.DOUBLE: "comes twice",
    Do.LATE: "is overtaken by others",
    Do.CUT: "is cut in half",
    Do.GARBLE: "is random bytes",
    Do.VERSION: "is of another version",
    Do.EPOCH: "is of another epoch",
    Do.INCARNATION: "is from another process",
    Do.REFUSE: "fails",
    Do.DOUBT: "fails, and lands later",
    Do.RAISE: "raises",
    Do.SLOW: f"takes {SLOW_SECONDS:g} s",
    Do.HOLD: f"hangs for {HUNG_SECONDS:g} s",
}
DAMAGE = (Do.CUT, Do.GARBLE, Do.VERSION, Do.EPOCH, Do.INCARNATION)

SENDERS = {
    "Bind": On.DECODE,
    "Ack": On.DECODE,
    "Finish": On.DECODE,
    "Ready": On.PREFILL,
}
"""Kinds of messages that each request needs, and the side that sends them."""
ENDING = {
    "Abort": On.DECODE,
    "Failed": On.PREFILL,
    "Drained": On.PREFILL,
}
"""Kinds with which one that is given up ends."""


def failures() -> Iterator[Case]:
    """All of them."""
    yield from _messages(P2D1)
    yield from _first_generations(P2D1)
    yield from _endings(P2D1)
    yield from _registrations(P2D1)
    for mode in StateMode:
        yield from _writes(with_mode(P2D1, mode), all_of_them=mode is StateMode.PREPUSH)
    yield from _merges(P2D1)
    yield from _reads(with_mode(P2D1, StateMode.PULL))
    for topology in (P1D2, P2D3, P3D2):
        yield from _messages(topology, (Do.LOSE, Do.LATE), ("Ready", "Ack"))
        yield _engine(topology, At.WRITE, Who(On.PREFILL, topology.prefill_tp - 1), Rule(At.WRITE, Do.DOUBT, skip=3))


def _messages(
    topology: Topology, deeds: Sequence[Do] = (Do.LOSE, Do.DOUBLE, Do.LATE, *DAMAGE), kinds: Sequence[str] = ()
) -> Iterator[Case]:
    """To or from the last source."""
    for kind, sender in SENDERS.items():
        if kinds and kind not in kinds:
            continue
        who = Who(sender, (topology.prefill_tp if sender is On.PREFILL else topology.decode_tp) - 1)
        for do in deeds:
            rule = Rule(At.POST, do, kind=kind, seconds=LATE_SECONDS)
            if do not in DAMAGE or kind == "Ready":
                yield _message(
                    topology, kind, f"{kind} {VERBS[do]}", who, rule, then=REPEATED if do is Do.LOSE else ARRIVES
                )
            if do in DAMAGE and (kind, do) != ("Bind", Do.EPOCH):
                # Whoever says that a room is used again is believed: only this process can.
                fault = f"{kind} {VERBS[do]}, and comes as well"
                yield _message(topology, kind, fault, who, replace(rule, also=True), then=ARRIVES)


def _message(topology: Topology, kind: str, fault: str, who: Who, rule: Rule, *, then: str) -> Case:
    return Case(
        fault,
        f"{kind} under way",
        topology,
        then,
        BOTH,
        rules=lambda room: [(who, replace(rule, room=room))],
        within=STALL_SECONDS + GRACE_SECONDS,
    )


def _first_generations(topology: Topology) -> Iterator[Case]:
    speaker = Who(On.PREFILL, 0)
    for do, also in ((Do.LOSE, False), (Do.DOUBLE, False), (Do.LATE, False), (Do.EPOCH, True), (Do.INCARNATION, True)):
        rule = Rule(At.CONTROL, do, seconds=LATE_SECONDS, also=also)
        yield Case(
            f"FirstGeneration {VERBS[do]}{', and comes as well' if also else ''}",
            "FirstGeneration under way",
            topology,
            ARRIVES,
            BOTH,
            rules=lambda room, rule=rule: [(speaker, replace(rule, room=room))],  # type: ignore[misc]
            within=2 * STALL_SECONDS + GRACE_SECONDS,
        )


def _endings(topology: Topology) -> Iterator[Case]:
    """A client goes away after two chunks, and what tells so is met."""
    for kind, sender in ENDING.items():
        side = On.PREFILL if kind == "Failed" else On.DECODE
        # All ranks: one that hears the end from decode before SGLang tells it sends nothing of the kind.
        who = Who(sender)
        for do in (Do.LOSE, Do.DOUBLE, Do.LATE, Do.GARBLE, Do.VERSION, Do.EPOCH, Do.INCARNATION):
            rule = Rule(At.POST, do, kind=kind, seconds=LATE_SECONDS)
            yield Case(
                f"{kind} {VERBS[do]}",
                f"{side.value} gives up",
                topology,
                f"both sides fail within {STALL_SECONDS:g} s",
                NONE,
                dict.fromkeys(On, (*STILL, "gave the request up", *ABORTED)),
                lambda room, who=who, rule=rule: [(who, replace(rule, room=room))],  # type: ignore[misc]
                prompt=replace(PROMPT, abort=Abort(side, chunks=2)),
                within=2 * STALL_SECONDS + GRACE_SECONDS,
            )


def _registrations(topology: Topology) -> Iterator[Case]:
    """The first request of a decode process that has just been started."""
    for do in (Do.LOSE, Do.DOUBLE, Do.LATE, Do.GARBLE, Do.VERSION, Do.INCARNATION):
        harmless = do in {Do.DOUBLE, Do.LATE}
        rule = Rule(At.POST, do, kind="Register", seconds=LATE_SECONDS)
        yield Case(
            f"Register {VERBS[do]}",
            "first request of a decode process",
            topology,
            ARRIVES if harmless else REPEATED,
            BOTH,
            rules=lambda room, rule=rule: [(Who(On.DECODE, 0), rule)],  # type: ignore[misc]
            others=(STRANGER,),
            within=STALL_SECONDS + GRACE_SECONDS,
            restarted=On.DECODE,
            prelude=lambda pair: pair.restart_decode(0),
        )


def _writes(topology: Topology, *, all_of_them: bool) -> Iterator[Case]:
    source = Who(On.PREFILL, topology.prefill_tp - 1)
    for do, skip in ((Do.REFUSE, 0), (Do.REFUSE, 3), (Do.DOUBT, 0), (Do.DOUBT, 3)):
        yield _engine(topology, At.WRITE, source, Rule(At.WRITE, do, skip=skip))
    if all_of_them:
        for do, seconds in ((Do.RAISE, 0.0), (Do.SLOW, SLOW_SECONDS), (Do.HOLD, HUNG_SECONDS)):
            yield _engine(topology, At.WRITE, source, Rule(At.WRITE, do, skip=1, seconds=seconds))


def _reads(topology: Topology) -> Iterator[Case]:
    reader = Who(On.DECODE, 0)
    for do, seconds in (
        (Do.REFUSE, 0.0),
        (Do.DOUBT, 0.0),
        (Do.RAISE, 0.0),
        (Do.SLOW, SLOW_SECONDS),
        (Do.HOLD, HUNG_SECONDS),
    ):
        for skip in (0, 2):
            yield _engine(topology, At.READ, reader, Rule(At.READ, do, skip=skip, seconds=seconds))


def _engine(topology: Topology, at: At, who: Who, rule: Rule) -> Case:
    number = {0: "first", 1: "second", 2: "third"}.get(rule.skip, "fourth")
    doubtful = rule.do in {Do.DOUBT, Do.RAISE}
    hangs, harmless = rule.do is Do.HOLD, rule.do is Do.SLOW
    if harmless:
        expectation = ARRIVES
    elif hangs:
        # One thread writes all that goes from one rank to another; a call that hangs holds it.
        expectation = "what goes between the same two ranks fails; units come home when the call returns"
    else:
        expectation = f"both sides fail at once and name the rank{'; units stay apart' * doubtful}"
    return Case(
        f"the {number} {at} {VERBS[rule.do]}",
        "mid-push" if at is At.WRITE else "while decode reads",
        topology,
        expectation,
        BOTH if harmless else NONE,
        dict.fromkeys(On, (f"could not {at}", f"this {at}", *(STILL if hangs else ()))),
        lambda room: [(who, replace(rule, room=room))],
        others=(STRANGER,) if hangs else (NEIGHBOUR, STRANGER),
        restart=On.PREFILL if doubtful else None,
        quarantined=doubtful,
        within=2 * STALL_SECONDS + GRACE_SECONDS,
    )


def _merges(topology: Topology) -> Iterator[Case]:
    target = Who(On.DECODE, 0)
    for do, skip in ((Do.RAISE, 0), (Do.RAISE, 3), (Do.HOLD, 0), (Do.HOLD, 3)):
        rule = Rule(At.MERGE, do, skip=skip, seconds=SLOW_SECONDS)
        number = "first" if not skip else "fourth"
        yield Case(
            f"the {number} merge {'raises' if do is Do.RAISE else VERBS[Do.SLOW]}",
            "mid-merge",
            topology,
            ARRIVES if do is Do.HOLD else "both sides fail at once and say that the merge failed",
            BOTH if do is Do.HOLD else NONE,
            dict.fromkeys(On, ("merge failed", "merge of linear state failed")),
            lambda room, rule=rule: [(target, replace(rule, room=room))],  # type: ignore[misc]
        )
