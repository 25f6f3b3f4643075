"""The figures of a merge: they are right, and a fault in them is nobody's who waits for bytes."""

import pytest

from sglang_hetero.transfer.pieces import DestinationSide, StateMode
from tests.reshard_oracle.rank import Format, Role, Shape

from .models import FOUR, MLA, SIX, TWO
from .world import World

OPAQUE = {role: Format(encoding="packed-rows") for role in (Role.TARGET_LATENT, Role.TARGET_ROPE)}
WORLDS = {
    "cut by head": (FOUR, (2, 1), {}),
    "packed": (FOUR, (1, 2), {}),
    "neither divides": (SIX, (3, 2), {}),
    "replicas": (TWO, (4, 1), {}),
    "stages": (FOUR, (2, 1), {"stages": 2}),
    "whole pages": (MLA, (2, 1), {"shapes": (Shape(4, 40, 12, OPAQUE), Shape(4, 40, 12, OPAQUE))}),
}


@pytest.mark.parametrize("mode", [StateMode.PREPUSH, StateMode.PULL])
@pytest.mark.parametrize("name", WORLDS)
def test_bytes_that_a_rank_merges_are_what_its_sources_write_and_it_reads(name, mode):
    """What engines were asked to move is the oracle, byte for byte."""
    model, tp, options = WORLDS[name]
    with World(model, tp, mode=mode, **options) as world:
        request = world.start(1, 22, 2)  # the last page is not full
        records = [node.side._current[1].perf for node in world.decode]
        world.serve(request)
        merged = sum(sum(record.line()["merged_bytes"].values()) for record in records)
        engines = [node.engine for node in (*world.prefill, *world.decode)]
        assert merged == sum(call.total_bytes for engine in engines for call in engine.script.calls) > 0
        if name != "whole pages":  # a World expects the end of a last page to stay; test_merge_batch.py has these bytes
            world.check()


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
def test_a_fault_of_the_figures_fails_no_request(tp, monkeypatch, caplog):
    def broken(side, piece):
        raise ZeroDivisionError("no pages")

    monkeypatch.setattr(DestinationSide, "nbytes", broken)
    with World(FOUR, tp) as world:
        world.serve(world.start(1, 22, 2))
        world.check()
    assert "room 1: the figures of a merge" in caplog.text


def test_figures_do_not_go_through_the_plan_for_every_piece(monkeypatch):
    """They are taken on SGLang's scheduler thread, too."""
    with World(FOUR, (2, 1)) as world:
        (known,) = world.sets
        (program,) = known.programs_of(StateMode.PREPUSH)
        pieces = program.chunk(0, 6, 22, last=True)

        def touched(*_):
            raise AssertionError("the plan's shares")

        monkeypatch.setattr(type(known.sides[0]), "parts", touched)
        assert all(known.destination.nbytes(piece) > 0 for piece in pieces)
