"""The thread that looks after a rank: what it says, where, and what it makes of errors."""

import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_hetero.backend.figures import FIGURES, figures_of
from sglang_hetero.backend.rank_report import all_quarantined, receiver_fault, report_of
from sglang_hetero.backend.watch import Watch
from sglang_hetero.layout.manifest import Coordinates, Side
from sglang_hetero.state import folder
from sglang_hetero.state.report import Report
from sglang_hetero.transfer.reception import Doubt, Writer

SECONDS = 20.0
NEVER = 1e6


class Looks:
    """A rank whose faults the test says; the thread looks when it is told to."""

    def __init__(self, tmp_path):
        self.faults: list[str] = []
        self.error: Exception | None = None
        self.where = tmp_path
        self.looks = 0

    def __call__(self) -> Report:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return Report(side="decode", rank="decode TP0/1", pid=7, faults=list(self.faults))


@pytest.fixture
def looks(tmp_path):
    return Looks(tmp_path)


@pytest.fixture
def watch(looks):
    made = Watch(looks, looks.where, seconds=NEVER)
    until(lambda: looks.where.joinpath("7.json").exists())
    yield made
    made.stop()
    made.worker.thread.join(SECONDS)
    assert not made.worker.thread.is_alive() and made.worker.fault == ""


def until(true):
    wait = threading.Event()
    for _ in range(int(SECONDS / 0.01)):
        if true():
            return
        wait.wait(0.01)
    raise AssertionError("it did not happen")


def test_it_leaves_its_report_in_the_folder(watch, looks):
    (report,), problems = folder.read(looks.where)
    assert (report.rank, problems) == ("decode TP0/1", []) and report.beat > 0 and report.at > 0


def test_a_fault_counts_when_it_lasts(watch, looks):
    looks.faults = ["a", "b"]
    assert watch.look().faults == []
    looks.faults = ["b", "c"]
    assert watch.look().faults == ["b"]
    assert watch.look().faults == ["b", "c"]
    looks.faults = []
    assert watch.look().faults == []


def test_a_fault_is_said_once_and_its_end_too(watch, looks, caplog):
    looks.faults = ["a unit is lost"]
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            watch.look()
        looks.faults = []
        for _ in range(2):
            watch.look()
    assert [record.message for record in caplog.records] == [
        "decode TP0/1: fault: a unit is lost",
        "decode TP0/1: no fault any more: a unit is lost",
    ]


def test_an_error_of_a_look_ends_nothing(looks, caplog):
    looks.error = ZeroDivisionError("boom")
    made = Watch(looks, looks.where, seconds=0.001)
    until(lambda: looks.looks > 3)
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert made.worker.fault == "" and folder.read(looks.where) == ([], [])
    looks.error = None
    until(lambda: looks.where.joinpath("7.json").exists())
    made.stop()
    made.worker.thread.join(SECONDS)


def test_a_folder_that_cannot_be_written_is_said_once(looks, caplog):
    looks.where = looks.where / "missing"
    made = Watch(looks, looks.where, seconds=0.001)
    until(lambda: looks.looks > 5)
    made.stop()
    made.worker.thread.join(SECONDS)
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_a_rank_that_cannot_be_looked_at_any_more_says_what_was_seen_last(looks):
    """Its process serves, so that silence would be the wrong word."""
    made = Watch(looks, looks.where, seconds=0.001)
    until(lambda: looks.where.joinpath("7.json").exists())
    looks.error = ZeroDivisionError("boom")
    until(lambda: folder.read(looks.where)[0][0].problems)
    (first,), _ = folder.read(looks.where)
    assert first.problems == ["its state cannot be told any more: ZeroDivisionError: boom"]
    until(lambda: folder.read(looks.where)[0][0].beat > first.beat)
    looks.error = None
    until(lambda: not folder.read(looks.where)[0][0].problems)
    made.stop()
    made.worker.thread.join(SECONDS)


def test_the_processes_above_are_those_of_the_start(watch, looks):
    (report,), _ = folder.read(looks.where)
    assert report.parents[0] == os.getppid()


# What a report says.


def scheduler():
    """The attributes of SGLang's scheduler that are read."""
    queue = SimpleNamespace(queue=[1, 2], pending_reqs=[1], retracted_queue=[])
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(size=1280, page_size=128, available_size=lambda: 640),
        req_to_token_pool=SimpleNamespace(
            size=8,
            pre_alloc_size=2,
            free_slots=[1, 2, 3],
            mamba_allocator=SimpleNamespace(size=9, available_size=lambda: 4),
        ),
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(size=16, available_size=lambda: 15),
        tree_cache=SimpleNamespace(
            supports_mamba=lambda: True,
            supports_prefix_sharing=lambda: True,
            full_evictable_size=lambda: 256,
            mamba_evictable_size=lambda: 2,
        ),
        running_batch=SimpleNamespace(reqs=[1]),
        waiting_queue=[],
        disagg_prefill_bootstrap_queue=None,
        disagg_prefill_inflight_queue=None,
        disagg_decode_prealloc_queue=queue,
        disagg_decode_transfer_queue=SimpleNamespace(queue=[1, 2, 3]),
    )


def test_figures_of_a_scheduler_without_what_its_role_has_not():
    assert figures_of(scheduler()) == {
        "pages": 10,
        "pages_free": 5,
        "rows": 10,
        "rows_free": 3,
        "slots": 9,
        "slots_free": 4,
        "aux_rows": 16,
        "aux_rows_free": 15,
        "cached_tokens": 256,
        "cached_slots": 2,
        "running": 1,
        "waiting": 0,
        "unresolved": 1,
        "preallocating": 2,
        "retracted": 0,
        "receiving": 3,
    }


def test_a_scheduler_that_says_nothing():
    assert figures_of(object()) == {} and len(FIGURES) > 10


WRITERS = [Writer(f"prefill TP{rank}/2", f"i{rank}", f"s{rank}") for rank in range(2)]
DOUBTS = [Doubt(1, 2, 2, 3.0, (WRITERS[1],)), Doubt(2, 3, 2, 1.0, (WRITERS[1], WRITERS[0]))]


def manager(**state):
    coordinates = Coordinates(tp_rank=1, tp_size=2)
    return SimpleNamespace(
        hetero_rank=SimpleNamespace(
            side=Side.DECODE,
            name="decode TP1/2 (h:1)",
            manifest=SimpleNamespace(coordinates=coordinates, host="h:1", incarnation="abc"),
            scheduler=scheduler(),
            here=SimpleNamespace(unsupported=("it is old",)),
        ),
        hetero_decode=SimpleNamespace(doubts=lambda: DOUBTS),
        hetero_state=lambda: state,
        hetero_integrity=lambda: ["a unit is lost"],
        hetero_counters={"pieces": 3},
    )


def test_a_report_has_the_place_the_books_and_the_faults():
    report = report_of(manager(units=4, units_quarantined=1))
    assert (report.side, report.rank, report.host, report.incarnation) == ("decode", "decode TP1/2 (h:1)", "h:1", "abc")
    assert (report.tp_rank, report.tp_size, report.pp_size) == (1, 2, 1)
    assert report.ours == {"units": 4, "units_quarantined": 1} and report.sglang["pages"] == 10
    assert report.faults == ["a unit is lost"] and report.counters == {"pieces": 3}
    assert report.notes == ["takes SGLang's own path only: it is old"] and report.process["threads"] >= 1


def test_a_rank_whose_units_are_all_quarantined_says_for_whom_it_waits():
    report = report_of(manager(units=4, units_quarantined=4))
    (fault,) = report.faults[1:]
    assert fault == (
        "all 4 units of staging are quarantined, so that this rank can take no request until these sources have "
        "drained or their processes are known to be gone: prefill TP0/2, prefill TP1/2"
    )
    assert report.in_doubt == [str(doubt) for doubt in DOUBTS] and "room 1" in report.in_doubt[0]


def test_the_same_wait_is_the_same_fault_as_time_goes_by():
    """What differs from look to look would never last (Watch)."""
    later = [replace(doubt, seconds=doubt.seconds + 1) for doubt in DOUBTS]
    assert all_quarantined(4, DOUBTS) == all_quarantined(4, later)
    assert "a merge or a read of its own" in all_quarantined(4, [replace(DOUBTS[0], writers=())])


def test_sglangs_receiving_thread():
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="decode_thread")
    thread.start()
    assert receiver_fault(thread, stopped=False) == receiver_fault(None, stopped=False) == ""
    gate.set()
    thread.join()
    assert "decode_thread" in receiver_fault(thread, stopped=False)
    assert receiver_fault(thread, stopped=True) == ""


def test_the_gauges_of_a_rank_are_what_it_has_just_said():
    """In a process of its own: prometheus_client's registry is one for all."""
    code = """
from prometheus_client import generate_latest
from sglang_hetero.backend.metrics import tell_report
from sglang_hetero.state.report import Report
for free, faults in ((3, ["a"]), (4, [])):
    ours = {"units": 4, "units_free": free, "rooms": 1}
    tell_report(Report(side="decode", rank="d0", pid=1, ours=ours, faults=faults))
    tell_report(Report(side="prefill", rank="p0", pid=2, ours={"rooms": 1}, faults=faults))
    print(generate_latest().decode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("sglang_hetero:")]
    assert [line.rpartition("}")[2] for line in lines if line.startswith("sglang_hetero:units_free{")] == [
        " 3.0",
        " 4.0",
    ]
    assert 'sglang_hetero:faults{rank="p0",side="prefill"} 1.0' in lines
    assert 'sglang_hetero:faults{rank="d0",side="decode"} 0.0' in lines
    assert not any("p0" in line for line in lines if "units" in line)
