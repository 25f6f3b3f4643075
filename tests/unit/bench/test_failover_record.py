"""What a failover run comes to, from requests and phases that are made up."""

import json
import socket
from dataclasses import replace

import aiohttp
import pytest

from bench_serving import failover
from bench_serving.failover_record import BIN_SECONDS, OF_ETCD, Fate, Mark, Phase, Record, Request, table
from sglang_hetero.errors import OptionError

LENGTH = 10.0
"""Seconds of each phase."""


def run(rates: dict[Phase, int] | None = None, *more: Request) -> Record:
    """A whole run with so many good requests in each phase (20 where it is not said), and some more."""
    record = Record(complete=True, met=2, missing=[], held=[])
    for number, phase in enumerate(Phase):
        start = number * LENGTH
        record.marks.append(Mark(start, phase, retries=number))
        count = (rates or {}).get(phase, 20)
        record.requests += [Request(start, start + LENGTH * at / count, Fate.OK) for at in range(count)]
    record.requests += more
    record.ended, record.retries = len(Phase) * LENGTH, 100
    return record


def bad(fate: Fate, phase: Phase, error: str = "HTTP 502: gone") -> Request:
    ended = list(Phase).index(phase) * LENGTH + 5
    return Request(ended - 7, ended, fate, error)


def broken(record: Record) -> list[str]:
    return [one.promise for one in record.verdicts(0.8) if not one.kept]


def test_a_run_without_a_fault_keeps_every_promise() -> None:
    record = run()
    assert broken(record) == []
    assert all(one.line.startswith("kept: ") for one in record.verdicts(0.8))
    assert record.errors() == []


def test_requests_belong_to_the_phase_in_which_they_end() -> None:
    late = Request(5.0, 15.0, Fate.OK)
    spans = run({}, late).spans()
    assert [one.phase for one in spans] == list(Phase)
    assert [one.ok for one in spans] == [20, 21, *[20] * 6]
    assert [one.rate for one in spans][:3] == [2.0, 2.1, 2.0]
    assert (spans[1].median, spans[1].longest) == (5.0, 10.0)
    assert [one.retries for one in spans] == [*[1] * 7, 100 - 7]


@pytest.mark.parametrize(
    ("fate", "phase", "promises"),
    [
        (Fate.REFUSED, Phase.WITHOUT, ["no request fails that had not begun"]),
        (Fate.BROKEN, Phase.WITHOUT, ["no request fails that had begun"]),
        (Fate.WRONG, Phase.QUIET, ["no answer has other tokens than the undivided model's"]),
        *(
            (Fate.REFUSED, one, ["no request fails that had not begun", "nothing fails for want of etcd"])
            for one in OF_ETCD
        ),
    ],
)
def test_one_bad_request_breaks_just_the_promises_that_it_is_about(fate, phase, promises) -> None:
    record = run({}, bad(fate, phase))
    assert broken(record) == promises
    (line,) = record.errors()
    assert line == f"1 x {fate}: HTTP 502: gone"
    assert next(one for one in record.verdicts(0.8) if one.promise == promises[0]).seen == "1 of 161"


def test_the_rate_must_come_back() -> None:
    assert broken(run({Phase.AFTER: 16})) == []
    (promise,) = broken(run({Phase.AFTER: 15}))
    assert promise == "with the prefill server back there are at least 80% of the requests per second"
    assert run({Phase.WITHOUT: 9}).ratios()[Phase.WITHOUT] == 0.45
    assert broken(run({Phase.WITHOUT: 1})) == [], "what it is meanwhile is told, and nothing is promised"


def test_a_kill_that_met_nothing_says_nothing() -> None:
    promise = ["requests that had not begun were met by the kill"]
    record = run()
    record.met = 0
    assert record.spans()[1].retries and broken(record) == promise
    record = run()
    for at in range(2, len(record.marks)):
        record.marks[at] = replace(record.marks[at], retries=1)  # as many as when the server was killed
    assert record.met and broken(record) == promise


def test_what_is_left_behind_breaks_a_promise() -> None:
    record = run()
    record.missing, record.held = ["prefill0 is missing"], ["decode0: 1 of 9 slots are free"]
    assert broken(record) == ["all servers are in etcd at the end", "the servers hold nothing at the end"]
    assert "decode0: 1 of 9 slots are free" in record.verdicts(0.8)[-1].line


def test_a_run_that_did_not_begin_or_ended_early_keeps_nothing_by_default() -> None:
    empty = Record()
    assert empty.spans() == [] and empty.ratios() == {} and empty.rates() == []
    assert len(broken(empty)) == len(empty.verdicts(0.8))
    early = run()
    early.complete = False
    assert broken(early) == ["the run is complete"]


def test_rates_are_per_second_and_of_whole_bins() -> None:
    record = Record(requests=[Request(0.0, at, Fate.OK) for at in (1.0, 2.0, 6.0, 11.0)], ended=12.0)
    record.requests.append(Request(0.0, 1.5, Fate.REFUSED, "x"))
    assert record.rates() == [(BIN_SECONDS / 2, 2 / BIN_SECONDS), (BIN_SECONDS * 1.5, 1 / BIN_SECONDS)]


def test_it_can_be_written_and_printed() -> None:
    record = run({}, bad(Fate.BROKEN, Phase.WITHOUT))
    written = json.loads(json.dumps(record.summary(0.8)))
    assert written["ratios"]["it is back"] == 1.0
    assert [one["kept"] for one in written["verdicts"]].count(False) == 1
    lines = table(record.spans(), record.ratios())
    assert len(lines) == 1 + len(Phase)
    assert lines[2].split()[-8:] == ["10", "20", "0", "0", "1", "1", "2.00", "100%"]


def test_a_picture_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    failover.draw(run({Phase.STARTING: 3}, bad(Fate.BROKEN, Phase.WITHOUT)), "a title", tmp_path / "failover.png")
    assert (tmp_path / "failover.png").read_bytes().startswith(b"\x89PNG")


def test_one_prefill_server_is_not_enough() -> None:
    assert failover.Plan(topology="p2p4_d1").victim == "prefill0"
    with pytest.raises(OptionError, match="--topology p2_d1: needs two prefill servers, such as p2x2_d2"):
        _ = failover.Plan(topology="p2_d1").victim


def test_a_router_that_is_gone_ends_the_run_but_not_its_report(tmp_path, monkeypatch, capsys) -> None:
    async def lose_the_router(plan, record, folder, say) -> None:
        record.requests.append(Request(0.0, 1.0, Fate.OK))
        record.ended = 1.0
        async with aiohttp.ClientSession() as session:
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))  # and does not listen
                run = failover.Run(plan, record, None, fleet=None, etcd=None, session=session, say=say)
                await run._get(f"http://127.0.0.1:{nobody.getsockname()[1]}/metrics")

    monkeypatch.setattr(failover, "run", lose_the_router)
    monkeypatch.setattr(failover, "raise_on_signals", lambda: None)
    assert failover.main(["--out", str(tmp_path)]) == 1
    assert "the run could not go on: no answer from http://127.0.0.1:" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "failover.json").read_text())["requests"]) == 1
