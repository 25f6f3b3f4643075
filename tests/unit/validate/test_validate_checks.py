"""The stages themselves: they pass on this CPU, and see what is wrong where something is made to be."""

import ast
import ctypes
import dataclasses
import inspect
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from sglang_hetero.client import Generation
from sglang_hetero.device import Lane
from sglang_hetero.doctor.lines import Status
from sglang_hetero.errors import HeteroError
from sglang_hetero.merge import Assembler, batch
from sglang_hetero.perf.records import PREFIX
from sglang_hetero.transfer.engine.base import EngineError
from sglang_hetero.validate import batches, engines, kernels, loopback, peer, serving, table
from sglang_hetero.validate.stage import Settings
from tests.unit.ascend.vendor_surface import SGLANG_ENGINES

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SIZE = loopback.DESCRIPTORS * 1024


def settings(folder, device="cpu"):
    return Settings(device=device, count=4, folder=str(folder), quick=True)


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kernels.OPERATIONS)
def test_one_wrong_bit_anywhere_is_seen(name, monkeypatch):
    case = kernels._case(name, layers=1, pages=2, slots=1)
    assert kernels._difference(case, CPU, Lane(CPU)) == ""
    real = kernels.ops
    operation = name.split()[0]

    class Wrong:
        def __getattr__(self, attribute):
            def call(target, *arguments):
                getattr(real, attribute)(target, *arguments)
                # The last byte of the whole memory: a neighbour of what is written, for all but pack_kv.
                whole = target._base if target._base is not None else target
                whole.view(torch.uint8).flatten()[-1] ^= 1

            return call if attribute == operation else getattr(real, attribute)

    monkeypatch.setattr(kernels, "ops", Wrong())
    assert "1 of" in kernels._difference(case, CPU, Lane(CPU))


@pytest.mark.parametrize("name", [*kernels.BATCHES, kernels.EMPTIES])
def test_one_wrong_bit_of_what_a_transfer_calls_is_seen(name, monkeypatch):
    """Its copies are others than those of the operations: these being right says nothing of it."""
    case = kernels._case(name, layers=2, pages=2, slots=1)
    assert kernels._difference(case, CPU, Lane(CPU)) == ""

    class Wrong(Assembler):
        def _flip(self):
            ((_, last),) = list(self.memory.items())[-1:]
            last[-1] ^= 1

        def __init__(self, plan, memory):
            super().__init__(plan, memory)
            self.memory = memory

        def merge_batch(self, arena, pieces):
            super().merge_batch(arena, pieces)
            self._flip()

        def begin_empty(self, pages):
            super().begin_empty(pages)
            self._flip()

    monkeypatch.setattr(batches, "Assembler", Wrong)
    again = kernels._case(name, layers=2, pages=2, slots=1)
    assert "1 of" in kernels._difference(again, CPU, Lane(CPU))


@pytest.mark.parametrize("name", kernels.BATCHES)
@pytest.mark.parametrize("fault", ["the blocks of a source change places", "rows behind the last token"])
def test_a_wrong_batch_is_seen(name, fault, monkeypatch):
    if fault == "rows behind the last token":
        move = batch._move
        monkeypatch.setattr(batch, "_move", lambda *given: dataclasses.replace(move(*given), rows=None))
    else:
        copies = batch.layer_copies

        def turned(*given):
            right = copies(*given)
            return [
                dataclasses.replace(one, target=other.target) for one, other in zip(right, right[::-1], strict=True)
            ]

        monkeypatch.setattr(batch, "layer_copies", turned)
    assert "bytes differ" in kernels._difference(kernels._case(name, layers=2, pages=2, slots=1), CPU, Lane(CPU))


def test_pages_that_are_not_emptied_are_seen(monkeypatch):
    monkeypatch.setattr(batches.Assembler, "begin_empty", lambda self, pages: None)
    case = kernels._case(kernels.EMPTIES, layers=2, pages=2, slots=1)
    assert "bytes differ" in kernels._difference(case, CPU, Lane(CPU))


# --- the loop-back ----------------------------------------------------------------------------------------------------


class Copies:
    """An engine that copies within this process. fault: what it does wrong."""

    def __init__(self, there, fault=""):
        self._there, self._fault = there, fault

    def write(self, _session, sources, destinations, sizes):
        end = self._there.address + SIZE
        for number, (source, destination, size) in enumerate(zip(sources, destinations, sizes, strict=True)):
            if int(destination) + int(size) > end and self._fault != "writes anywhere":
                if self._fault == "refuses nothing":
                    return
                raise EngineError("outside", settled=True)
            if self._fault == "leaves one out" and number == len(sizes) - 1:
                return
            ctypes.memmove(int(destination), int(source), int(size))

    def read(self, _session, local, remote, sizes):
        if self._fault == "cannot read":
            raise EngineError("no reads here", settled=True)
        for mine, other, size in zip(local, remote, sizes, strict=True):
            ctypes.memmove(int(mine), int(other), int(size) - (self._fault == "reads too little"))


class There:
    session = "there"

    def __init__(self):
        self._memory = peer.memory("cpu", 0, SIZE)
        self.address = self._memory.data_ptr()

    def ask(self, word):
        if word == "fill":
            self._memory[:SIZE].copy_(peer.pattern(SIZE, peer.SEED))
        return {"digest": peer.digest(self._memory)}


def way(fault="", chip="", transport="sdma"):
    there = There()
    wrong = loopback._Wrong("area", transport, chip)
    return loopback._Way(wrong, Copies(there, fault), peer.memory("cpu", 0, SIZE), there, SIZE)


def checked(one):
    return [one.write().status, one.read().status, one.refusal().status]


OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("", [OK, OK, OK]),
        ("leaves one out", [FAIL, OK, OK]),
        ("reads too little", [OK, FAIL, OK]),
        ("cannot read", [OK, WARN, OK]),
        ("writes anywhere", [OK, OK, FAIL]),
        ("refuses nothing", [OK, OK, WARN]),
    ],
)
def test_a_wrong_engine_is_seen(fault, wanted):
    assert checked(way(fault)) == wanted


def test_the_other_chips_transport_only_warns():
    assert checked(way("leaves one out", chip="910b", transport="sdma"))[0] is WARN
    assert checked(way("leaves one out", chip="a3", transport="sdma"))[0] is FAIL


@pytest.mark.parametrize(("chip", "status"), [("910b", Status.WARN), ("a3", Status.FAIL), ("", Status.FAIL)])
@pytest.mark.parametrize("made", [False, True], ids=["no engine", "an engine that registers nothing"])
def test_the_limits_of_the_other_chips_transport_only_warn(chip, status, made, tmp_path, monkeypatch):
    def no_engine(*_arguments, **_options):
        if made:
            return engines.Upstream(None, "session")
        raise engines.NoEngine("sdma cannot be had here")

    monkeypatch.setattr(engines, "make_store", lambda _url: None)
    monkeypatch.setattr(engines, "make", no_engine)
    monkeypatch.setattr(loopback, "_registers", lambda *_arguments: "refused")
    lines = []
    loopback.limits(msgspec.structs.replace(settings(tmp_path), chip=chip), "sdma", lines.append)
    assert [line.name for line in lines] == list(loopback.LIMIT_PROMISES)
    assert {line.status for line in lines} == {status}


def test_blocks_change_places():
    values = torch.arange(loopback.DESCRIPTORS, dtype=torch.uint8).repeat_interleave(4)
    assert np.array_equal(loopback._turned(values).numpy(), values.numpy()[::-1])


# --- servers ----------------------------------------------------------------------------------------------------------


def line(side, room, outcome="ok", rank=0, **more):
    told = {"side": side, "rank": f"{side} TP{rank}", "room": room, "outcome": outcome, "bytes": {"kv": 1000}}
    told |= {"tokens": 10, **more}
    return f"[2026-01-01] INFO {PREFIX} {json.dumps(told)}"


def logged(folder, area, *lines):
    (folder / area).mkdir(parents=True)
    (folder / area / "prefill0.log").write_text("\n".join([*lines, f"{PREFIX} torn {{", "else"]))
    return serving._records(folder / area)


def whole(room):
    """All ranks of P2/D1."""
    return line("prefill", room), line("prefill", room, rank=1), line("decode", room)


BOTH = (*whole(1), *whole(2))


@pytest.mark.parametrize(
    ("lines", "name", "status"),
    [
        (BOTH, "p2_d1", OK),
        (BOTH[:5], "p2_d1", FAIL),
        ((*BOTH[:4], BOTH[5]), "p2_d1", FAIL),
        ((*BOTH[:4], BOTH[3], BOTH[5]), "p2_d1", FAIL),
        ((), "p2_d1", FAIL),
        ((), "p2_d2", OK),
        ((*BOTH, line("decode", 3, "it was cancelled")), "p2_d1", FAIL),
    ],
    ids=[
        "all",
        "one not received",
        "a rank has not sent",
        "the same rank twice",
        "not our path",
        "equal sizes",
        "one failed",
    ],
)
def test_every_request_must_have_taken_our_path(lines, name, status, tmp_path):
    assert serving._hand_overs("a", logged(tmp_path, "a", *lines), name, 2).status is status


@pytest.mark.parametrize(("share", "status"), [(0.9, OK), (0.0, FAIL)])
def test_overlap_is_that_of_the_longest_prompt_at_its_slowest_rank(share, status, tmp_path):
    short = line("prefill", 1, tokens=10, early_share=0.5, after_prefill_ms=1.0)
    long = {"tokens": 900, "after_prefill_ms": 3.0}
    ranks = [line("prefill", 2, rank=rank, early_share=own, **long) for rank, own in enumerate((0.95, share))]
    logged(tmp_path, "a", short, *ranks)
    said = []
    serving.overlap(settings(tmp_path), "a", said.append)
    assert [one.status for one in said] == [status]
    assert said[0].figures == {"share": share, "after prefill ms": 3.0}


def test_overlap_without_servers_is_skipped(tmp_path):
    said = []
    serving.overlap(settings(tmp_path), "a", said.append)
    assert [one.status for one in said] == [Status.SKIP]


DRAFTED = [2, 1, 0, 1]


def answers(*tokens, drafts=DRAFTED):
    return [serving.Answer(list(own), drafts) for own in tokens]


def keep(folder, area, found):
    serving._keep(settings(folder), area, found)


UNDIVIDED = serving.area_of("mixed_tp1")
PREPUSH, PULL = (serving.area_of("p2_d1", mode) for mode in ("prepush", "pull"))


def test_on_a_cpu_one_wrong_token_fails(tmp_path):
    keep(tmp_path, UNDIVIDED, answers([1, 2], [3, 4]))
    assert serving._tokens(settings(tmp_path), PREPUSH, answers([1, 2], [3, 4])).status is OK
    assert serving._tokens(settings(tmp_path), PREPUSH, answers([1, 2], [3, 5])).status is FAIL
    assert serving._tokens(settings(tmp_path), PREPUSH, answers([1, 2])).status is FAIL


def test_nothing_to_compare_with_is_no_pass(tmp_path):
    for judge in (serving._tokens, serving._drafts):
        assert judge(settings(tmp_path), PREPUSH, answers([1, 2])).status is Status.SKIP
    serving._tokens_file(settings(tmp_path), UNDIVIDED).write_text("[[1, 2]]")
    assert serving._tokens(settings(tmp_path), PREPUSH, answers([1, 2])).status is Status.SKIP


def test_an_answer_without_what_is_compared_is_no_pass():
    """Nothing would equal nothing."""
    whole = Generation("text", [1, 2], 5, 2, 0.1, {"spec_correct_drafts_histogram": DRAFTED})
    assert serving.answer_of(whole, 2) == serving.Answer([1, 2], DRAFTED)
    for lacks in (dataclasses.replace(whole, tokens=[]), dataclasses.replace(whole, meta={})):
        with pytest.raises(HeteroError, match="see the servers' logs"):
            serving.answer_of(lacks, 2)


def test_on_a_cpu_drafts_must_be_those_of_the_undivided_server(tmp_path):
    """Tokens are right without them, too."""
    keep(tmp_path, UNDIVIDED, answers([1, 2], [3, 4]))
    good = serving._drafts(settings(tmp_path), PREPUSH, answers([1, 2], [3, 4]))
    assert (good.status, good.figures) == (OK, {"drafts a step": 1.0, "undivided drafts a step": 1.0})
    others = answers([1, 2], [3, 4], drafts=[4, 0, 0, 0])
    bad = serving._drafts(settings(tmp_path), PREPUSH, others)
    assert (bad.status, "0.00 a verify step, of the undivided server 1.00" in bad.seen) == (FAIL, True)
    told = serving._drafts(settings(tmp_path, "npu"), PREPUSH, others)
    assert (told.status, told.figures["drafts a step"]) == (OK, 0.0)


def test_on_an_npu_the_modes_must_agree_and_the_undivided_server_is_told_of(tmp_path):
    keep(tmp_path, UNDIVIDED, answers([1, 2], [3, 9]))
    keep(tmp_path, PREPUSH, answers([1, 2], [3, 4]))
    npu = settings(tmp_path, "npu")
    good = serving._tokens(npu, PULL, answers([1, 2], [3, 4]))
    assert (good.status, "1 of 2 are the undivided server's" in good.seen) == (OK, True)
    assert serving._tokens(npu, PULL, answers([1, 2], [3, 5])).status is FAIL
    keep(tmp_path, UNDIVIDED, answers([7, 7], [7, 7]))
    assert serving._tokens(npu, PULL, answers([1, 2], [3, 4])).status is WARN


@pytest.mark.parametrize(
    "stage", [one for one in table.stages(matrix=True) if one.run.endswith("serving:run")], ids=lambda one: one.name
)
def test_a_stage_with_servers_says_what_it_has_promised(stage, monkeypatch, tmp_path):
    """Of servers that are not divided nothing is handed over, so that there is no line about that."""
    found = answers([1, 2])
    keep(tmp_path, UNDIVIDED, found)
    monkeypatch.setattr(serving, "_serve", lambda *_: found)
    lines = (*whole(1), line("decode", 1, rank=1))
    monkeypatch.setattr(serving, "_records", lambda _: [json.loads(one.split(PREFIX)[1]) for one in lines])
    said = []
    serving.run(settings(tmp_path), stage.argument, said.append)
    assert {one.status for one in said} == {OK}, said
    assert sorted(one.name for one in said) == sorted(stage.promises)
    assert {one.area for one in said} == {stage.name}


FLEET = """#!/bin/sh
echo "$@" $SGLANG_HETERO_STATE $SGLANG_HETERO_VERIFY $LAUNCH_MTP >"$LAUNCH_LOGS/said"
trap 'echo stopped >>"$LAUNCH_LOGS/said"; exit 0' TERM
"""


def fleet(folder, monkeypatch, rest):
    script = folder / "fleet.sh"
    script.write_text(FLEET + rest)
    script.chmod(0o755)
    monkeypatch.setattr(serving.models, "path", lambda name: folder / name)
    return msgspec.structs.replace(settings(folder, "npu"), fleet=str(script))


def test_servers_on_an_npu_are_those_of_the_scripts_and_are_stopped(tmp_path, monkeypatch):
    both = r"printf 'a line of something else\nREADY http://here\n'"  # one write: the second must not be left lying
    given = fleet(tmp_path, monkeypatch, both + "\nwhile :; do sleep 0.1; done\n")
    logs = tmp_path / "logs"
    with serving._on_device(given, "p2_d1", "push", logs) as url:
        assert url == "http://here"
    assert (logs / "said").read_text().split() == ["ascend", "p2_d1", "push", "1", "3", "stopped"]


def test_servers_that_end_before_they_serve_are_told_of(tmp_path, monkeypatch):
    given = fleet(tmp_path, monkeypatch, "exit 3\n")
    with (
        pytest.raises(HeteroError, match="exit status 3"),
        serving._on_device(given, "p2_d1", "push", tmp_path / "logs"),
    ):
        pass


@pytest.mark.parametrize(
    ("function", "file"),
    [
        ("_memfabric", "disaggregation/ascend/transfer_engine.py"),
        ("_mooncake", "distributed/device_communicators/mooncake_transfer_engine.py"),
    ],
)
def test_engines_are_made_with_calls_that_sglang_makes_too(function, file):
    """Those are compared with the vendors' wheels (tests/unit/ascend/test_vendor_surface.py)."""
    tree = ast.parse(inspect.getsource(getattr(engines, function)))
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "native"
    }
    assert called == {"initialize", "get_rpc_port"}
    assert called <= SGLANG_ENGINES[file]
