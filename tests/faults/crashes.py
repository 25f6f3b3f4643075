"""Processes that die, stop for a while or are started again, and clients that go away, at every step of a request."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.harness import On, Pair
from tests.harness.flow import Flow, Strike
from tests.harness.processes import Condition, call_all

from .cases import ABORTED, NEIGHBOUR, PROMPT, STRANGER, Case, End
from .steps import Ambush, Placed, When, Who, holding, reached
from .topologies import BOOTSTRAP_SECONDS, GRACE_SECONDS, P1D2, P2D1, P2D3, P3D2, P4D2, STALL_SECONDS, Topology

LET_GO_SECONDS = 0.3
"""After a strike, until what held the request at its step goes on."""
PAUSE_SECONDS = STALL_SECONDS + 1.5
"""Longer than a transfer may stand still."""
LONG_PAUSE_SECONDS = BOOTSTRAP_SECONDS + 2.0
"""Longer than a handshake may take."""

PREFILL_WORDS = ("prefill TP", "prefill at ")
"""How decode names who has let it down: a rank, or a server by its bootstrap address."""
DECODE_WORDS = ("decode TP",)
UNBOUND = "had ended at prefill TP"
"""What prefill says of a request that it has let go of before it was bound: it does not remember why."""
HANDSHAKE_WORDS = (*DECODE_WORDS, "Bootstrapping")
"""Before prefill knows a decode rank it can only name SGLang's state."""


def crashes() -> Iterator[Case]:
    """All of them."""
    for when in When:
        yield from _killed(P2D1, when)
        yield from _paused(P2D1, when)
        yield from _given_up(P2D1, when)
        yield from _restarted(P2D1, when)
    for topology in (P1D2, P2D3, P3D2, P4D2):
        yield from _killed(topology, When.PUSH)
        yield from _restarted(topology, When.PUSH)
    for topology in (P1D2, P2D3):
        yield from _killed(topology, When.FIRST)
        yield from _paused(topology, When.PUSH)
        yield from _given_up(topology, When.PUSH)
        yield from _given_up(topology, When.LAST)


def _killed(topology: Topology, when: When) -> Iterator[Case]:
    victims: list[tuple[str, Who]] = [("a prefill rank", Who(On.PREFILL, topology.prefill_tp - 1))]
    if topology is P2D1 and when in {When.PUSH, When.LAST, When.FIRST}:
        victims.append(("the prefill rank that speaks for the others", Who(On.PREFILL, 0)))
    victims += [("the whole prefill", Who(On.PREFILL)), ("a decode rank", Who(On.DECODE, topology.decode_tp - 1))]
    for name, victim in victims:
        yield _dies(f"kill -9 of {name}", topology, when, victim, _expectation(when, victim.on), restart=victim.on)


def _paused(topology: Topology, when: When) -> Iterator[Case]:
    victims = [("a prefill rank", Who(On.PREFILL, topology.prefill_tp - 1)), ("decode", Who(On.DECODE))]
    if topology is P2D1 and when in {When.BOOTSTRAP, When.PUSH, When.FINISH}:
        victims.append(("the whole prefill", Who(On.PREFILL)))
    for name, victim in victims:
        seconds = LONG_PAUSE_SECONDS if when is When.BOOTSTRAP and victim.on is On.DECODE else PAUSE_SECONDS
        # What was told before the pause, or is told after it, counts on the side that was paused.
        yield _case(
            f"SIGSTOP of {name} for {seconds:g} s, then SIGCONT",
            topology,
            when,
            victim,
            lambda pair, victim=victim: _pause(pair, victim),  # type: ignore[misc]
            ends={**_healthy_ends(when, victim.on), victim.on: _own_end(when, victim.on)},
            expectation=f"{_expectation(when, victim.on)}; the paused side fails when it goes on",
            resumed=seconds,
        )


def _given_up(topology: Topology, when: When) -> Iterator[Case]:
    for on in On:
        if when is When.FINISH and on is On.DECODE:
            continue  # the request has arrived
        word = f"the client gave the request up ({on.value})"
        ends = {On.PREFILL: End.FAILS, On.DECODE: End.FAILS}
        if when is When.FINISH:
            ends = {On.PREFILL: End.EITHER, On.DECODE: End.ARRIVES}
        yield _case(
            f"the client goes away, {on.value} is told",
            topology,
            when,
            Who(On.PREFILL, topology.prefill_tp - 1),
            lambda pair: None,
            ends=ends,
            expectation=f"both sides fail: '{word}'" if when is not When.FINISH else "decode has it; prefill ends",
            words=dict.fromkeys(On, (word, *ABORTED, *((UNBOUND,) if when is When.BOOTSTRAP else ()))),
            abort=on,
        )


def _restarted(topology: Topology, when: When) -> Iterator[Case]:
    """The server is killed and started again before anybody has run into a timeout."""
    for on in On:
        expectation = f"{_expectation(when, on)}; the new one is accepted at once"
        yield _dies(f"restart of {on.value} at once", topology, when, Who(on), expectation, at_once=on)


def _dies(
    fault: str,
    topology: Topology,
    when: When,
    victim: Who,
    expectation: str,
    *,
    restart: On | None = None,
    at_once: On | None = None,
) -> Case:
    """restart: the server that is started again when all has ended; at_once: before that."""
    return _case(
        fault,
        topology,
        when,
        victim,
        lambda pair: _kill(pair, victim),
        ends={**_healthy_ends(when, victim.on), victim.on: End.DIES},
        expectation=expectation,
        restart=restart,
        at_once=at_once,
    )


def _healthy_ends(when: When, victim: On) -> dict[On, End]:
    """Of the side that nothing is done to: with Finish decode has everything."""
    if victim is On.DECODE:
        return {On.PREFILL: End.FAILS}
    return {On.DECODE: End.ARRIVES if when is When.FINISH else End.FAILS}


def _own_end(when: When, victim: On) -> End:
    if when is When.FINISH:
        return End.ARRIVES
    return End.FAILS


def _expectation(when: When, victim: On) -> str:
    if victim is On.DECODE:
        limit = BOOTSTRAP_SECONDS if when is When.BOOTSTRAP else STALL_SECONDS
        return f"prefill fails within {limit:g} s and names decode"
    if when is When.FINISH:
        return "decode has everything and goes on"
    return f"decode fails within {STALL_SECONDS:g} s and names prefill"


def _words(when: When) -> dict[On, tuple[str, ...]]:
    return {
        On.PREFILL: HANDSHAKE_WORDS if when is When.BOOTSTRAP else DECODE_WORDS,
        On.DECODE: PREFILL_WORDS,
    }


def _case(
    fault: str,
    topology: Topology,
    when: When,
    victim: Who,
    do: Callable[[Pair], None],
    *,
    ends: dict[On, End],
    expectation: str,
    words: dict[On, tuple[str, ...]] | None = None,
    restart: On | None = None,
    resumed: float = 0.0,
    abort: On | None = None,
    at_once: On | None = None,
) -> Case:
    source = victim if victim.on is On.PREFILL and victim.rank is not None else Who(On.PREFILL, topology.prefill_tp - 1)
    target = Who(On.DECODE, topology.decode_tp - 1)
    within = (BOOTSTRAP_SECONDS if when is When.BOOTSTRAP else STALL_SECONDS) + GRACE_SECONDS

    def rules(room: int) -> Sequence[Placed]:
        return holding(when, room, source, target)

    def strikes(pair: Pair, room: int, ambush: Ambush) -> Sequence[Strike]:
        def struck(flow: Flow) -> None:
            do(pair)
            if abort is not None:
                (journey,) = (each for each in flow.journeys if each.room == room)
                flow.abort(journey, abort)

        found = [Strike(reached(when, room, ambush), struck), _let_go(pair)]
        if at_once is not None:
            again = pair.restart_prefill if at_once is On.PREFILL else pair.restart_decode
            found.append(Strike(_always, lambda _: again(0)))
        if resumed:
            found += [Strike(_always, lambda _: _resume(pair), resumed - LET_GO_SECONDS), _let_go(pair, 0.0)]
        return found

    killed = restart or at_once
    others = tuple(each for each in (NEIGHBOUR, STRANGER) if each is STRANGER or (killed is None and not resumed))
    return Case(
        fault,
        str(when),
        topology,
        expectation,
        ends,
        words if words is not None else _words(when),
        rules,
        strikes,
        prompt=replace(PROMPT, paused_after=0) if when is When.BOUND else PROMPT,
        others=others,
        within=within,
        restart=restart,
        restarted=at_once,
        paused=victim.on if resumed else None,
        meets=False,  # the first strike waits for them
    )


def _always(_: Flow) -> bool:
    return True


def _let_go(pair: Pair, seconds: float = LET_GO_SECONDS) -> Strike:
    return Strike(_always, lambda _: call_all(pair.running, "let_go") and None, seconds)


def _kill(pair: Pair, victim: Who) -> None:
    if victim.rank is not None:
        victim.of(pair)[0].kill()
    elif victim.on is On.PREFILL:
        pair.kill_prefill(victim.server)
    else:
        pair.kill_decode(victim.server)


def _pause(pair: Pair, victim: Who) -> None:
    ranks = victim.of(pair)
    if victim.on is On.PREFILL and victim.rank is None:
        ranks.append(pair.bootstraps[victim.server])
    for rank in ranks:
        rank.pause()


def _resume(pair: Pair) -> None:
    for process in [*pair.ranks, *pair.bootstraps]:
        if process.condition is Condition.PAUSED:
            process.resume()
