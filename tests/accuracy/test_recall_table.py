"""The recall table without servers: rows, injection, records, verdicts, document."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from sglang_hetero.accuracy.stats import Interval
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import topology
from sglang_hetero.layout.axes import Segment, Sharding
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.geometry import HeadAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.manifest import Coordinates, Side
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.merge.assemble import Assembler
from sglang_hetero.models import specs
from sglang_hetero.reshard.plan import plan
from sglang_hetero.transfer import merger, reception

from . import __main__ as command
from . import document, run, summary
from .faults import FOLDER, Injection, MergeFault, counted, faults
from .injected import merge_faults
from .plan import BLIND_SPOTS, BROKEN, UNDIVIDED, Row, fleets, only, rows
from .record import Answer, Records, RowRecord
from .run import NotHit, check_hits
from .verdict import Verdict, apart, compare, evaluate

FAULTS = faults(specs.get("tiny"))
MODEL = ModelGeometry(
    attention=HeadAttention(4, 8, 8),
    attention_layers=(2,),
    linear=LinearAttention(
        tuple(
            Segment(name, heads, width, Sharding.DIVIDED)
            for name, heads, width in (("q", 4, 2), ("k", 4, 2), ("v", 8, 3))
        ),
        conv_kernel=4,
        ssm_heads=8,
        ssm_rows=3,
        ssm_columns=2,
    ),
    linear_layers=(0, 1),
    draft_layers=(0,),
)
Q, K, V = 8, 8, 24
"""Channels of the whole model."""
SLOT, PAGES = 3, np.array([5, 2], np.int64)


class World:
    """One decode rank whose caches are filled with numbers that occur once in each, and the plan to it."""

    def __init__(self, prefill: int, decode: int, rank: int, layout: ConvLayout) -> None:
        options = PoolOptions(
            page_size=4, pages=8, slots=4, conv_layout=layout, kv_dtype="float32", conv_dtype="float32"
        )
        sources = [
            manifest(MODEL, Side.PREFILL, Coordinates(tp_rank=each, tp_size=prefill), options)
            for each in range(prefill)
        ]
        destination = manifest(MODEL, Side.DECODE, Coordinates(tp_rank=rank, tp_size=decode), options)
        made = plan(sources, destination)
        memory = {}
        for component in destination.components:
            for layer in component.layers:
                words = torch.arange(1, component.buffer_span // 4 + 1, dtype=torch.int32)
                memory[component.role, layer] = words.view(torch.uint8)
        self.assembler = Assembler(made, memory)
        source_set = SimpleNamespace(plan=made, assembler=self.assembler)
        self.inbox = SimpleNamespace(source_set=source_set, slot=SLOT, pages=PAGES, room=77)

    def pool(self, role: Role, layer: int) -> np.ndarray:
        """[items, (token,) cut axis, the rest]."""
        return self.assembler._pools[role, layer][0].numpy().copy()

    def everything(self) -> dict[tuple[Role, int], np.ndarray]:
        return {key: self.pool(*key) for key in self.assembler._pools}

    def strike(self, fault: MergeFault, role: str, layer: int) -> int:
        piece = SimpleNamespace(layer=layer, first_page=0, pages=len(PAGES))
        return merge_faults.strike(json.loads(json.dumps(asdict(fault))), self.assembler, self.inbox, piece, role)


@pytest.mark.parametrize("layout", list(ConvLayout))
@pytest.mark.parametrize(("decode", "rank"), [(1, 0), (2, 1)])
def test_segments_are_swapped_in_the_slot_of_the_request_and_nowhere_else(layout, decode, rank):
    world = World(4, decode, rank, layout)
    before = world.everything()
    assert world.strike(FAULTS["conv-kv"], "conv", 1) > 0
    expected = before[Role.CONV, 1]
    q, k, v = np.split(expected[SLOT], [Q // decode, (Q + K) // decode])
    expected[SLOT] = np.concatenate([q, v, k])
    for key, was in before.items():
        assert np.array_equal(world.pool(*key), was), key


def test_blocks_stay_as_the_sources_sent_them():
    """Each source's q, k and v one after another: what a merge that knows no segments would make."""
    world = World(2, 1, 0, ConvLayout.WINDOW_FIRST)
    before = world.everything()
    assert world.strike(FAULTS["conv-sources"], "conv", 0) > 0
    q, k, v = np.split(before[Role.CONV, 0][SLOT], [Q, Q + K])
    halves = [(each[: len(each) // 2], each[len(each) // 2 :]) for each in (q, k, v)]
    before[Role.CONV, 0][SLOT] = np.concatenate([half[source] for source in (0, 1) for half in halves])
    for key, was in before.items():
        assert np.array_equal(world.pool(*key), was), key


@pytest.mark.parametrize(
    ("decode", "rank", "head", "local"), [(1, 0, 0, 0), (1, 0, 5, 5), (2, 0, 0, 0), (2, 1, 0, None), (2, 1, 5, 1)]
)
def test_one_head_of_the_whole_model_is_lost(decode, rank, head, local):
    """local: which one it is at the rank, None if another rank has it."""
    world = World(1, decode, rank, ConvLayout.CHANNELS_FIRST)
    before = world.everything()
    touched = world.strike(replace(FAULTS["ssm-head"], heads=(head,)), "ssm", 0)
    assert touched == (0 if local is None else 3 * 2)
    if local is not None:
        before[Role.SSM, 0][SLOT, local] = 0
    for key, was in before.items():
        assert np.array_equal(world.pool(*key), was), key


def test_the_pages_of_the_draft_are_zeroed():
    world = World(2, 1, 0, ConvLayout.CHANNELS_FIRST)
    before = world.everything()
    for role in ("draft_key", "draft_value"):
        assert world.strike(FAULTS["draft"], role, 0) == 2 * 4 * 4 * 8
        before[Role(role), 0][PAGES] = 0
    for key, was in before.items():
        assert np.array_equal(world.pool(*key), was), key


def test_a_fault_of_one_layer_leaves_the_others_alone():
    world = World(2, 1, 0, ConvLayout.CHANNELS_FIRST)
    (only_layer,) = FAULTS["conv-kv-one"].layers
    assert only_layer == 0
    assert world.strike(FAULTS["conv-kv-one"], "conv", 1) == 0
    assert world.strike(FAULTS["conv-kv-one"], "conv", 0) > 0
    assert world.strike(FAULTS["conv-kv-one"], "ssm", 0) == 0


def test_the_control_changes_nothing():
    world = World(2, 1, 0, ConvLayout.CHANNELS_FIRST)
    before = world.everything()
    touched = [world.strike(FAULTS["control"], role, layer) for role, layer in before]
    assert not any(touched)
    assert all(np.array_equal(world.pool(*key), was) for key, was in before.items())


def test_the_hook_merges_first_and_tells_of_every_request(tmp_path):
    injection = Injection(tmp_path)
    environment = dict(injection.environment)
    injection.choose(FAULTS["ssm-head"])
    world, done = World(2, 1, 0, ConvLayout.CHANNELS_FIRST), []
    merged = merge_faults.breaking(
        lambda *_: done.append(world.pool(Role.SSM, 0)[SLOT, 0].any()),
        Path(environment[merge_faults.ORDER]),
        Path(environment[merge_faults.HITS]),
    )
    state = SimpleNamespace(piece=SimpleNamespace(role=None, layer=0))
    page = SimpleNamespace(piece=SimpleNamespace(role=Role.TARGET_KEY, layer=2, first_page=0, pages=2))
    for room, batch in ((77, [page]), (77, [state]), (78, [page]), (0, [page])):
        world.inbox.room = room
        merged(None, world.assembler, world.inbox, batch)
    assert done == [True, True, False, False]
    assert injection.hit(FAULTS["ssm-head"]) == (2, 1)
    with pytest.raises(ValueError, match="'ssm-head' when 'draft' was asked for"):
        injection.hit(FAULTS["draft"])
    injection.choose(FAULTS["draft"])
    assert injection.hit(FAULTS["draft"]) == (0, 0)


def test_the_hook_goes_where_the_product_looks_for_its_merge(tmp_path, monkeypatch):
    """SGLang would swallow an error of the plugin; and it must not act where there are no caches."""
    monkeypatch.setenv(merge_faults.ORDER, str(tmp_path / "order"))
    monkeypatch.setenv(merge_faults.HITS, str(tmp_path / "hits"))
    monkeypatch.setattr(reception, "merge", merger.merge)
    monkeypatch.delitem(merge_faults.sys.modules, merge_faults.SCHEDULER, raising=False)
    merge_faults.activate()
    assert reception.merge is merger.merge
    monkeypatch.setitem(merge_faults.sys.modules, merge_faults.SCHEDULER, SimpleNamespace())
    merge_faults.activate()
    assert reception.merge is not merger.merge


def test_the_folder_of_the_hook_is_a_plugin_of_sglang():
    from importlib.metadata import distributions

    (found,) = distributions(path=[str(FOLDER)])
    (entry,) = found.entry_points
    assert (entry.group, entry.value) == ("sglang.srt.plugins", f"{merge_faults.__name__.split('.')[-1]}:activate")


# --- rows --------------------------------------------------------------------------------------------------------


def test_rows_can_be_served_and_have_names_of_their_own():
    every = rows()
    assert every[0] == Row(UNDIVIDED)
    assert len({row.name for row in every}) == len(every)
    for row in every:
        topology.parse(row.topology).check_model(specs.get("tiny"))
        assert row.whole in every
        assert not row.fault or row.fault in FAULTS
    assert all(names[0] == "control" for _, names in BROKEN)
    assert set(every) >= BLIND_SPOTS and all(row.fault for row in BLIND_SPOTS)
    assert {"mixed_tp2", "mixed_tp4", "p2_d1", "p2_d2", "p2x2_d2"} < {row.topology for row in every}, "the seed's five"


def test_broken_rows_share_a_fleet_that_is_not_that_of_the_whole_row():
    groups = fleets(rows())
    assert [row for group in groups for row in group if row.fault == ""] == [
        group[0] for group in groups if not group[0].fault
    ]
    broken = {group[0].topology: [row.fault for row in group] for group in groups if group[0].fault}
    assert broken == {name: list(names) for name, names in BROKEN}


def test_patterns_choose_rows_and_what_they_stand_beside():
    assert only(rows(), []) == rows()
    assert [row.name for row in only(rows(), ["p2_d1:ssm*"])] == ["p2_d1:ssm-head", "p2_d1:ssm-head-one"]
    assert {row.topology for row in only(rows(), ["p1_d2"])} == {"p1_d2"}
    assert [row.name for row in command.wanted(["p2_d1:draft"])] == [UNDIVIDED, "p2_d1", "p2_d1:draft"]


# --- records and verdicts ----------------------------------------------------------------------------------------


def record(row: Row, right: int, accepted: int = 3, odd: int = 0, asked: int = 100) -> RowRecord:
    """`right` of `asked` answers are; `odd` others have another third token."""
    answers = tuple(
        Answer((1, 2, 9 if number < odd else 3), number >= asked - right, rounds=2, accepted=accepted + number % 2)
        for number in range(asked)
    )
    depths = tuple(float(number % 2) for number in range(asked))
    return RowRecord(row.name, row.name, depths, answers, *((asked, asked) if row.fault else (0, 0)), seconds=2.0)


WHOLE, HEAD, DRAFT, CONTROL, BLIND = (
    Row("p2_d1", fault=name) for name in ("", "ssm-head", "draft", "control", "conv-sources")
)


def verdicts(*records: tuple[Row, RowRecord], tie=lambda question, position: False) -> dict[Row, Verdict]:
    found = {Row(UNDIVIDED): record(Row(UNDIVIDED), 99), WHOLE: record(WHOLE, 99), **dict(records)}
    return {each.row: each.verdict for each in evaluate(found, Row(UNDIVIDED), FAULTS, tie)}


@pytest.mark.parametrize(
    ("row", "answers", "verdict"),
    [
        (WHOLE, {"right": 99}, Verdict.EQUAL),
        (WHOLE, {"right": 99, "odd": 1}, Verdict.DIFFERS),
        (CONTROL, {"right": 99}, Verdict.EQUAL),
        (CONTROL, {"right": 99, "odd": 1}, Verdict.DIFFERS),
        (HEAD, {"right": 40, "odd": 60}, Verdict.SEEN),
        (HEAD, {"right": 97, "odd": 3}, Verdict.NOT_SEEN),
        (HEAD, {"right": 99, "accepted": 1}, Verdict.SEEN),
        (DRAFT, {"right": 99, "accepted": 1}, Verdict.SEEN),
        (DRAFT, {"right": 99}, Verdict.NOT_SEEN),
        (DRAFT, {"right": 40, "accepted": 1, "odd": 60}, Verdict.DIFFERS),
        (BLIND, {"right": 99}, Verdict.BLIND),
        (BLIND, {"right": 40, "odd": 60}, Verdict.SEEN),
    ],
)
def test_what_a_row_has_shown(row, answers, verdict):
    assert verdicts((row, record(row, **answers)))[row] is verdict


def test_what_rounding_decides_is_told_apart():
    asked = []

    def tie(question: int, position: int) -> bool:
        asked.append((question, position))
        return question == 0

    assert compare(record(WHOLE, 99, odd=2), record(Row(UNDIVIDED), 99), tie) == (1, 1)
    assert asked == [(0, 2), (1, 2)]
    assert verdicts((WHOLE, record(WHOLE, 99, odd=1)), tie=tie)[WHOLE] is Verdict.EQUAL


def test_a_row_without_its_whole_one_is_refused():
    with pytest.raises(HeteroError, match="p2_d1:draft stands beside p2_d1"):
        evaluate(
            {Row(UNDIVIDED): record(Row(UNDIVIDED), 9), DRAFT: record(DRAFT, 9)},
            Row(UNDIVIDED),
            FAULTS,
            lambda *_: False,
        )


def test_intervals_that_touch_are_not_apart():
    assert apart(Interval(0.0, 0.4), Interval(0.5, 1.0)) and apart(Interval(0.5, 1.0), Interval(0.0, 0.4))
    assert not apart(Interval(0.0, 0.5), Interval(0.5, 1.0))
    assert not apart(None, Interval(0.5, 1.0))


def test_answers_that_were_not_broken_are_refused():
    check_hits("a row", FAULTS["draft"], 10, 10, 10)
    check_hits("a row", FAULTS["control"], 10, 10, 0)
    for fault, merged, hit in (
        ("draft", 0, 0),
        ("draft", 10, 9),
        ("draft", 9, 9),
        ("control", 0, 0),
        ("control", 10, 1),
    ):
        with pytest.raises(NotHit, match=f"a row: 10 requests were asked, the hook has met {merged} and changed {hit}"):
            check_hits("a row", FAULTS[fault], 10, merged, hit)


def test_warm_up_requests_do_not_count():
    lines = [{"fault": "draft", "room": room, "touched": 4} for room in (0, 5, 5, 6)]
    assert counted("\n".join(map(json.dumps, lines)), "draft") == (2, 2)


def test_records_are_read_as_they_were_written_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    Records(path).add(record(WHOLE, 99))
    with open(path, "a") as file:
        file.write('{"row": "p1_d2", "ke')
    again = Records(path)
    assert again.get("p2_d1") == record(WHOLE, 99)
    again.add(record(DRAFT, 98))
    last = Records(path)
    assert last.get("p2_d1:draft") == record(DRAFT, 98) and last.get("p2_d1") == record(WHOLE, 99)


# --- a run, with servers that are made up -------------------------------------------------------------------------


class MadeUpFleet:
    """In the place of a fleet: remembers that it was started; its decode server's hook tells of every request."""

    started: ClassVar[list[str]] = []
    now: ClassVar[dict[str, str]] = {}
    url = "http://nobody"

    def __init__(self, topology, options, say):
        self.name, self.environment = topology.name, dict(options.decode_env)

    def __enter__(self):
        MadeUpFleet.started.append(self.name)
        MadeUpFleet.now = self.environment
        return self

    def __exit__(self, *_):
        MadeUpFleet.now = {}

    def check(self):
        pass


def made_up_answers(url, asked, tokens, done=lambda _: None):
    """All right, unless the hook is told to lose a head; with `conv-kv` in place nothing is drafted well."""
    fault = {"name": "", "heads": [], "conv": ""}
    if MadeUpFleet.now:
        fault = json.loads(Path(MadeUpFleet.now[merge_faults.ORDER]).read_text())
        hits = [
            json.dumps({"fault": fault["name"], "room": room, "touched": fault["name"] != "control"})
            for room in range(1, len(asked) + 1)
        ]
        Path(MadeUpFleet.now[merge_faults.HITS]).write_text("\n".join(hits))
    lost = bool(fault["heads"])
    return [Answer((7,) * tokens if not lost else (8,) * tokens, not lost, 2, 0 if fault["conv"] else 6) for _ in asked]


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(MadeUpFleet, "started", [])
    monkeypatch.setattr(run, "Fleet", MadeUpFleet)
    monkeypatch.setattr(run, "ask", made_up_answers)
    monkeypatch.setattr(command, "raise_on_signals", lambda: None)
    monkeypatch.setattr(command, "tie_of", lambda *_: lambda *_: False)
    return MadeUpFleet


def test_a_run_starts_each_fleet_once_and_goes_on_where_it_was(made_up, tmp_path, capsys):
    arguments = ["--model", "tiny", "--per-depth", "8", "--out", str(tmp_path)]
    assert command.main([*arguments, "--only", "p2_d1:ssm-head", "p2_d1:conv-kv"]) == 0
    assert made_up.started == [UNDIVIDED, "p2_d1", "p2_d1"]
    assert "1/1 whole rows equal to the undivided server, 2/2 broken merges seen" in capsys.readouterr().out
    assert command.main([*arguments, "--only", "p2_d1:control", "p2_d1:ssm-head"]) == 0
    assert made_up.started == [UNDIVIDED, "p2_d1", "p2_d1", "p2_d1"]
    found = {each.row.name: each for each in summary.read(tmp_path / "table.json").figures}
    assert (found["p2_d1:control"].merged, found["p2_d1:control"].hit) == (40, 0)
    assert found["p2_d1:ssm-head"].hit == 40
    assert all((tmp_path / f"table.{kind}").stat().st_size for kind in ("csv", "md", "png"))
    capsys.readouterr()
    assert command.main([*arguments, "--list", "--only", "p2_d1:draft", "p2_d1:ssm-head"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["p2_d1:draft"] == "to do" and told["p2_d1:ssm-head"] == "done"


def test_a_fault_that_does_not_show_is_told_by_the_status(made_up, tmp_path, capsys):
    arguments = ["--model", "tiny", "--per-depth", "8", "--out", str(tmp_path), "--only", "p2_d1:kv"]
    assert command.main(arguments) == 1
    assert "NOT SEEN: p2_d1:kv" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["fingerprint", "source_digest"])
def test_what_changes_during_a_run_ends_it_and_nothing_is_kept(made_up, tmp_path, monkeypatch, capsys, changed):
    told = iter(("before", *("after",) * 9))
    monkeypatch.setattr(run.models if changed == "fingerprint" else run, changed, lambda *_: next(told))
    assert command.main(["--model", "tiny", "--per-depth", "1", "--out", str(tmp_path), "--only", UNDIVIDED]) == 1
    assert "has changed meanwhile" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


def test_other_questions_are_other_rows(made_up, tmp_path):
    for seed in ("1", "2"):
        command.main(
            ["--model", "tiny", "--per-depth", "1", "--out", str(tmp_path), "--only", UNDIVIDED, "--seed", seed]
        )
    assert made_up.started == [UNDIVIDED, UNDIVIDED]


def test_what_cannot_be_is_told(made_up, tmp_path, capsys):
    for arguments, said in (
        (["--only", "p9"], "no row is called p9"),
        (["--report"], "there are no results yet"),
        (["--write-docs"], "is no table of python -m tests.accuracy"),
    ):
        assert command.main(["--model", "tiny", "--out", str(tmp_path), *arguments]) == 1
        assert said in capsys.readouterr().err
    assert not made_up.started


# --- the document ------------------------------------------------------------------------------------------------


def a_summary() -> summary.Summary:
    found = {row: record(row, right) for row, right in ((Row(UNDIVIDED), 99), (WHOLE, 99), (HEAD, 40), (DRAFT, 99))}
    return summary.Summary(
        {"model": "`tiny`", "questions": "100"}, tuple(evaluate(found, Row(UNDIVIDED), FAULTS, lambda *_: False))
    )


def test_a_summary_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(summary.to_json(a_summary()))
    assert summary.read(path) == a_summary()
    path.write_text("[]")
    with pytest.raises(HeteroError, match=r"is no table of python -m tests\.accuracy"):
        summary.read(path)


def test_the_csv_has_a_line_per_row():
    head, *lines = summary.to_csv(a_summary().figures).splitlines()
    assert len(lines) == 4 and all(line.count(",") >= head.count(",") for line in lines)
    assert head.endswith("right_at_0,right_at_1")


def test_the_table_is_put_in_its_place(tmp_path):
    path = tmp_path / "document.md"
    path.write_text(f"before\n{document.BEGIN}\nold\n{document.END}\nafter\n")
    document.write(a_summary(), path)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "1/1 whole rows equal to the undivided server, 1/2 broken merges seen" in text
    assert "| `p2_d1` | SSM: head 0 lost, all layers | 40/100 | 0.400 (0.309 to 0.498)" in text
    with pytest.raises(ValueError, match="no place for the table"):
        document.write(a_summary(), Path(__file__))


def test_a_picture_is_drawn(tmp_path):
    from .picture import draw

    figures = a_summary().figures
    draw(replace(a_summary(), figures=(*figures, replace(figures[0], accept=None))), tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
