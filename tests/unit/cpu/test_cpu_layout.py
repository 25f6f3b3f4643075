"""The two layouts of a conv slot, element by element."""

import pytest
import torch

from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV, conv_layout_from_env, live_window, pool_slot_shape
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.window import ConvLayout


@pytest.mark.parametrize(
    ("layout", "drafts", "shape"),
    [
        ("channels_first", None, (10, 3)),
        ("channels_first", 4, (10, 3)),
        ("window_first", None, (3, 10)),
        ("window_first", 1, (3, 10)),
        ("window_first", 4, (6, 10)),
    ],
)
def test_slot_shape(layout, drafts, shape):
    assert pool_slot_shape(10, 3, drafts, ConvLayout(layout)) == shape


def test_window_first_keeps_the_live_rows_last():
    slots = torch.arange(2 * 6 * 5).view(2, 6, 5)  # [slots, W, dim]
    live = live_window(slots, 3, ConvLayout.WINDOW_FIRST)
    assert live.shape == (2, 5, 3)
    for slot in range(2):
        for channel in range(5):
            assert live[slot, channel].tolist() == [int(slots[slot, row, channel]) for row in (3, 4, 5)]
    live[1] = -1
    assert (slots[1, 3:] == -1).all()
    assert (slots[1, :3] >= 0).all()
    assert (slots[0] >= 0).all()


def test_channels_first_is_the_slot_itself():
    slots = torch.arange(2 * 5 * 3).view(2, 5, 3)
    live = live_window(slots, 3, ConvLayout.CHANNELS_FIRST)
    assert torch.equal(live, slots)
    live[0] = -1
    assert (slots[0] == -1).all()


def test_layout_from_the_environment(monkeypatch):
    monkeypatch.delenv(CONV_LAYOUT_ENV, raising=False)
    assert conv_layout_from_env() is ConvLayout.CHANNELS_FIRST
    monkeypatch.setenv(CONV_LAYOUT_ENV, "window_first")
    assert conv_layout_from_env() is ConvLayout.WINDOW_FIRST
    monkeypatch.setenv(CONV_LAYOUT_ENV, "window-first")
    with pytest.raises(HeteroError, match=r"window-first.*channels_first, window_first"):
        conv_layout_from_env()
