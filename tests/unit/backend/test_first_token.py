"""The metadata row as bytes: what is written on one side is read on the other; what one side has not is begun anew."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from sglang_hetero.backend.first_token import NAMES, described, read_row, write_row
from sglang_hetero.errors import LayoutMismatch, ProtocolError
from sglang_hetero.reshard.row import RowPlan, plan_row
from tests.reshard_oracle.pair import decode, prefill

ROWS = 4
DRAFT = ("output_topk_p", "output_topk_index", "output_hidden_states", "output_dsa_topk_indices")


def metadata(hidden=8, dtype=torch.bfloat16, **others):
    """Rows of SGLang's MetadataBuffers, of which the unused columns are None."""
    torch.manual_seed(0)
    columns = {
        "output_ids": torch.randint(1, 99, (ROWS, 16), dtype=torch.int32),
        "cached_tokens": torch.randint(1, 99, (ROWS, 16), dtype=torch.int32),
        "output_topk_p": torch.rand(ROWS, 16),
        "output_topk_index": torch.randint(1, 99, (ROWS, 16), dtype=torch.int64),
        "output_hidden_states": torch.randn(ROWS, hidden).to(dtype),
        "bootstrap_room": torch.randint(1, 99, (ROWS, 8), dtype=torch.int64).to(torch.uint64),
        **others,
    }
    found = SimpleNamespace(**dict.fromkeys(NAMES) | columns)
    used = [columns[name] for name in NAMES if columns.get(name) is not None]
    found.get_buf_infos = lambda: ([tensor.data_ptr() for tensor in used], [], [])
    return found


def planned(source, target, *, drafts_move=True):
    """The plan for two sides with these metadata."""
    theirs, ours = (replace(one, row=described(rows)) for one, rows in ((prefill()[0], source), (decode(), target)))
    return plan_row(theirs, ours, drafts_move=drafts_move)


def poisoned(target):
    """Fill all rows, and say what is in them then."""
    tensors = {name: tensor for name, tensor in vars(target).items() if isinstance(tensor, torch.Tensor)}
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(0xAB)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def check_only(target, before, row):
    """No other row has changed."""
    for name, old in before.items():
        for other in set(range(ROWS)) - {row}:
            assert torch.equal(getattr(target, name)[other].view(torch.uint8), old[other].view(torch.uint8)), name


def test_a_row_arrives_and_no_other_row_changes():
    source, target = metadata(), metadata()
    before = poisoned(target)
    write_row(target, 2, read_row(source, 1), planned(source, target))
    for name in before:
        assert torch.equal(getattr(target, name)[2].view(torch.uint8), getattr(source, name)[1].view(torch.uint8)), name
    check_only(target, before, 2)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [((16, torch.float32), (40, torch.bfloat16)), ((40, torch.bfloat16), (16, torch.float32))],
    ids=["decode drafts", "prefill drafts"],
)
def test_drafts_of_one_side_begin_with_the_first_token_and_nothing_else(theirs, ours):
    positions = torch.randint(0, 99, (ROWS, 12), dtype=torch.int32)
    source = metadata(*theirs)
    target = metadata(*ours, output_dsa_topk_indices=positions)  # it may be there on one side only
    before = poisoned(target)
    write_row(target, 2, read_row(source, 1), planned(source, target, drafts_move=False))
    token = int(source.output_ids[1][0])
    assert target.output_topk_p[2].tolist() == [1.0] + [0.0] * 15
    assert target.output_topk_index[2].tolist() == [token] * 16
    assert target.output_hidden_states[2].tolist() == [0.0] * ours[0]
    assert target.output_dsa_topk_indices[2].tolist() == [-1] * 12
    for name in ("output_ids", "cached_tokens", "bootstrap_room"):
        assert torch.equal(getattr(target, name)[2], getattr(source, name)[1]), name
    check_only(target, before, 2)


def test_what_belongs_to_a_draft_is_marked():
    found = described(metadata(output_dsa_topk_indices=torch.zeros(ROWS, 2, dtype=torch.int32)))
    assert [column.name for column in found if column.draft] == list(DRAFT)
    assert [(column.name, str(column)) for column in found if column.draft][2] == (
        "output_hidden_states",
        "16 bytes of bfloat16",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 16},
        {"hidden": 4, "dtype": torch.float32},  # as many bytes
        {"output_topk_index": None},
        {"kv_checksum": torch.zeros(ROWS, 8, dtype=torch.uint64)},
    ],
    ids=["width", "dtype", "lacks", "more"],
)
@pytest.mark.parametrize("there", ["prefill", "decode"])
def test_rows_that_do_not_go_together_are_refused_before_a_byte_moves(changes, there):
    rows = [metadata(), metadata(**changes)]
    source, target = rows if there == "decode" else rows[::-1]
    words = r"column \w+ of the row .*prefill TP0/2 .* has .*, decode TP0/1 .*; start both with the same model"
    with pytest.raises(LayoutMismatch, match=words):
        planned(source, target)


def test_what_is_no_draft_s_is_the_same_whoever_drafts():
    with pytest.raises(LayoutMismatch, match=r"column kv_checksum .* has none, decode .* 64 bytes of uint64"):
        planned(metadata(), metadata(kv_checksum=torch.zeros(ROWS, 8, dtype=torch.uint64)), drafts_move=False)


@pytest.mark.parametrize("change", ["less", "shorter"])
def test_a_row_that_is_not_as_told_is_refused_and_nothing_is_written(change):
    """Whatever prefill says: its bytes come from the network."""
    source, target = metadata(), metadata()
    content, plan = read_row(source, 0), planned(source, target)
    wrong = content[:-1] if change == "less" else (*content[:-1], content[-1][:-1])
    before = poisoned(target)
    with pytest.raises(ProtocolError, match=r"columns of .* bytes, prefill has told of"):
        write_row(target, 1, wrong, plan)
    check_only(target, before, None)


@pytest.mark.parametrize("taken", [(0, 1), (1, 0, *range(2, 6)), (0, 1, 2, 3, 2, 5)], ids=["few", "turned", "size"])
def test_a_plan_of_another_row_is_refused_and_nothing_is_written(taken):
    source, target = metadata(cached_tokens=torch.zeros(ROWS, 8, dtype=torch.int32)), metadata()
    content = read_row(source, 0)
    before = poisoned(target)
    with pytest.raises(ProtocolError, match=r"on both sides|bytes on prefill and \d+ here.*; start both with the same"):
        write_row(target, 1, content, RowPlan(tuple(map(len, content)), taken))
    check_only(target, before, None)


def test_a_column_that_is_not_known_is_refused():
    found = metadata()
    addresses, _, _ = found.get_buf_infos()
    found.get_buf_infos = lambda: ([*addresses, 12345], [], [])
    with pytest.raises(ProtocolError, match="other columns"):
        read_row(found, 0)
    with pytest.raises(ProtocolError, match="other columns"):
        described(found)
