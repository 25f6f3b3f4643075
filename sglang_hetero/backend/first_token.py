"""The row of SGLang's metadata that says how a request goes on: its first token, log-probabilities, draft inputs.

SGLang writes the row into decode's memory from afar. Here it travels in a message, and decode's own scheduler writes it
when everything else of the request is there. SGLang also takes prefill's size of a column for decode's, so that a
hidden state of another size lands in another request's row; here columns go by name, and what decode cannot take over
it begins itself.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_hetero.errors import ProtocolError
from sglang_hetero.layout.row import Column
from sglang_hetero.reshard.row import RowPlan

TOKEN = "output_ids"
"""The column with the first token, in its first element."""
NAMES = (
    TOKEN,
    "cached_tokens",
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "output_token_sampling_mask_len",
    "output_token_sampling_mask_idx",
    "output_token_sampling_logprobs",
    "output_topk_p",
    "output_topk_index",
    "output_hidden_states",
    "output_dsa_topk_indices",
    "bootstrap_room",
    "kv_checksum",
)
"""Attributes of MetadataBuffers, in the order of its get_buf_infos; those that a server does not use are None."""
NO_DSA_INDEX = -1
"""SGLang's mark for a position that the indexer of sparse attention has not chosen."""


def _certain(column: torch.Tensor, _token: int) -> None:
    """The first guess is the only one."""
    column.zero_()
    column[0] = 1.0


BEGINNINGS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "output_topk_p": _certain,
    "output_topk_index": lambda column, token: column.fill_(token),
    "output_hidden_states": lambda column, _: column.zero_(),
    "output_dsa_topk_indices": lambda column, _: column.fill_(NO_DSA_INDEX),
}
"""What a draft model begins with where prefill has none: called with a column of decode's row and the first token.

The first guess is the first token once more, because that is a token of every vocabulary; the state behind it is 0,
which the draft's norm leaves 0. These guesses are wrong as a rule, and verification then takes none of them.
"""


def columns(metadata: Any) -> list[torch.Tensor]:
    """The tensors of which each has a row per request. Raises ProtocolError if SGLang has others than we know."""
    return [tensor for _, tensor in _named(metadata)]


def _named(metadata: Any) -> list[tuple[str, torch.Tensor]]:
    found = [(name, tensor) for name in NAMES if (tensor := getattr(metadata, name, None)) is not None]
    addresses, _, _ = metadata.get_buf_infos()
    if [tensor.data_ptr() for _, tensor in found] != list(addresses):
        raise ProtocolError("SGLang's metadata has other columns than this release knows")
    return found


def described(metadata: Any) -> tuple[Column, ...]:
    """What a row is made of. Raises ProtocolError if SGLang has other columns than we know."""
    return tuple(
        Column(name, str(tensor.dtype).removeprefix("torch."), tensor[0].nbytes, draft=name in BEGINNINGS)
        for name, tensor in _named(metadata)
    )


def read_row(metadata: Any, row: int) -> tuple[bytes, ...]:
    """The bytes of a row, column by column."""
    return tuple(tensor[row].cpu().view(torch.uint8).numpy().tobytes() for tensor in columns(metadata))


def write_row(metadata: Any, row: int, content: tuple[bytes, ...], plan: RowPlan) -> None:
    """Write what `read_row` gave on the other side, the mark that it is complete (the room) with it.

    plan: for these two sides' rows. Raises ProtocolError, and writes nothing, if it is not of this row or that content.
    """
    own = _named(metadata)
    sizes = tuple(len(part) for part in content)
    wanted = [None if column is None else sizes[column] for column in plan.taken] if sizes == plan.sizes else None
    if wanted is None or len(own) != len(wanted):
        raise ProtocolError(
            f"the row with the first token has columns of {list(sizes)} bytes, prefill has told of {list(plan.sizes)}; "
            "install the same release of sglang-hetero on both sides"
        )
    if unfit := [
        f"{name} has {size} bytes on prefill and {tensor[row].nbytes} here"
        for (name, tensor), size in zip(own, wanted, strict=True)
        if size not in (None, tensor[row].nbytes)
    ]:
        raise ProtocolError(
            f"the row with the first token is another one on prefill than on decode: {', '.join(unfit)}; start both "
            "with the same model and the same release of SGLang and sglang-hetero"
        )
    token = 0
    for (name, tensor), column in zip(own, plan.taken, strict=True):
        if column is None:
            BEGINNINGS[name](tensor[row], token)
            continue
        given = torch.frombuffer(bytearray(content[column]), dtype=torch.uint8)
        tensor[row].view(torch.uint8).copy_(given)
        if name == TOKEN:
            token = int(tensor[row][0])
