"""The way in: every rule about the arguments, the choice of the path, and views over several layers."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_hetero import merge
from sglang_hetero.errors import HeteroError, MergeError
from sglang_hetero.merge import ops

OPERATIONS = ["merge_kv", "pack_kv", "reorder_conv", "scatter_ssm"]


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def kv(**changes):
    """Arguments of a legal merge_kv, some of them changed."""
    arguments = {
        "pool": zeros(2, 5, 4, 3, 2),
        "shards": [torch.ones(2, 2, 4, 1, 2), torch.ones(2, 2, 4, 2, 2)],
        "pages": ids(1, 3),
        "head_offsets": [0, 1],
        "tokens": 7,
    }
    return arguments | changes


def pack(**changes):
    arguments = {"out": zeros(2, 2, 4, 1, 2), "pool": torch.ones(2, 5, 4, 3, 2), "pages": ids(1, 3), "head_start": 2}
    return arguments | changes


def conv(**changes):
    arguments = {
        "pool": zeros(2, 5, 6, 3),
        "shards": [torch.ones(2, 1, 3, 3), torch.ones(2, 1, 3, 3)],
        "slots": ids(4),
        "blocks": [[(0, 0, 3)], [(0, 3, 3)]],
    }
    return arguments | changes


def ssm(**changes):
    arguments = {
        "pool": zeros(2, 6, 3, 2, 2),
        "shards": [torch.ones(2, 2, 1, 2, 2), torch.ones(2, 2, 2, 2, 2)],
        "slots": ids(1, 2),
        "head_offsets": [0, 1],
        "checkpoint_stride": 2,
    }
    return arguments | changes


LEGAL = dict(zip(OPERATIONS, [kv, pack, conv, ssm], strict=True))
SHARD = torch.ones(2, 2, 4, 1, 2)
OUT = zeros(2, 2, 4, 1, 2)

# name: (operation, arguments, part of the message)
RULES = {
    "no_shard": ("merge_kv", kv(shards=[], head_offsets=[]), "no shard"),
    "pool_without_layers": (
        "merge_kv",
        kv(pool=zeros(5, 4, 3, 2)),
        r"pool has shape \[5, 4, 3, 2\]; expected \[layers",
    ),
    "shard_without_layers": ("merge_kv", kv(shards=[SHARD[0]], head_offsets=[0]), "shard 0 has shape"),
    "eight_bytes": ("merge_kv", kv(pool=zeros(2, 5, 4, 3, 2, dtype=torch.float64)), "8 bytes per element"),
    "mixed_dtypes": (
        "merge_kv",
        kv(shards=[SHARD, SHARD.half()]),
        "shard 1 is torch.float16, the pool is torch.float32",
    ),
    "mixed_devices": ("merge_kv", kv(shards=[SHARD, SHARD.to("meta")]), "shard 1 is on meta, the pool is on cpu"),
    "layers_differ": ("merge_kv", kv(shards=[SHARD[:1]], head_offsets=[0]), "shard 0 has 1 in axis layers, expected 2"),
    "page_sizes_differ": ("merge_kv", kv(shards=[SHARD[:, :, :2]], head_offsets=[0]), "2 in axis page, expected 4"),
    "dims_differ": ("merge_kv", kv(shards=[SHARD[..., :1]], head_offsets=[0]), "1 in axis dim, expected 2"),
    "items_differ": ("merge_kv", kv(shards=[SHARD, SHARD[:, :1]]), "shard 1 has 1 in axis pages, expected 2"),
    "windows_differ": ("reorder_conv", conv(pool=zeros(2, 5, 6, 4)), "shard 0 has 3 in axis window, expected 4"),
    "states_transposed": ("scatter_ssm", ssm(pool=zeros(2, 6, 3, 2, 4)), "shard 0 has 2 in axis dk, expected 4"),
    "pool_shares_memory": ("merge_kv", kv(pool=zeros(1, 5, 4, 3, 2).expand(2, -1, -1, -1, -1)), "share memory"),
    "out_shares_memory": ("pack_kv", pack(out=zeros(2, 1, 4, 1, 2).expand(-1, 2, -1, -1, -1)), "out is written"),
    "ids_of_32_bits": ("merge_kv", kv(pages=ids(1, 3).int()), "contiguous int64 vector, not torch.int32"),
    "ids_of_two_axes": ("merge_kv", kv(pages=ids(1, 3)[None]), r"contiguous int64 vector, not torch.int64 \[1, 2\]"),
    "ids_strided": ("merge_kv", kv(pages=ids(1, 0, 3, 0)[::2]), "contiguous int64 vector"),
    "ids_elsewhere": ("merge_kv", kv(pages=ids(1, 3).to("meta")), "pages is on meta"),
    "ids_too_few": ("merge_kv", kv(pages=ids(1)), "1 pages for 2 items"),
    "page_too_high": ("merge_kv", kv(pages=ids(1, 5)), "pages holds 5; the pool has 0 to 4"),
    "page_negative": ("pack_kv", pack(pages=ids(-1, 3)), "pages holds -1"),
    "page_twice": ("merge_kv", kv(pages=ids(3, 3)), "pages holds 3 twice"),
    "packed_page_twice": ("pack_kv", pack(pages=ids(3, 3)), "pages holds 3 twice"),
    "slot_too_high": ("reorder_conv", conv(slots=ids(5)), "slots holds 5; the pool has 0 to 4"),
    "slot_too_high_for_stride": ("scatter_ssm", ssm(slots=ids(1, 3)), "slots holds 3; the pool has 0 to 2"),
    "slot_twice": ("scatter_ssm", ssm(slots=ids(1, 1)), "slots holds 1 twice"),
    "offsets_too_few": ("merge_kv", kv(head_offsets=[0]), "2 shards but 1 head offsets"),
    "heads_overlap": ("merge_kv", kv(head_offsets=[1, 0]), "shard 0 and shard 1 both write heads 1 to 1"),
    "state_heads_overlap": ("scatter_ssm", ssm(head_offsets=[2, 1]), "shard 0 and shard 1 both write heads 2 to 2"),
    "heads_too_high": ("merge_kv", kv(head_offsets=[0, 2]), "shard 1 takes 2 heads from 2; there are 3"),
    "heads_negative": ("merge_kv", kv(head_offsets=[-1, 1]), "shard 0 takes 1 heads from -1"),
    "no_heads": ("merge_kv", kv(shards=[SHARD[:, :, :, :0]], head_offsets=[0]), "shard 0 takes 0 heads"),
    "packed_heads_too_high": ("pack_kv", pack(head_start=3), "takes 1 heads from 3; there are 3"),
    "tokens_before_last_page": ("merge_kv", kv(tokens=4), "4 tokens do not end in the last of 2 pages of 4"),
    "tokens_behind_last_page": ("merge_kv", kv(tokens=9), "9 tokens do not end"),
    "packed_tokens": ("pack_kv", pack(tokens=0), "0 tokens do not end"),
    "blocks_too_few": ("reorder_conv", conv(blocks=[[(0, 0, 3)]]), "2 shards but 1 lists of blocks"),
    "block_source_too_high": (
        "reorder_conv",
        conv(blocks=[[(1, 0, 3)], []]),
        "a block of shard 0 reads 3 channels from 1; there are 3",
    ),
    "block_target_too_high": ("reorder_conv", conv(blocks=[[(0, 4, 3)], []]), "3 channels from 4; there are 6"),
    "block_empty": ("reorder_conv", conv(blocks=[[(0, 0, 0)], []]), "reads 0 channels from 0"),
    "blocks_overlap": ("reorder_conv", conv(blocks=[[(0, 0, 3)], [(0, 2, 3)]]), "both write channels 2 to 2"),
    "blocks_of_one_shard_overlap": (
        "reorder_conv",
        conv(blocks=[[(0, 0, 2), (1, 1, 2)], []]),
        "both write channels 1 to 1",
    ),
    "checkpoint_stride": ("scatter_ssm", ssm(checkpoint_stride=0), "checkpoint_stride is 0"),
}


@pytest.mark.parametrize("operation, arguments, message", list(RULES.values()), ids=list(RULES))
def test_rejects(operation, arguments, message):
    written = arguments.get("out", arguments["pool"])
    before = written.clone()
    with pytest.raises(MergeError, match=message) as caught:
        getattr(ops, operation)(**arguments)
    assert str(caught.value).startswith(f"{operation}: ")
    assert isinstance(caught.value, HeteroError)
    assert torch.equal(written, before)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_accepts_what_the_rules_are_tried_on(operation):
    arguments = LEGAL[operation]()
    getattr(ops, operation)(**arguments)
    assert arguments.get("out", arguments["pool"]).any()


@pytest.mark.parametrize(
    "operation, arguments",
    [
        ("merge_kv", kv(shards=[SHARD[:, :0]], pages=ids(), head_offsets=[0], tokens=None)),
        ("pack_kv", pack(out=OUT[:, :0], pages=ids())),
        ("reorder_conv", conv(shards=[torch.ones(2, 0, 3, 3)], slots=ids(), blocks=[[(0, 0, 3)]])),
        ("scatter_ssm", ssm(shards=[torch.ones(2, 0, 3, 2, 2)], slots=ids(), head_offsets=[0])),
        ("merge_kv", kv(pool=zeros(0, 5, 4, 3, 2), shards=[SHARD[:0]], head_offsets=[0])),
    ],
    ids=["merge_kv", "pack_kv", "reorder_conv", "scatter_ssm", "no_layers"],
)
def test_nothing_to_move_is_no_error(operation, arguments):
    getattr(ops, operation)(**arguments)
    assert not arguments["pool"].any() or operation == "pack_kv"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_device_gets_the_triton_path_and_unchecked_ids(operation, monkeypatch):
    seen = []
    path = SimpleNamespace(**{name: lambda *args, name=name: seen.append((name, args)) for name in OPERATIONS})
    monkeypatch.setitem(sys.modules, "sglang_hetero.merge.triton_ops", path)
    monkeypatch.setattr(merge, "triton_ops", path, raising=False)

    def to_meta(value):
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        return [item.to("meta") for item in value] if isinstance(value, list) and hasattr(value[0], "to") else value

    arguments = {name: to_meta(value) for name, value in LEGAL[operation]().items()}
    getattr(ops, operation)(**arguments)
    assert [name for name, _ in seen] == [operation]
    first = arguments.get("out", arguments["pool"])
    assert seen[0][1][0] is first


def layers_of(tensor):
    return list(tensor.unbind(0))


def test_stacks_layers_of_one_storage():
    pool = torch.arange(3 * 4 * 5).view(3, 4, 5)
    stacked = ops.stack_layers(layers_of(pool[:, 1:, ::2]))
    assert torch.equal(stacked, pool[:, 1:, ::2])
    assert stacked.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
    stacked[2, 0, 0] = -1
    assert pool[2, 1, 0] == -1


def test_stacks_layers_that_are_not_outermost_in_memory():
    pool = torch.arange(24).view(4, 3, 2)
    assert torch.equal(ops.stack_layers(list(pool.unbind(1))), pool.transpose(0, 1))


def test_stacks_every_second_layer_and_a_single_one():
    pool = torch.arange(24).view(4, 3, 2)
    assert torch.equal(ops.stack_layers(layers_of(pool)[1::2]), pool[1::2])
    assert torch.equal(ops.stack_layers([pool[2]]), pool[2:3])


APART = {
    "none": lambda pool: [],
    "two_storages": lambda pool: [pool[0], pool[1].clone()],
    "unequal_distance": lambda pool: [pool[0], pool[1], pool[3]],
    "reversed": lambda pool: [pool[1], pool[0]],
    "twice_the_same": lambda pool: [pool[0], pool[0]],
    "other_shape": lambda pool: [pool[0], pool[1][:2]],
    "other_strides": lambda pool: [pool[0][:2, :2], pool[1][:2, :2].T],
    "other_dtype": lambda pool: [pool[0], pool[1].view(torch.float64)],
}


@pytest.mark.parametrize("layers", list(APART.values()), ids=list(APART))
def test_does_not_stack(layers):
    assert ops.stack_layers(layers(torch.arange(24).view(4, 3, 2))) is None
