"""Facts about the models that other tests rely on."""

import dataclasses
from pathlib import Path

import pytest

from sglang_hetero import models
from sglang_hetero.errors import HeteroError
from sglang_hetero.models.specs import Family

HYBRID = ["tiny", "tiny-gqa2", "tiny-h6", "tiny-moe", "tiny-next", "qwen35-2b-cache"]
PLAIN = ["tiny-gqa"]
TRAINED = ["recall"]
ALL = [*HYBRID[:-1], *PLAIN, HYBRID[-1], *TRAINED]
# SGLang's CPU path pads feed-forward widths to a multiple of 32 per rank (configs/update_config.py).
CPU_PADDING = 32


def sharded(name: str) -> dict[str, int]:
    """Everything that tensor parallelism splits, as counts of the smallest unit."""
    spec = models.spec(name)
    counts = {
        "attention heads": spec.attention_heads,
        "kv heads": spec.kv_heads,
        "linear key heads": spec.linear_key_heads,
        "linear value heads": spec.linear_value_heads,
        "vocabulary": spec.vocab_size,
    }
    if spec.intermediate_size is not None:
        counts["feed-forward / 32"] = spec.intermediate_size // CPU_PADDING
    if spec.experts is not None:
        counts["expert / 32"] = spec.experts.intermediate_size // CPU_PADDING
        counts["shared expert / 32"] = spec.experts.shared_intermediate_size // CPU_PADDING
    return counts


def test_names() -> None:
    assert models.names() == ALL


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(HeteroError) as error:
        models.spec("huge")
    message = str(error.value)
    assert "'huge'" in message and "\n" not in message
    assert all(name in message for name in ALL)
    with pytest.raises(HeteroError, match="unknown model"):
        models.path("huge")


@pytest.mark.parametrize("name", ALL)
def test_common_facts(name: str) -> None:
    spec = models.spec(name)
    assert spec.name == name
    assert spec.max_positions >= 32768
    assert spec.attention_heads % spec.kv_heads == 0
    assert spec.kv_heads < spec.attention_heads
    assert sorted(spec.full_attention_layers + spec.linear_attention_layers) == list(range(spec.num_layers))
    assert (spec.intermediate_size is None) == (spec.experts is not None)


@pytest.mark.parametrize("name", HYBRID)
def test_hybrids(name: str) -> None:
    spec = models.spec(name)
    assert spec.mtp_layers == 1
    assert spec.linear_value_heads % spec.linear_key_heads == 0
    assert spec.full_attention_layers[0] == 3 and len(spec.linear_attention_layers) > len(spec.full_attention_layers)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_transformers(name: str) -> None:
    spec = models.spec(name)
    assert spec.mtp_layers == 0
    assert spec.full_attention_layers == list(range(spec.num_layers))
    assert (spec.linear_key_heads, spec.linear_value_heads) == (0, 0)


@pytest.mark.parametrize(
    ("name", "size"),
    [(n, s) for n in ("tiny", "tiny-moe", "tiny-next", "tiny-gqa", "recall") for s in (1, 2, 4)]
    + [("tiny-h6", s) for s in (1, 2, 3)],
)
def test_splits_evenly(name: str, size: int) -> None:
    uneven = {what: count for what, count in sharded(name).items() if count % size}
    assert not uneven


def test_h6_hidden_size_splits_too() -> None:
    spec = models.spec("tiny-h6")
    assert all(spec.hidden_size % size == 0 for size in (1, 2, 3))
    assert (spec.kv_heads, spec.linear_key_heads, spec.linear_value_heads) == (6, 6, 12)


def test_gqa2_replicates_kv_heads_at_four_ranks() -> None:
    spec = models.spec("tiny-gqa2")
    assert spec.kv_heads == 2
    uneven = {what for what, count in sharded("tiny-gqa2").items() if count % 4}
    assert uneven == {"kv heads"}


@pytest.mark.parametrize("name", ["tiny", "tiny-gqa2", "tiny-h6", "tiny-moe", "tiny-next", "recall"])
def test_key_and_value_widths_differ(name: str) -> None:
    """An implementation that takes one for the other must not pass by luck."""
    spec = models.spec(name)
    assert spec.linear_key_dim != spec.linear_value_dim
    assert spec.kv_heads != spec.linear_value_heads


def test_widths_of_k_and_v_differ_in_most() -> None:
    equal = [name for name in HYBRID if models.spec(name).linear_key_width == models.spec(name).linear_value_width]
    assert equal == ["tiny-h6", "qwen35-2b-cache"]


def test_the_trained_one() -> None:
    spec = models.spec("recall")
    assert (spec.linear_attention_layers, spec.full_attention_layers, spec.mtp_layers) == ([0, 1], [2], 1)
    assert [name for name in ALL if models.spec(name).trained] == TRAINED


def test_cache_geometry_of_qwen35_2b() -> None:
    spec = models.spec("qwen35-2b-cache")
    assert spec.full_attention_layers == [3, 7, 11, 15, 19, 23]
    assert len(spec.linear_attention_layers) == 18
    assert (spec.kv_heads, spec.head_dim) == (2, 256)
    assert (spec.linear_key_heads, spec.linear_value_heads) == (16, 16)
    assert (spec.linear_key_dim, spec.linear_value_dim, spec.conv_kernel) == (128, 128, 4)
    assert spec.conv_channels == 6144


def test_families() -> None:
    families = {name: models.spec(name).family for name in ALL}
    assert families.pop("tiny-gqa") is Family.QWEN3
    assert families.pop("tiny-moe") is Family.QWEN3_5_MOE
    assert families.pop("tiny-next") is Family.QWEN3_NEXT
    assert set(families.values()) == {Family.QWEN3_5}


def test_fingerprint_follows_the_spec_and_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_hetero.models import store

    spec = models.spec("tiny")
    before = store.fingerprint(spec)
    assert before == models.fingerprint("tiny")
    assert store.fingerprint(dataclasses.replace(spec, seed=spec.seed + 1)) != before
    scales = dataclasses.replace(spec.scales, branch=spec.scales.branch * 2)
    assert store.fingerprint(dataclasses.replace(spec, scales=scales)) != before
    monkeypatch.setattr(store, "GENERATOR_VERSION", store.GENERATOR_VERSION + 1)
    assert store.fingerprint(spec) != before


def test_the_documentation_has_a_row_for_every_model() -> None:
    table = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert [name for name in ALL if f"\n| `{name}` |" not in table] == []
