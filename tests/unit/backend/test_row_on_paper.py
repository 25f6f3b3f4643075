"""The row with the first token on paper is that of SGLang's own buffers."""

import pytest
import torch

from sglang_hetero.backend.first_token import described
from sglang_hetero.layout.config import arithmetic_dtype, hidden_size
from sglang_hetero.layout.synthetic import NO_HIDDEN, first_token_row

ROWS, MASK = 2, 40
PLAIN = (16, "float32")


@pytest.mark.parametrize("hidden", [None, (16, "float32"), (48, "bfloat16"), (2048, "float16")], ids=str)
@pytest.mark.parametrize("npu", [False, True], ids=["cpu", "npu"])
def test_it_has_the_columns_of_sglang(monkeypatch, hidden, npu):
    from sglang.srt.disaggregation import utils

    if npu:
        monkeypatch.setattr(utils, "is_npu", lambda: True)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *sizes, **how: zeros(*sizes, **how | {"device": "cpu"}))
    size, dtype = hidden or PLAIN
    buffers = utils.MetadataBuffers(
        ROWS, hidden_size=size, hidden_states_dtype=getattr(torch, dtype), max_sampling_mask_tokens=MASK
    )
    assert first_token_row(hidden, npu=npu) == described(buffers)
    assert NO_HIDDEN == PLAIN


@pytest.mark.parametrize("given", ["auto", "half", "float16", "bfloat16", "float", "float32"])
@pytest.mark.parametrize("own", [None, "float32", "float16", "bfloat16", torch.bfloat16], ids=str)
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_is_that_which_sglang_takes(own, given, field):
    from sglang.srt.configs.model_config import _get_and_verify_dtype

    config = {"model_type": "qwen3_5_text"} | ({} if own is None else {field: own})
    as_sglang_has_it = config if not isinstance(own, torch.dtype) else config | {field: "bfloat16"}
    wanted = _get_and_verify_dtype(as_sglang_has_it, given)
    assert arithmetic_dtype(config, given) == str(wanted).removeprefix("torch.")


def test_the_size_is_the_text_models():
    assert hidden_size({"hidden_size": 7, "text_config": {"hidden_size": 64, "model_type": "qwen3_5_text"}}) == 64
    assert hidden_size({"model_type": "qwen3_5_text"}) is None
