"""What SGLang's forward passes of linear layers call on an NPU, and whether this host has it.

SGLang calls operators as `torch.ops.npu.NAME`, which several packages register, and looks for none of them before a
request needs it. Their names are read from the installed release, so that this holds for another, too.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_hetero.doctor import host
from sglang_hetero.doctor.lines import Line, fail, ok, warn

NAME = "operators"
FOLDER = "srt/hardware_backend/npu/attention"
ATTENTION = {
    "ascend_gdn_backend.py": "Qwen3.5, Qwen3-Next and other models with gated delta nets",
    "ascend_kda_backend.py": "Kimi-Linear",
}
"""SGLang's file for each kind of linear layer, and the models that need it."""
REQUIRED = "ascend_gdn_backend.py"
"""Of the models in the first place of this package, and of the one that `validate` serves."""
PREFIX = ("torch", "ops", "npu")
REGISTERING = ("custom_ops", "sgl_kernel_npu")
"""Packages that SGLang imports for their operators (hardware_backend/npu/utils.py: init_npu_backend)."""
REMEDY = (
    "install a release of sgl-kernel-npu, or the package custom_ops, that has them for this CANN and torch_npu "
    "(docs/ascend.md, Vendor surface)"
)


def called(source: str) -> set[str]:
    """Names of the operators that a file of SGLang calls as torch.ops.npu.NAME."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and _is_npu(node)}


def imported(source: str, package: str = "sgl_kernel_npu") -> set[tuple[str, str]]:
    """What a file imports from a package: pairs of a module and a name in it."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package
        for alias in node.names
    }


def line(area: str) -> Line:
    """Whether this host has all of it. torch must know NPUs already (device.attach)."""
    import torch

    folder = Path(host.installed().folder) / FOLDER
    for package in REGISTERING:
        with suppress(Exception):  # what a vendor's package raises; what is missing without it is told below
            importlib.import_module(package)
    missing = {
        file: list(absent((folder / file).read_text(encoding="utf-8"), torch.ops.npu, importlib.import_module))
        for file in ATTENTION
    }
    return judged(area, {file: names for file, names in missing.items() if names})


def absent(source: str, operators: Any, load: Callable[[str], Any]) -> Iterator[str]:
    """Names that a file needs and that neither `operators` nor the modules that `load` gives have."""
    yield from sorted(f"torch.ops.npu.{name}" for name in called(source) if not hasattr(operators, name))
    for module, name in sorted(imported(source)):
        try:
            found = hasattr(load(module), name)
        except Exception:  # as above
            found = False
        if not found:
            yield f"{module}.{name}"


def judged(area: str, missing: dict[str, list[str]]) -> Line:
    """The line of the stage. missing: names by file; a file that needs nothing more is not in it."""
    if not missing:
        return ok(area, NAME, "all that SGLang's linear attention calls on NPUs is there")
    seen = "; ".join(f"not there: {', '.join(names)}, for {ATTENTION[file]}" for file, names in missing.items())
    return (fail if REQUIRED in missing else warn)(area, NAME, seen, REMEDY)


def _is_npu(node: ast.Attribute) -> bool:
    names, value = [], node.value
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return isinstance(value, ast.Name) and (value.id, *reversed(names)) == PREFIX
