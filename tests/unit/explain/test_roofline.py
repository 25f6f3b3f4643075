"""The roofline on paper, against sums that are done here by hand, and the table of docs/ascend.md."""

import json
import re
from pathlib import Path

import pytest

from sglang_hetero import cli
from sglang_hetero.explain import published, roofline

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "ascend.md"
TOKENS = 18592
HCCS, ROCE, MEMORY = 19.2e9, 22.6e9, 1.6e12
HEAD = TOKENS * 256 * 2
"""Bytes of K, or V, of one head of one layer."""
STATE = 128 * 128 * 4
CONV = 3 * 2


def ask(capsys, model, prefill, decode, *arguments):
    sizes = ["--prefill-tp", str(prefill), "--decode-tp", str(decode), "--tokens", str(TOKENS)]
    chosen = arguments or ("--roofline", "910B")
    assert cli.main(["explain", "--model", model, *sizes, "--json", *chosen]) == 0
    return json.loads(capsys.readouterr().out)


def rows(found):
    return {row["what"].split(":")[0]: row for row in found["roofline"]["rows"]}


def near(microseconds):
    return pytest.approx(microseconds * 1e6)


def test_two_sources_that_send_half_each(capsys):
    found = rows(ask(capsys, "Qwen3.5-2B", 2, 1))
    kv = 2 * 2 * HEAD
    state = 16 * STATE + 3 * 16 * 128 * CONV
    for what, layers, size in (("attention layer", 6, kv), ("linear layer", 18, state), ("draft", 1, kv)):
        row = found[what]
        assert (row["layers"], row["bytes"]) == (layers, size)
        # A link for each pair of NPUs, but one port at decode.
        assert row["link_us"] == {"HCCS": near(size / 2 / HCCS), "RoCE": near(size / ROCE)}
        assert row["merge_us"] == near(2 * size / MEMORY)
        assert row["pack_us"] == 0
    whole = 7 * kv + 18 * state
    assert found["the request"]["bytes"] == whole
    assert found["the request"]["layers"] == 25
    assert found["the request"]["link_us"]["HCCS"] == near(whole / 2 / HCCS)


def test_a_source_of_several_decode_ranks_gathers_and_shares_its_port(capsys):
    row = rows(ask(capsys, "Qwen3.5-2B", 1, 2))["attention layer"]
    assert row["bytes"] == 2 * HEAD
    assert row["link_us"] == {"HCCS": near(2 * HEAD / HCCS), "RoCE": near(4 * HEAD / ROCE)}
    assert row["pack_us"] == near(2 * 4 * HEAD / MEMORY)


def test_replicas_take_layers_in_turns(capsys):
    """TP 4 over 2 heads: a layer comes whole from one of the replicas, half of all from each."""
    found = rows(ask(capsys, "Qwen3.5-35B-A3B", 4, 2))
    assert found["attention layer"]["link_us"]["HCCS"] == near(2 * HEAD / HCCS)
    total = found["the request"]["bytes"]
    assert total / 4 / HCCS < found["the request"]["link_us"]["HCCS"] / 1e6 < total / HCCS


def test_equal_sizes_merge_nothing(capsys):
    assert rows(ask(capsys, "Qwen3.5-2B", 2, 2))["the request"]["merge_us"] == 0


def test_the_big_model_has_more_state(capsys):
    row = rows(ask(capsys, "Qwen3.5-397B-A17B", 16, 8))["linear layer"]
    assert (row["layers"], row["bytes"]) == (45, (64 * STATE + (2 * 16 + 64) * 128 * CONV) // 8)


def test_a_published_geometry_is_that_of_the_seeded_model(capsys):
    """qwen35-2b-cache is made after Qwen3.5-2B."""
    ours, theirs = (rows(ask(capsys, name, 2, 1)) for name in ("qwen35-2b-cache", "Qwen3.5-2B"))
    assert ours == theirs


@pytest.mark.parametrize("machine", roofline.MACHINES)
def test_a_person_is_shown_the_same(capsys, machine):
    arguments = ["--prefill-tp", "2", "--decode-tp", "1", "--tokens", str(TOKENS), "--roofline", machine]
    assert cli.main(["explain", "--model", "Qwen3.5-2B", *arguments]) == 0
    shown = capsys.readouterr().out
    found = rows(ask(capsys, "Qwen3.5-2B", 2, 1, "--roofline", machine))["the request"]
    assert f"{found['merge_us']:,.0f}" in shown and f"{found['link_us']['HCCS']:,.0f}" in shown


def test_without_being_asked_there_is_none(capsys):
    assert "roofline" not in ask(capsys, "Qwen3.5-2B", 2, 1, "--scattered")


def test_the_document_has_the_figures_of_today(capsys):
    """Each table follows the command that makes it."""
    text = DOCUMENT.read_text()
    tables = re.findall(r"    sglang-hetero (explain .*--roofline (\w+))\n\n((?:\|.*\n)+)", text)
    assert {name for command, _, _ in tables for name in published.CONFIGS if name in command} == set(published.CONFIGS)
    for command, machine, table in tables:
        assert cli.main([*command.split(), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["roofline"]["rows"]
        links = [link.name for link in roofline.MACHINES[machine].links]
        made = [roofline.header(links), *(roofline.cells(roofline.Row(**row), links) for row in found)]
        shown = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        del shown[1]
        assert shown == made
