"""transformers reads what we write: configuration, weights and tokenizer."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from sglang_hetero import models
from tests.reference.mtp import load_head
from tests.reference.target import load

CLASSES = {
    "tiny": "Qwen3_5TextConfig",
    "tiny-gqa2": "Qwen3_5TextConfig",
    "tiny-h6": "Qwen3_5TextConfig",
    "tiny-moe": "Qwen3_5MoeTextConfig",
    "tiny-next": "Qwen3NextConfig",
    "qwen35-2b-cache": "Qwen3_5TextConfig",
    "tiny-gqa": "Qwen3Config",
    "recall": "Qwen3_5TextConfig",
}
HYBRID = [name for name in CLASSES if name != "tiny-gqa"]


@pytest.mark.parametrize("name", CLASSES)
def test_config(name: str) -> None:
    spec = models.spec(name)
    config = AutoConfig.from_pretrained(models.path(name))
    assert type(config).__name__ == CLASSES[name]
    assert config.num_hidden_layers == spec.num_layers
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == spec.full_attention_layers
    assert (config.num_attention_heads, config.num_key_value_heads) == (spec.attention_heads, spec.kv_heads)
    assert config.head_dim == spec.head_dim
    assert config.max_position_embeddings == spec.max_positions
    assert config.rope_parameters["rope_theta"] == 1e7
    assert config.eos_token_id == spec.vocab_size - 1


@pytest.mark.parametrize("name", HYBRID)
def test_config_of_a_hybrid(name: str) -> None:
    spec = models.spec(name)
    config = AutoConfig.from_pretrained(models.path(name))
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (
        spec.linear_key_heads,
        spec.linear_value_heads,
    )
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (spec.linear_key_dim, spec.linear_value_dim)
    sections = config.rope_parameters.get("mrope_section")
    if sections is not None:
        # Every rotary frequency belongs to one axis: half of the rotated quarter of a head.
        assert sum(sections) == spec.head_dim // 4 // 2


def test_next_repeats_rope_theta_where_sglang_reads_it() -> None:
    config = json.loads((models.path("tiny-next") / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e7


@pytest.mark.parametrize("name", ["tiny", "tiny-h6", "tiny-moe", "tiny-next", "qwen35-2b-cache"])
def test_every_weight_has_a_place(name: str) -> None:
    """load() and load_head() raise on missing and on left-over weights."""
    model = load(models.path(name))
    load_head(models.path(name))
    spec = models.spec(name)
    first = model.model.layers[0].linear_attn
    assert first.conv1d.weight.shape == (spec.conv_channels, 1, spec.conv_kernel)
    assert float(first.A_log.detach().max()) < 0
    rows = model.lm_head.weight.detach()[[spec.pad_token, spec.eos_token]]
    assert not rows.any(), "pad and end token must have a logit of 0"


def test_every_weight_of_a_plain_transformer_has_a_place() -> None:
    model = load(models.path("tiny-gqa"))
    spec = models.spec("tiny-gqa")
    assert len(model.model.layers) == spec.num_layers
    # Its norms multiply by the weight, those of the hybrid models by 1 + weight.
    assert abs(float(model.model.norm.weight.detach().mean()) - 1) < 0.1


def test_dtypes() -> None:
    with safe_open(models.path("tiny") / "model.safetensors", framework="pt") as tensors:
        dtypes = {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    single = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert single and all(name.endswith("A_log") for name in single)
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


def test_models_that_differ_in_one_width_share_the_other_weights() -> None:
    """Every tensor has its own random stream: other layers do not change with one."""
    from dataclasses import replace

    from sglang_hetero.models.weights import state_dict

    wide, narrow = (state_dict(replace(models.spec("tiny"), kv_heads=heads)) for heads in (4, 2))
    changed = {name for name in wide if wide[name].shape != narrow[name].shape}
    assert changed and all(name.endswith(("k_proj.weight", "v_proj.weight")) for name in changed)
    assert all(torch.equal(wide[name], narrow[name]) for name in wide.keys() - changed)


@pytest.mark.parametrize("name", ["tiny", "tiny-h6"])
def test_tokenizer(name: str) -> None:
    spec = models.spec(name)
    tokenizer = AutoTokenizer.from_pretrained(models.path(name))
    assert len(tokenizer) == spec.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (spec.eos_token, spec.pad_token)
    text = "Grüße, 世界!\n\tx"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode()), "one token per byte"
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([300, spec.eos_token]) == "<w300><|eos|>"


def test_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.path("tiny"))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "user: hi\nassistant: yo\nuser: ?\nassistant: "
