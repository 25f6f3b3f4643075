"""docs/versions.md says of an older release what the code and the records say."""

import re
from pathlib import Path

import pytest

from sglang_hetero.doctor import symbols
from sglang_hetero.releases import OLDER

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "versions.md").read_text()
each_older = pytest.mark.parametrize("release", OLDER, ids=lambda release: release.number)


def section(release) -> str:
    return TEXT.partition(f"\n## SGLang {release.number}\n")[2].partition("\n## ")[0]


def short(name: str) -> str:
    """A row's name without its module, whose parts are the lower-case ones."""
    return re.sub(r"^([a-z_0-9]+\.)+", "", name)


def place(name: str, row) -> str:
    if row is None:
        return "none"
    return "another body" if str(row) == name else f"`{row.name}`"


@each_older
def test_the_table_of_an_older_release_is_that_of_the_code(release):
    table = section(release).partition(f"| symbol | in its place in {release.number} | why |\n|---|---|---|\n")[2]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.partition("\n\n")[0].splitlines()]
    assert found == [
        *([f"`{short(name)}`", place(name, one.row), one.why] for name, one in release.instead.items()),
        *([f"`{short(str(one))}`", str(one.value), one.why] for one in release.attributes),
    ]


@each_older
def test_the_number_of_other_differences_is_that_of_the_records(release):
    newest, older = symbols.recorded().symbols, symbols.recorded(release).symbols
    different = {name for name in newest.keys() & older.keys() if newest[name] != older[name]} - release.instead.keys()
    assert f"{len(different)} more symbols" in " ".join(section(release).split())
