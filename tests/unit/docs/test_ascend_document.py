"""docs/ascend.md: what it says works has a test; what it says is refused, is so with those words, and has a test."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINES = (ROOT / "docs" / "ascend.md").read_text().splitlines()


def rows(header: str) -> list[list[str]]:
    """Cells of the table under that header line, code marks removed."""
    body = LINES[LINES.index(header) + 2 :]
    table = body[: next(i for i, line in enumerate(body) if not line.startswith("|"))]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in table]


WORKS = rows("| case | shown by |")
REFUSED = rows("| case | the message says | said by | shown by |")


def check_test(name: str) -> None:
    path, function = name.split("::")
    defined = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert function in defined, name


@pytest.mark.parametrize(("case", "test"), WORKS)
def test_what_works_has_a_test(case, test):
    check_test(test)


@pytest.mark.parametrize(("case", "words", "module", "test"), REFUSED)
def test_what_is_refused_is_refused_there_with_those_words(case, words, module, test):
    """The words are of one literal, so that they are in the message as a whole."""
    nodes = ast.walk(ast.parse((ROOT / "sglang_hetero" / module).read_text()))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert any(words in text for text in texts), f"{module} says nowhere: {words}"
    check_test(test)


def test_no_row_is_lost():
    assert len(WORKS) > 5
    assert len(REFUSED) > 10
