"""A release of SGLang, read from its source: nothing is imported, so a broken or another one can be looked at, too.

What a symbol is, is told as text (its signature, or its value) and as a digest of its source. A method is looked for in
the bases of its class as Python would, as far as the bases are SGLang's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from textwrap import dedent

from sglang_hetero.backend.selfcheck import digest_of_source
from sglang_hetero.errors import UpstreamChanged

PACKAGE = "sglang"
MAX_STEPS = 32
"""Names that stand for other names, followed from one to the next; more of them is a circle."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotFound(UpstreamChanged):
    """A release of SGLang has no such symbol."""


@dataclass(frozen=True)
class Found:
    """signature: `(a, b=1)` of what is called, without self; `= value` of a value. parameters: their names, in the
    order in which `inspect.signature` gives them; None for what is not called. digest: of the source."""

    signature: str
    parameters: tuple[str, ...] | None
    digest: str


class Release:
    """The source of one release: the folder that holds `srt`, or one that holds the package's folder."""

    def __init__(self, folder: Path) -> None:
        """Raises UpstreamChanged if there is no SGLang in that folder."""
        found = next((path for path in (folder, folder / PACKAGE) if (path / "srt").is_dir()), None)
        if found is None:
            raise UpstreamChanged(
                f"{folder} is no source of SGLang, it has no folder srt; give the folder of the unpacked wheel"
            )
        self.folder = found

    @cached_property
    def version(self) -> str:
        """The release's number, as its own files say; empty if they do not."""
        for name in ("_version.py", "version.py"):
            try:
                tree = ast.parse((self.folder / name).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                continue
            for node in tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                    names = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if any(getattr(one, "id", "") in ("__version__", "version") for one in names):
                        return str(node.value.value)
        return ""

    def find(self, module: str, name: str) -> Found:
        """What a module has under a name; a dot stands for a class and its attribute. Raises NotFound."""
        owner, _, attribute = name.partition(".")
        home, node = self._resolve(self._module(module), owner)
        if attribute:
            if not isinstance(node, ast.ClassDef):
                raise NotFound(f"{owner} in {module} is no class")
            home, node = self._attribute(home, node, attribute)
        return self._describe(home, node, method=bool(attribute))

    @cache  # noqa: B019 (one object for each command)
    def _module(self, module: str) -> _Module:
        package, *path = module.split(".")
        if package != PACKAGE:
            raise NotFound(f"{module} is not of SGLang")
        base = self.folder.joinpath(*path)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                try:
                    text = file.read_text(encoding="utf-8")
                    return _Module(module, ast.parse(text), text.splitlines(keepends=True), file.name == "__init__.py")
                except (OSError, SyntaxError, ValueError) as error:
                    raise NotFound(f"{module} cannot be read ({error})") from None
        raise NotFound(f"there is no module {module}")

    def _resolve(self, home: _Module, name: str) -> tuple[_Module, ast.stmt]:
        """The statement that makes a name of a module, which may be in another module that it is imported from."""
        for _ in range(MAX_STEPS):
            node = home.names.get(name)
            if node is None:
                raise NotFound(f"there is no {name} in {home.name}")
            if isinstance(node, ast.Import):
                return home, node
            if not isinstance(node, ast.ImportFrom):
                return home, node
            name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            home = self._module(home.imported(node))
        raise NotFound(f"{name} in {home.name} is imported in a circle")

    def _attribute(self, home: _Module, owner: ast.ClassDef, name: str) -> tuple[_Module, ast.stmt]:
        for where, found in self._bases(home, owner, set()):
            node = _names(found.body).get(name)
            if node is not None:
                return where, node
        raise NotFound(f"{owner.name} in {home.name} has no {name}")

    def _bases(self, home: _Module, owner: ast.ClassDef, seen: set[str]) -> Iterator[tuple[_Module, ast.ClassDef]]:
        """The class, then its bases from left to right, each with its own; those of other packages are left out."""
        if (key := f"{home.name}.{owner.name}") in seen:
            return
        seen.add(key)
        yield home, owner
        for base in owner.bases:
            if not isinstance(base, ast.Name):
                continue
            try:
                where, node = self._resolve(home, base.id)
            except NotFound:
                continue
            if isinstance(node, ast.ClassDef):
                yield from self._bases(where, node, seen)

    def _describe(self, home: _Module, node: ast.stmt, *, method: bool) -> Found:
        digest = digest_of_source(home.text_of(node))
        if isinstance(node, Function):
            return Found(_signature(node.args, method), _parameters(node.args, method), digest)
        if isinstance(node, ast.ClassDef):
            parameters, signature = self._of_class(home, node)
            return Found(signature, parameters, digest)
        value = getattr(node, "value", None)
        return Found(f"= {ast.unparse(value)}" if isinstance(value, ast.expr) else "a name", None, digest)

    def _of_class(self, home: _Module, owner: ast.ClassDef) -> tuple[tuple[str, ...], str]:
        """What a class is called with: as its __init__ says, or for a record its fields."""
        try:
            _, node = self._attribute(home, owner, "__init__")
        except NotFound:
            node = owner
        if isinstance(node, Function):
            return _parameters(node.args, True), _signature(node.args, True)
        fields = [
            one
            for _, each in reversed(list(self._bases(home, owner, set())))
            for one in each.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        shown = ", ".join(ast.unparse(one) for one in fields)
        return tuple(one.target.id for one in fields if isinstance(one.target, ast.Name)), f"({shown})"


@dataclass(frozen=True)
class _Module:
    name: str
    tree: ast.Module
    lines: list[str]
    is_package: bool

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """What makes each name of the module; of several the last one, as Python has it."""
        return _names(self.tree.body)

    def imported(self, node: ast.ImportFrom) -> str:
        """The module that names are imported from."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def text_of(self, node: ast.stmt) -> str:
        """Source of a statement, with its decorators, as `inspect.getsource` gives it, without indentation."""
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        return dedent("".join(self.lines[first - 1 : node.end_lineno]))


def _names(body: Sequence[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.If | ast.Try):
            # Which branch runs depends on the host: what is made in one of them counts, and the first one first.
            branches = [node.body, node.orelse]
            if isinstance(node, ast.Try):
                branches += [handler.body for handler in node.handlers]
            for branch in reversed(branches):
                found |= _names(branch)
    return found


def _parameters(arguments: ast.arguments, method: bool) -> tuple[str, ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    names = [one.arg for one in positional]
    if method and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    names += [arguments.vararg.arg] if arguments.vararg else []
    names += [one.arg for one in arguments.kwonlyargs]
    names += [arguments.kwarg.arg] if arguments.kwarg else []
    return tuple(names)


def _signature(arguments: ast.arguments, method: bool) -> str:
    shown = ast.unparse(arguments)
    first = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][:1]
    if method and first in (["self"], ["cls"]):
        shown = shown.partition(", ")[2]
    return f"({shown})"
