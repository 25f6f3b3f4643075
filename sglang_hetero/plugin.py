"""Entry point of the group `sglang.srt.plugins`: SGLang calls activate() in each of its processes."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

# Where the model runs this is loaded before the plugins are. The data-parallel controller and a program that makes an
# sglang.Engine have it too and run no model: closing the gaps there changes nothing that they use. The HTTP server
# and the detokenizer load their plugins without it, and pay nothing.
_SCHEDULER = "sglang.srt.managers.scheduler"
_KERNELS = "sgl_kernel"
# For our tests: a process that is stock but for what a CPU needs.
_STOCK = "SGLANG_HETERO_TEST_STOCK"


def activate() -> None:
    """Apply what this process needs: on a CPU what SGLang lacks there (docs/cpu.md), then the hooks of the transfer.

    An error ends the process with one line: SGLang's load_plugins swallows every Exception, and to go on without the
    replacements, or with some of them, would give wrong answers.
    """
    try:
        if _in_cpu_engine() and _kernels_are_ours():
            from sglang_hetero.cpu.gaps import close_gaps

            close_gaps()
    except Exception as error:
        _stop("the CPU reference platform does not work here", error)
    if os.environ.get(_STOCK) == "1":
        return
    try:
        from sglang_hetero.backend.hooks import install
        from sglang_hetero.backend.options import read
        from sglang_hetero.backend.secret import seal_of

        options = read(os.environ)
        seal_of(options.token_file)  # each part of the server makes its own; a file that cannot serve is told now
        _ = options.etcd  # the same
        install(options)
    except Exception as error:
        _stop("the transfer cannot be put in", error)


def _in_cpu_engine() -> bool:
    """Has this process of SGLang's CPU engine loaded the scheduler?

    It costs nothing to ask, so that a GPU or NPU host never imports anything for our sake.
    """
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and _SCHEDULER in sys.modules


def _kernels_are_ours() -> bool:
    """Is sgl_kernel our stand-in? Raises what its import raises, if it is; a real one that is broken is SGLang's."""
    try:
        kernels = importlib.import_module(_KERNELS)
    except Exception:
        if _would_find_ours():
            raise
        return False
    return bool(getattr(kernels, "IS_HETERO_CPU_REFERENCE", False))


def _would_find_ours() -> bool:
    from sglang_hetero.cpu import enable

    spec = importlib.util.find_spec(_KERNELS)
    return spec is not None and spec.origin is not None and enable.SHIMS in Path(spec.origin).parents


def _stop(what: str, error: Exception) -> NoReturn:
    from sglang_hetero.errors import HeteroError

    name = "" if isinstance(error, HeteroError) else f"{type(error).__name__}: "
    text = " ".join(f"{name}{error}".split())
    print(f"sglang-hetero: {what}: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1) from error
