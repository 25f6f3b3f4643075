"""The parts of the handoff benchmark beside `paths`: their order, figures and lines, without processes."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench_serving import handoff
from bench_serving import handoff_load as load
from bench_serving import handoff_overlap as overlap
from bench_serving import handoff_run as run
from bench_serving.handoff_overlap import AT_END, NO_STATE, STATES, VARIANTS, Passed
from sglang_hetero import models

SHAPE = run.geometry(models.spec("qwen35-2b-cache"), tokens=18592, concurrency=1)
AFTER = {"prepush": 0.011, "push": 0.030, "pull": 0.050, AT_END: 0.060, NO_STATE: 0.010}
"""Seconds after prefill."""
BEFORE = {"prepush": 80, "push": 40, "pull": 40, AT_END: 0, NO_STATE: 90}
CPU_SECONDS = {"prepush": 0.0034, AT_END: 0.0030}


class FakeOverlap:
    """Answers at once; the hand-over at the end gets slower with each trial."""

    def __init__(self, *_: object) -> None:
        self.shape = SHAPE
        self.asked: list[tuple[str, float]] = []

    def sample(self, variant: str, tokens: int, token_seconds: float) -> Passed:
        self.asked.append((variant, token_seconds))
        if not token_seconds:
            return Passed(0.05 * len(self.asked), 0, 100)
        return Passed(AFTER[variant], BEFORE[variant], 100)

    def pass_times(self, variant: str) -> SimpleNamespace:
        self.asked.append((variant, 0.0))
        return SimpleNamespace(cpu_seconds=CPU_SECONDS[variant], seconds=2 * CPU_SECONDS[variant])

    def close(self) -> None:
        pass


class FakeLoad:
    """A link of 1 GB/s that one prompt alone uses to four fifths."""

    def __init__(self, *_: object) -> None:
        pass

    def prompt_bytes(self, tokens: int) -> int:
        return 1_000_000

    def together(self, prompts: int) -> float:
        return prompts * 0.001 / (0.8 if prompts == 1 else 1.0)

    def fair(self, tokens: list[int]) -> list[float]:
        return [0.4 if each == load.LONG else 0.01 * len(tokens) for each in tokens]

    def close(self) -> None:
        pass


def test_the_timer_is_slower_than_the_fastest_trial():
    bench = FakeOverlap()
    rows = {row.variant: row for row in overlap.measure(bench, 8192, 2, lambda _: None)}
    layers = SHAPE.layers + 1
    wanted = overlap.SLOWER * 0.05 / layers
    assert [variant for variant, seconds in bench.asked if not seconds] == [AT_END] * overlap.TRIALS
    timed = [seconds for _, seconds in bench.asked if seconds]
    assert timed == pytest.approx([wanted / 8192] * 2 * len(VARIANTS))
    assert rows["prepush"].layer_ms == pytest.approx(1e3 * wanted, abs=1e-3)
    assert list(rows) == list(VARIANTS)


def test_exposed_time_of_the_state_is_over_that_without_state():
    rows = {row.variant: row for row in overlap.measure(FakeOverlap(), 512, 3, lambda _: None)}
    assert rows["prepush"].state_ms == pytest.approx(1)
    assert rows["pull"].state_ms == pytest.approx(40)
    assert rows["prepush"].landed == 0.8
    lines = "\n".join(overlap.table(list(rows.values())))
    assert "prepush 0.03 of pull's" in lines  # 1 of 40 ms
    assert f"{0.8 / rows['prepush'].due:.1%} of what was due" in lines


def test_what_is_due_is_all_but_the_last_layer_and_the_draft_of_the_last_chunk():
    token = 2 * 2 * 256 * 2  # K and V of 2 heads of 256 channels of 2 bytes
    for tokens, last in ((512, 512), (8192, 8192), (18592, 18592 - 16384)):
        whole = run.cache_bytes(SHAPE, tokens)
        assert overlap.due(SHAPE, tokens) == pytest.approx(1 - 2 * token * last / whole)
    state = run.cache_bytes(SHAPE, 0) // 18
    linear_last = replace(SHAPE, full_attention_layers=(0, *SHAPE.full_attention_layers[:-1]))
    assert overlap.due(linear_last, 512) == pytest.approx(1 - (token * 512 + state) / run.cache_bytes(linear_last, 512))


def test_the_hooks_cost_what_a_pass_takes_longer():
    bench = FakeOverlap()
    cost = overlap.hooks(bench)
    assert (cost.cpu_us, cost.layers) == (pytest.approx(400), 25)
    assert cost.pass_ms == pytest.approx(40)
    assert [variant for variant, _ in bench.asked[:4]] == ["prepush", AT_END, "prepush", AT_END]
    assert "1% of a pass of 40 ms" in overlap.hook_lines(cost)[0]


def test_throughput_is_beside_that_of_one_prompt():
    rows = {row.prompts: row for row in load.throughput(FakeLoad(), 2, lambda _: None)}
    assert list(rows) == list(load.TOGETHER)
    assert rows[1].ratio == 1
    assert rows[32].ratio == pytest.approx(1.25)
    assert rows[32].gb_per_second == pytest.approx(1.0)
    assert rows[4].ms == pytest.approx(4.0)


def test_a_short_prompt_is_compared_with_itself():
    found = load.fairness(FakeLoad(), 3, lambda _: None)
    assert (found.alone_ms, found.beside_ms, found.long_ms, found.ratio) == (10, 20, 400, 2)
    assert "2.00 times as long" in load.fairness_lines(found)[0]


@pytest.mark.parametrize("only", ["layers", "hooks", "together", "fair", "layers,hooks,together,fair"])
def test_only_the_chosen_parts_run_and_all_of_them_are_in_the_file(monkeypatch, tmp_path, capsys, only):
    report = tmp_path / "handoff.json"
    monkeypatch.setattr(handoff, "Harness", nullcontext)
    monkeypatch.setattr(overlap, "Bench", FakeOverlap)
    monkeypatch.setattr(load, "Bench", FakeLoad)
    monkeypatch.setattr("sys.argv", ["handoff", "--only", only, "--tokens", "512", "--json", str(report)])
    assert handoff.main() == 0
    figures = json.loads(report.read_text())
    assert {name for name in handoff.PARTS if name in figures} == set(only.split(","))
    if "layers" in only:
        assert [row["variant"] for row in figures["layers"]] == [*STATES, AT_END, NO_STATE]
    assert capsys.readouterr().out.splitlines()[0].startswith(handoff.MODEL)
