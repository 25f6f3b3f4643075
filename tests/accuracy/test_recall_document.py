"""docs/accuracy_topologies.md stands beside the results that its table is made of."""

from sglang_hetero.models import specs

from . import __main__ as command
from . import document, summary
from .faults import faults
from .plan import rows


def test_the_document_has_the_results_beside_it_and_every_row():
    found = summary.read(document.RESULTS)
    assert document.table(found) in document.DOCUMENT.read_text(), (
        "python -m tests.accuracy --write-docs makes the table"
    )
    assert [each.row for each in found.figures] == rows()
    known = faults(specs.get(command.MODEL))
    assert all(not each.row.fault or each.says == known[each.row.fault].says for each in found.figures)
    assert document.PICTURE.name in document.DOCUMENT.read_text() and document.PICTURE.exists()
