"""The benchmark on a geometry that takes no time."""

import json
import math

import pytest
import torch

from bench_serving import merge as bench


@pytest.fixture
def run(monkeypatch, tmp_path):
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench, "TOKENS", 6)
    monkeypatch.setattr(bench, "KV_DIM", 4)
    monkeypatch.setattr(bench, "SEGMENT", 8)
    monkeypatch.setattr(bench, "SSM_DIM", 4)
    monkeypatch.setattr(bench, "SSM_HEADS", 4)
    monkeypatch.setattr(bench, "UNIT_BYTES", 4096)

    def main(*arguments):
        report = tmp_path / "out" / "merge.json"
        monkeypatch.setattr("sys.argv", ["merge", "--repeats", "3", "--page", "2", "--json", str(report), *arguments])
        assert bench.main() == 0
        return json.loads(report.read_text())

    yield main
    torch.set_num_threads(threads)


@pytest.mark.parametrize("layout", bench.LAYOUTS)
def test_reports_every_operation_beside_a_memcpy(run, layout, capsys):
    figures = run("--layout", layout)
    rows = {(row["operation"].split()[0].rstrip(","), row["placement"]) for row in figures["results"]}
    operations = ("merge_kv", "pack_kv", "reorder_conv", "scatter_ssm", "merge_batch", "merge_pages")
    wanted = {(name, placement) for name in operations for placement in ("contiguous", "scattered")}
    assert rows == wanted | {("merge_slot", "contiguous")}
    assert figures["machine"]["threads"] == 1
    assert figures["machine"]["torch"] == torch.__version__
    assert all(
        math.isfinite(row["ratio"]) and row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        for row in figures["results"]
    )
    captured = capsys.readouterr()
    assert "ratio" in captured.out
    assert "merge_kv, scattered, 3 items" in captured.err


def test_counts_the_bytes_that_are_written(run, monkeypatch):
    written = []
    for name in ("merge_kv", "reorder_conv", "scatter_ssm"):
        monkeypatch.setattr(bench.ops, name, lambda pool, shards, *rest: written.extend(s.nbytes for s in shards))
    monkeypatch.setattr(bench.ops, "pack_kv", lambda out, *rest: written.append(out.nbytes))
    monkeypatch.setattr(bench, "batch_cases", lambda *_: ())
    for case in bench.cases(bench.LAYOUTS[0], page=2):
        written.clear()
        case.run()
        assert sum(written) == case.bytes, case.operation


@pytest.mark.parametrize("layout", bench.LAYOUTS)
def test_batches_write_as_many_bytes_as_they_say_and_the_memcpy_too(run, monkeypatch, layout):
    pools, copied = {}, []

    class Assembler(bench.Assembler):
        def __init__(self, plan, memory):
            super().__init__(plan, memory)
            pools.update(memory)

    monkeypatch.setattr(bench, "Assembler", Assembler)
    plain = torch.Tensor.copy_

    def copy(self, source):
        copied.append(source.nbytes)
        return plain(self, source)

    for case in bench.batch_cases(layout, page=2):
        for pool in pools.values():
            pool.zero_()
        case.run()
        assert sum(int(pool.count_nonzero()) for pool in pools.values()) == case.bytes, case.operation
        with monkeypatch.context() as patch:
            copied.clear()
            patch.setattr(torch.Tensor, "copy_", copy)
            case.memcpy()
        assert sum(copied) == case.bytes, case.operation


def test_scattered_ids_are_distinct_and_fit_the_pool():
    found = bench.ids(50, "scattered")
    assert len(set(found.tolist())) == 50
    assert int(found.min()) >= 1 and int(found.max()) <= 100
