"""Whether a vendor's wheel has a name, without an NPU: from its Python sources, its binaries, or an import.

The wheels are unpacked in .venv-ascend. torch_npu and Mooncake cannot be imported there: there is no torch, and no
CANN. Their Python files are read as syntax. A name that C++ registers (an operator, a method of a bound class) stands
in the library as a text of its own, between two zero bytes.
"""

import ast
import json
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-ascend" / "bin" / "python"
SITE = ROOT / ".venv-ascend" / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"
SECONDS = 60

_IMPORT = """
import importlib, json, sys
answers = {}
for name in json.load(sys.stdin):
    module, *path = name.split(".")
    found = importlib.import_module(module)
    for part in path:
        found = getattr(found, part, None)
    answers[name] = None if found is None else (getattr(found, "__doc__", None) or "")
print(json.dumps(answers))
"""


def documents(names: list[str]) -> dict[str, str | None]:
    """Docstring of each dotted name of packages that can be imported; None of one that is not there.

    A method that pybind11 has bound begins its docstring with its signature.
    """
    done = subprocess.run(
        [PYTHON, "-I", "-c", _IMPORT],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"`make ascend-env` repairs .venv-ascend where it is broken:\n{done.stderr}"
    answers: dict[str, str | None] = json.loads(done.stdout)
    return answers


@cache
def binary(path: Path) -> bytes:
    """The content of a library."""
    return path.read_bytes()


def in_binaries(libraries: list[Path], text: str, *, tail: bool = False) -> bool:
    """Whether one of these libraries has the text as a whole one, or with `tail` as the end of one."""
    whole = (b"" if tail else b"\0") + text.encode() + b"\0"
    return any(whole in binary(library) for library in libraries)


def source(dotted: str) -> Path | None:
    """The file of a module or package of the wheels."""
    path = SITE.joinpath(*dotted.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


class Bindings(NamedTuple):
    """What a module binds at its top level. origins: module and name of what it imports; stars: modules."""

    own: dict[str, ast.AST]
    origins: dict[str, tuple[str, str]]
    stars: list[str]


@cache
def bindings(dotted: str) -> Bindings:
    """Of a module of the wheels; nothing of one that is not there."""
    found = Bindings({}, {}, [])
    file = source(dotted)
    if file is None:
        return found
    package = dotted if file.name == "__init__.py" else dotted.rpartition(".")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a vendor's text may have escapes that Python does not know
        tree = ast.parse(file.read_text())
    for node in _flat(tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.own[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.own.update({target.id: node for target in targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.Import):
            found.own.update({(one.asname or one.name).split(".")[0]: node for one in node.names})
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for one in node.names:
                if one.name == "*":
                    found.stars.append(origin)
                else:
                    found.origins[one.asname or one.name] = (origin, one.name)
                    found.own[one.asname or one.name] = node
    return found


def lookup(dotted: str, name: str, seen: frozenset[str] = frozenset()) -> ast.AST | None:
    """What defines a name of a module, in whichever module of its package that is."""
    if dotted in seen:
        return None
    found, seen = bindings(dotted), seen | {dotted}
    if name in found.origins:
        inner = lookup(*found.origins[name], seen)
        return found.own[name] if inner is None else inner
    if name in found.own:
        return found.own[name]
    for star in found.stars:
        inner = lookup(star, name, seen)
        if inner is not None:
            return inner
    return None


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of a module, those under an `if` or a `try` too."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                found += _flat(getattr(node, part, []))
    return found


def defined(dotted: str) -> ast.AST | None:
    """What defines a dotted name in Python; None where no Python file does."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if source(module) is None:
            continue
        if source(dotted) is not None:
            return ast.parse("")
        node = lookup(module, parts[length])
        return _member(node, parts[length + 1 :]) if node is not None else None
    return None


def _member(node: ast.AST, path: list[str]) -> ast.AST | None:
    for name in path:
        if not isinstance(node, ast.ClassDef):
            return None
        found = None
        for inner in node.body:
            names = [getattr(inner, "name", "")]
            if isinstance(inner, ast.Assign):
                names = [target.id for target in inner.targets if isinstance(target, ast.Name)]
            if name in names:
                found = inner
        if found is None:
            return None
        node = found
    return node


def accepts(node: ast.AST, positional: int, keywords: tuple[str, ...]) -> bool:
    """Whether a function, or a class's __new__ or __init__, takes so many arguments and these keywords.

    What is given by C++ alone takes anything here.
    """
    if isinstance(node, ast.ClassDef):
        makers = [inner for inner in node.body if getattr(inner, "name", "") in {"__new__", "__init__"}]
        return all(accepts(maker, positional + 1, keywords) for maker in makers)
    if not isinstance(node, ast.FunctionDef):
        return True
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    if positional > len(names) and given.vararg is None:
        return False
    known = {*names[positional:], *(one.arg for one in given.kwonlyargs)}
    if given.kwarg is None and not set(keywords) <= known:
        return False
    needed = names[: len(names) - len(given.defaults)][positional:]
    return set(needed) <= set(keywords)
