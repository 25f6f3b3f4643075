"""The seeds and scales do what docs/models.md says: no near ties, varied text, drafts right part of the time."""

import statistics

import pytest

from sglang_hetero import models
from tests.reference.tuning import measure, text_prompts

SAMPLE = slice(None, None, 8)  # of the 40 prompts: 5, from 1 to some 200 tokens


@pytest.mark.parametrize("name", ["tiny", "tiny-gqa2", "tiny-h6", "tiny-moe", "tiny-next", "tiny-gqa"])
def test_tuning(name: str) -> None:
    path = models.path(name)
    tuning = measure(path, text_prompts(path)[SAMPLE], depth=3 if models.spec(name).mtp_layers else 0)
    # fp32 implementations differ by about 1e-5 in a log-probability: a tie this wide never flips.
    assert tuning.smallest_gap > 1e-3
    if models.spec(name).mtp_layers:
        assert len(tuning.histogram) == 4 and min(tuning.histogram) > 0, tuning.histogram
        assert 1.5 <= tuning.accept_length <= 3, tuning.histogram
    assert statistics.mean(tuning.distinct) >= 16
    assert min(tuning.distinct) > 4
