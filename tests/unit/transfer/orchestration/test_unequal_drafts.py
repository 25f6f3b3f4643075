"""Only one side drafts: what nobody sends is empty before anybody reads it; where it cannot be, the request fails."""

import threading
from contextlib import contextmanager

import pytest

from sglang_hetero.errors import MergeError, TransferRefused
from sglang_hetero.layout import Role
from sglang_hetero.transfer import decode
from sglang_hetero.transfer.pieces import StateMode
from tests.reshard_oracle.model import without_draft

from .models import FOUR
from .world import World

PLAIN = without_draft(FOUR)
TOKENS = 22


@pytest.mark.parametrize("mode", list(StateMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_decode_alone_drafts(tp, mode):
    """The pages of a request are emptied, the end of the last one too, and no others; also when they are used again."""
    with World(PLAIN, tp, mode=mode, decode_model=FOUR, verify=True) as world:
        assert {known.plan.missing for known in world.sets} == {frozenset({Role.DRAFT_KEY, Role.DRAFT_VALUE})}
        first, second = world.start(1, TOKENS, 2, 3), world.start(2, 9, seed=5)
        world.serve(first, second)
        world.check()


@pytest.mark.parametrize("mode", list(StateMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_prefill_alone_drafts(tp, mode):
    with World(FOUR, tp, mode=mode, decode_model=PLAIN, verify=True) as world:
        world.serve(world.start(1, TOKENS, 2, 3), world.start(2, 9, seed=5))
        world.check()


def test_pages_that_cannot_be_emptied_fail_the_request_and_nothing_else(monkeypatch):
    with World(PLAIN, (2, 2), decode_model=FOUR) as world:
        whole = world.sets[1].assembler.begin_empty

        def refused(pages):
            whole(pages[:1])
            raise MergeError("no more memory")

        monkeypatch.setattr(world.sets[1].assembler, "begin_empty", refused)
        request = world.start(1, TOKENS, 2, 3)
        # The other rank learns of it as it does in SGLang, where all ranks look at the worst of their states.
        name = world.decode[1].name
        world.until(lambda: name in request.reasons, send=False)
        assert request.reasons[name].endswith("its draft caches cannot be emptied: MergeError: no more memory")
        world.decode[0].side.fail(1, "another rank has failed it")
        world.until(lambda: world.failed(request), send=False)
        world.end(request)
        monkeypatch.undo()
        world.serve(world.start(2, TOKENS, 2, 3))
        world.check()


def test_a_request_that_is_refused_empties_nothing(monkeypatch):
    """Nobody would wait for it, and SGLang gives its pages to somebody else."""
    with World(PLAIN, (2, 2), decode_model=FOUR) as world:
        world.serve(world.start(1, TOKENS, 2, 3))
        side, emptied = world.decode[0].side, []
        monkeypatch.setattr(world.sets[0].assembler, "begin_empty", lambda pages: emptied.append(list(pages)))
        side.open(5, world.sets[0], [1, 2], 1)
        with pytest.raises(TransferRefused):
            side.open(5, world.sets[0], [3, 4], 2)
        assert emptied == [[1, 2]]
        side.fail(5, "the test ends")


class SlowLane:
    """A device that has not come yet to what was enqueued for it. calls: what was asked of its stream, in order."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.calls: list[str] = []

    @contextmanager
    def active(self):
        self.calls.append("on the stream")
        try:
            yield
        finally:
            self.calls.append("off the stream")

    def done(self):
        self.calls.append("event")
        return self.arrived.is_set


@pytest.mark.parametrize("fails", [False, True], ids=["emptied", "fails in the middle"])
def test_pages_are_emptied_on_the_stream_of_the_forward_passes_and_waited_for(monkeypatch, fails):
    """The draft's forward passes read them there. What was enqueued before an error still empties them."""
    with World(PLAIN, (1, 1), decode_model=FOUR) as world:
        side, lane = world.decode[0].side, SlowLane()
        whole = world.sets[0].assembler.begin_empty

        def begin_empty(pages):
            lane.calls.append("emptied")
            whole(pages)
            if fails:
                raise MergeError("no more memory")

        monkeypatch.setattr(side, "_forward", lane)
        monkeypatch.setattr(world.sets[0].assembler, "begin_empty", begin_empty)
        world.start(1, TOKENS)
        assert lane.calls == ["on the stream", "emptied", "off the stream", "event"]
        assert not side._current[1].emptied()
        side.fail(1, "the test ends")
        lane.arrived.set()
        settled = threading.Thread(target=side.settle, args=(1,), daemon=True)
        settled.start()
        settled.join(10.0)
        assert not settled.is_alive()


@pytest.mark.parametrize("long", [False, True], ids=["in time", "long"])
def test_pages_are_not_given_away_before_the_device_has_emptied_them(monkeypatch, caplog, long):
    """Another request would find zeros over what it has begun to write. Whoever waits long for it says so, once."""
    monkeypatch.setattr(decode, "FENCE_WARNING_SECONDS", 0.01 if long else 60.0)
    with World(PLAIN, (1, 1), decode_model=FOUR) as world:
        lane = SlowLane()
        monkeypatch.setattr(world.decode[0].side, "_forward", lane)
        request = world.start(1, TOKENS)
        world.decode[0].side.fail(1, "the client gave up")
        settled = threading.Thread(target=world.decode[0].side.settle, args=(1,), daemon=True)
        settled.start()
        settled.join(0.2)
        assert settled.is_alive()
        said = [one.getMessage() for one in caplog.records if "for its device" in one.getMessage()]
        assert len(said) == long
        assert not long or (
            said[0].startswith(f"room 1: {world.decode[0].side.manifest.label} has waited")
            and "empty the pages of its draft caches" in said[0]
        )
        lane.arrived.set()
        settled.join(10.0)
        assert not settled.is_alive()
        monkeypatch.undo()
        world.decode[0].rank.scrub(request.places[0])
        world.until(lambda: world.prefill[0].side.failure(1) is not None, send=False)
        world.prefill[0].side.release(1)
        del world.requests[1]
        world.check()


def test_it_is_said_in_the_log(caplog):
    with World(PLAIN, (1, 1), decode_model=FOUR):
        pass
    with World(FOUR, (1, 1), decode_model=PLAIN):
        pass
    with World(FOUR, (1, 1)):
        pass
    said = [one.getMessage() for one in caplog.records if "draft model" in one.getMessage()]
    assert len(said) == 2
    assert "has no draft model" in said[0] and "Start prefill with the same speculative decoding" in said[0]
    assert "its draft caches are not sent" in said[1]
