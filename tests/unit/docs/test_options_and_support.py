"""docs/options.md and docs/support.md say what the tables in the code say, no more and no less."""

import re
from pathlib import Path

import pytest

from sglang_hetero.backend import options, support

ROOT = Path(__file__).resolve().parents[3]
READERS = ("sglang_hetero", "scripts", "docs", "bench_serving", "tests/serving", "tests/harness")
"""Not the unit tests, which name variables that do not exist."""


def rows(document: str, header: str) -> list[list[str]]:
    """Cells of the table under that header line, code marks removed."""
    text = (ROOT / "docs" / document).read_text()
    body = text[text.index(header) :].splitlines()[2:]
    table = body[: next((i for i, line in enumerate(body) if not line.startswith("|")), len(body))]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table]


def test_options():
    found = rows("options.md", "| variable | values |")
    assert found == [[o.name, o.values, o.default, o.reader.value, o.what] for o in options.OPTIONS]


def test_variables_that_are_no_options():
    assert rows("options.md", "| variable | described in |") == [list(item) for item in options.ELSEWHERE.items()]


@pytest.mark.parametrize(("name", "document"), options.ELSEWHERE.items())
def test_other_variables_are_described_where_the_table_says(name, document):
    assert name in (ROOT / document).read_text()


def test_no_variable_with_our_prefix_is_unknown():
    """A name that some part of the tree reads, and the table lacks, would stop a server."""
    known = options.NAMES | options.ELSEWHERE.keys()
    named = set()
    for folder in READERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh"):
                named |= set(re.findall(r"\bSGLANG_HETERO(?:_[A-Z]+)*\b", path.read_text()))
    assert named <= known, named - known


def test_features():
    found = rows("support.md", "| feature | side |")
    sides = {f.name: " and ".join(sorted(f.sides, reverse=True)) for f in support.FEATURES}
    assert found == [[f.name, sides[f.name], f"{f.source}: {f.setting}", f.why, f.remedy] for f in support.FEATURES]


def test_what_shows_in_the_caches():
    assert rows("support.md", "| feature | found by |") == [[f.name, f.found] for f in support.BY_LAYOUT]
    for feature in support.BY_LAYOUT:
        for module in feature.found.split(", "):
            assert (ROOT / "sglang_hetero" / module).is_file()
