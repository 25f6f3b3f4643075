"""docs/state.md names every field, figure and gauge that there is."""

import re
from pathlib import Path

import msgspec

from sglang_hetero.backend.figures import FIGURES
from sglang_hetero.backend.metrics import GAUGES
from sglang_hetero.state.report import Control, Discovery, Report, State

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "state.md").read_text()
SHORT = {"pp_rank", "pp_size", "dp_rank", "dp_size", "beat"}
"""The document has `pp_...` and `dp_...` for these; the beat is only for the reader's arithmetic."""


def test_every_field_is_there():
    fields = {field.name for kind in (Report, State, Control, Discovery) for field in msgspec.structs.fields(kind)}
    assert [name for name in sorted(fields - SHORT) if f"`{name}`" not in TEXT] == []


def test_every_figure_of_sglangs_is_there():
    named = [name for name in FIGURES if not name.endswith("_free")]
    assert [name for name in named if f"`{name}`" not in TEXT] == []


def test_every_gauge_is_there_as_the_table_says():
    assert dict(re.findall(r"^\| `sglang_hetero:(\w+)` \| (.*) \|$", TEXT, re.M)) == GAUGES
