"""What the lines of a stage are worth, which stages run where, and what is written of them."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from sglang_hetero import cli
from sglang_hetero.doctor.lines import Status, fail, ok, skip, warn
from sglang_hetero.validate import command, environment, report, table
from sglang_hetero.validate.stage import Ended, Said, Settings, Stage, chosen, judge, obstacle

STAGE = Stage("one", "nowhere:run", ("a", "b"), 10.0)
WELL = Ended(0)
END = Said(end=True)


def output(*records):
    return b"".join(msgspec.json.encode(one) + b"\n" if isinstance(one, Said) else one for one in records)


def said(name, status=Status.OK, area="one"):
    made = {Status.OK: lambda: ok(area, name, "seen"), Status.FAIL: lambda: fail(area, name, "seen", "remedy")}
    return Said(line=made[status]())


def statuses(lines):
    return {line.name: line.status for line in lines}


def test_lines_that_were_promised_are_taken():
    assert statuses(judge(STAGE, output(said("a"), said("b"), END), WELL)) == {"a": Status.OK, "b": Status.OK}


LIES = {
    "the same line twice": (said("a"), said("a", Status.FAIL), said("b"), END),
    "another stage's line": (said("a"), said("b", area="two"), END),
    "a line that was not promised": (said("a"), said("b"), said("c"), END),
    "no JSON": (said("a"), said("b"), b"pass\n", END),
    "a status that is none": (
        said("a"),
        said("b"),
        b'{"line":{"area":"one","name":"a","status":"great","seen":"x"}}\n',
        END,
    ),
    "a failure without a remedy": (
        said("a"),
        said("b"),
        b'{"line":{"area":"one","name":"a","status":"fail","seen":"x"}}\n',
        END,
    ),
    "a line that says it is of two": (
        said("a"),
        said("b"),
        b'{"line":{"area":"one","name":"a","status":"ok","seen":"x","fast":true}}\n',
        END,
    ),
}


@pytest.mark.parametrize("records", LIES.values(), ids=LIES)
def test_a_stage_that_lies_fails(records):
    lines = judge(STAGE, output(*records), WELL)
    assert statuses(lines).get("record 1") is Status.FAIL


def test_the_first_of_two_lines_stands():
    lines = judge(STAGE, output(said("a", Status.FAIL), said("a"), said("b"), END), WELL)
    assert statuses(lines)["a"] is Status.FAIL


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ended(0, stopped=12.0), "stopped after 12 s"),
        (Ended(-11, words="boom"), "signal 11; its last words: boom"),
        (Ended(3), "exit status 3"),
    ],
)
def test_a_bad_end_fails_even_if_all_was_said(ended, words):
    lines = judge(STAGE, output(said("a"), said("b"), END), ended)
    whole = lines[-1]
    assert (whole.status, words in whole.seen) == (Status.FAIL, True)


CPU = Settings(device="cpu", count=1, folder="/nowhere")
NPU = Settings(device="npu", count=2, folder="/nowhere")


@pytest.mark.parametrize(
    ("one", "settings", "words"),
    [
        (Stage("s", "m:f", (), 1.0, kinds=("npu",)), CPU, "it is for npu"),
        (Stage("s", "m:f", (), 1.0, devices=3), NPU, "needs 3 npu devices, this host has 2"),
        (Stage("s", "m:f", (), 1.0, devices=3), CPU, ""),
        (Stage("s", "m:f", (), 1.0, slow=True), msgspec.structs.replace(CPU, quick=True), "--quick"),
        (Stage("s", "m:f", (), 1.0, slow=True), CPU, ""),
        (Stage("s", "m:f", (), 1.0, servers=True), NPU, "fleet.sh"),
        (Stage("s", "m:f", (), 1.0, servers=True), CPU, ""),
        (Stage("s", "m:f", (), 1.0, servers=True), msgspec.structs.replace(NPU, fleet="/x/fleet.sh"), ""),
    ],
)
def test_why_a_stage_does_not_run(one, settings, words):
    found = obstacle(one, settings)
    assert words in found
    assert bool(words) == bool(found)


def test_every_stage_runs_somewhere_and_can_be_found():
    import importlib

    every = table.stages(matrix=True)
    assert len({one.name for one in every}) == len(every)
    for one in every:
        module, _, name = one.run.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), one.run
        assert one.promises and one.kinds
    names = [one.name for one in every]
    assert names.index("serve-mixed_tp1") < names.index("serve-p2_d1-prepush") < names.index("overlap")


def test_the_document_has_every_stage():
    text = (Path(__file__).parents[3] / "docs" / "validate.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, flags=re.MULTILINE))
    plain = table.stages()
    assert set(rows) == {one.name for one in plain}
    for one in plain:
        assert set(rows[one.name].split(", ")) == (set(one.kinds) if len(one.kinds) < len(command.KINDS) else {"all"})
    for name in {one.name for one in table.stages(matrix=True)} - set(rows):
        assert f"`{name}`" in text
    (limits,) = re.findall(r"time limit \((\d+) minutes; `kernels` (\d+), those\s+with servers (\d+)\)", text)
    seconds = (table.LOOK_SECONDS, table.KERNEL_SECONDS, table.SERVE_SECONDS)
    assert [60 * int(one) for one in limits] == list(seconds)
    assert table.LOOP_SECONDS == table.LOOK_SECONDS


def test_only_some_stages():
    every = table.stages()
    assert [one.name for one in chosen(every, ["loopback-sdma", "kernels"])] == ["kernels", "loopback-sdma"]
    with_needs = [one.name for one in chosen(every, ["overlap"])]
    assert with_needs == ["serve-mixed_tp1", "serve-p2_d1-prepush", "overlap"]
    assert chosen(every, []) == list(every)


def test_a_stage_that_is_none_is_named(capsys):
    assert cli.main(["validate", "--only", "kernel"]) == 1
    line = capsys.readouterr().err
    assert "'kernel': no such stage" in line
    assert "kernels" in line


LINES = [
    ok("a", "x", "seen | so", ms=1.0),
    fail("a", "y", "bad", "do this"),
    skip("b", "z", "why"),
    warn("b", "w", "s", "r"),
]


def test_the_page_has_a_row_for_each_line_and_says_what_to_do():
    page = report.page_of(LINES, {"a": 3.2}, {"device": "1 cpu"})
    assert page.startswith("# sglang-hetero validate: FAIL")
    assert "* **a, y**: do this" in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and "stage" not in line]
    assert len(rows) == len(LINES)
    assert r"seen \| so" in rows[0]


def test_the_json_has_every_line():
    found = json.loads(report.json_of(LINES, {"a": 3.25}, {"device": "1 cpu"}))
    assert (found["ok"], found["counts"]) == (False, {"ok": 1, "warn": 1, "fail": 1, "skip": 1})
    assert [line["name"] for line in found["lines"]] == ["x", "y", "z", "w"]
    assert found["seconds"] == {"a": 3.2}


def test_the_worst_of_several_lines_stands_for_them():
    merged = environment.merged(
        "all", [ok("a", "x", "fine"), warn("a", "y", "so so", "r1"), fail("a", "z", "bad", "r2")]
    )
    assert (merged.status, merged.seen, merged.remedy) == (Status.FAIL, "z: bad", "r2")
    assert environment.merged("all", [ok("a", "x", "fine"), skip("a", "y", "no")]).status is Status.OK


@pytest.mark.parametrize(("status", "code"), [(Status.OK, 0), (Status.FAIL, 1)])
def test_the_exit_status_is_by_failures_alone(status, code, monkeypatch, tmp_path, capsys):
    lines = [skip("one", "b", "why"), warn("one", "w", "seen", "remedy"), said("a", status).line]
    monkeypatch.setattr(command, "run_all", lambda stages, settings, tell: [(STAGE, lines, 1.0)])
    monkeypatch.setattr(command, "raise_on_signals", lambda: None)
    files = {"--json": tmp_path / "deep" / "v.json", "--report": tmp_path / "v.md"}
    options = [word for option, file in files.items() for word in (option, str(file))]
    assert cli.main(["validate", "--device", "cpu", "--folder", str(tmp_path / "f"), *options]) == code
    assert json.loads(files["--json"].read_text())["ok"] == (code == 0)
    assert files["--report"].read_text().startswith("# sglang-hetero validate")
    assert "1 skip" in capsys.readouterr().out


@pytest.mark.parametrize("left", ["serve-mixed_tp1-tokens.json", "serve-p2_d1-prepush/prefill0.log"])
def test_nothing_is_judged_by_what_a_former_run_has_left(tmp_path, monkeypatch, left):
    """A stage whose servers do not start leaves the old logs as they are, and others read them."""
    old = tmp_path / left
    old.parent.mkdir(exist_ok=True)
    old.write_text("[[1]]")
    monkeypatch.setattr(command, "run_all", lambda stages, settings, tell: [])
    monkeypatch.setattr(command, "raise_on_signals", lambda: None)
    assert cli.main(["validate", "--device", "cpu", "--folder", str(tmp_path)]) == 0
    assert not old.exists()
