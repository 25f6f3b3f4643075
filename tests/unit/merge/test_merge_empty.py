"""What nobody sends is emptied, in the pages of the request and nowhere else: every byte of the rank is compared."""

import numpy as np
import pytest
import torch

from sglang_hetero.errors import MergeError
from sglang_hetero.layout import Role
from sglang_hetero.merge import Assembler
from sglang_hetero.reshard import plan
from tests.reshard_oracle.handover import decode_rank, prefill_ranks
from tests.reshard_oracle.model import heads_kv, without_draft
from tests.reshard_oracle.rank import Shape, first_difference

# The draft's values have another dtype, and its second layer lies elsewhere.
MODEL = (
    heads_kv(Role.TARGET_KEY, 4, 4, (0,)),
    heads_kv(Role.TARGET_VALUE, 4, 4, (0,)),
    heads_kv(Role.DRAFT_KEY, 4, 4, (0, 1)),
    heads_kv(Role.DRAFT_VALUE, 4, 4, (0, 1), "int8"),
)
SHAPE = Shape(page_size=2)


def world():
    to = decode_rank(MODEL, 1, 0, SHAPE)
    made = plan([rank.manifest for rank in prefill_ranks(without_draft(MODEL), 2, SHAPE)], to.manifest)
    memory = {key: torch.from_numpy(to.bytes_from(buffer.address)) for key, buffer in to.buffers.items()}
    return to, Assembler(made, memory)


@pytest.mark.parametrize("pages", [(3,), (2, 3, 4), (5, 1, 6), (4, 3, 2), (1, 2, 3, 4, 5, 6)], ids=str)
def test_the_pages_of_a_request_are_emptied_and_no_others(pages):
    to, assembler = world()
    expected, _ = world()
    for (role, _), buffer in expected.buffers.items():
        if role.draft:
            assert buffer.items[list(pages)].all(), "it was not poisoned"
            buffer.items[list(pages)] = 0
    assembler.begin_empty(np.array(pages, dtype=np.int64))
    assert first_difference(expected, to) is None


def test_padding_is_no_request_s():
    to, assembler = world()
    with pytest.raises(MergeError, match="item 0 is no request's"):
        assembler.begin_empty(np.array([1, 0], dtype=np.int64))
    assert first_difference(world()[0], to) is None
