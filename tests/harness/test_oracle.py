"""The oracle against worked examples; no SGLang needed."""

import numpy as np
import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Geometry, oracle
from .oracle import Component

GEOMETRY = Geometry()


def test_values_are_reproducible_and_nearly_unique() -> None:
    position, head, channel = np.meshgrid(np.arange(64), np.arange(8), np.arange(16), indexing="ij")
    for itemsize, most_repeats in ((4, 1), (2, 4)):
        first = oracle.values(1, Component.KEY, 0, head=head, position=position, channel=channel, itemsize=itemsize)
        again = oracle.values(1, Component.KEY, 0, head=head, position=position, channel=channel, itemsize=itemsize)
        assert np.array_equal(first, again)
        _, repeats = np.unique(first, return_counts=True)
        assert repeats.max() <= most_repeats
    everywhere = oracle.values(1, Component.KEY, 0, head=head, position=position, channel=channel, itemsize=4)
    for other in (
        oracle.values(2, Component.KEY, 0, head=head, position=position, channel=channel, itemsize=4),
        oracle.values(1, Component.VALUE, 0, head=head, position=position, channel=channel, itemsize=4),
        oracle.values(1, Component.KEY, 1, head=head, position=position, channel=channel, itemsize=4),
        oracle.values(1, Component.KEY, 0, head=position, position=head, channel=channel, itemsize=4),
    ):
        assert not np.array_equal(everywhere, other)


@pytest.mark.parametrize("itemsize", [1, 2])
def test_no_value_looks_like_poison(itemsize: int) -> None:
    many = oracle.values(0, Component.SSM, 0, channel=np.arange(1 << 18), itemsize=itemsize)
    for byte in (oracle.DESTINATION_POISON, oracle.SOURCE_POISON):
        assert oracle.repeated_byte(byte, itemsize) not in many


@pytest.mark.parametrize("tp", [2, 4])
def test_kv_shards_join_to_the_whole_on_the_head_axis(tp: int) -> None:
    whole = oracle.kv_shard(GEOMETRY, 3, Component.KEY, 1, range(5), tp=1, rank=0)
    shards = [oracle.kv_shard(GEOMETRY, 3, Component.KEY, 1, range(5), tp=tp, rank=rank) for rank in range(tp)]
    assert np.array_equal(np.concatenate(shards, axis=1), whole)


def test_replicated_kv_heads_are_contiguous_by_rank() -> None:
    """Case 1: H=2 on four ranks is heads 0, 0, 1, 1."""
    geometry = Geometry(kv_heads=2)
    whole = oracle.kv_shard(geometry, 3, Component.KEY, 1, range(5), tp=1, rank=0)
    for rank, head in enumerate((0, 0, 1, 1)):
        shard = oracle.kv_shard(geometry, 3, Component.KEY, 1, range(5), tp=4, rank=rank)
        assert np.array_equal(shard, whole[:, head : head + 1])


def test_conv_segments_are_sharded_each_on_its_own() -> None:
    """q and k have 4 heads of 4 channels, v has 8: on two ranks [8 q | 8 k | 16 v] each."""
    whole = oracle.conv_shard(GEOMETRY, 3, 0, tp=1, rank=0)
    assert whole.shape == (64, 3)
    query, key, value = whole[:16], whole[16:32], whole[32:]
    for rank in range(2):
        wanted = np.concatenate([query[8 * rank :][:8], key[8 * rank :][:8], value[16 * rank :][:16]])
        assert np.array_equal(oracle.conv_shard(GEOMETRY, 3, 0, tp=2, rank=rank), wanted)
    assert len(np.unique(whole)) == whole.size


def test_window_first_is_the_same_window_behind_dead_rows() -> None:
    channels_first = oracle.conv_shard(GEOMETRY, 3, 0, tp=2, rank=1)
    geometry = Geometry(conv_layout=ConvLayout.WINDOW_FIRST)
    window_first = oracle.conv_shard(geometry, 3, 0, tp=2, rank=1)
    assert window_first.shape == (5, 32), "K-1 live rows and draft tokens - 1 dead ones"
    assert np.array_equal(window_first[-3:], channels_first.T)


def test_ssm_shards_join_to_the_whole_on_the_head_axis() -> None:
    whole = oracle.ssm_shard(GEOMETRY, 3, 0, tp=1, rank=0)
    assert whole.shape == (8, 4, 4)
    assert np.array_equal(
        np.concatenate([oracle.ssm_shard(GEOMETRY, 3, 0, tp=4, rank=rank) for rank in range(4)]), whole
    )


@pytest.mark.parametrize(
    ("fields", "tp", "message"),
    [
        ({"kv_heads": 3}, 2, "kv_heads=3 and tp=2"),
        ({"linear_key_heads": 2}, 4, "linear_key_heads=2 is not divisible by tp=4"),
    ],
)
def test_a_geometry_that_cannot_be_sharded_is_refused(fields: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry(**fields).check_tp(tp)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [(3, 1), (0, 1, 2, 3), (4,)])
def test_a_geometry_with_impossible_layers_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="full_attention_layers"):
        Geometry(full_attention_layers=layers)


def test_split_covers_the_prompt() -> None:
    assert oracle.split(129, 2) == [64, 129]
    assert oracle.split(63, 3) == [21, 42, 63]
