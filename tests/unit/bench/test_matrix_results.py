"""Results that are kept, what rounds come to, the seed's figures, and the report."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench_serving import matrix, matrix_identity, matrix_report, matrix_run, matrix_seed, matrix_start
from bench_serving.matrix_plan import FULL, SMALL, TOPOLOGIES, Cell
from bench_serving.matrix_results import METRICS, Result, Results, ResultsError, Spread, Verdict, answers, summaries
from bench_serving.matrix_start import Command, Launcher
from sglang_hetero.errors import HeteroError, OptionError
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.options import Options
from sglang_hetero.launcher.stopping import Stopped

FIGURES = {
    "req_per_s": 2.0,
    "tokens_per_s": 600.0,
    "ttft_ms": 100.0,
    "tpot_ms": 10.0,
    "e2e_ms": 170.0,
    "accept_length": 1.8,
}
CELL = Cell("p2_d1", SMALL.shapes[0], 1)


def result(cell: Cell, key: str = "k", reason: str = "", **changes: float) -> Result:
    return Result(key, cell.name, cell.round, None if reason else FIGURES | changes, reason, 60.0, "2026-01-01")


def built(tmp_path: Path, *given: str):
    return matrix.matrix(matrix.parser().parse_args(["--scale", "small", "--out", str(tmp_path), *given]))


def fill(found, **changes: float) -> None:
    for cell in found.plan:
        found.results.add(result(cell, found.key(cell), **changes), cell, found.identity)


def test_results_are_found_again_and_the_last_counts(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    first = Results(path)
    first.add(result(CELL, reason="no output"), CELL, {"model": "tiny"})
    first.add(result(CELL), CELL, {"model": "tiny"})
    again = Results(path)
    assert again.get("k") == result(CELL) and len(again) == 1 and not again.torn
    assert again.took() == {"p2_d1:8x2": [60.0]}
    assert json.loads(path.read_text().splitlines()[0])["identity"] == {"model": "tiny"}


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path):
    path = tmp_path / "results.jsonl"
    found = Results(path)
    found.add(result(CELL, "one"), CELL, {})
    found.add(result(CELL, "two"), CELL, {})
    path.write_text(path.read_text()[:-40])
    again = Results(path)
    assert again.torn == 1 and again.get("one") and again.get("two") is None
    again.add(result(CELL, "three"), CELL, {})
    last = Results(path)
    assert last.get("one") and last.get("three") and len(last) == 2


@pytest.mark.parametrize("line", ["[]", "1", '{"key": "k"}', "nonsense", '{"key": 1, "figures": []}'])
def test_lines_that_are_no_results(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(line + "\n")
    assert len(Results(path)) == 0 and Results(path).torn == 1


def test_a_file_that_cannot_be_read(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ResultsError, match="move it away"):
        Results(path)


def test_rounds_give_medians_and_spread():
    done = [(replace(CELL, round=n), result(CELL, req_per_s=value)) for n, value in ((1, 2.0), (2, 5.0), (3, 2.5))]
    (found,) = summaries(done)
    spread = found.spread("req_per_s")
    assert spread == Spread(2.5, 2.0, 5.0, 3) and spread.percent == pytest.approx(120)
    assert found.spread("req_per_s_per_device").median == pytest.approx(2.5 / 3), "P2/D1 is three devices"
    assert found.spread("ttft_ms") == Spread(100.0, 100.0, 100.0, 3)


def ratio(ours: list[float], others: list[float]):
    """The answer on requests per second, P2/D1 over mixed TP2."""
    done = [
        (Cell(name, CELL.shape, n), result(Cell(name, CELL.shape, n), req_per_s=value))
        for name, values in (("p2_d1", ours), ("mixed_tp2", others))
        for n, value in enumerate(values, 1)
    ]
    (found,) = [each for each in answers(summaries(done), matrix_seed.read()) if each.question.metric == "req_per_s"]
    return found


@pytest.mark.parametrize(
    ("ours", "others", "verdict"),
    [
        ([9.0], [1.0], Verdict.TOO_FEW),
        ([9.0, 9.0], [1.0, 1.0], Verdict.TOO_FEW),
        ([9.0, 9.0, 9.0], [1.0, 1.0], Verdict.TOO_FEW),
        ([1.1, 1.1, 1.1], [1.0, 1.0, 1.0], Verdict.HIGHER),
        # In each round, although the second round of one is slower than the first of the other.
        ([3.0, 1.1, 3.0], [2.0, 1.0, 2.0], Verdict.HIGHER),
        ([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], Verdict.LOWER),
        ([3.0, 3.0, 0.9], [1.0, 1.0, 1.0], Verdict.NONE),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], Verdict.NONE),
    ],
)
def test_nothing_is_claimed_from_few_rounds_or_where_they_disagree(ours, others, verdict):
    assert ratio(ours, others).verdict is verdict


def test_a_ratio_stands_beside_the_seeds():
    found = ratio([2.0], [1.0])
    assert found.ratio.median == 2.0
    assert found.seed == pytest.approx(3.177 / 2.824), "of the shape that ours stands for"


def test_the_seeds_matrix_is_whole_and_agrees_with_itself():
    seed = matrix_seed.read()
    assert seed.keys() == {(name, shape.output, shape.concurrency) for name in TOPOLOGIES for shape in FULL.shapes}
    for (name, output, streams), row in seed.items():
        assert row["npus"] == Cell(name, FULL.shapes[0], 1).devices
        assert all(row[metric] > 0 for metric in METRICS)
        # Rounded to three digits behind the point.
        tokens = FULL.lengths.mean + output
        assert row["tokens_per_s"] == pytest.approx(row["req_per_s"] * tokens, abs=0.00055 * tokens), (
            name,
            output,
            streams,
        )
        for metric, digits in (("req_per_s", 0.001), ("tokens_per_s", 0.1)):
            assert row[f"{metric}_per_device"] == pytest.approx(row[metric] / row["npus"], abs=digits)
        assert row["e2e_ms"] == pytest.approx(row["ttft_ms"] + row["tpot_ms"] * (output - 1), rel=0.001)


def test_what_is_done_is_not_done_again_and_a_failure_is(tmp_path, monkeypatch):
    found = built(tmp_path, "--rounds", "1")
    assert found.todo() == found.plan and len(found.plan) == 10
    ran = []

    def figures(_self, cell):
        ran.append(cell.name)
        if cell.name == "p2_d1:8x2":
            raise HeteroError("decode0 ended")
        if len(ran) == 5:
            raise Stopped
        return dict(FIGURES)

    monkeypatch.setattr(matrix_run.Matrix, "_figures", figures)
    with pytest.raises(Stopped):
        found.run()
    again = built(tmp_path, "--rounds", "1")
    assert [cell.name for cell in again.todo()] == ["p2_d1:8x2", *(cell.name for cell in again.plan[4:])]
    monkeypatch.setattr(matrix_run.Matrix, "_figures", lambda _self, _cell: dict(FIGURES))
    again.run()
    assert not built(tmp_path, "--rounds", "1").todo()
    assert [cell.round for cell in built(tmp_path, "--rounds", "2").todo()] == [2] * 10, "only the new round"
    assert len(built(tmp_path, "--rounds", "1", "--mtp", "2").todo()) == 10, "other settings"


def test_a_run_in_which_everything_fails_ends(tmp_path, monkeypatch):
    def fails(_self, _cell):
        raise HeteroError("no memory")

    monkeypatch.setattr(matrix_run.Matrix, "_figures", fails)
    found = built(tmp_path, "--rounds", "1")
    with pytest.raises(HeteroError, match="3 cells in a row have no result"):
        found.run()
    assert len(found.done()) == 3


def test_failures_that_are_not_in_a_row_do_not_end_it(tmp_path, monkeypatch):
    def figures(_self, cell):
        if cell.topology != "p2_d1":
            return dict(FIGURES)
        raise HeteroError("no memory")

    monkeypatch.setattr(matrix_run.Matrix, "_figures", figures)
    found = built(tmp_path, "--rounds", "2")
    found.run()
    assert len(found.done()) == 20 and len(found.todo()) == 4


@pytest.mark.parametrize(("variable", "value"), [("SGLANG_HETERO_STATE", "pull"), ("SGLANG_HETERO_LAYERWISE", "0")])
def test_options_of_the_transfer_are_part_of_the_key(tmp_path, monkeypatch, variable, value):
    before = built(tmp_path).key(CELL)
    assert built(tmp_path).key(CELL) == before
    assert built(tmp_path, "--port", "31000", "--start-seconds", "9").key(CELL) == before
    monkeypatch.setenv(variable, value)
    assert built(tmp_path).key(CELL) != before


def test_the_code_is_part_of_the_key(tmp_path, monkeypatch):
    before = built(tmp_path).key(CELL)
    monkeypatch.setattr(matrix_identity, "source_digest", lambda: "other")
    assert built(tmp_path).key(CELL) != before


def test_secrets_are_not_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HETERO_TOKEN_FILE", "/run/hush")
    monkeypatch.setenv("SGLANG_HETERO_ETCD_USER", "hush")
    given = ["--prefill-env", "MY_API_KEY=hush"]
    arguments = matrix.parser().parse_args(["--scale", "small", "--out", str(tmp_path), *given])
    text = json.dumps(matrix.matrix(arguments, ("--api-key", "hush", "--admin-api-key=hush")).identity)
    assert "hush" not in text and "--api-key" in text and "SGLANG_HETERO_TOKEN_FILE" in text
    command = Command("sh {topology} --api-key hush --log-level info", "m", tmp_path)
    text = json.dumps(matrix_identity.identity(command, Options(), SMALL))
    assert "hush" not in text and "--log-level info" in text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--topologies", "p2_d"], "unknown topology"),
        (["--topologies", "mixed_tp3"], "which 3 does not divide"),
        (["--model", "nothing"], "nothing"),
        (["--model", "tiny-gqa"], "no MTP layer"),
        (["--only", "p9"], "names no cell"),
        (["--start", "up {topology}"], "needs --tokenizer"),
        (["--start", "up", "--tokenizer", "."], "say with {topology}"),
        (["--start", "up {topology}", "--tokenizer", "/nowhere"], "no folder"),
        (["--tokenizer", "."], "goes with --start"),
        (["--log-dir", "logs"], "--log-dir: the logs of a matrix go to its --out folder"),
        (
            ["--start", "{topology}", "--tokenizer", ".", "--mtp", "2", "--chunk", "64"],
            "--mtp, --chunk: of our launcher",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path, capsys, given, reason):
    assert matrix.main(["--scale", "small", "--out", str(tmp_path), *given]) == 1
    assert reason in capsys.readouterr().err


def test_two_at_the_same_folder(tmp_path, capsys):
    with matrix._alone(tmp_path):
        assert matrix.main(["--scale", "small", "--out", str(tmp_path), "--report"]) == 1
    assert "another matrix writes there" in capsys.readouterr().err
    with matrix._alone(tmp_path), pytest.raises(OptionError), matrix._alone(tmp_path):
        pass


def test_the_report_needs_nothing_beside_it_and_says_what_one_round_is_worth(tmp_path):
    found = built(tmp_path, "--rounds", "1")
    fill(found)
    assert [path.name for path in matrix_report.write(found)] == ["matrix.json", "matrix.csv", "report.html"]
    page = (tmp_path / "report.html").read_text()
    assert "One round: no claims" in page and "Ranks share" in page
    assert "▲" not in re.sub(r"▲ higher in every round,", "", page), "no claim in the table"
    assert set(re.findall(r'(?:src|href)="([^"]{,18})', page)) == {"data:image/svg+xml"}
    assert page.count("<img ") == 6 and "Not complete" not in page
    told = json.loads((tmp_path / "matrix.json").read_text())
    assert len(told["rounds"]) == 10 and {each["verdict"] for each in told["ratios"]} == {Verdict.TOO_FEW}
    assert str(tmp_path) not in page


def test_three_rounds_are_claims(tmp_path):
    found = built(tmp_path, "--rounds", "3")
    for cell in found.plan:
        faster = 3.0 if cell.topology == "p2_d1" else 2.0
        found.results.add(result(cell, found.key(cell), req_per_s=faster), cell, found.identity)
    matrix_report.write(found)
    page = (tmp_path / "report.html").read_text()
    assert "no claims." not in page and "1.50 ▲" in page and "1.00 ≈" in page


def test_failures_are_told_and_markup_is_not_taken_for_ours(tmp_path):
    found = built(tmp_path, "--rounds", "1", "--only", "p2_d1")
    one, other = found.plan
    found.results.add(result(one, found.key(one)), one, found.identity)
    found.results.add(result(other, found.key(other), reason="<script>alert(1)</script>"), other, found.identity)
    matrix_report.write(found)
    page = (tmp_path / "report.html").read_text()
    assert "Not complete:</b> 1 of 2 measurements have a result, 1 failed" in page
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    assert "None yet: no two topologies" in page


def test_a_report_of_failures_only(tmp_path):
    found = built(tmp_path, "--rounds", "1", "--only", "p2_d1:8x2")
    (cell,) = found.plan
    found.results.add(result(cell, found.key(cell), reason="no memory"), cell, found.identity)
    matrix_report.write(found)
    assert "no memory" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "matrix.csv").read_text() == ""


def test_our_launcher_gets_the_cells_topology_and_options(tmp_path, monkeypatch):
    started = []

    class Fleet:
        url = "http://router"
        servers = tuple(
            SimpleNamespace(instance=instance, endpoint=SimpleNamespace(url=f"http://{instance.name}"))
            for instance in topology.parse("p2_d1").instances
        )

        def __init__(self, found, options):
            started.append((found.name, options))

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            started.append("stopped")

        def check(self):
            started.append("checked")

    monkeypatch.setattr(matrix_start, "Fleet", Fleet)
    monkeypatch.setattr(matrix_start, "told_accept_length", {"http://decode0": 1.8}.get)
    launcher, options = Launcher("tiny"), Options(log_dir=tmp_path)
    assert launcher.tokenizer.is_dir()
    with launcher.servers(CELL, options) as servers:
        assert servers.url == "http://router"
        assert servers.accept_length() == 1.8, "of decode: a prefill server and the router do not tell it"
        servers.check()
    assert started == [("p2_d1", options), "checked", "stopped"]
