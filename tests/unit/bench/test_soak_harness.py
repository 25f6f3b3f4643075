"""The soak on the harness: its plan, what it calls wrong, and that it sees each kind of fault, without processes."""

import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench_serving import soak, soak_harness
from bench_serving.soak_harness import PAGE, PAGES, HarnessSoak, Place, Plan, wrong_end
from bench_serving.soak_record import Goal, Kind, Record
from tests.harness import Abort, Handoff, HarnessTimeout, On, Outcome, RankDied, Result
from tests.harness.processes import Condition

PLAN = Plan(prefill_tp=(2, 4), states=("push", "pull"), batch=10, abort_share=0.0)
ARRIVED = Outcome(True, True)
FAILED = Outcome(False, False, ("prefill says why",), ("decode says why",))
ON_PREFILL, ON_DECODE = Abort(On.PREFILL), Abort(On.DECODE)


class FakeRank:
    """A rank of this process's id that answers nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.pid, self.condition = name, os.getpid(), Condition.RUNNING
        self.asked: list[tuple[str, tuple]] = []

    def start(self, command: str, *arguments: object) -> None:
        self.asked.append((command, arguments))

    def result(self, command: str, deadline: float) -> None:
        return None


class FakePair:
    """Everything arrives, unless `outcome`, `differences` or `error` say otherwise."""

    def __init__(self, plan: Plan) -> None:
        def side(on: On, tp: int, number: int) -> SimpleNamespace:
            return SimpleNamespace(ranks=[FakeRank(f"{on.value} {number} rank {rank}") for rank in range(tp)])

        self.prefills = [side(On.PREFILL, tp, number) for number, tp in enumerate(plan.prefill_tp)]
        self.decodes = [side(On.DECODE, plan.decode_tp, number) for number in range(len(plan.states))]
        self.bootstraps = [FakeRank("bootstrap") for _ in plan.prefill_tp]
        self.next_room = 1
        self.rooms: list[range] = []
        self.killed: list[tuple[str, int]] = []
        self.restarted: list[tuple[str, int]] = []
        self.outcome = ARRIVED
        self.differences: list[str] = []
        self.error: Exception | None = None
        self.held: list[str] = []
        self.still_busy = False
        self.closed = False

    @property
    def prefill(self):
        return [rank for group in self.prefills for rank in group.ranks]

    @property
    def decode(self):
        return [rank for group in self.decodes for rank in group.ranks]

    @property
    def ranks(self):
        return self.prefill + self.decode

    running = ranks

    def hetero(self):
        return [{"units_free": 8, "units_quarantined": 0} for _ in self.ranks]

    def quiet(self, seconds):
        if self.still_busy:
            raise HarnessTimeout("units are held")

    def leaks(self):
        return self.held

    def close(self):
        self.closed = True

    def handoff_many(self, handoffs, leftovers, before_compare, forward, strikes):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        rooms = range(self.next_room, self.next_room + len(handoffs))
        self.next_room = rooms.stop
        self.rooms.append(rooms)
        for strike in strikes:
            strike.do(None)
        placed = tuple(SimpleNamespace(room=room) for room in rooms)
        result = Result((), [], placed, placed, seconds=0.1)
        before_compare(self, result)
        return Result(tuple(self.outcome for _ in handoffs), self.differences, placed, placed, seconds=0.1)

    def kill_prefill(self, number):
        self.killed.append(("prefill", number))

    def kill_decode(self, number):
        self.killed.append(("decode", number))
        for rank in self.decodes[number].ranks:
            rank.condition = Condition.DEAD

    def restart_prefill(self, number):
        self.restarted.append(("prefill", number))

    def restart_decode(self, number):
        self.restarted.append(("decode", number))
        for rank in self.decodes[number].ranks:
            rank.condition = Condition.RUNNING


class FakeHarness:
    def __init__(self, plan: Plan = PLAN) -> None:
        self.plan = plan
        self.pairs: list[FakePair] = []
        self.spoil = lambda pair: None

    def pair(self, geometry, **options):
        pair = FakePair(self.plan)
        self.spoil(pair)
        self.pairs.append(pair)
        return pair


def soaked(handoffs: int, plan: Plan = PLAN, spoil=lambda pair: None) -> tuple[Record, FakeHarness]:
    record, harness = Record(), FakeHarness(plan)
    harness.spoil = spoil
    HarnessSoak(harness, plan, record, lambda line: None).run(Goal(handoffs))
    return record, harness


def test_requests_are_the_same_in_every_run_and_within_the_pools():
    plan = Plan(batch=200, abort_share=0.5)
    requests = plan.requests(3, 200)
    assert requests == plan.requests(3, 200) != plan.requests(4, 200)
    assert len({request.seed for request in requests}) == 200
    assert all(1 <= request.tokens <= PAGE * PAGES and request.chunks <= request.tokens for request in requests)
    assert {request.tokens % PAGE for request in requests} >= {0, 1, PAGE - 1}
    assert {request.prefill for request in requests} == {0, 1} and {request.decode for request in requests} == {0, 1, 2}
    aborted = [request.abort for request in requests if request.abort]
    assert 60 < len(aborted) < 140 and {abort.on for abort in aborted} == set(On)
    for tp in (*plan.prefill_tp, plan.decode_tp):
        plan.geometry.check_tp(tp)
    Plan(prefill_tp=(2, 3)).geometry.check_tp(3)


@pytest.mark.parametrize(
    ("outcome", "abort", "dead", "words"),
    [
        (ARRIVED, None, None, None),
        (FAILED, None, None, "nobody gave up"),
        (FAILED, ON_DECODE, None, None),
        (Outcome(False, False, (), ("why",)), ON_DECODE, None, "without a cause on prefill"),
        (Outcome(False, False, ("why",), ("",)), ON_PREFILL, None, "without a cause on decode"),
        (Outcome(False, True, ("why",)), ON_PREFILL, None, None),  # the abort came when decode had it
        (Outcome(False, True, ("why",)), ON_DECODE, None, "on prefill only"),
        (Outcome(True, False, (), ("why",)), ON_DECODE, None, None),  # prefill was done
        (Outcome(True, False, (), ("why",)), ON_PREFILL, None, "on decode only"),
        (Outcome(False, False, (), ("why",)), None, Place(On.PREFILL, 0), None),
        (Outcome(False, False, (), ()), None, Place(On.PREFILL, 0), "without a cause on decode"),
        (Outcome(False, False, ("why",), ()), None, Place(On.DECODE, 0), None),
        (Outcome(False, False, (), ()), None, Place(On.DECODE, 0), "without a cause on prefill"),
        (Outcome(True, False, (), ()), None, Place(On.DECODE, 0), None),
    ],
)
def test_which_ends_are_wrong(outcome, abort, dead, words):
    said = wrong_end(Handoff(10, abort=abort), outcome, dead)
    assert said is None if words is None else said is not None and words in said


def test_all_is_right_and_rooms_are_used_again_if_wanted():
    record, harness = soaked(500)
    assert record.last_line == "500 handoffs, 0 aborted, 0 restarts: 0 wrong, 0 leaks, 0 hangs"
    assert record.arrived == record.handoffs
    (pair,) = harness.pairs
    assert pair.rooms[-1].stop == 501 and pair.closed
    _, harness = soaked(500, replace(PLAN, rooms=200))
    (pair,) = harness.pairs
    assert all(rooms.start <= 200 for rooms in pair.rooms)
    assert sum(1 in rooms for rooms in pair.rooms) == 3


def test_a_batch_that_takes_too_long_is_a_hang_and_names_the_last_one(monkeypatch):
    monkeypatch.setattr(soak_harness, "HANG_SECONDS", 0.05)
    ended = Outcome(False, False, ("in the end",), ("in the end",), {On.PREFILL: 1.0, On.DECODE: 2.0})
    aborting = replace(PLAN, abort_share=1.0)
    record, _ = soaked(10, aborting, spoil=lambda pair: setattr(pair, "outcome", ended))
    assert any(fault.kind is Kind.HANG and "('in the end', 'in the end')" in fault.what for fault in record.faults)


def test_decode_steps_once_for_what_has_arrived_there():
    record, harness = soaked(50)
    (pair,) = harness.pairs
    stepped = [room for rank in pair.decode for name, (rooms,) in rank.asked if name == "step" for room in rooms]
    assert sorted(stepped) == list(range(1, record.handoffs + 1))


def test_every_server_is_restarted_in_turn_and_serves_each_peer():
    plan = Plan(prefill_tp=(2, 4), states=("push", "pull"), batch=10, abort_share=0.0, restart_every=50)
    record, harness = soaked(400, plan)
    (pair,) = harness.pairs
    turn = [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)]
    assert pair.killed == pair.restarted
    assert pair.killed[:4] == turn
    assert [restart.side for restart in record.restarts[:4]] == ["prefill 1", "prefill 2", "decode 1", "decode 2"]
    assert not record.faults


def test_a_wrong_byte_is_seen():
    record, _ = soaked(50, spoil=lambda pair: pair.differences.append("SSM differs"))
    assert record.count(Kind.WRONG) and "SSM differs" in record.faults[0].what


def test_a_failure_that_nobody_asked_for_is_seen():
    record, _ = soaked(50, spoil=lambda pair: setattr(pair, "outcome", FAILED))
    assert "nobody gave up" in record.faults[0].what
    assert record.hopeless and record.handoffs < 50


def test_what_is_held_is_seen():
    record, _ = soaked(50, spoil=lambda pair: pair.held.append("decode 0: 9 of 10 pages are free"))
    assert record.faults[0].kind is Kind.LEAK and "9 of 10 pages" in record.faults[0].what
    record, _ = soaked(50, spoil=lambda pair: setattr(pair, "still_busy", True))
    assert record.faults[0].kind is Kind.LEAK and "units are held" in record.faults[0].what


@pytest.mark.parametrize(("error", "kind"), [(HarnessTimeout("stuck"), Kind.HANG), (RankDied("dead"), Kind.WRONG)])
def test_after_a_hang_or_a_death_it_goes_on_with_a_new_pair(error, kind):
    errors = iter([error])
    record, harness = soaked(100, spoil=lambda pair: setattr(pair, "error", next(errors, None)))
    assert [fault.kind for fault in record.faults] == [kind]
    assert len(harness.pairs) == 2 and all(pair.closed for pair in harness.pairs)
    assert record.handoffs == 100


def test_threads_that_stay_are_a_leak_and_told_once(monkeypatch):
    monkeypatch.setattr(soak_harness, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(soak_harness, "SAMPLE_SECONDS", 0.0)
    threads = iter(range(10**6))  # one more at each look
    real = soak_harness.soak_process.look

    def look(pid):
        return soak_harness.soak_process.Process(real(pid).rss, 10 * next(threads), 5)

    monkeypatch.setattr(soak_harness.soak_process, "look", look)
    record, _ = soaked(60)
    assert record.count(Kind.LEAK) and "threads" in record.faults[0].what
    monkeypatch.setattr(soak_harness.soak_process, "look", real)
    assert not soaked(60)[0].faults


@pytest.fixture
def signals():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_the_command_writes_a_summary_and_says_what_was_wrong(monkeypatch, tmp_path, capsys, signals):
    harness = FakeHarness(Plan(abort_share=0.1))
    drawn = []
    monkeypatch.setattr(soak, "Harness", lambda: nullcontext(harness))
    monkeypatch.setattr(soak, "draw", lambda record, path: drawn.append(path))
    assert soak.main(["--handoffs", "500", "--restart-every", "100", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "soak.json").read_text())
    restarts = len(summary["restarts"])
    assert restarts >= 3
    assert capsys.readouterr().out.endswith(f"{restarts} restarts: 0 wrong, 0 leaks, 0 hangs\n")
    assert drawn == [tmp_path / "soak.png"]
    harness.spoil = lambda pair: pair.held.append("a page")
    assert soak.main(["--handoffs", "64"]) == 1
    captured = capsys.readouterr()
    assert "leak: a page" in captured.err and ", 0 hangs" in captured.out


def test_ctrl_c_ends_with_what_has_been_seen(monkeypatch, capsys, signals):
    harness = FakeHarness(Plan())
    monkeypatch.setattr(soak, "Harness", lambda: nullcontext(harness))

    def interrupted(pair):
        real = pair.handoff_many

        def handoff_many(*arguments, **options):
            if pair.next_room > 200:
                os.kill(os.getpid(), signal.SIGINT)
            return real(*arguments, **options)

        pair.handoff_many = handoff_many

    harness.spoil = interrupted
    assert soak.main(["--handoffs", "100000"]) == 0
    captured = capsys.readouterr()
    handoffs = int(captured.out.split()[0])
    assert 200 <= handoffs < 400
    assert "ended before its goal" in captured.err


def test_help_has_examples_and_wrong_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        soak.parser().parse_args(["--help"])
    assert "python -m bench_serving.soak --handoffs 100000 --restart-every 10000" in capsys.readouterr().out
    for wrong in (
        ["--abort-share", "2"],
        ["--states", "push,shove"],
        ["--hours", "0"],
        ["--hours", "1", "--handoffs", "1"],
    ):
        with pytest.raises(SystemExit):
            soak.parser().parse_args(wrong)
