"""The handoff benchmark's order, table, figures and command line, without processes."""

import json
from contextlib import nullcontext

import pytest

from bench_serving import handoff
from bench_serving import handoff_run as run
from bench_serving.handoff import LIMIT, OURS, UPSTREAM, VARIANTS, Failed, Sample
from sglang_hetero import models
from tests.harness import Geometry

SECONDS = {UPSTREAM: 0.9, OURS: 0.12, run.BULK: 0.05, LIMIT: 0.1}
LONG = 2048


class FakeBench:
    """Answers at once; upstream's path does not pass long prompts."""

    staging_bytes = 32 << 20

    def __init__(self, *_: object) -> None:
        self.asked: list[tuple[str, int]] = []

    def warm_up(self, tokens: int) -> None:
        self.asked.append(("warm-up", tokens))

    def close(self) -> None:
        self.asked.append(("close", 0))

    def sample(self, variant: str, tokens: int) -> Sample:
        self.asked.append((variant, tokens))
        if variant == UPSTREAM and tokens >= LONG:
            raise Failed(f"a prompt of {tokens} tokens did not arrive")
        rounds = len(self.asked)
        return Sample(SECONDS[variant] * (1 + rounds / 1000), 7 if variant == OURS else 2, 1000 * tokens)


@pytest.fixture
def run_main(monkeypatch, tmp_path):
    made: list[FakeBench] = []

    def main(*arguments: str) -> dict:
        report = tmp_path / "out" / "handoff.json"
        monkeypatch.setattr(handoff, "Harness", nullcontext)
        monkeypatch.setattr(handoff, "Bench", lambda *a: made.append(FakeBench()) or made[-1])
        monkeypatch.setattr("sys.argv", ["handoff", "--only", "paths", "--json", str(report), *arguments])
        assert handoff.main() == 0
        return json.loads(report.read_text())

    main.benches = made
    return main


def test_every_length_has_a_row_per_variant_and_a_failure_is_shown(run_main, capsys):
    figures = run_main("--tokens", f"512,{LONG}", "--rounds", "3")
    rows = {(row["tokens"], row["variant"]): row for row in figures["results"]}
    assert set(rows) == {(tokens, variant) for tokens in (512, LONG) for variant in VARIANTS}
    assert rows[512, LIMIT]["ratio"] == 1
    assert rows[512, OURS]["ratio"] == pytest.approx(1.2, rel=0.05)
    assert rows[512, OURS]["descriptors"] == 7
    assert rows[512, OURS]["bytes"] == 512_000
    assert rows[512, OURS]["staging_bytes"] == 32 << 20
    failed = rows[LONG, UPSTREAM]
    assert (failed["ms"], failed["ratio"], failed["descriptors"]) == (None, None, None)
    assert figures["staging_bytes"] == {"1024": 32 << 20, "18592": 32 << 20}
    captured = capsys.readouterr()
    assert [line.split() for line in captured.out.splitlines() if "fails" in line] == [[str(LONG), UPSTREAM, "fails"]]
    assert "staging memory after 18,592 tokens: 32 MiB" in captured.out
    assert f"{LONG} tokens, round 1/3, {UPSTREAM}: fails" in captured.err
    assert f"512 tokens, round 3/3, {OURS}: 12" in captured.err


def test_a_variant_that_failed_is_not_tried_again_in_that_length(run_main):
    run_main("--tokens", f"{LONG}", "--rounds", "3")
    (bench,) = run_main.benches
    assert bench.asked[-1] == ("close", 0)
    assert bench.asked.count((UPSTREAM, LONG)) == 1
    assert bench.asked[0] == ("warm-up", LONG)


def test_a_failure_of_our_path_ends_the_run(run_main, monkeypatch, capsys):
    def fails(self: FakeBench, variant: str, tokens: int) -> Sample:
        raise Failed(f"a prompt of {tokens} tokens did not arrive")

    monkeypatch.setattr(FakeBench, "sample", fails)
    monkeypatch.setattr(handoff, "VARIANTS", (OURS,))
    with pytest.raises(AssertionError):
        run_main("--tokens", "512")
    assert "handoff: a prompt of 512 tokens did not arrive" in capsys.readouterr().err


def test_the_order_changes_between_rounds():
    rounds = [handoff.order(VARIANTS, number) for number in range(4)]
    assert all(sorted(each) == sorted(VARIANTS) for each in rounds)
    assert len({tuple(each) for each in rounds}) == 4
    assert rounds[0].index(OURS) < rounds[0].index(LIMIT)
    assert rounds[1].index(OURS) > rounds[1].index(LIMIT)


def test_lengths_must_be_positive():
    assert handoff.lengths("512,2048") == [512, 2048]
    with pytest.raises(SystemExit):
        handoff.parser().parse_args(["--tokens", "512,0"])


def test_parts_are_those_that_there_are():
    assert handoff.parts("hooks,paths") == ["paths", "hooks"]
    assert handoff.parser().parse_args([]).only == list(handoff.PARTS)
    with pytest.raises(SystemExit):
        handoff.parser().parse_args(["--only", "paths,everything"])


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        handoff.parser().parse_args(["--help"])
    assert "python -m bench_serving.handoff --tokens 64,512 --rounds 9" in capsys.readouterr().out


def test_chunks_end_at_the_chunk_size_and_at_the_end():
    assert run.chunk_ends(100) == [100]
    assert run.chunk_ends(run.CHUNK) == [run.CHUNK]
    assert run.chunk_ends(18592) == [8192, 16384, 18592]


def test_counts_the_bytes_of_a_request():
    """The figures of docs/core.md: 268 MB of KV for 146 pages, 19 MB of state."""
    shape = run.geometry(models.spec("qwen35-2b-cache"), tokens=18592, concurrency=1)
    assert isinstance(shape, Geometry)
    state = run.cache_bytes(shape, 0)
    assert state == 18 * (3 * 2048 * 3 * 2 + 16 * 128 * 128 * 4)
    assert run.cache_bytes(shape, 146 * 128) - state == 267_911_168
