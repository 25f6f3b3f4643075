"""The metadata row as bytes: what is written on one side is read on the other, and rows of two shapes are refused."""

from types import SimpleNamespace

import pytest
import torch

from sglang_hetero.backend.first_token import NAMES, read_row, write_row
from sglang_hetero.errors import ProtocolError

ROWS = 4


def metadata(hidden=8, **others):
    """Rows of SGLang's MetadataBuffers, of which the unused columns are None."""
    torch.manual_seed(0)
    columns = {
        "output_ids": torch.randint(1, 99, (ROWS, 16), dtype=torch.int32),
        "cached_tokens": torch.randint(1, 99, (ROWS, 16), dtype=torch.int32),
        "output_topk_index": torch.randint(1, 99, (ROWS, 16), dtype=torch.int64),
        "output_hidden_states": torch.randn(ROWS, hidden).to(torch.bfloat16),
        "bootstrap_room": torch.randint(1, 99, (ROWS, 8), dtype=torch.int64).to(torch.uint64),
        **others,
    }
    found = SimpleNamespace(**dict.fromkeys(NAMES) | columns)
    used = [columns[name] for name in NAMES if columns.get(name) is not None]
    found.get_buf_infos = lambda: ([tensor.data_ptr() for tensor in used], [], [])
    return found


def test_a_row_arrives_and_no_other_row_changes():
    source, target = metadata(), metadata()
    for tensor in vars(target).values():
        if isinstance(tensor, torch.Tensor):
            tensor.view(torch.uint8).fill_(0xAB)
    before = {name: tensor.clone() for name, tensor in vars(target).items() if isinstance(tensor, torch.Tensor)}
    write_row(target, 2, read_row(source, 1))
    for name, old in before.items():
        assert torch.equal(getattr(target, name)[2].view(torch.uint8), getattr(source, name)[1].view(torch.uint8)), name
        for row in (0, 1, 3):
            assert torch.equal(getattr(target, name)[row].view(torch.uint8), old[row].view(torch.uint8)), name


def test_rows_of_another_shape_are_refused_and_nothing_is_written():
    source, target = metadata(hidden=8), metadata(hidden=16)
    before = target.output_ids.clone()
    with pytest.raises(ProtocolError, match=r"columns of .*start both sides with the same model"):
        write_row(target, 0, read_row(source, 0))
    assert torch.equal(target.output_ids, before)


def test_a_column_that_is_not_known_is_refused():
    found = metadata()
    addresses, _, _ = found.get_buf_infos()
    found.get_buf_infos = lambda: ([*addresses, 12345], [], [])
    with pytest.raises(ProtocolError, match="other columns"):
        read_row(found, 0)
