"""Faults that are no single blow: storms of aborts, too little of something, strangers who send rubbish, used rooms."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import requests
import zmq

from sglang_hetero.backend.bootstrap import ROUTE
from sglang_hetero.transfer import messages
from tests.harness import Abort, Handoff, Leftovers, On, Pair
from tests.harness.flow import Strike
from tests.harness.processes import call_all
from tests.harness.sabotage import At, Do, Rule

from .cases import NEIGHBOUR, PROMPT, Case, End, Scene, Script
from .steps import Ambush, When, Who, holding, reached
from .topologies import BOOTSTRAP_SECONDS, GRACE_SECONDS, P1D2, P2D1, WINDOW_SECONDS, Topology

STORM = 1000
"""Requests that clients give up, all together."""
SQUALL = 200
"""The same on a second topology."""
WAVE = 12
"""Requests at a time."""
SLOTS = 16
RUBBISH = 2000
"""Messages that a stranger sends to each socket."""
RUBBISH_BYTES = 300
"""Of one, at most."""
LINGER_MS = 5000
"""For what a stranger has sent to go out."""
ALL = {On.PREFILL: End.ARRIVES, On.DECODE: End.ARRIVES}
PLENTY = replace(P2D1, slots=SLOTS, servers=1)
SCARCE = replace(P2D1, scarce=True)


def scripts() -> Iterator[Case]:
    """All of them."""
    yield _case(
        f"{STORM} aborts", "anywhere", PLENTY, "others arrive; nothing stays", lambda scene: _storm(scene, STORM)
    )
    yield _case(
        f"{SQUALL} aborts",
        "anywhere",
        replace(P1D2, slots=SLOTS, servers=1),
        "others arrive; nothing stays",
        lambda scene: _storm(scene, SQUALL),
    )
    yield _case(f"{SLOTS + 1} requests on {SLOTS} slots", "at the start", PLENTY, "all arrive", _one_too_many)
    yield _case("staging smaller than demand", "at the start", SCARCE, "all arrive", _too_little_staging)
    yield replace(
        _case(
            "all units are quarantined",
            "a request comes",
            SCARCE,
            f"it fails within {WINDOW_SECONDS:g} s and says so; after a restart of prefill all arrive",
            _no_units,
        ),
        restart=On.PREFILL,
        quarantined=True,
    )
    yield replace(
        _case(
            "prefill is dead",
            "a request comes",
            P2D1,
            f"it fails within {BOOTSTRAP_SECONDS:g} s and names prefill",
            _to_the_dead,
        ),
        restart=On.PREFILL,
    )
    yield _case(
        f"{RUBBISH} random messages to each socket", "while a request is under way", P2D1, "it arrives", _rubbish
    )
    yield _case("a stranger's messages of this request", "mid-push", P2D1, "it arrives", _stranger)
    for on in On:
        yield _case(
            f"a room is used again after an abort on {on.value}", "at once", P2D1, "the second arrives", _again(on)
        )
    yield replace(
        _case(
            "a room is used again after a restart of decode",
            "mid-push",
            P2D1,
            "the second arrives",
            _again_after_restart,
        ),
        restarted=On.DECODE,
    )


def _case(fault: str, step: str, topology: Topology, expectation: str, script: Script) -> Case:
    return Case(fault, step, topology, expectation, ALL, script=script, others=())


def _must_arrive(scene: Scene, handoffs: list[Handoff]) -> None:
    for outcome in scene.hand_over(handoffs).outcomes:
        if not outcome.succeeded:
            scene.wrong.append(f"a request failed: {outcome.reasons}")


def _storm(scene: Scene, aborts: int) -> None:
    """Waves of requests, most of which are given up, on either side, at any time."""
    rng = random.Random(aborts)
    while aborts > 0:
        wave = []
        for _ in range(WAVE):
            chunks = rng.randint(1, 4)
            given_up = Abort(rng.choice(list(On)), rng.randint(0, chunks), rng.randint(0, 3))
            stays = rng.random() < 1 / WAVE
            wave.append(
                Handoff(rng.randint(chunks, 200), chunks, rng.randrange(1 << 20), abort=None if stays else given_up)
            )
        for handoff, outcome in zip(wave, scene.hand_over(wave).outcomes, strict=True):
            aborts -= handoff.abort is not None
            if handoff.abort is None and not outcome.succeeded:
                scene.wrong.append(f"a request that nobody gave up failed: {outcome.reasons}")


def _one_too_many(scene: Scene) -> None:
    """What has arrived keeps its slot here until all is compared; so the last one gets that of one that is given up."""
    full = [Handoff(64 + number, 2, seed=number) for number in range(SLOTS)]
    full[0] = replace(full[0], abort=Abort(On.DECODE, chunks=1))
    last = Handoff(100, 2, seed=SLOTS)
    given_up, *others = scene.hand_over([*full, last]).outcomes
    if given_up.decode:
        scene.wrong.append("nothing was given up")
    scene.wrong += [f"a request failed: {each.reasons}" for each in others if not each.succeeded]


def _too_little_staging(scene: Scene) -> None:
    _must_arrive(scene, [Handoff(100 + number, 2, seed=number) for number in range(6)])


def _no_units(scene: Scene) -> None:
    """Writes fail and may still land until units for no request are left."""
    pair = scene.pair
    pair.prefill[0].call("sabotage", [Rule(At.WRITE, Do.DOUBT, count=1 << 16)])
    for seed in range(2):
        for outcome in scene.hand_over([replace(PROMPT, seed=seed)]).outcomes:
            if outcome.decode or outcome.prefill:
                scene.wrong.append("a request arrived although its writes failed")
    call_all(pair.running, "let_go")
    started = time.monotonic()
    (outcome,) = scene.hand_over([Handoff(100, 1, seed=5)]).outcomes
    scene.seconds = outcome.ended[On.DECODE] - started
    _must_fail(scene, outcome.decode_reasons, ("wait for a writer", "quarantine"), WINDOW_SECONDS)


def _must_fail(scene: Scene, reasons: tuple[str, ...], words: tuple[str, ...], limit: float) -> None:
    if not any(word in reason for word in words for reason in reasons):
        scene.wrong.append(f"decode: no reason has any of {words}: {reasons}")
    else:
        scene.error = reasons[0]
    if scene.seconds is None or scene.seconds > limit + GRACE_SECONDS:
        scene.wrong.append(f"decode: it took {scene.seconds} s, the limit is {limit} s")


def _to_the_dead(scene: Scene) -> None:
    """SGLang's router does not know yet that prefill has died."""
    pair = scene.pair
    pair.kill_prefill(0)
    started = time.monotonic()
    # A strike, so that the Flow reckons with processes that are dead.
    result = pair.handoff_many(
        [PROMPT, replace(NEIGHBOUR, prefill=1)], Leftovers.UNTOUCHED, strikes=[Strike(lambda _: True, lambda _: None)]
    )
    to_the_dead, other = result.outcomes
    scene.seconds = to_the_dead.ended[On.DECODE] - started
    _must_fail(scene, to_the_dead.decode_reasons, ("prefill",), BOOTSTRAP_SECONDS)
    if not other.decode:
        scene.wrong.append(f"a request of another server failed: {other.reasons}")


def _rubbish(scene: Scene) -> None:
    """Whoever can reach the ports sends what is no message: to the ranks, as SGLang's frames, and to the service."""
    pair, rng = scene.pair, random.Random(0)

    def send(_: object) -> None:
        with _context() as context:
            for host, port in [rank.call("endpoint") for rank in pair.ranks]:
                with context.socket(zmq.PUSH) as push:
                    push.connect(f"tcp://{host}:{port}")
                    for _ in range(RUBBISH):
                        push.send_multipart(_frames(rng))
            for address in _control_services(pair):
                with context.socket(zmq.DEALER) as dealer:
                    dealer.connect(f"tcp://{address}")
                    for _ in range(RUBBISH):
                        dealer.send_multipart(_frames(rng))

    result = pair.handoff_many(
        [replace(PROMPT, paused_after=1), NEIGHBOUR],
        Leftovers.UNTOUCHED,
        strikes=[Strike(lambda flow: flow.journeys[0].sent == 1, send)],
    )
    scene.wrong += [f"bytes: {difference}" for difference in result.differences]
    scene.wrong += [f"a request failed: {each.reasons}" for each in result.outcomes if not each.succeeded]


@contextmanager
def _context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    """For the sockets of a stranger; what they have sent goes out before it ends."""
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=LINGER_MS)


def _frames(rng: random.Random) -> list[bytes]:
    """One to ten frames of random bytes, some with the beginning of one of ours."""
    frames = [rng.randbytes(rng.randint(0, RUBBISH_BYTES)) for _ in range(rng.randint(1, 10))]
    if rng.random() < 0.5:
        frames[-1] = messages.MAGIC + bytes([messages.VERSION]) + frames[-1]
    return frames


def _control_services(pair: Pair) -> list[str]:
    found = []
    for group in pair.prefills:
        offer = requests.get(f"http://127.0.0.1:{group.side.bootstrap_port}{ROUTE}", timeout=10).json()
        found.append(f"127.0.0.1:{offer['control_port']}")
    return found


def _stranger(scene: Scene) -> None:
    """Messages that are well formed, of the request's room, and from a process that has no business with it."""
    pair = scene.pair
    room = pair.next_room
    source = Who(On.PREFILL, 1)
    ambush = Ambush(pair, holding(When.PUSH, room, source, Who(On.DECODE, 0)))

    def send(_: object) -> None:
        somebody = {"room": room, "epoch": 1, "incarnation": "a stranger"}
        to_prefill = [
            messages.Finish(**somebody),
            messages.Ack(**somebody, stage=0, upto=1),
            messages.Abort(**somebody, reason="because"),
        ]
        to_decode = [
            messages.Failed(**somebody, source=0, reason="because"),
            messages.Drained(**somebody, source=0),
            messages.Ready(**somebody, source=0, total=1),
        ]
        with _context() as context:
            for rank in pair.ranks:
                host, port = rank.call("endpoint")
                with context.socket(zmq.PUSH) as push:
                    push.connect(f"tcp://{host}:{port}")
                    for message in to_prefill if rank in pair.prefill else to_decode:
                        push.send(messages.encode(message))
        call_all(pair.ranks, "let_go")

    result = pair.handoff_many(
        [PROMPT, NEIGHBOUR], Leftovers.UNTOUCHED, strikes=[Strike(reached(When.PUSH, room, ambush), send)]
    )
    scene.wrong += [f"bytes: {difference}" for difference in result.differences]
    scene.wrong += [f"a request failed: {each.reasons}" for each in result.outcomes if not each.succeeded]


def _again(on: On) -> Script:
    def play(scene: Scene) -> None:
        room = scene.pair.next_room
        scene.hand_over([replace(PROMPT, abort=Abort(on, chunks=2))])
        scene.pair.next_room = room
        _must_arrive(scene, [replace(PROMPT, seed=8)])

    return play


def _again_after_restart(scene: Scene) -> None:
    pair = scene.pair
    room = pair.next_room
    ambush = Ambush(pair, holding(When.PUSH, room, Who(On.PREFILL, 1), Who(On.DECODE, 0)))
    strikes = [
        Strike(reached(When.PUSH, room, ambush), lambda _: pair.kill_decode(0)),
        Strike(lambda _: True, lambda _: pair.restart_decode(0)),
        Strike(lambda _: True, lambda _: call_all(pair.running, "let_go") and None),
    ]
    pair.handoff_many([PROMPT], strikes=strikes)
    after, pair.next_room = pair.next_room, room
    _must_arrive(scene, [replace(PROMPT, seed=8)])
    pair.next_room = after
