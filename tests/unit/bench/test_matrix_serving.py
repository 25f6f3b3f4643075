"""The whole way of a matrix, with SGLang's own client and a server that only looks like SGLang."""

import csv
import json
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest

from bench_serving import matrix
from bench_serving.matrix_plan import SMALL
from sglang_hetero import models

FAKE = Path(__file__).with_name("fake_sglang.py")


def arguments(tmp_path: Path, modes: dict[str, str]) -> list[str]:
    """Of a matrix with a topology for each mode, of the lightest shape."""
    cases = tmp_path / "modes"
    cases.mkdir(exist_ok=True)
    for name, mode in modes.items():
        (cases / name).write_text(f'exec "{sys.executable}" "{FAKE}" {mode} "{tmp_path}/{name}.log"\n')
    command = shlex.join(["sh", f"{cases}/{{topology}}"])
    return [
        *("--scale", "small", "--only", "*:8x2", "--rounds", "1", "--out", str(tmp_path / "out")),
        *("--topologies", ",".join(modes), "--start", command, "--model", "fake"),
        *("--tokenizer", str(models.path("tiny"))),
    ]


@pytest.fixture(autouse=True)
def _signals():
    """The command takes over the signals of its process, which is pytest's here."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def ours() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.is_running()]


def test_cells_are_measured_checked_and_not_measured_again(tmp_path, capfd):
    given = arguments(tmp_path, {"mixed_tp1": "honest", "p1_d1": "silent"})
    before = ours()
    assert matrix.main(given) == 1, "one of the two has no result"
    said = capfd.readouterr().err
    assert "[1/2] mixed_tp1-8x2-round1: begins" in said and "requests/s" in said
    assert "about" in said and "left for 1" in said
    assert "[2/2] p1_d1-8x2-round1: NO RESULT" in said and "warm-up: no output at all in 4 of 4 requests" in said
    assert "one request alone fails, too" in said and "the transfer failed" in said
    assert ours() == before, "nothing is left running"

    requests = [json.loads(line) for line in (tmp_path / "mixed_tp1.log").read_text().splitlines()]
    warm_ups, measured = requests[:4], requests[4:]
    assert len(measured) == SMALL.lengths.count
    assert sum(each["prompt"] for each in measured) == SMALL.lengths.total
    assert max(each["prompt"] for each in measured) == max(each["prompt"] for each in warm_ups) == SMALL.lengths.most
    assert all(each["asked"] == 8 and each["ignores"] is True for each in requests)
    assert max(each["running"] for each in requests) == 2, "the concurrency of the shape"

    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["cell"] for line in lines] == ["mixed_tp1:8x2", "p1_d1:8x2"]
    figures = lines[0]["figures"]
    assert figures["accept_length"] == 2.5
    tokens = figures["tokens_per_s"] / figures["req_per_s"]
    assert tokens == pytest.approx(SMALL.lengths.total / SMALL.lengths.count + 8)
    assert lines[1]["figures"] is None and lines[1]["identity"]["versions"]["sglang"]

    page = (tmp_path / "out" / "report.html").read_text()
    assert "One round" in page and "no claims" in page and "no output at all in 4 of 4 requests" in page
    with open(tmp_path / "out" / "matrix.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["topology"] == "mixed_tp1" and float(row["req_per_s"]) == pytest.approx(figures["req_per_s"], abs=1e-4)

    # Again: what is done stays, and is not started.
    (tmp_path / "modes" / "mixed_tp1").write_text("exit 1\n")
    assert matrix.main([*given, "--list"]) == 0
    listed = capfd.readouterr().out
    assert "1 of 2 done" in listed and "failed, to be tried again: warm-up: no output at all" in listed
    assert matrix.main([*given, "--topologies", "mixed_tp1"]) == 0
    assert "1 cells, 1 done before" in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("short", "warm-up: not exactly 8 output tokens in 4 of 4 requests: 0: 7"),
        ("broken", "every request failed; one request alone fails, too"),
        ("longer", "the server counted other prompt lengths"),
        ("dies", "servers ended with exit code 3"),
    ],
)
def test_a_server_that_does_not_hold_it_has_no_result(tmp_path, capfd, mode, reason):
    assert matrix.main(arguments(tmp_path, {"mixed_tp1": mode})) == 1
    assert reason in capfd.readouterr().err
    (line,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["figures"] is None


def test_a_command_that_starts_nothing(tmp_path, capfd):
    given = arguments(tmp_path, {"mixed_tp1": "honest"})
    (tmp_path / "modes" / "mixed_tp1").write_text("echo no NPU; exit 7\n")
    assert matrix.main(given) == 1
    said = capfd.readouterr().err
    assert "servers ended with exit code 7" in said and "no NPU" in said
    assert not (tmp_path / "mixed_tp1.log").exists()
