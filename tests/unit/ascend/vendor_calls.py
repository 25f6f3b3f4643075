"""What a Python file uses of a vendor's packages, read from its syntax: nothing is imported."""

import ast
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("torch_npu", "sgl_kernel_npu", "memfabric_hybrid", "mooncake")
MODULE = ("torch", "npu")
"""torch.npu is torch_npu.npu."""
OPERATORS = ("torch", "ops", "npu")


def of_files(files: Iterable[Path]) -> set[str]:
    """Dotted names, such as `torch_npu.npu.Stream`, of all these files."""
    return {name for file in files for name in of_file(file)}


def of_file(file: Path) -> set[str]:
    """Dotted names of one file: attributes of a vendor's module, and what is imported from one."""
    tree = ast.parse(file.read_text())
    found = set()
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            found |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name.split(".")[0] in PACKAGES and "." in one.name}
        elif isinstance(node, ast.Attribute) and node not in inner and (name := _dotted(node)):
            found.add(name)
    return {name for name in found if "." in name}


def attributes(files: Iterable[Path], owner: str) -> set[str]:
    """Attributes of `self.<owner>` in these files, of what getattr is called on it with a text too."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and _is_own(node.value, owner):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
                target, name = node.args[:2]
                if _is_own(target, owner) and isinstance(name, ast.Constant):
                    found.add(str(name.value))
    return found


def _is_own(node: ast.AST, owner: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == owner and getattr(node.value, "id", "") == "self"


def _dotted(node: ast.Attribute) -> str:
    """`torch_npu.a.b` of a chain of attributes of a vendor's module, else an empty text."""
    parts: list[str] = []
    inside: ast.AST = node
    while isinstance(inside, ast.Attribute):
        parts.append(inside.attr)
        inside = inside.value
    if not isinstance(inside, ast.Name):
        return ""
    names = (inside.id, *reversed(parts))
    if names[: len(OPERATORS)] == OPERATORS and len(names) > len(OPERATORS):
        return f"torch_npu.{names[len(OPERATORS)]}"
    if names[: len(MODULE)] == MODULE:
        names = ("torch_npu", *names[1:])
    return ".".join(names) if names[0] in PACKAGES else ""
