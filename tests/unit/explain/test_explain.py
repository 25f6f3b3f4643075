"""`explain` on paper: the figures that a person reads, and every way to ask wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_hetero import cli

QWEN35_2B = ["--model", "qwen35-2b-cache", "--tokens", "18592"]
PAGES, ENTRIES, CHUNKS = 146, 14, 3
"""18,592 tokens in pages of 128; K and V of 6 layers and of the draft's one; chunks of 8,192 tokens."""
LINEAR_LAYERS = 18
KV_BYTES = 18592 * 256 * 2 * ENTRIES
"""One head of 256 bf16 elements per token: what a rank of TP 2 has."""
STATE_BYTES = LINEAR_LAYERS * (3072 * 3 * 2 + 8 * 128 * 128 * 4)
"""Conv: 3,072 channels x 3 rows in bf16; SSM: 8 heads of 128 x 128 in fp32."""


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["explain", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["explain", *arguments]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def p_d(prefill: int, decode: int) -> list[str]:
    return ["--prefill-tp", str(prefill), "--decode-tp", str(decode)]


@pytest.mark.parametrize("layout", ["channels_first", "window_first"])
@pytest.mark.parametrize(("scattered", "kv"), [([], ENTRIES * CHUNKS), (["--scattered"], ENTRIES * PAGES)])
def test_a_long_prompt_of_qwen35_2b(capsys, scattered, kv, layout):
    found = explain(capsys, *QWEN35_2B, *p_d(2, 1), "--conv-layout", layout, *scattered)
    assert [source["rank"] for source in found["sources"]] == [0, 1]
    for source in found["sources"]:
        assert source["kv_descriptors"] == kv
        assert source["state_descriptors"] == 2 * LINEAR_LAYERS
        assert source["bytes"] == KV_BYTES + STATE_BYTES
        assert not source["packed"]
    assert found["upstream"]["kv_descriptors"] == 261_632
    assert found["upstream"]["kv_descriptor_bytes"] == 512
    # Channels-first q, k and v go each on their own; window-first SGLang takes the slot for one block, and is wrong.
    assert found["upstream"]["state_descriptors"] == LINEAR_LAYERS * (4 if layout == "channels_first" else 2)
    assert found["upstream"]["kv_senders"] == found["upstream"]["state_senders"] == 2
    assert any("conv" in fault for fault in found["upstream"]["faults"]) == (layout == "window_first")


def test_page_and_chunk_are_options(capsys):
    found = explain(capsys, *QWEN35_2B, *p_d(2, 1), "--page", "64", "--chunk", "4096", "--scattered")
    assert (found["pages"], found["chunks"]) == (291, 5)
    assert {source["kv_descriptors"] for source in found["sources"]} == {291 * ENTRIES}


def test_a_narrow_prefill_gathers_first(capsys):
    """Half of a page's heads is a run of 512 bytes per token; gathered it is one piece per chunk and entry."""
    found = explain(capsys, *QWEN35_2B, *p_d(1, 2), "--scattered")
    (source,) = found["sources"]
    assert source["packed"]
    assert [route["kv_descriptors"] for route in source["to"]] == [ENTRIES * CHUNKS] * 2
    assert source["bytes"] == 2 * (KV_BYTES + STATE_BYTES)


def test_equal_sizes_need_no_staging(capsys):
    """Then both ranks have the same bytes for an item, and SGLang's own path writes one to the other."""
    found = explain(capsys, *QWEN35_2B, *p_d(2, 2))
    assert [[route["decode_rank"] for route in source["to"]] for source in found["sources"]] == [[0], [1]]
    assert not any(route["staged"] for source in found["sources"] for route in source["to"])
    assert found["upstream"]["faults"] == []
    assert found["upstream"]["kv_descriptors"] == ENTRIES * CHUNKS
    assert found["upstream"]["state_descriptors"] == 2 * LINEAR_LAYERS
    assert found["upstream"]["kv_senders"] == found["upstream"]["state_senders"] == 1
    found = explain(capsys, *QWEN35_2B, *p_d(2, 1))
    assert all(route["staged"] for source in found["sources"] for route in source["to"])


def test_replicas_share_the_work(capsys):
    """TP 8 holds each of 2 kv heads four times: all ranks send some layers, together each layer once."""
    found = explain(capsys, *QWEN35_2B, *p_d(8, 1))
    assert all(source["kv_descriptors"] > 0 for source in found["sources"])
    assert sum(source["bytes"] for source in found["sources"]) == 2 * (KV_BYTES + STATE_BYTES)


def test_pipeline_stages_send_their_own_layers(capsys):
    found = explain(capsys, *QWEN35_2B, *p_d(2, 1), "--prefill-pp", "2")
    layers = {
        (source["stage"], layer)
        for source in found["sources"]
        for route in source["to"]
        for part in route["parts"]
        if not part["role"].startswith("draft")
        for layer in part["layers"]
    }
    assert layers == {(0 if layer < 12 else 1, layer) for layer in range(24)}


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_a_plain_transformer_sends_keys_and_values_only(capsys, prefill, decode):
    found = explain(capsys, "--model", "tiny-gqa", "--tokens", "300", *p_d(prefill, decode))
    parts = [part for source in found["sources"] for route in source["to"] for part in route["parts"]]
    assert {part["role"] for part in parts} == {"target_key", "target_value"}
    assert {tuple(part["layers"]) for part in parts} == {(0, 1, 2, 3)}
    assert sum(source["state_descriptors"] for source in found["sources"]) == 0
    assert sum(source["bytes"] for source in found["sources"]) == 300 * 4 * 64 * 2 * 2 * 4
    assert found["inputs"]["mtp"] == 0
    assert found["upstream"]["faults"] == []


def test_a_checkpoint_folder_and_its_config_are_the_same_as_the_name(capsys, tmp_path: Path):
    from sglang_hetero import models
    from sglang_hetero.models.config import model_config

    (tmp_path / "config.json").write_text(json.dumps(model_config(models.spec("tiny"))))
    wanted = explain(capsys, "--model", "tiny", "--tokens", "100", *p_d(2, 1))
    wanted["inputs"].pop("model")
    for model in (tmp_path, tmp_path / "config.json"):
        found = explain(capsys, "--model", str(model), "--tokens", "100", *p_d(2, 1))
        assert found["inputs"].pop("model") == str(model)
        assert found == wanted


def test_the_table_names_every_rank_and_what_it_sends(capsys):
    assert cli.main(["explain", "--model", "tiny-h6", "--tokens", "1000", *p_d(2, 3)]) == 0
    shown = capsys.readouterr().out
    ranks = ("prefill 0", "prefill 1", "decode 0", "decode 1", "decode 2")
    for text in (*ranks, "target key", "target value", "draft key", "conv", "ssm", "head 2..2 -> 0..0"):
        assert text in shown
    assert "neither divides the other" in shown  # what stock SGLang would do with 2 to 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "tiny", "--tokens", "9", *p_d(3, 1)],
            "--prefill-tp 3 cannot",
        ),
        (["--model", "tiny", "--tokens", "9", *p_d(1, 3)], "--decode-tp 3 cannot"),
        (["--model", "no-such-model", "--tokens", "9", *p_d(1, 1)], "no seeded model has this name"),
        (["--model", "tiny", "--tokens", str(1 << 40), *p_d(1, 1)], "more than"),
        (["--model", "tiny", "--tokens", "9", *p_d(1, 1000)], "more than"),
        (["--model", "tiny", "--tokens", "9", "--page", str(1 << 40), *p_d(1, 1)], "more than"),
        (["--model", "tiny", "--tokens", "100000", "--chunk", "1", *p_d(1, 1)], "chunks"),
        (["--model", "tiny", "--tokens", "1000", "--chunk", "100", *p_d(1, 1)], "no multiple of --page 128"),
        (["--model", "tiny", "--tokens", "9", "--prefill-pp", "9", *p_d(1, 1)], "only 8 layers"),
        (["--model", "tiny", "--tokens", "9", *p_d(8, 1)], "TP sizes that can: 1, 2, 4"),
        (["--model", "tiny", "--tokens", "1000000", "--page", "1", *p_d(1, 1)], "pages"),
        (["--model", "x" * 5000, "--tokens", "9", *p_d(1, 1)], "5002 characters"),
    ],
    ids=[
        "prefill-tp",
        "decode-tp",
        "model",
        "tokens",
        "tp",
        "page",
        "chunks",
        "uneven",
        "stages",
        "linear-heads",
        "pages",
        "name",
    ],
)
def test_wrong_questions_end_in_one_line(capsys, arguments, message):
    assert message in fails(capsys, *arguments)


HOSTILE = [
    "",
    "[]",
    "{",
    "[" * 100_000,
    '{"model_type": "bert"}',
    "{}",
    "\udce4",
    '{"model_type": ' + "9" * 5000 + "}",
    '{"model_type": "' + "x" * 1_000_000 + '"}',
    '{"model_type": "\\u001b[31mred\\nline"}',
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_file_that_is_no_configuration(capsys, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    line = fails(capsys, "--model", str(tmp_path), "--tokens", "9", *p_d(1, 1))
    assert line.isprintable()
    assert len(line) < 1000


@pytest.mark.parametrize(
    ("field", "content"),
    [("rope_scaling", {"\ud800": "\ud800"}), ("architectures", ["\ud800"])],
    ids=["key-and-value", "architecture"],
)
def test_half_a_surrogate_pair_is_no_harm(capsys, tmp_path, field, content):
    from sglang_hetero import models
    from sglang_hetero.models.config import model_config

    (tmp_path / "config.json").write_text(json.dumps(model_config(models.spec("tiny")) | {field: content}))
    assert explain(capsys, "--model", str(tmp_path), "--tokens", "9", *p_d(1, 1))["pages"] == 1


def test_a_configuration_nested_too_deeply(capsys, tmp_path):
    from sglang_hetero import models
    from sglang_hetero.models.config import model_config

    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    (tmp_path / "config.json").write_text(json.dumps(model_config(models.spec("tiny")) | {"rope_scaling": deep}))
    assert "nested too deeply" in fails(capsys, "--model", str(tmp_path), "--tokens", "9", *p_d(1, 1))


@pytest.mark.parametrize("value", ["-1", "65", "x", "9" * 5000])
def test_a_depth_is_a_small_whole_number(capsys, value):
    with pytest.raises(SystemExit):
        cli.main(["explain", "--model", "tiny", "--tokens", "9", *p_d(1, 1), "--mtp", value])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "must be 0 to 64" in last
    assert len(last) < 300


def test_a_model_without_draft_layers_has_none_whatever_is_asked(capsys, tmp_path):
    """Kimi-Linear: no MTP layer, and conv windows that are window-first everywhere."""
    config = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = explain(capsys, "--model", str(tmp_path), "--tokens", "300", "--conv-layout", "channels_first", *p_d(2, 1))
    assert found["inputs"]["mtp"] == 0
    assert found["inputs"]["conv_layout"] == "window_first"
    assert found["upstream"]["faults"] == []
    assert sum(source["kv_descriptors"] for source in found["sources"]) == 1  # one rank sends the one latent layer


@pytest.mark.parametrize("option", ["--prefill-tp", "--decode-tp", "--tokens", "--page", "--chunk", "--prefill-pp"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_counts_are_one_or_more(capsys, option, value):
    with pytest.raises(SystemExit):
        cli.main(["explain", "--model", "tiny", "--tokens", "9", *p_d(1, 1), option, value])
    assert option in capsys.readouterr().err


# --- speculation that differs -----------------------------------------------------------------------------------------

HIDDEN = 128 * 2
"""Bytes of a hidden state of qwen35-2b-cache in bfloat16."""
DEPTHS = {
    "decode alone": (["--prefill-mtp", "0"], (0, 3)),
    "prefill alone": (["--decode-mtp", "0"], (3, 0)),
    "of two depths": (["--prefill-mtp", "1", "--decode-mtp", "5"], (1, 5)),
    "alike": ([], (3, 3)),
    "neither": (["--mtp", "0"], (0, 0)),
}


@pytest.mark.parametrize(("options", "depths"), DEPTHS.values(), ids=DEPTHS)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_each_role_has_its_own_depth(capsys, options, depths, tp):
    """Oracle: docs/speculation.md. Draft caches go only if both draft, and decode begins the draft's columns itself
    where one does not."""
    found = explain(capsys, *QWEN35_2B, *p_d(*tp), *options)
    assert (found["inputs"]["prefill_mtp"], found["inputs"]["decode_mtp"]) == depths
    both, one = all(depths), bool(depths[0]) != bool(depths[1])
    roles = {part["role"] for source in found["sources"] for route in source["to"] for part in route["parts"]}
    assert {role for role in roles if role.startswith("draft")} == ({"draft_key", "draft_value"} if both else set())
    assert bool(found["unequal_drafts"]) is one
    window = 3
    assert found["slot_rows"] == {"prefill": window + depths[0], "decode": window + depths[1], "live": window}
    row = {column["name"]: column for column in found["row"]}
    assert {name for name, column in row.items() if not column["taken"]} == (
        {"output_topk_p", "output_topk_index", "output_hidden_states"} if one else set()
    )
    sizes = [(HIDDEN, "bfloat16") if depth else (64, "float32") for depth in depths]
    hidden = row["output_hidden_states"]
    assert [(hidden[f"{side}_bytes"], hidden[f"{side}_dtype"]) for side in ("prefill", "decode")] == sizes
    stock = found["upstream"]["faults"]
    assert any("another request's row" in fault for fault in stock) is one
    assert any("prefill's size is taken for decode's" in fault for fault in stock) is (depths[0] != depths[1])
    staged = {route["staged"] for source in found["sources"] for route in source["to"]}
    assert staged == {tp[0] != tp[1] or depths[0] != depths[1]}


def test_depth_alone_differs_in_nothing_with_channels_first_slots(capsys):
    options = ["--prefill-mtp", "1", "--decode-mtp", "5", "--conv-layout", "channels_first"]
    found = explain(capsys, *QWEN35_2B, *p_d(2, 2), *options)
    assert not any(route["staged"] for source in found["sources"] for route in source["to"])
    assert found["upstream"]["faults"] == []
    assert found["slot_rows"] == {"prefill": 3, "decode": 3, "live": 3}


def shown(capsys, *arguments):
    assert cli.main(["explain", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_what_differs_is_said_in_words(capsys):
    said = shown(capsys, *QWEN35_2B, *p_d(2, 1), "--prefill-mtp", "0")
    for words in (
        "Speculation on one side only: prefill TP0/2 (on paper) has no draft model",
        "Conv slots have 3 rows on prefill and 6 on decode: the last 3 of them travel",
        "7 columns are the same on both sides and taken over",
        "output_hidden_states 64 bytes of float32 256 bytes of bfloat16 begun there",
        "lands in another request's row",
    ):
        assert words in said, words
    said = shown(capsys, *QWEN35_2B, *p_d(2, 1))
    for words in ("Speculation on one side", "Conv slots have", "The row with the first token"):
        assert words not in said, words


def test_a_configuration_that_does_not_say_how_large_a_hidden_state_is(capsys):
    arguments = ["--model", "Qwen3.5-2B", "--tokens", "300", *p_d(2, 1)]
    assert "not known, the configuration does not say hidden_size" in shown(capsys, *arguments, "--prefill-mtp", "0")
    assert explain(capsys, *arguments, "--prefill-mtp", "0")["row"] == []
    assert len(explain(capsys, *arguments, "--mtp", "0")["row"]) == 10


def test_what_the_hand_shake_refuses_is_refused(capsys, monkeypatch):
    """By the same rule, in reshard/row.py: here a server has a column more, as an option of SGLang's makes it."""
    from sglang_hetero.explain import command
    from sglang_hetero.layout.row import Column

    made = []

    def rows(*_, **__):
        made.append(())
        more = (Column("kv_checksum", "uint64", 64),) if len(made) == 3 else ()
        return (Column("output_ids", "int32", 64), *more)

    monkeypatch.setattr(command, "first_token_row", rows)
    line = fails(capsys, *QWEN35_2B, *p_d(2, 1), "--prefill-mtp", "0")
    assert "column kv_checksum of the row with the first token: prefill TP0/2 (on paper) has none" in line
    assert "start both with" in line


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_depth_is_refused_of_a_model_without_mtp(capsys, role):
    line = fails(capsys, "--model", "tiny-gqa", "--tokens", "9", *p_d(1, 1), f"--{role}-mtp", "3")
    assert f"--{role}-mtp 3: the model has no MTP layer" in line
