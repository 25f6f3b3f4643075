"""Fixtures of the CPU platform's unit tests."""

import sys

import pytest
import torch

from sglang_hetero.cpu.enable import SHIMS

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)


@pytest.fixture
def close():
    """Compare with an fp64 expectation: to rounding of the result's dtype, or to what fp32 arithmetic can give."""

    def compare(actual, expected, tol=2e-5):
        rtol = 2**-7 if actual.dtype is torch.bfloat16 else tol
        torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=max(tol, rtol / 8))

    return compare


@pytest.fixture
def shims(monkeypatch):
    """Make the stand-in packages importable, as the .pth file does: behind everything else."""
    if str(SHIMS) not in sys.path:
        monkeypatch.setattr(sys, "path", [*sys.path, str(SHIMS)])
