"""A short recall table on real servers: P2/D1 remembers, and a broken merge shows."""

import pytest

from sglang_hetero.accuracy.stats import wilson
from tests.accuracy.ask import Sheet
from tests.accuracy.plan import Row
from tests.accuracy.record import Records
from tests.accuracy.run import Table
from tests.accuracy.verdict import accept_length, apart

SHEET = Sheet(per_depth=4)
CONTROL, BROKEN, DRAFT = (Row("p2_d1", fault=name) for name in ("control", "conv-kv", "draft"))
LEAST = 0.85
"""Of 20 questions. The undivided server has more than 0.95 of many."""
LIMIT_SECONDS = 900
"""The servers' start on a busy machine, and three times 20 questions."""


@pytest.mark.timeout(LIMIT_SECONDS)
def test_state_that_is_mixed_up_shows_and_whole_state_remembers(tmp_path):
    table = Table([CONTROL, BROKEN, DRAFT], "recall", SHEET, Records(tmp_path / "answers.jsonl"), tmp_path, print)
    table.run()
    whole, broken, draft = (table.record(row) for row in table.rows)
    right = {row: sum(answer.right for answer in row.answers) for row in (whole, broken, draft)}
    asked = len(SHEET.questions())
    assert right[whole] >= LEAST * asked
    assert apart(wilson(right[whole], asked), wilson(right[broken], asked)), f"{right[broken]} of {asked} are right"
    assert [answer.tokens for answer in draft.answers] == [answer.tokens for answer in whole.answers]
    assert accept_length(draft.answers)[0] < accept_length(whole.answers)[0]
