"""The bounds in docs/security.md are those of the source."""

import importlib
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "security.md").read_text()
ROWS = re.findall(r"^\| .* \| (\d+)(?: bytes| s)? \| `([\w.]+)\.([A-Z_]+)` \|$", TEXT, flags=re.MULTILINE)


def test_the_table_is_read():
    table = TEXT.split("## What is bounded")[1].split("\n\n")[1].splitlines()[2:]
    assert len(ROWS) == sum("STAGING_MB" not in row for row in table) > 20


@pytest.mark.parametrize(("number", "module", "name"), ROWS, ids=[f"{module}.{name}" for _, module, name in ROWS])
def test_a_bound_is_what_the_source_says(number, module, name):
    assert getattr(importlib.import_module(f"sglang_hetero.{module}"), name) == int(number)


def test_the_files_that_are_named_exist():
    root = Path(__file__).resolve().parents[3]
    for found in re.findall(r"tests/[\w/]+\.py", TEXT):
        assert (root / found).is_file(), found
