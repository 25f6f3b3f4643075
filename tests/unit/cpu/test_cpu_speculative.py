"""Index ops against plain Python walks."""

import ctypes
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hetero.cpu.ops import speculative as ops
from sglang_hetero.errors import HeteroError

FULL_MASK, QLEN_ONLY, PACKED = 0, 1, 2


def table(rows=4, length=12):
    return (torch.arange(rows * length, dtype=torch.int32) + 100).view(rows, length)


def test_assign_req_to_token_and_back():
    rows, start, end = torch.tensor([2, 0]), torch.tensor([3, 0]), torch.tensor([5, 4])
    req_to_token = torch.zeros(3, 8, dtype=torch.int32)
    slots = torch.tensor([11, 12, 13, 14, 15, 16])
    ops.assign_req_to_token_pool_cpu(rows, req_to_token, start, end, slots, 8)
    assert req_to_token.tolist() == [[13, 14, 15, 16, 0, 0, 0, 0], [0] * 8, [0, 0, 0, 11, 12, 0, 0, 0]]
    packed = torch.zeros(6, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(rows, req_to_token, start, end, packed, 8)
    assert torch.equal(packed, slots)


def test_draft_cache_locs_are_those_behind_the_prefix():
    req_to_token, out = table(), torch.zeros(8, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([3, 1]), req_to_token, torch.tensor([2, 7]), out, 12, topk=2, num_cols=2
    )
    assert out.tolist() == req_to_token[3, 2:6].tolist() + req_to_token[1, 7:11].tolist()


@pytest.mark.parametrize("topk", [1, 2])
def test_draft_metadata_gives_each_branch_its_own_slots(topk):
    req_to_token = table()
    out = ops.build_draft_decode_metadata_cpu(
        req_to_token, torch.tensor([1, 2]), torch.tensor([4, 1]), topk, num_steps=3, pool_len=12
    )
    assert out.shape == (2 * topk, 12)
    for i, (row, length) in enumerate(((1, 4), (2, 1))):
        for branch in range(topk):
            own = length + 3 * branch
            expected = req_to_token[row, :length].tolist() + req_to_token[row, own : own + 3].tolist()
            assert out[i * topk + branch, : length + 3].tolist() == expected


def test_bonus_token_is_the_last_accepted():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    bonus = torch.zeros(2, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3]), bonus, 3)
    assert bonus.tolist() == [5, 10]


def test_accepted_cache_locs_are_packed():
    out = torch.full((6,), -9)
    ops.fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([50, 51, 52, 53, 54, 55]), out
    )
    assert out.tolist() == [50, 52, 53, -9, -9, -9]


def test_rotate_input_ids():
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    starts, lengths = torch.tensor([0, 3, 4]), torch.tensor([3, 0, 3])
    ops.rotate_input_ids_cpu(ids, starts, lengths, torch.tensor([[70], [80], [90]]), None)
    assert ids.tolist() == [2, 3, 70, 4, 6, 7, 90]
    ids = torch.tensor([1, 2, 3, 4, 5])
    ops.rotate_input_ids_cpu(ids, torch.tensor([0]), torch.tensor([4]), torch.tensor([9]), torch.tensor([1]))
    assert ids.tolist() == [2, 9, 4, 4, 5]


def build(lengths, drafts, mask, mode, topk=1):
    n = len(lengths)
    out = {
        "positions": torch.zeros(n * drafts, dtype=torch.int64),
        "retrieve_index": torch.full((n, drafts), -5),
        "retrieve_next_token": torch.full((n, drafts), -5),
        "retrieve_next_sibling": torch.full((n, drafts), -5),
    }
    ops.build_tree_kernel_efficient_cpu(
        torch.empty(0), torch.empty(0), torch.tensor(lengths), mask, *out.values(), topk, drafts - 1, drafts, mode
    )
    return out


@pytest.mark.parametrize("drafts", [2, 4, 6])
def test_chain_of_any_depth(drafts):
    lengths = [5, 0, 9]
    out = build(lengths, drafts, None, FULL_MASK)
    assert out["positions"].tolist() == [n + t for n in lengths for t in range(drafts)]
    assert out["retrieve_index"].flatten().tolist() == list(range(3 * drafts))
    assert out["retrieve_next_token"].tolist() == [[*range(1, drafts), -1]] * 3
    assert (out["retrieve_next_sibling"] == -1).all()


def test_masks_are_causal_over_the_drafts():
    lengths, drafts = [2, 0, 3], 3
    causal = [[j <= i for j in range(drafts)] for i in range(drafts)]
    short = torch.zeros(3 * drafts * drafts, dtype=torch.bool)
    build(lengths, drafts, short, QLEN_ONLY)
    assert short.tolist() == [x for _ in lengths for row in causal for x in row]
    full = torch.zeros(sum(drafts * (n + drafts) for n in lengths), dtype=torch.bool)
    build(lengths, drafts, full, FULL_MASK)
    assert full.tolist() == [x for n in lengths for row in causal for x in [True] * n + row]


def test_trees_and_packed_masks_are_refused():
    with pytest.raises(HeteroError, match="speculative-eagle-topk 1"):
        build([1], 4, None, FULL_MASK, topk=2)
    with pytest.raises(HeteroError, match="mask mode 2"):
        build([1], 4, torch.zeros(1, dtype=torch.uint8), PACKED)


def verify(parents, tokens, wanted, limit):
    """Run the op on one or more trees given by parent lists (the first node is the root)."""
    n, drafts = len(parents), len(parents[0])
    child, sibling = torch.full((n, drafts), -1), torch.full((n, drafts), -1)
    for b in range(n):
        for node in range(drafts - 1, 0, -1):  # so that siblings come in order
            sibling[b, node] = child[b, parents[b][node]]
            child[b, parents[b][node]] = node
    predicts = torch.full((n * drafts,), -9, dtype=torch.int32)
    accept, count = torch.full((n, limit), -1, dtype=torch.int32), torch.full((n,), -9, dtype=torch.int32)
    index = torch.arange(n * drafts).view(n, drafts)
    ops.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept,
        accept_token_num=count,
        candidates=torch.tensor(tokens),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor(wanted),
    )
    return predicts.tolist(), accept.tolist(), count.tolist()


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 7))
def test_verify_walks_random_trees(seed, requests, drafts):
    rng = random.Random(seed)
    parents = [[0] + [rng.randrange(node) for node in range(1, drafts)] for _ in range(requests)]
    tokens = [[rng.randrange(3) for _ in range(drafts)] for _ in range(requests)]
    wanted = [[rng.randrange(3) for _ in range(drafts)] for _ in range(requests)]
    limit = rng.randint(1, drafts)
    predicts, accept, count = verify(parents, tokens, wanted, limit)
    for b in range(requests):
        path = [0]
        while len(path) < limit:
            node = path[-1]
            matching = [c for c in range(1, drafts) if parents[b][c] == node and tokens[b][c] == wanted[b][node]]
            if not matching:
                break
            path.append(matching[0])
        assert count[b] == len(path) - 1
        assert accept[b] == [b * drafts + node for node in path] + [-1] * (limit - len(path))
        for node in range(drafts):
            assert predicts[b * drafts + node] == (wanted[b][node] if node in path else -9)


def test_verify_chain_by_hand():
    predicts, accept, count = verify([[0, 0, 1, 2]], [[7, 8, 9, 10]], [[8, 9, 5, 6]], 4)
    assert count == [2]
    assert accept == [[0, 1, 2, -1]]
    assert predicts == [8, 9, 5, -9]


def test_kv_copy_reads_before_it_writes():
    buffers = [torch.arange(12.0).view(6, 2), torch.arange(18, dtype=torch.int16).view(6, 3)]
    before = [buffer.clone() for buffer in buffers]
    strides = [buffer[0].numel() * buffer.element_size() for buffer in buffers]
    targets, sources = [2, 3, 0], [1, 2, 5]  # slot 2 is source and target
    ops.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor(strides),
        torch.tensor(targets),
        torch.tensor(sources),
    )
    for buffer, old in zip(buffers, before, strict=True):
        for slot in range(6):
            source = sources[targets.index(slot)] if slot in targets else slot
            assert torch.equal(buffer[slot], old[source])
    assert ctypes.sizeof(ctypes.c_int16) * 3 == strides[1]
