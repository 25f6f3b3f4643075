"""The figures of a request, by a clock that is set by hand; what is expected was computed with pencil and paper."""

import json
import logging
import threading

import pytest

from sglang_hetero.layout.component import Role
from sglang_hetero.perf import records
from sglang_hetero.perf.records import Component, Figures, Perf, component_of, silent
from sglang_hetero.perf.spans import NoTrace

KV, STATE, DRAFT = Component


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Told(NoTrace):
    """A trace that keeps what it is told."""

    on = True

    def __init__(self):
        self.said = []

    def span(self, track, name, start, end, room, **details):
        self.said.append((str(track), name, start, end, room, details))

    def instant(self, track, name, at, room, **details):
        self.said.append((str(track), name, at, None, room, details))


@pytest.fixture
def world():
    clock, trace, figures = Clock(), Told(), []
    return clock, trace, figures


def perf(world, side="prefill"):
    clock, trace, figures = world
    return Perf(side, f"{side} TP0/1", clock=clock, trace=trace, observe=figures.append)


def lines(caplog):
    prefix = f"{records.PREFIX} "
    return [
        json.loads(r.getMessage().removeprefix(prefix)) for r in caplog.records if r.getMessage().startswith(prefix)
    ]


@pytest.mark.parametrize(
    ("role", "component"),
    [(None, STATE)]
    + [(role, STATE if role in (Role.CONV, Role.SSM) else DRAFT if "draft" in role.value else KV) for role in Role],
)
def test_components(role, component):
    assert component_of(role) is component


def sent_request(world, told=True):
    """Made at 1, bound at 2, two chunks at 3 to 5 and 6 to 9, hand-overs at 5.5 and 9.5, writes to 10."""
    clock, subject = world[0], perf(world)
    for at, call in [
        (1.0, lambda: subject.sent(7)),
        (2.0, lambda: subject.sent(7).bound()),
        (3.0, lambda: subject.sent(7).forward_began(100)),
        (5.0, lambda: subject.sent(7).forward_ended(False)),
        (5.5, lambda: subject.sent(7).handed_over(False)),
        (6.0, lambda: subject.sent(7).forward_began(50)),
        (9.0, lambda: subject.sent(7).forward_ended(True)),
        (9.5, lambda: subject.sent(7).handed_over(True)),
    ]:
        clock.now = at
        if told or "forward" not in call.__code__.co_names[-1]:
            call()
    record = subject.sent(7)
    record.wrote("decode TP0/1", 4.0, 4.5, {KV: 1000}, {KV: 10})
    record.wrote("decode TP0/1", 8.0, 9.0, {KV: 500, STATE: 500}, {KV: 5, STATE: 1})  # ends with prefill: it counts
    record.wrote("decode TP0/1", 8.5, 9.25, {STATE: 1000}, {STATE: 2})
    record.wrote("decode TP0/1", 9.0, 10.0, {DRAFT: 1000}, {DRAFT: 4})
    clock.now = 11.0
    return subject


def test_the_line_of_a_request_that_was_sent(world, caplog):
    caplog.set_level(logging.INFO)
    sent_request(world).sent_end(7)
    assert lines(caplog) == [
        {
            "side": "prefill",
            "rank": "prefill TP0/1",
            "room": 7,
            "outcome": "ok",
            "tokens": 150,
            "chunks": 2,
            "bound_to_forward_ms": 1000.0,
            "prefill_ms": 6000.0,
            "transfer_ms": 6000.0,
            "after_prefill_ms": 1000.0,
            "early_share": 0.5,
            "writes": 4,
            "bytes": {"kv": 1500, "state": 1500, "draft": 1000},
            "descriptors": {"kv": 15, "state": 3, "draft": 4},
        }
    ]
    assert world[2] == [
        Figures({"transfer_seconds": 6.0}, 0.5, {KV: 1500, STATE: 1500, DRAFT: 1000}, {KV: 15, STATE: 3, DRAFT: 4})
    ]


def test_prefill_ends_with_the_last_hand_over_where_no_pass_was_followed(world):
    line = sent_request(world, told=False).sent(7).line()
    assert line["early_share"] == 0.75  # what ended at 9.25 was there at 9.5
    assert line["after_prefill_ms"] == 500.0
    assert (line["tokens"], line["chunks"], line["prefill_ms"]) == (0, 2, None)


def test_what_a_prefill_rank_traces(world):
    sent_request(world)
    said = world[1].said
    assert [entry for entry in said if entry[0] == "forward" and entry[3] is not None] == [
        ("forward", "chunk 1", 3.0, 5.0, 7, {"tokens": 100, "chunk": 1}),
        ("forward", "chunk 2", 6.0, 9.0, 7, {"tokens": 50, "chunk": 2}),
    ]
    assert ("forward", "prefill ended", 9.0, None, 7, {}) in said
    assert [entry for entry in said if entry[0] == "link"][1] == (
        "link",
        "kv+state",
        8.0,
        9.0,
        7,
        {"peer": "decode TP0/1", "bytes": {"kv": 500, "state": 500}, "descriptors": {"kv": 5, "state": 1}},
    )


def test_passes_that_overlap_end_in_the_order_in_which_they_began(world):
    """SGLang's overlap schedule launches the next pass before it has the result of the one before."""
    clock, subject = world[0], perf(world)
    record = subject.sent(7)
    for at, call in [
        (0.0, lambda: record.forward_began(100)),
        (1.0, lambda: record.forward_began(50)),
        (10.0, lambda: record.forward_ended(False)),
        (11.0, lambda: record.forward_began(25)),
        (20.0, lambda: record.forward_ended(False)),
        (30.0, lambda: record.forward_ended(True)),
        (31.0, lambda: record.forward_ended(True)),  # of a pass that nobody saw begin
    ]:
        clock.now = at
        call()
    assert [(*entry[1:4], entry[5]) for entry in world[1].said if entry[3] is not None] == [
        ("chunk 1", 0.0, 10.0, {"tokens": 100, "chunk": 1}),
        ("chunk 2", 1.0, 20.0, {"tokens": 50, "chunk": 2}),
        ("chunk 3", 11.0, 30.0, {"tokens": 25, "chunk": 3}),
    ]
    line = record.line()
    assert (line["tokens"], line["chunks"], line["prefill_ms"]) == (175, 3, 31000.0)


def test_a_request_that_failed_counts_with_its_bytes_only(world, caplog):
    caplog.set_level(logging.INFO)
    sent_request(world).sent_end(7, "decode TP0/1 is gone")
    assert lines(caplog)[0]["outcome"] == "decode TP0/1 is gone"
    assert world[2] == [Figures({}, None, {KV: 1500, STATE: 1500, DRAFT: 1000}, {KV: 15, STATE: 3, DRAFT: 4})]


def received_request(world):
    clock, subject = world[0], perf(world, "decode")
    clock.now = 1.0
    assert subject.created(7)
    clock.now = 2.0
    record = subject.opened(7, 3)
    for at, call in [
        (2.5, record.granted),
        (3.0, record.ready),
        (3.5, lambda: record.merged(KV, 4000, 0.25, 2)),
        (4.0, record.ready),
        (4.5, lambda: record.merged(STATE, 600, 0.125)),
        (5.0, record.first_generation),
        (5.5, record.first_generation),  # told twice: the first counts
        (6.0, lambda: record.merged(KV, 1000, 0.5)),
        (6.25, record.complete),
        (7.0, lambda: subject.enqueued(7)),
    ]:
        clock.now = at
        call()
    return subject


def test_the_line_of_a_request_that_was_received(world, caplog):
    caplog.set_level(logging.INFO)
    subject = received_request(world)
    assert subject.awaits_step
    world[0].now = 7.5
    subject.stepped([None, 8])  # others
    assert not lines(caplog)
    world[0].now = 9.0
    subject.stepped([8, 7])
    assert not subject.awaits_step
    assert subject.counts == (0, 0)
    assert lines(caplog) == [
        {
            "side": "decode",
            "rank": "decode TP0/1",
            "room": 7,
            "outcome": "ok",
            "pages": 3,
            "allocation_wait_ms": 1000.0,
            "window_wait_ms": 500.0,
            "ready_ms": 1000.0,
            "merge_ms": 875.0,
            "merges": 3,
            "merged_bytes": {"kv": 5000, "state": 600},
            "merged_ms": {"kv": 750.0, "state": 125.0},
            "reads": 0,
            "read_ms": 0.0,
            "first_generation_to_enqueue_ms": 2000.0,
            "complete_to_enqueue_ms": 750.0,
            "enqueue_to_first_response_ms": 2000.0,
        }
    ]
    assert world[2] == [
        Figures(
            {
                "allocation_wait_seconds": 1.0,
                "window_wait_seconds": 0.5,
                "merge_seconds": 0.875,
                "first_generation_to_enqueue_seconds": 2.0,
                "enqueue_to_first_response_seconds": 2.0,
            }
        )
    ]


def test_what_a_decode_rank_traces(world):
    subject = received_request(world)
    world[0].now = 9.0
    subject.stepped([7])
    spans = {entry[1]: entry[2:4] for entry in world[1].said if entry[3] is not None and entry[1] != "merge kv"}
    assert spans == {
        "allocation wait": (1.0, 2.0),
        "window wait": (2.0, 2.5),
        "merge state": (4.375, 4.5),
        "FirstGeneration to enqueue": (5.0, 7.0),
        "enqueue to first response": (7.0, 9.0),
    }
    assert [entry[2:4] for entry in world[1].said if entry[1] == "merge kv"] == [(3.25, 3.5), (5.5, 6.0)]
    assert {entry[1]: entry[2] for entry in world[1].said if entry[3] is None} == {
        "FirstGeneration": 5.0,
        "complete": 6.25,
        "enqueue": 7.0,
        "first response": 9.0,
    }


def test_a_request_that_failed_early_says_null_for_the_rest(world, caplog):
    caplog.set_level(logging.INFO)
    subject = perf(world, "decode")
    subject.created(7)
    subject.opened(7, 1)
    subject.received_end(7, "no units")
    (line,) = lines(caplog)
    assert line["outcome"] == "no units"
    assert line["window_wait_ms"] is None
    assert line["enqueue_to_first_response_ms"] is None
    assert world[2] == [Figures()]


def test_another_request_with_the_same_room_does_not_touch_the_first(world, caplog):
    caplog.set_level(logging.INFO)
    subject = received_request(world)
    waiting = perf(world, "decode")
    waiting.opened(7, 1)
    assert not waiting.created(7)
    assert waiting.received(7).is_open
    # The one in decode's queue has left the transfer: a new one may have its room.
    assert subject.created(7)
    assert [line["outcome"] for line in lines(caplog)] == [records.REPLACED]
    assert not subject.awaits_step
    assert not subject.received(7).is_open


def test_a_request_that_decode_gave_up_in_its_queue_is_forgotten(world, caplog):
    caplog.set_level(logging.INFO)
    subject = received_request(world)
    subject.created(8)
    subject.opened(8, 1)
    world[0].now = 7.0 + records.RESPONSE_SECONDS
    subject.enqueued(8)
    assert subject.counts == (0, 2)
    subject.created(9)
    subject.opened(9, 1)
    world[0].now += 0.5
    subject.enqueued(9)
    assert [(line["room"], line["outcome"]) for line in lines(caplog)] == [(7, records.FORGOTTEN)]
    assert subject.counts == (0, 2)


def test_steps_of_others_end_what_decode_gave_up_in_its_queue(world, caplog):
    """Or every step would look for it until another request is enqueued."""
    caplog.set_level(logging.INFO)
    subject = received_request(world)  # enqueued at 7
    for room, at in ((8, 8.0), (9, 9.0)):
        subject.created(room)
        subject.opened(room, 1)
        world[0].now = at
        subject.enqueued(room)
    world[0].now = 8.0 + records.RESPONSE_SECONDS
    subject.stepped([7, 5])  # late, but not given up
    assert [(line["room"], line["outcome"]) for line in lines(caplog)] == [(7, "ok")]
    world[0].now += 0.5
    subject.stepped([5])
    assert [(line["room"], line["outcome"]) for line in lines(caplog)][1:] == [(8, records.FORGOTTEN)]
    assert subject.awaits_step
    world[0].now += 1.0
    subject.stepped([])
    assert not subject.awaits_step
    assert subject.counts == (0, 0)


def test_rooms_that_nobody_knows(world, caplog):
    caplog.set_level(logging.INFO)
    subject = perf(world)
    subject.sent_end(1)
    subject.received_end(1, "why")
    subject.enqueued(1)
    subject.stepped([1])
    assert not lines(caplog)
    assert not world[2]


def test_the_number_of_records_is_bounded(world, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(records, "MAX_RECORDS", 3)
    subject = perf(world)
    for room in range(5):
        subject.sent(room)
        subject.received(room)
    assert subject.counts == (3, 3)
    assert [(line["side"], line["room"], line["outcome"]) for line in lines(caplog)] == [
        (side, room, records.FORGOTTEN) for room in range(2) for side in ("prefill", "decode")
    ]


def test_a_metrics_page_that_fails_does_not_end_the_caller(caplog):
    def broken(figures):
        raise RuntimeError("no room for metrics")

    subject = Perf("prefill", "rank", observe=broken)
    subject.sent(1)
    subject.sent_end(1)
    assert "no room for metrics" in caplog.text


def test_a_silent_one_says_nothing(caplog):
    caplog.set_level(logging.INFO)
    subject = silent("decode", "rank")
    subject.opened(1, 1)
    subject.received_end(1)
    assert not lines(caplog)


def test_threads_lose_nothing():
    subject = Perf("prefill", "rank", log=False)

    def write():
        for _ in range(500):
            subject.sent(1).wrote("peer", 0.0, 1.0, {KV: 1}, {KV: 2})

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line = subject.sent(1).line()
    assert (line["writes"], line["bytes"], line["descriptors"]) == (2000, {"kv": 2000}, {"kv": 4000})
