"""Columns of the row with the first token: by name, and without the draft's where only one side drafts."""

import pytest
from msgspec.structs import replace

from sglang_hetero.errors import LayoutMismatch
from sglang_hetero.layout.row import Column
from sglang_hetero.reshard import RowPlan, plan
from tests.reshard_oracle.model import without_draft
from tests.reshard_oracle.pair import MODEL, decode, prefill

TOKEN, ROOM = Column("token", "int32", 64), Column("room", "uint64", 64)
GUESS, STATE = Column("guess", "int64", 128, draft=True), Column("state", "bfloat16", 96, draft=True)
NO_STATE = Column("state", "float32", 64, draft=True)
PLAIN = without_draft(MODEL)


def planned(theirs, ours, models=(MODEL, MODEL)):
    """What decode takes over, with these columns on the two sides."""
    sources = [replace(source, row=theirs) for source in prefill(model=models[0])]
    return plan(sources, replace(decode(model=models[1]), row=ours)).row


@pytest.mark.parametrize("models", [(MODEL, MODEL), (PLAIN, PLAIN)], ids=["both draft", "neither"])
def test_everything_is_taken_over_in_whatever_order(models):
    assert planned((TOKEN, GUESS, STATE, ROOM), (STATE, ROOM, TOKEN, GUESS), models) == RowPlan(
        (64, 128, 96, 64), (2, 3, 0, 1)
    )


@pytest.mark.parametrize("models", [(PLAIN, MODEL), (MODEL, PLAIN)], ids=["decode drafts", "prefill drafts"])
def test_what_belongs_to_the_draft_of_one_side_is_not_taken_over(models):
    theirs, ours = (TOKEN, GUESS, NO_STATE, ROOM), (TOKEN, STATE, ROOM)
    assert planned(theirs, ours, models) == RowPlan((64, 128, 64, 64), (0, None, 3))
    assert planned(ours, theirs, models) == RowPlan((64, 96, 64), (0, None, None, 2))
    with pytest.raises(LayoutMismatch, match=r"column room .*prefill TP0/2 .* has 64 bytes of uint64, decode .* none"):
        planned((TOKEN, ROOM), (TOKEN,), models)


@pytest.mark.parametrize("models", [(MODEL, MODEL), (PLAIN, PLAIN)], ids=["both draft", "neither"])
@pytest.mark.parametrize("ours", [(TOKEN, NO_STATE), (TOKEN,), (TOKEN, STATE, ROOM)], ids=["other", "less", "more"])
def test_rows_that_differ_are_refused(models, ours):
    words = r"of the row with the first token: prefill TP0/2 .*, decode TP0/1 .*; start"
    with pytest.raises(LayoutMismatch, match=words):
        planned((TOKEN, STATE), ours, models)


def test_ranks_that_tell_nothing_of_it():
    """Those of `explain`, say."""
    assert planned((), ()) == RowPlan((), ())
