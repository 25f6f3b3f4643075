"""When a process is taken for dead: it has refused twice, some seconds apart, and nothing was heard of it meanwhile."""

import socket
from dataclasses import replace

import pytest

from sglang_hetero.backend.doubts import APART_SECONDS, DOUBT_SECONDS, MAX_DOUBT_SECONDS, Doubts
from sglang_hetero.transfer.lifetime.repetition import FIRST_SECONDS
from sglang_hetero.transfer.link import Awaited, Endpoint
from tests.unit.backend.prefill_server import HOST, NOBODY, Engine, Side, until

SESSION = "10.0.0.9:1"


class World:
    """Questions are asked when `pass_time` lets so many seconds go by, and are answered before it returns."""

    def __init__(self):
        self.now, self.engine = 1000.0, Engine()
        self.side = Side(waiting={"old": Awaited("prefill TP0/1", "10.0.0.9:7", SESSION, NOBODY, 16)})
        self.doubts = Doubts("decode TP0/1", self.side, self.engine, clock=lambda: self.now)
        self.doubts.resolve(self.side.awaited())

    def pass_time(self, seconds):
        self.now += seconds
        self.doubts.resolve(self.side.awaited())
        until(lambda: not self.doubts._jobs._waiting and not self.doubts._jobs._running)

    def hear(self):
        self.side.waiting["old"] = replace(self.side.waiting["old"], heard=self.now)

    @property
    def asked(self):
        return len(self.engine.asked)


@pytest.fixture
def world():
    made = World()
    yield made
    made.doubts.close()


def test_one_that_refuses_twice_is_gone(world):
    world.engine.ended.add(SESSION)
    world.pass_time(DOUBT_SECONDS)
    assert (world.asked, world.side.ended) == (1, {}), "one refusal proves nothing"
    world.pass_time(APART_SECONDS / 2)
    assert (world.asked, world.side.ended) == (1, {})
    world.pass_time(APART_SECONDS / 2)
    assert world.asked == 2
    assert set(world.side.ended) == {"old"}


def test_one_whose_engine_never_listens_is_asked_where_it_takes_messages(world):
    """Such as MemFabric's."""
    world.engine.sees_ends = False
    with socket.create_server((HOST, 0)) as lives:
        world.side.waiting["old"] = replace(world.side.waiting["old"], endpoint=Endpoint(*lives.getsockname()))
        for _ in range(3):
            world.pass_time(MAX_DOUBT_SECONDS)
        assert world.side.ended == {}, "also a process that is stopped listens"
    world.pass_time(MAX_DOUBT_SECONDS)
    assert world.side.ended == {}, "one refusal proves nothing"
    world.pass_time(APART_SECONDS)
    assert set(world.side.ended) == {"old"}


def test_one_whose_engine_alone_refuses_is_not_gone(world):
    """A rule of a firewall for the engines' ports."""
    world.engine.ended.add(SESSION)
    with socket.create_server((HOST, 0)) as lives:
        world.side.waiting["old"] = replace(world.side.waiting["old"], endpoint=Endpoint(*lives.getsockname()))
        for _ in range(5):
            world.pass_time(MAX_DOUBT_SECONDS)
    assert (world.asked, world.side.ended) == (5, {})


def test_what_is_heard_meanwhile_shows_that_it_lives(world):
    world.hear()
    world.engine.ended.add(SESSION)
    world.pass_time(DOUBT_SECONDS)
    for _ in range(10):
        world.now += APART_SECONDS / 2
        world.hear()
        world.pass_time(APART_SECONDS / 2)
    assert world.side.ended == {}
    world.pass_time(APART_SECONDS)
    assert set(world.side.ended) == {"old"}, "it was silent for once"


def test_what_is_heard_while_it_refuses_counts(world):
    """Between the question and its answer."""
    world.pass_time(DOUBT_SECONDS - 1)
    peer_gone = world.engine.peer_gone

    def gone(session):
        world.hear()
        return peer_gone(session)

    world.engine.peer_gone = gone
    world.engine.ended.add(SESSION)
    for _ in range(5):
        world.pass_time(MAX_DOUBT_SECONDS)
    assert (world.asked, world.side.ended) == (5, {})


def test_one_that_accepts_again_begins_anew(world):
    world.engine.ended.add(SESSION)
    world.pass_time(DOUBT_SECONDS)
    world.engine.ended.clear()
    world.pass_time(APART_SECONDS)
    world.engine.ended.add(SESSION)
    world.pass_time(MAX_DOUBT_SECONDS)
    assert (world.asked, world.side.ended) == (3, {})
    world.pass_time(APART_SECONDS)
    assert set(world.side.ended) == {"old"}


def test_one_that_nobody_waits_for_any_more_is_not_asked_about(world):
    world.engine.ended.add(SESSION)
    world.pass_time(DOUBT_SECONDS)
    world.side.waiting.clear()
    world.pass_time(APART_SECONDS)
    assert (world.asked, world.side.ended) == (1, {})


def test_what_is_said_again_between_two_questions():
    """To fail is news; then it is said again after FIRST_SECONDS, and after twice that: the second time is between."""
    assert DOUBT_SECONDS < 3 * FIRST_SECONDS < DOUBT_SECONDS + APART_SECONDS
