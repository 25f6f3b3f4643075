"""Entry point of the group `sglang.srt.plugins`: SGLang calls activate() in each of its processes."""

import importlib
import os
import sys

# The model runs in scheduler processes only; the launcher and the detokenizer need nothing and pay nothing.
_SCHEDULER = "sglang.srt.managers.scheduler"


def activate() -> None:
    """Apply what this process needs (docs/cpu.md)."""
    if _on_cpu_reference():
        from sglang_hetero.cpu.gaps import close_gaps_or_stop

        close_gaps_or_stop()


def _on_cpu_reference() -> bool:
    """Is this a scheduler of SGLang's CPU engine, with our stand-in for sgl_kernel?

    The first two questions cost nothing, so that a GPU or NPU host never imports more for the sake of the third.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or _SCHEDULER not in sys.modules:
        return False
    try:
        kernels = importlib.import_module("sgl_kernel")
    except ImportError:
        return False
    return getattr(kernels, "IS_HETERO_CPU_REFERENCE", False)
