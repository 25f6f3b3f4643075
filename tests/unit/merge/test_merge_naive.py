"""The reference against examples written out by hand."""

import torch

from sglang_hetero.merge import naive


def test_merge_kv_by_hand():
    pool = torch.zeros(1, 3, 2, 2, 1, dtype=torch.int8)
    left = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).view(1, 2, 2, 1, 1)
    naive.merge_kv(pool, [left, left + 10], torch.tensor([2, 0]), [0, 1], tokens=3)
    assert pool[0, :, :, :, 0].tolist() == [[[3, 13], [0, 0]], [[0, 0], [0, 0]], [[1, 11], [2, 12]]]


def test_pack_kv_by_hand():
    pool = torch.arange(12, dtype=torch.int8).view(1, 3, 2, 2, 1)
    out = torch.full((1, 2, 2, 1, 1), -1, dtype=torch.int8)
    naive.pack_kv(out, pool, torch.tensor([2, 0]), 1, tokens=3)
    assert out.flatten().tolist() == [9, 11, 1, -1]


def test_reorder_conv_by_hand():
    # Two ranks with q of one channel and k and v of two between them; the window holds two inputs.
    first = torch.tensor([[10, 11], [20, 21], [30, 31]], dtype=torch.int8).view(1, 1, 3, 2)
    pool = torch.zeros(1, 2, 6, 2, dtype=torch.int8)
    blocks = [[(0, 0, 1), (1, 2, 1), (2, 4, 1)], [(0, 1, 1), (1, 3, 1), (2, 5, 1)]]
    naive.reorder_conv(pool, [first, first + 5], torch.tensor([1]), blocks)
    assert pool[0, 0].eq(0).all()
    assert pool[0, 1].tolist() == [[10, 11], [15, 16], [20, 21], [25, 26], [30, 31], [35, 36]]


def test_scatter_ssm_by_hand():
    pool = torch.zeros(1, 6, 2, 1, 2, dtype=torch.int8)
    left = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).view(1, 2, 1, 1, 2)
    naive.scatter_ssm(pool, [left, left + 10], torch.tensor([2, 0]), [0, 1], checkpoint_stride=2)
    assert pool[0, 0, :, 0].tolist() == [[3, 4], [13, 14]]
    assert pool[0, 4, :, 0].tolist() == [[1, 2], [11, 12]]
    assert pool[0, [1, 2, 3, 5]].eq(0).all()
