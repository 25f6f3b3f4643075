"""The row with the first token on paper is that of SGLang's own buffers."""

from types import SimpleNamespace

import pytest
import torch

from sglang_hetero.backend.first_token import described
from sglang_hetero.layout.config import arithmetic_dtype, hidden_size, ssm_dtype
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


@pytest.mark.parametrize("own", [None, "float32", "bfloat16", "float16", "float8"])
@pytest.mark.parametrize("nested", [False, True], ids=["text", "text in a whole"])
def test_the_dtype_of_ssm_states_is_that_which_sglang_takes(monkeypatch, own, nested):
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    monkeypatch.delenv("SGLANG_MAMBA_SSM_DTYPE", raising=False)
    text = {"model_type": "qwen3_5_text"} | ({} if own is None else {"mamba_ssm_dtype": own})
    whole = SimpleNamespace(text_config=SimpleNamespace(**text)) if nested else SimpleNamespace(**text)
    wanted = str(mamba2_state_dtype(whole).temporal).removeprefix("torch.")
    assert ssm_dtype({"model_type": "qwen3_5", "text_config": text} if nested else text) == wanted


def test_the_size_is_the_text_models():
    assert hidden_size({"hidden_size": 7, "text_config": {"hidden_size": 64, "model_type": "qwen3_5_text"}}) == 64
    assert hidden_size({"model_type": "qwen3_5_text"}) is None
