"""One test per rule about pages, slots, chunks and memory of a request: what is refused, and how it says so."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sglang_hetero.errors import BindError, HeteroError, MergeError
from sglang_hetero.layout import AxisName, Role
from sglang_hetero.merge.assemble import Assembler, pack_pages
from sglang_hetero.merge.views import item_view, staged_view
from sglang_hetero.reshard import bind, bind_pages, bind_slot, plan
from sglang_hetero.reshard.bind import chunk_pages
from tests.reshard_oracle.handover import decode_rank
from tests.reshard_oracle.pair import MODEL, SHAPE, changed_axes, decode, prefill

PLAN = plan(prefill(), decode())
GOOD = {"pages": [3, 1], "slot": 2, "tokens": 3}


def of(role):
    return next(share for share in PLAN.of(0) if share.role is role)


def test_the_request_is_good_before_it_is_broken():
    assert bind(PLAN, 0, **GOOD).pieces


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": [1.0, 2.0]}, r"pages must be a row of integers, they are float64 of shape \(2,\)"),
        ({"pages": []}, "pages must be a row of integers"),
        ({"pages": np.array([], dtype=np.int64)}, "3 tokens take 2 pages of 2, 0 were given"),
        ({"pages": [[1, 2]]}, r"pages must be a row of integers, they are int64 of shape \(1, 2\)"),
        ({"pages": [1, 2**64]}, "pages must be a row of integers"),
        ({"pages": [1, 2**63]}, "target_key: page .* does not exist|must be a row of integers"),
        ({"pages": [1]}, "3 tokens take 2 pages of 2, 1 were given"),
        ({"pages": [1, 2, 3]}, "3 tokens take 2 pages of 2, 3 were given"),
        ({"tokens": 0}, "0 tokens take 0 pages of 2, 2 were given"),
        ({"tokens": -3}, "-3 tokens take 0 pages of 2, 2 were given"),
        ({"pages": [0, 1]}, "target_key: page 0 does not exist: ids go from 1 to 6, 0 is padding"),
        ({"pages": [1, 7]}, "target_key: page 7 does not exist: ids go from 1 to 6"),
        ({"pages": [-1, 1]}, "target_key: page -1 does not exist"),
        ({"slot": 0}, "conv: slot 0 does not exist: ids go from 1 to 3, 0 is padding"),
        ({"slot": 4}, "conv: slot 4 does not exist: ids go from 1 to 3"),
        ({"slot": -1}, "conv: slot -1 does not exist"),
        ({"slot": 2**63}, "conv: slot 9223372036854775808 does not exist"),
        ({"chunks": [range(1)]}, "the chunks end at page 1 of a request of 2 pages"),
        ({"chunks": [range(3)]}, "the chunks end at page 3 of a request of 2 pages"),
        ({"chunks": []}, "the chunks end at page 0 of a request of 2 pages"),
        ({"chunks": [range(1, 2)]}, r"chunks must follow each other from page 0, but range\(1, 2\) comes at page 0"),
        ({"chunks": [range(2), range(1, 2)]}, r"range\(1, 2\) comes at page 2"),
        ({"chunks": [range(1), range(1, 1), range(1, 2)]}, r"range\(1, 1\) comes at page 1"),
        ({"pages": [1, 1]}, "page 1 is given twice"),
        ({"pages": [[1], [1, 2]]}, "pages must be a row of integers"),
        ({"slot": None}, "slot must be an integer, not None"),
        ({"slot": 1.5}, "slot must be an integer, not 1.5"),
        ({"tokens": 3.0}, "tokens must be an integer, not 3.0"),
        ({"chunks": 2}, "chunks must be a row of ranges, not 2"),
        ({"chunks": [(0, 2)]}, r"\(0, 2\) comes at page 0"),
        ({"chunks": [range(0, 2, 2)]}, r"range\(0, 2, 2\) comes at page 0"),
    ],
)
def test_rejects_request(changes, message):
    with pytest.raises(BindError, match=message):
        bind(PLAN, 0, **(GOOD | changes))


@pytest.mark.parametrize("source", [-1, 2, 1.5, None, "0"])
def test_rejects_source_that_the_plan_does_not_have(source):
    """An empty binding would look like a source that has nothing to send."""
    with pytest.raises(BindError, match=str(source)):
        bind(PLAN, source, **GOOD)


def test_rejects_single_pieces():
    with pytest.raises(BindError, match="page 7 does not exist"):
        bind_pages(of(Role.TARGET_KEY), 1, [7], 1)
    with pytest.raises(BindError, match="2 tokens take 1 pages of 2, 2 were given"):
        bind_pages(of(Role.TARGET_KEY), 1, [1, 2], 2)
    with pytest.raises(BindError, match="slot 0 does not exist"):
        bind_slot(of(Role.SSM), 0, 0)


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_rejects_chunking_of_nothing(bad):
    with pytest.raises(BindError, match=r"tokens \d, chunk \d and page size \d must be 1 or more"):
        chunk_pages(*bad)


def test_a_page_goes_with_the_chunk_that_completes_it():
    assert chunk_pages(7, 3, 2) == [range(1), range(1, 3), range(3, 4)]
    assert chunk_pages(8, 4, 2) == [range(2), range(2, 4)]
    assert chunk_pages(5, 1, 4) == [range(1), range(1, 2)]
    assert chunk_pages(1, 8192, 128) == [range(1)]


def memory():
    rank = decode_rank(MODEL, 1, 0, SHAPE)
    return rank, {key: torch.from_numpy(rank.bytes_from(buffer.address)) for key, buffer in rank.buffers.items()}


def test_merge_needs_what_every_source_sent():
    rank, pools = memory()
    before = [allocation.copy() for _, allocation in rank.allocations]
    area = torch.zeros(1000, dtype=torch.uint8)
    assembler = Assembler(PLAN, pools)
    with pytest.raises(MergeError, match="layer 1 of target_key: nothing has arrived from source 1"):
        assembler.merge_pages(Role.TARGET_KEY, 1, torch.tensor([1]), 2, {0: area})
    with pytest.raises(MergeError, match="layer 0 of conv: nothing has arrived from source 0"):
        assembler.merge_slot(Role.CONV, 0, torch.tensor([1]), {1: area})
    with pytest.raises(HeteroError, match="needs 24 bytes, the memory has 23"):
        assembler.merge_pages(Role.TARGET_KEY, 1, torch.tensor([1]), 2, {0: area[:23], 1: area})
    for tokens in (0, 3):
        with pytest.raises(HeteroError, match=f"{tokens} tokens"):
            assembler.merge_pages(Role.TARGET_KEY, 1, torch.tensor([1]), tokens, {0: area, 1: area})
    with pytest.raises(HeteroError, match="7"):
        assembler.merge_pages(Role.TARGET_KEY, 1, torch.tensor([7]), 2, {0: area, 1: area})
    for untouched, (_, allocation) in zip(before, rank.allocations, strict=True):
        assert (untouched == allocation).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pages": torch.tensor([0])}, "item 0 is no request's"),
        ({"pages": [1]}, "ids of pages and slots must be a row of int64, they are list"),
        ({"pages": torch.tensor(1)}, "ids of pages and slots must be a row of int64"),
        ({"pages": torch.tensor([], dtype=torch.int64)}, "ids of pages and slots must be a row of int64"),
        ({"tokens": 1.0}, "tokens must be an integer, not 1.0"),
        ({"tokens": None}, "tokens must be an integer, not None"),
        ({"area": None}, "memory must be a tensor, it is NoneType"),
        ({"area": torch.zeros(2000, dtype=torch.uint8)[::2]}, "without gaps"),
        ({"area": torch.zeros(1, dtype=torch.uint8).expand(1000)}, "without gaps"),
        ({"role": Role.SSM, "layer": 0}, "ssm lies in slots, not in pages"),
        ({"layer": 0}, "layer 0 of target_key is not in the plan"),
    ],
)
def test_pages_are_merged_only_where_all_is_right(wrong, message):
    rank, pools = memory()
    before = [allocation.copy() for _, allocation in rank.allocations]
    area = wrong.get("area", torch.zeros(1000, dtype=torch.uint8))
    call = {"role": Role.TARGET_KEY, "layer": 1, "pages": torch.tensor([1]), "tokens": 2} | wrong
    call.pop("area", None)
    with pytest.raises(MergeError, match=message):
        Assembler(PLAN, pools).merge_pages(**call, areas={0: area, 1: area})
    for untouched, (_, allocation) in zip(before, rank.allocations, strict=True):
        assert (untouched == allocation).all()


def test_slots_are_merged_only_where_all_is_right():
    _, pools = memory()
    area = torch.zeros(1000, dtype=torch.uint8)
    assembler = Assembler(PLAN, pools)
    for slots, message in (([1, 2], "a request has one slot, 2 were given"), ([0], "item 0 is no request's")):
        with pytest.raises(MergeError, match=message):
            assembler.merge_slot(Role.CONV, 0, torch.tensor(slots), {0: area, 1: area})
    with pytest.raises(MergeError, match="target_key lies in pages, not in slots"):
        assembler.merge_slot(Role.TARGET_KEY, 1, torch.tensor([1]), {0: area, 1: area})


def test_what_lies_in_one_run_is_not_packed():
    share = of(Role.TARGET_KEY)
    assert not share.packed
    with pytest.raises(MergeError, match="target_key: what source 0 sends lies in one run, there is nothing to pack"):
        pack_pages(
            share, torch.zeros(1000, dtype=torch.uint8), torch.tensor([1]), 2, torch.zeros(100, dtype=torch.uint8)
        )


def test_rejects_memory_that_does_not_fit():
    part = decode().of(Role.SSM)[0]
    with pytest.raises(MergeError, match=r"ssm: memory must be a row of uint8 without gaps, it is torch.int8 of shape"):
        item_view(torch.zeros(1000, dtype=torch.int8), part)
    with pytest.raises(MergeError, match=r"shape \(10, 100\)"):
        item_view(torch.zeros(10, 100, dtype=torch.uint8), part)
    span = 3 * part.item_stride + part.item_span
    item_view(torch.zeros(span, dtype=torch.uint8), part)
    with pytest.raises(MergeError, match=f"ssm: needs {span} bytes, the memory has {span - 1}"):
        item_view(torch.zeros(span - 1, dtype=torch.uint8), part)
    with pytest.raises(MergeError, match="ssm: the memory does not begin at a multiple of 4"):
        item_view(torch.zeros(span + 2, dtype=torch.uint8)[2:], part)
    share = of(Role.SSM)
    with pytest.raises(MergeError, match=f"staged ssm: needs {2 * share.staged_bytes} bytes"):
        staged_view(torch.zeros(2 * share.staged_bytes - 1, dtype=torch.uint8), share, 2)


def test_stride_of_a_single_element_does_not_count():
    """torch may report any stride along an axis of one element."""
    part = decode(0, 8).of(Role.SSM)[0]
    assert part.axis(AxisName.HEAD).size == 1
    odd = replace(part, axes=changed_axes(part, AxisName.HEAD, stride=4))
    assert item_view(torch.zeros(1000, dtype=torch.uint8), odd).shape == (4, 1, 2, 3)
