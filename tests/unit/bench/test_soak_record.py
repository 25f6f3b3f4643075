"""What a soak's samples, books and faults come to, and its picture: without processes."""

import pytest

from bench_serving import soak_picture, soak_process
from bench_serving.soak_record import (
    GROWTH_BYTES,
    GROWTH_NOISE,
    GROWTH_SAMPLES,
    MAX_FAULTS,
    MIB,
    Books,
    Goal,
    Kind,
    Record,
    Restart,
    Sample,
    duration,
    told,
)
from sglang_hetero.errors import TraceError

SAMPLES = 4 * GROWTH_SAMPLES
STEP = 5000
"""Requests between two samples."""


def sampled(rss, *, samples: int = SAMPLES, life: int = 0) -> Record:
    """A process whose resident memory after `n` requests is `rss(n)`."""
    record = Record()
    for number in range(samples):
        done = number * STEP
        record.samples.append(Sample(float(number), done, "decode 0 of 1", life, int(rss(done)), 20, 30, 16, 0))
    return record


def test_memory_that_grows_with_the_requests_is_a_leak():
    record = sampled(lambda done: 500 * MIB + 2 * GROWTH_BYTES * done)
    record.judge_memory()
    (fault,) = record.faults
    assert fault.kind is Kind.LEAK
    assert "decode 0 of 1" in fault.what and f"{2 * GROWTH_BYTES} bytes each" in fault.what


@pytest.mark.parametrize(
    "rss",
    [
        pytest.param(lambda done: 500 * MIB, id="flat"),
        pytest.param(lambda done: 500 * MIB + GROWTH_BYTES * done / 2, id="less-than-the-bound"),
        pytest.param(lambda done: 500 * MIB + min(done, SAMPLES * STEP // 2) * 10 * GROWTH_BYTES, id="warm-up-only"),
    ],
)
def test_memory_that_comes_to_rest_is_none(rss):
    record = sampled(rss)
    record.judge_memory()
    assert not record.faults


def test_little_memory_is_noise_and_few_samples_are_no_line():
    short = sampled(lambda done: 500 * MIB + GROWTH_NOISE * done / (SAMPLES * STEP))
    short.judge_memory()
    assert not short.faults
    few = sampled(lambda done: 500 * MIB + 100 * GROWTH_BYTES * done, samples=GROWTH_SAMPLES)
    assert not few.growth()


def test_each_life_of_a_process_is_judged_by_itself():
    record = sampled(lambda done: 500 * MIB)
    again = sampled(lambda done: 900 * MIB, life=1)  # twice as large, but at rest
    record.samples += again.samples
    record.judge_memory()
    assert not record.faults
    assert [growth.life for growth in record.growth()] == [0, 1]


def test_books_are_exact_where_they_must_be():
    books = Books(["pages"], {"threads": 2})
    books.note("decode", {"pages": 10, "threads": 20})
    assert books.missing("decode", {"pages": 10, "threads": 22}) == []
    assert books.missing("decode", {"pages": 9, "threads": 20}) == ["decode: pages 9, 10 at the start"]
    assert books.missing("decode", {"pages": 11, "threads": 5}) == ["decode: pages 11, 10 at the start"]
    assert books.missing("decode", {"pages": 10, "threads": 23}) == ["decode: 23 threads, 20 at the start"]
    assert books.missing("prefill", {"pages": 1, "threads": 99}) == []


def test_books_allow_what_a_killed_peer_leaves_until_the_process_itself_is_new():
    books = Books((), {"sockets": 1})
    books.note("decode", {"sockets": 10})
    books.allow("decode", "sockets", 4)
    assert books.missing("decode", {"sockets": 15}) == []
    assert books.missing("decode", {"sockets": 16}) == ["decode: 16 sockets, 10 at the start"]
    books.restarted("decode")
    assert books.missing("decode", {"sockets": 12}) == ["decode: 12 sockets, 10 at the start"]


def test_the_last_line_and_the_summary_count_the_faults():
    record = Record(handoffs=200, arrived=180, aborted=17, lost=3)
    record.restarts.append(Restart(1.0, "prefill 1", 3, 2.5))
    assert record.last_line == "200 handoffs, 17 aborted, 1 restarts: 0 wrong, 0 leaks, 0 hangs"
    record.fault(Kind.WRONG, "a byte")
    record.fault(Kind.HANG, "a batch")
    record.note("something")
    record.note("something")
    assert record.last_line == "200 handoffs, 17 aborted, 1 restarts: 1 wrong, 0 leaks, 1 hangs"
    summary = record.summary()
    assert (summary["wrong"], summary["leaks"], summary["hangs"], summary["lost"]) == (1, 0, 1, 3)
    assert summary["notes"] == ["something"]
    assert summary["faults"][0]["handoffs"] == 200


def test_a_goal_is_a_number_of_requests_or_of_seconds():
    record = Record(handoffs=50)
    record.started -= 100.0
    assert not Goal(51).reached(record) and Goal(50).reached(record)
    assert Goal(150).left(record) == pytest.approx(200, rel=0.01)
    assert not Goal(seconds=101.0).reached(record) and Goal(seconds=99.0).reached(record)
    assert Goal(seconds=160.0).left(record) == pytest.approx(60, rel=0.01)
    assert "50 of 150, " in record.progress(Goal(150))


def test_many_faults_are_hopeless():
    record = Record()
    for _ in range(MAX_FAULTS - 1):
        record.fault(Kind.WRONG, "again")
    assert not record.hopeless
    record.fault(Kind.WRONG, "again")
    assert record.hopeless
    assert told(fault.what for fault in record.faults) == [f"{MAX_FAULTS} x again"]


def test_rates_are_those_between_samples():
    record = Record()
    for seconds, handoffs in ((0.0, 0), (2.0, 100), (3.0, 110)):
        record.samples += [Sample(seconds, handoffs, name, 0, 1, 1, 1) for name in ("a", "b")]
    assert record.rates() == [(2.0, 50.0), (3.0, 10.0)]
    record.handoffs = 140
    record.started -= 7.0
    assert ", 20.0/s" in record.progress(Goal(1000))  # since the start: no other sample is old enough
    record.started -= 5.5
    assert ", 3.8/s" in record.progress(Goal(1000))  # since the one at 2 s
    assert duration(3723.4) == "1:02:03"


def test_a_running_process_is_looked_at(tmp_path):
    import os
    import socket

    before = soak_process.look(os.getpid())
    with socket.socket():
        after = soak_process.look(os.getpid())
    assert before is not None and after is not None
    assert after.sockets == before.sockets + 1
    assert after.threads >= 1 and after.rss > MIB
    assert soak_process.look(2**22 + 1) is None  # above the largest process id that Linux has


def test_the_picture_has_a_line_per_life(tmp_path):
    record = sampled(lambda done: 500 * MIB)
    record.samples += sampled(lambda done: 400 * MIB, life=1).samples
    record.restarts.append(Restart(3.0, "decode 1", 0, 1.0))
    lives = soak_picture.lines(record.samples)
    assert [len(samples) for samples in lives["decode 0 of 1"]] == [SAMPLES, SAMPLES]
    path = tmp_path / "soak.png"
    soak_picture.draw(record, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(TraceError, match="no samples"):
        soak_picture.draw(Record(), path)
