"""Every symbol of SGLang that this package touches, collected from where each is named, and where it is used.

Four places name them: the self-check (backend/selfcheck.py, and backend/conv_axis.py for what its repair relies on),
the gaps of the CPU path (cpu/gaps.py), the import statements of this package, and LAYOUTS below for classes whose
memory is read without naming them in code; releases/ says what is in their place in an older release. Attributes that
are read from SGLang's objects by name only are in none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

import sglang_hetero
from sglang_hetero.backend.selfcheck import BOOTSTRAP, MEMORY_POOL, RANK, SERVING
from sglang_hetero.layout import known_pools
from sglang_hetero.releases import MADE_FOR
from sglang_hetero.releases import Release as Served
from sglang_hetero.releases.symbol import Symbol

NPU_POOLS = "sglang.srt.hardware_backend.npu.memory_pool_npu"
PACKAGE = Path(sglang_hetero.__file__).parent
SCANNED = ("backend", "cpu", "layout")
"""Parts of this package that know SGLang's names."""

LAYOUTS: tuple[Symbol, ...] = (
    Symbol(MEMORY_POOL, "MambaPool", None),
    Symbol(MEMORY_POOL, "HybridLinearKVPool", None),
    Symbol(MEMORY_POOL, known_pools.MHA, None),
    Symbol(MEMORY_POOL, known_pools.MLA, None),
    Symbol(NPU_POOLS, known_pools.NPU_MHA, None),
    Symbol(NPU_POOLS, known_pools.NPU_MLA, None),
    Symbol(NPU_POOLS, "_init_npu_conv_state", None),
    Symbol("sglang.srt.layers.amx_utils", "_init_amx_conv_state", None),
    Symbol("sglang.srt.disaggregation.ascend.transfer_engine", "AscendTransferEngine", None),
    Symbol("sglang.srt.distributed.device_communicators.mooncake_transfer_engine", "MooncakeTransferEngine", None),
)
"""Whose layout in memory is described (layout/), and the engines that are known by the name of their class."""


class Purpose(StrEnum):
    """What a symbol is for, and so what does not work without it."""

    SERVER = "server"
    """A prefill or decode server with this package: it does not start."""
    CPU = "CPU reference platform"
    """Only the CPU reference platform (docs/cpu.md)."""


@dataclass(frozen=True)
class Use:
    """A symbol and its users. absent: this package adds it, so that it must not be there. where: files of ours."""

    symbol: Symbol
    purpose: Purpose
    absent: bool = False
    where: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """The symbol's, from the module on."""
        return str(self.symbol)


def uses(release: Served = MADE_FOR) -> tuple[Use, ...]:
    """All of them as they are in one release, sorted by name, each once. Imports torch."""
    found: dict[str, Use] = {}
    for use in _named(release):
        known = found.get(use.name)
        # Of two rows that name one symbol the one that says more stays; a server's need outweighs the CPU platform's.
        if known is None:
            found[use.name] = use
            continue
        symbol = max((known.symbol, use.symbol), key=lambda one: (bool(one.digest), bool(one.parameters)))
        purpose = Purpose.SERVER if Purpose.SERVER in (known.purpose, use.purpose) else Purpose.CPU
        where = tuple(sorted({*known.where, *use.where}))
        found[use.name] = Use(symbol, purpose, known.absent and use.absent, where)
    return tuple(found[name] for name in sorted(found))


def _named(release: Served) -> Iterator[Use]:
    from sglang_hetero.backend.conv_axis import SYMBOLS
    from sglang_hetero.cpu.gaps import gaps

    for symbol in release.rows((*BOOTSTRAP, *SERVING, *RANK, *SYMBOLS, *LAYOUTS)):
        yield Use(symbol, Purpose.SERVER, where=_mentions(symbol))
    for attribute in release.attributes:
        symbol = Symbol(attribute.module, f"{attribute.owner}.{attribute.name}", None)
        yield Use(symbol, Purpose.SERVER, absent=True, where=_mentions(symbol))
    for gap in gaps():
        if not gap.module.startswith("sglang.") or not release.has(gap.symbol):
            continue
        name = f"{gap.owner}.{gap.name}" if gap.owner else gap.name
        parameters = None if gap.parameters is None else " ".join(one for one in gap.parameters if one != "self")
        yield Use(Symbol(gap.module, name, parameters), Purpose.CPU, gap.absent, ("cpu/gaps.py",))
    for file, module, name in imports():
        purpose = Purpose.CPU if file.startswith("cpu/") else Purpose.SERVER
        yield Use(Symbol(module, name, None), purpose, where=(file,))


def imports() -> Iterator[tuple[str, str, str]]:
    """File, module and name of everything that this package imports from SGLang."""
    for file, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("sglang."):
                yield from ((file, node.module or "", alias.name) for alias in node.names)


def _mentions(symbol: Symbol) -> tuple[str, ...]:
    """Files of ours with the symbol's last name in them (of a constructor its class's); else the table itself, where
    a row may stand for what is relied on without being called."""
    owner, _, name = symbol.name.rpartition(".")
    wanted = owner.rpartition(".")[2] if name == "__init__" else name
    files = tuple(sorted(file for file, names in _names().items() if wanted in names))
    return files or ("backend/selfcheck.py",)


@cache
def _trees() -> dict[str, ast.Module]:
    files = [file for part in SCANNED for file in sorted((PACKAGE / part).rglob("*.py"))]
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def _names() -> dict[str, frozenset[str]]:
    """The names that each file uses: attributes, variables, functions, and the words of texts like `module.name`."""
    found = {}
    for file, tree in _trees().items():
        if file in ("backend/selfcheck.py", "cpu/gaps.py"):
            continue
        found[file] = frozenset(_of(ast.walk(tree)))
    return found


def _of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from node.value.split(".")
