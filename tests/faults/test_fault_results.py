"""Results: what they come to, how they are written and read, and that the document has every fault and no other."""

from pathlib import Path

import pytest

from . import document, matrix
from .__main__ import everything
from .result import FaultResult, Kind, Recorder, Verdict, complaints, name, read, read_line, summary

RIGHT = FaultResult("a fault", "mid-push", "P2D1", Kind.HARNESS, "it fails", seconds=1.5, error="because")


@pytest.mark.parametrize(
    ("result", "verdict", "counted"),
    [
        (RIGHT, Verdict.RIGHT, "1 faults, 0 wrong, 0 leaked, 0 hung"),
        (RIGHT.but(wrong=("a byte",)), Verdict.WRONG, "1 faults, 1 wrong, 0 leaked, 0 hung"),
        (RIGHT.but(leaked=("a page",)), Verdict.LEAKED, "1 faults, 0 wrong, 1 leaked, 0 hung"),
        (RIGHT.but(hung="room 3"), Verdict.HUNG, "1 faults, 0 wrong, 0 leaked, 1 hung"),
        (RIGHT.but(wrong=("a byte",), leaked=("a page",)), Verdict.WRONG, "1 faults, 1 wrong, 1 leaked, 0 hung"),
        (RIGHT.but(skipped="no privilege"), Verdict.SKIPPED, "0 faults, 0 wrong, 0 leaked, 0 hung"),
    ],
    ids=["right", "wrong", "leaked", "hung", "wrong-and-leaked", "skipped"],
)
def test_what_a_result_comes_to(result: FaultResult, verdict: Verdict, counted: str) -> None:
    assert result.verdict is verdict
    assert summary([result]) == counted
    assert bool(list(complaints(result))) is (verdict is not Verdict.RIGHT)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "faults.jsonl"
    recorder = Recorder(path)
    second = RIGHT.but(fault="another", wrong=("a|b", "c\nd"))
    recorder.add(RIGHT)
    recorder.add(second)
    assert read(path) == [RIGHT, second]
    # The next run tries one of them again.
    again = second.but(wrong=())
    Recorder(path).add(again)
    assert read(path) == [RIGHT, again]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"fault": 1, "more": 2}', RIGHT.line().replace("harness", "nowhere")]
)
def test_a_line_that_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_line(text)


def test_no_two_faults_have_one_name() -> None:
    names = [each for each, _ in everything()]
    assert len(set(names)) == len(names)


def test_every_kind_of_fault_is_tried_at_every_step() -> None:
    """The steps of a request at the first topology: processes die, stop, are started again, and clients go away."""
    steps = {case.step for case in matrix.cases() if case.fault.startswith("kill -9 of a prefill rank")}
    assert len(steps) == 7
    for fault in (
        "kill -9 of a decode rank",
        "kill -9 of the whole prefill",
        "restart of decode",
        "restart of prefill",
    ):
        assert {case.step for case in matrix.cases() if case.fault.startswith(fault)} == steps, fault


def test_the_table_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    path.write_text(f"before\n{document.BEGIN}\nold\n{document.END}\nafter\n")
    odd = RIGHT.but(fault="a | b", wrong=("x",))
    document.write([RIGHT, odd, RIGHT.but(kind=Kind.SERVER, step="later", skipped="no servers")], path)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert document.rows(text) == [
        ("a fault", "mid-push", "P2D1"),
        ("a | b", "mid-push", "P2D1"),
        ("a fault", "later", "P2D1"),
    ]
    assert "WRONG" in text and "skipped: no servers" in text


def test_the_document_has_every_fault_and_no_other() -> None:
    found = [name(*row) for row in document.rows(document.DOCUMENT.read_text())]
    assert found == [each for each, _ in everything()], "python -m tests.faults --write-docs makes the table"
