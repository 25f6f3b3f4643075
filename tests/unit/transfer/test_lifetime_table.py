"""docs/lifetime.md shows what the machines do."""

import re

from tests.model_check import table


def test_the_document_has_the_tables_of_these_machines() -> None:
    made = table.tables()
    assert table.written(made) == table.DOC.read_text(), "run python -m tests.model_check.table --write"
    states = re.findall(r"^\*\*(.+)\*\*$", made, re.MULTILINE)
    assert len(states) == len(set(states)) > 15
    for state in states:
        (text,) = re.findall(rf"^\*\*{state}\*\*$(.*?)(?=^\*\*|\Z)", made, re.MULTILINE | re.DOTALL)
        events = table.SENDING_EVENTS if "sending" in state or "drained" in state else ()
        assert all(event.name in text for event in events)
