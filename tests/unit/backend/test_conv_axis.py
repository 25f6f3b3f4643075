"""Which axis of a conv slot is cut, on tensors of every platform; the bytes are in test_installed_sglang.py."""

from types import SimpleNamespace

import pytest
import torch

from sglang_hetero.backend import conv_axis
from sglang_hetero.backend.pairing import Conv

LAYERS, SLOTS, CHANNELS, LIVE = 2, 5, 16, 3
GROUPS = [8, 8, 16]
TP = 2


def slots(rows, columns):
    return torch.zeros(LAYERS, SLOTS, rows, columns)


def strided():
    """As layers/amx_utils.py makes them: shape [channels, window], bytes [window][channels]."""
    return slots(LIVE, CHANNELS).transpose(-1, -2)


def page_major():
    """As with SGLang's envelope layout: slots with other state between them."""
    return torch.zeros(LAYERS, SLOTS, CHANNELS + 4, LIVE)[:, :, :CHANNELS]


def pool(*tensors, axis=0, groups=GROUPS):
    return SimpleNamespace(
        mamba_cache=SimpleNamespace(conv=list(tensors)), conv_slice_axis=axis, conv_shard_groups=groups
    )


PLAIN_SHAPE, KIMI_SHAPE = (CHANNELS, LIVE), (LIVE, CHANNELS)


@pytest.mark.parametrize(
    ("tensor", "announced", "shape", "axis", "conv"),
    [
        (slots(CHANNELS, LIVE), 0, PLAIN_SHAPE, 0, Conv.ANNOUNCED),
        (slots(LIVE, CHANNELS), 0, PLAIN_SHAPE, 1, Conv.REPAIRED),
        (slots(LIVE + 4, CHANNELS), 0, PLAIN_SHAPE, 1, Conv.REPAIRED),
        (slots(LIVE, CHANNELS), 1, KIMI_SHAPE, 1, Conv.ANNOUNCED),
        (slots(LIVE + 4, CHANNELS), 1, KIMI_SHAPE, 1, Conv.ANNOUNCED),
        (slots(CHANNELS, LIVE), 1, KIMI_SHAPE, 0, Conv.REPAIRED),
        (strided(), 0, PLAIN_SHAPE, 0, Conv.UNCUTTABLE),
        (page_major(), 0, PLAIN_SHAPE, 0, Conv.UNCUTTABLE),
        (slots(7, 9), 0, PLAIN_SHAPE, 0, Conv.UNCUTTABLE),
    ],
    ids=["CUDA", "window-first", "NPU", "Kimi", "Kimi-NPU", "Kimi-turned", "AMX", "page-major", "unknown"],
)
def test_axis(tensor, announced, shape, axis, conv):
    made = pool(tensor, axis=announced)
    conv_axis.announce(made, [shape])
    assert made.conv_slice_axis == axis
    assert conv_axis.conv_of(made, TP) is conv


def test_as_many_channels_as_window_rows_are_left_as_announced():
    """Nothing but the platform tells then."""
    made = pool(slots(LIVE, LIVE), groups=[2, 2, 2])
    conv_axis.announce(made, [(LIVE, LIVE)])
    assert made.conv_slice_axis == 0


def test_tensors_that_disagree_are_left_as_announced():
    made = pool(slots(CHANNELS, LIVE), slots(LIVE, CHANNELS))
    conv_axis.announce(made, [PLAIN_SHAPE, PLAIN_SHAPE])
    assert made.conv_slice_axis == 0
    assert conv_axis.conv_of(made, TP) is Conv.UNCUTTABLE


@pytest.mark.parametrize("groups", [None, [8, 8], [8, 8, 18], [7, 9, 16]], ids=str)
def test_segments_that_sglang_would_not_use(groups):
    """Without them, with another sum, or where a rank has no whole share of one, it moves one block."""
    assert conv_axis.conv_of(pool(slots(CHANNELS, LIVE), groups=groups), TP) is Conv.UNCUTTABLE


def test_no_linear_state():
    assert conv_axis.conv_of(pool(torch.zeros(0, SLOTS, CHANNELS, LIVE)), TP) is Conv.NONE
    assert conv_axis.conv_of(pool(), TP) is Conv.NONE


def test_a_pool_announces_what_it_has_once_it_is_made():
    class Pool:
        def __init__(self, *, cache_params, rows, columns):
            vars(self).update(vars(pool(slots(rows, columns))))

    Pool.__init__ = conv_axis._announcing(Pool.__init__)
    params = SimpleNamespace(shape=SimpleNamespace(conv=[PLAIN_SHAPE]))
    assert Pool(cache_params=params, rows=LIVE, columns=CHANNELS).conv_slice_axis == 1
    assert Pool(cache_params=params, rows=CHANNELS, columns=LIVE).conv_slice_axis == 0
