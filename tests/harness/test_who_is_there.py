"""Prefill servers that do not answer, end, or are started again: what decode does about it, with SGLang's own queues.

All that can happen to a pair is in tests/faults; here is what concerns who is there.
"""

import random
import socket
import time
from collections.abc import Callable

import pytest
import zmq

from . import Handoff, Harness, On, Pair
from .flow import Strike, until
from .processes import call_all
from .product import check, check_all_is_back, geometry
from .sides import LOOPBACK, Request

SHAPE = geometry(64)
SOON = 15.0
"""Seconds for decode to know of an end that could be known at once; SGLang's own limits are 40 s here."""
QUESTION_SECONDS = 5.0
"""How long one question to a bootstrap server waits, ours and SGLang's."""
FAR_AWAY = 1 << 40
"""A room that no pair gives."""


def test_who_never_answers_delays_no_other(harness: Harness) -> None:
    """A bootstrap address that takes connections and says nothing: each question to it waits for 5 s."""
    with socket.create_server((LOOPBACK, 0)) as silent, harness.pair(SHAPE, prefill_tp=2, decode_tp=1) as pair:
        pair.decode[0].call("open", [Request(FAR_AWAY, 10, 0, bootstrap_port=silent.getsockname()[1])])
        result = check(pair, [Handoff(10), Handoff(129, 2, seed=1)])
        assert result.seconds < QUESTION_SECONDS, "the requests waited for somebody else's server"


@pytest.mark.full
def test_who_never_answers_is_named(harness: Harness) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent, harness.pair(SHAPE, prefill_tp=2, decode_tp=1) as pair:
        (decode,) = pair.decode
        address = silent.getsockname()
        decode.call("open", [Request(FAR_AWAY, 10, 0, bootstrap_port=address[1])])

        def failed() -> bool:
            return bool(decode.call("poll", [FAR_AWAY]) == [0])

        until(failed, lambda: "the request that nobody answers has not ended", 30.0)
        reason, _ = decode.call("fail", FAR_AWAY)
        assert f"{LOOPBACK}:{address[1]} does not answer" in reason
        decode.call("release", FAR_AWAY, False)
        check_all_is_back(pair)


@pytest.mark.parametrize("known", [False, True], ids=["never-asked", "heartbeat-missed"])
def test_prefill_that_is_well_hears_of_what_is_given_up_before_it_is_bound(harness: Harness, known: bool) -> None:
    """It would wait for SGLang's bootstrap timeout. Decode gives its request up before it knows the server, or when
    SGLang's heartbeat has missed a server that is only slow."""
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1) as pair:
        (decode,) = pair.decode
        if known:
            check(pair, [Handoff(10)])
        request = Request(FAR_AWAY, 10, 0, pair.prefills[0].side.bootstrap_port)
        call_all(pair.prefill, "open", [request])
        decode.call("open", [request])
        if known:
            until(lambda: decode.call("poll", [FAR_AWAY]) == [2], lambda: "decode does not know its prefill server")
            decode.call("give_up_servers")
        else:
            decode.call("abort", FAR_AWAY)
        assert decode.call("poll", [FAR_AWAY]) == [0]
        reason, _ = decode.call("fail", FAR_AWAY)
        decode.call("release", FAR_AWAY, False)
        cause = "does not answer SGLang's heartbeat" if known else "given up before it began"
        assert cause in reason
        for rank in pair.prefill:
            told = f"{rank.name} was not told"
            until(lambda rank=rank: rank.call("poll", [FAR_AWAY]) == [0], lambda told=told: told, SOON)
            assert cause in rank.call("conclude", FAR_AWAY, True)
        check_all_is_back(pair)
        check(pair, [Handoff(129, 2, seed=1)])


@pytest.mark.full
def test_a_prefill_server_that_ends_and_is_started_again(harness: Harness) -> None:
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1) as pair:
        check(pair, [Handoff(10)])
        began = Strike(lambda flow: all(each.sent for each in flow.journeys), lambda _: pair.kill_prefill(0))
        result = pair.handoff_many([Handoff(250, 4, seed=1, paused_after=1)], strikes=[began])
        (outcome,) = result.outcomes
        assert not outcome.decode
        assert any("has ended" in reason or "started again" in reason for reason in outcome.decode_reasons), outcome
        print(f"known after {outcome.ended[On.DECODE] - began.struck:.1f} s: {outcome.decode_reasons}")
        assert outcome.ended[On.DECODE] - began.struck < SOON
        pair.restart_prefill(0)
        started = time.monotonic()
        check(pair, [Handoff(129, 2, seed=2)])
        print(f"accepted after {time.monotonic() - started:.1f} s")
        assert time.monotonic() - started < SOON
        check_all_is_back(pair)


@pytest.mark.full
@pytest.mark.parametrize(
    ("restart", "tp", "times"),
    [(Pair.restart_prefill, (2, 1), 3), (Pair.restart_decode, (1, 2), 2)],
    ids=[on.value for on in On],
)
def test_a_server_that_is_started_again_at_once(
    harness: Harness, restart: Callable[[Pair, int], None], tp: tuple[int, int], times: int
) -> None:
    """Nobody has asked for anything meanwhile: decode must not send a request to former prefill ranks."""
    with harness.pair(SHAPE, prefill_tp=tp[0], decode_tp=tp[1]) as pair:
        for seed in range(times):
            check(pair, [Handoff(129, 2, seed=seed)])
            restart(pair, 0)
        check(pair, [Handoff(129, 2, seed=times)])
        check_all_is_back(pair)


@pytest.mark.full
def test_damaged_frames_on_the_port_of_a_rank(harness: Harness) -> None:
    """Case 34: whatever comes, both of SGLang's threads that receive live, and a request arrives."""
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=1) as pair, zmq.Context() as context:
        check(pair, [Handoff(10)])
        choice = random.Random(3)
        for host, port in call_all(pair.ranks, "endpoint"):
            with context.socket(zmq.PUSH) as sock:
                sock.set(zmq.LINGER, 10_000)
                sock.connect(f"tcp://{host}:{port}")
                for _ in range(2000):
                    parts = [b"None", b"ABORT", b"7", b"", b"AUX_DATA", b"CHUNK_READY", b"STAGING_REQ", b"WATERMARK"]
                    parts += [choice.randbytes(choice.randrange(40)) for _ in range(4)]
                    sock.send_multipart([choice.choice(parts) for _ in range(choice.randrange(1, 22))])
        check(pair, [Handoff(129, 2, seed=1)])
        assert all(counts["dropped"] for counts in pair.hetero("hetero_counters"))
        check_all_is_back(pair)
