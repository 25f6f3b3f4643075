"""Which columns decode takes over from the row that prefill sends with a first token.

What the draft model begins with (its first guess and the hidden state behind it) is of use only where the prompt's
draft caches come along. Where one side drafts and the other does not, decode begins it itself; sizes of those columns
may then differ, as they do in SGLang. All other columns must be the same on both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_hetero.errors import LayoutMismatch
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.layout.row import Column


@dataclass(frozen=True)
class RowPlan:
    """sizes: bytes of each column at prefill, in the order of its row. taken: for each column of decode's row, in the
    order of that one, which column of prefill's it is; None for one that decode begins itself.
    """

    sizes: tuple[int, ...]
    taken: tuple[int | None, ...]


def plan_row(source: Manifest, destination: Manifest, *, drafts_move: bool) -> RowPlan:
    """drafts_move: prefill and decode both draft, or neither does.

    Raises LayoutMismatch, naming the column, unless the two rows go together.
    """
    theirs = {column.name: number for number, column in enumerate(source.row)}
    left = _compared(source, drafts_move=drafts_move)
    right = _compared(destination, drafts_move=drafts_move)
    for name in {**left, **right}:
        if (mine := left.get(name)) != (other := right.get(name)):
            raise LayoutMismatch(
                f"column {name} of the row with the first token: {source.label} has {mine or 'none'}, "
                f"{destination.label} {other or 'none'}; start both with the same model, dtype, speculative algorithm "
                "and SGLANG_ variables"
            )
    taken = tuple(theirs[column.name] if column.name in right else None for column in destination.row)
    return RowPlan(tuple(column.nbytes for column in source.row), taken)


def _compared(manifest: Manifest, *, drafts_move: bool) -> Mapping[str, Column]:
    """The columns that must be the same on both sides, by name."""
    return {column.name: column for column in manifest.row if drafts_move or not column.draft}
