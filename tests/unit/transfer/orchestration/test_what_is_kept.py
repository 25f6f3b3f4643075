"""What of a request that has ended stays in memory: a server runs for months, and SGLang switches the cyclic GC off."""

import gc
import weakref
from contextlib import contextmanager

import pytest

from sglang_hetero.transfer.pieces import StateMode

from .models import FOUR
from .world import World


@contextmanager
def no_collector():
    """Only reference counts free something."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", [StateMode.PREPUSH, StateMode.PULL])
@pytest.mark.parametrize("ends_well", [True, False], ids=["well", "badly"])
def test_a_request_that_has_ended_is_freed_at_once(mode, ends_well):
    with no_collector(), World(FOUR, (2, 1), mode=mode) as world:
        request = world.start(1, 22, 2)
        inbox = weakref.ref(world.decode[0].side._current[1])
        if ends_well:
            world.serve(request)
        else:
            world.until(lambda: request.sent == 1)
            world.decode[0].side.fail(1, "the client gave up")
            world.until(lambda: world.failed(request))
            world.end(request)
        world.until(lambda: inbox() is None, what="the end of its books")
        world.check()


def test_the_plan_of_a_prefill_process_that_is_no_more_is_freed():
    """That a request of it has ended, and how, is remembered all the same."""
    with World(FOUR, (2, 1)) as world:
        world.serve(world.start(1, 22, 2))
        side, plan = world.decode[0].side, weakref.ref(world.sets[0].plan)
        world.restart_prefill(1)
        world.serve(world.start(2, 9))
        gc.collect()
        assert plan() is None
        assert len(side._over) == 2
        world.check()
