"""The row of SGLang's metadata that says how a request goes on: its first token, log-probabilities, draft inputs.

SGLang writes the row into decode's memory from afar. Here it travels in a message, and decode's own scheduler writes it
when everything else of the request is there.
"""

from typing import Any

import torch

from sglang_hetero.errors import ProtocolError

NAMES = (
    "output_ids",
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


def columns(metadata: Any) -> list[torch.Tensor]:
    """The tensors of which each has a row per request. Raises ProtocolError if SGLang has others than we know."""
    found = [tensor for name in NAMES if (tensor := getattr(metadata, name, None)) is not None]
    addresses, _, _ = metadata.get_buf_infos()
    if [tensor.data_ptr() for tensor in found] != list(addresses):
        raise ProtocolError("SGLang's metadata has other columns than this release knows")
    return found


def read_row(metadata: Any, row: int) -> tuple[bytes, ...]:
    """The bytes of a row, column by column."""
    return tuple(tensor[row].cpu().view(torch.uint8).numpy().tobytes() for tensor in columns(metadata))


def write_row(metadata: Any, row: int, content: tuple[bytes, ...]) -> None:
    """Write what `read_row` gave on the other side, the mark that it is complete (the room) with it.

    Raises ProtocolError, and writes nothing, if the two sides' rows are not of one shape.
    """
    own = columns(metadata)
    sizes = [tensor[row].nbytes for tensor in own]
    if sizes != [len(part) for part in content]:
        raise ProtocolError(
            f"the row with the first token has columns of {[len(part) for part in content]} bytes at prefill, {sizes} "
            "here; start both sides with the same model and speculative decoding"
        )
    for tensor, part in zip(own, content, strict=True):
        given = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        tensor[row].view(torch.uint8).copy_(given)
