"""What is told of decode's steps, and the page of metrics."""

import types
from dataclasses import dataclass

import pytest

from sglang_hetero.backend import metrics, steps
from sglang_hetero.backend.options import Options
from sglang_hetero.errors import OptionError
from sglang_hetero.perf.records import Component, Figures, Perf

KV, STATE, DRAFT = Component


@dataclass
class Request:
    bootstrap_room: int | None
    done: bool = False

    def finished(self):
        return self.done


def batch(*requests):
    return types.SimpleNamespace(reqs=list(requests))


@pytest.fixture
def perf(monkeypatch):
    found = Perf("decode", "decode TP0/1", log=False)
    monkeypatch.setattr(steps, "_watched", [found])
    for room in (1, 2):
        found.created(room)
        found.opened(room, 1)
    found.enqueued(1)
    return found


def test_the_first_step_of_a_request_ends_its_record(perf):
    said = steps.around_decode_result(
        lambda *arguments, **named: (arguments, named), "p", batch(Request(1), Request(None)), "result", more=1
    )
    assert said[0][0] == "p"
    assert said[0][2:] == ("result",)
    assert said[1] == {"more": 1}
    assert perf.counts == (0, 1)  # the other is still on its way
    assert not perf.awaits_step


def test_requests_that_wait_for_nothing_cost_no_look(perf, caplog):
    class Untouchable:
        @property
        def bootstrap_room(self):
            raise AssertionError("nobody waits for a step")

    perf.stepped([1])
    steps.around_decode_result(lambda *_: None, None, batch(Untouchable()), None)
    assert not caplog.records


def test_a_request_that_prefills_token_finishes(perf):
    request = Request(1)

    def original(processor, batch):
        request.done = True
        batch.reqs = []  # SGLang may filter it
        return "streamed"

    assert steps.around_prebuilt_result(original, None, batch(request)) == "streamed"
    assert not perf.awaits_step


def test_a_request_whose_first_token_is_streamed_waits_for_its_own_step(perf):
    steps.around_prebuilt_result(lambda *_: None, None, batch(Request(1)))
    assert perf.awaits_step


def test_an_error_of_ours_does_not_reach_sglang(perf, caplog):
    assert steps.around_decode_result(lambda *_: "tokens", None, batch(object()), None) == "tokens"
    assert "the figures of a step" in caplog.text


def test_a_rank_with_a_folder_that_cannot_be_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "_watched", [])
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="SGLANG_HETERO_TRACE"):
        steps.perf_of("decode", "r", Options(trace=str(tmp_path / "file")))
    assert not steps.perf_of("decode", "r", Options()).trace.on


def value(name, **labels):
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(f"{metrics.PREFIX}:{name}", labels) or 0.0


def test_metrics():
    observe = metrics.figures_observer("prefill")
    labels = {"side": "prefill"}
    names = ["transfer_seconds_sum", "transfer_seconds_count", "early_bytes_ratio_sum", "window_wait_seconds_count"]
    before = [value(name, **labels) for name in names]
    counted = [
        value("component_bytes_total", component="state", **labels),
        value("component_descriptors_total", component="draft", **labels),
    ]
    observe(Figures({"transfer_seconds": 0.25}, 0.5, {KV: 10, STATE: 7}, {KV: 2, DRAFT: 3}))
    assert [now - then for now, then in zip((value(n, **labels) for n in names), before, strict=True)] == [
        0.25,
        1.0,
        0.5,
        0.0,
    ]
    assert value("component_bytes_total", component="state", **labels) - counted[0] == 7
    assert value("component_descriptors_total", component="draft", **labels) - counted[1] == 3


def test_every_time_that_a_record_tells_has_a_histogram():
    """And every histogram has a time that feeds it."""
    clock = iter(range(100))
    told = []
    perf = Perf("decode", "r", clock=lambda: float(next(clock)), observe=told.append, log=False)
    perf.created(1)
    record = perf.opened(1, 1)
    record.granted()
    record.merged(KV, 1, 0.5)
    record.first_generation()
    perf.enqueued(1)
    perf.stepped([1])
    perf.sent(2).handed_over(True)
    perf.sent(2).wrote("p", 0.0, 1.0, {KV: 1}, {KV: 1})
    perf.sent_end(2)
    found = {name for figures in told for name in figures.seconds}
    assert found | {metrics.EARLY} == set(metrics.HISTOGRAMS)
    assert told[1].early == 1.0
