"""An explanation as tables for a person."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_hetero.reshard.explain import Explanation, Part, Source

from .roofline import Roofline, cells, header

MIB = 1 << 20
PIPE_WIDTH = 200
"""Columns where there is no terminal to say: nothing is wrapped for a reader that is a program."""

LEGEND = (
    "Elements are counted on each rank from 0: head 0..7 -> 8..15 means that heads 0 to 7 of the prefill rank become "
    "heads 8 to 15 of the decode rank. staged, merged: written into a buffer at decode and moved into the caches from "
    "there. gathered: collected into one buffer at prefill before that. as it is: both ranks have the same layout, "
    "SGLang's own path writes item to item. A descriptor is one write of neighbouring bytes; those for KV include the "
    "draft model's."
)


def show(explanation: Explanation) -> None:
    """Print who sends what to whom, then what stock SGLang would do."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    stock = explanation.upstream
    plural = "" if explanation.chunks == 1 else "s"
    console.print(
        f"{explanation.tokens:,} tokens in {explanation.pages:,} pages, {explanation.chunks} prefill chunk{plural}."
    )
    console.print(_sources(explanation))
    console.print(_parts(explanation))
    console.print(LEGEND)
    console.print()
    for line in speculation(explanation):
        console.print(line)
    if any(column.differs for column in explanation.row):
        console.print(_row(explanation))
    for rank, fingerprint in enumerate(explanation.fingerprints):
        console.print(f"Plan of decode {rank} (both sides must come to the same): {fingerprint}")
    console.print()
    console.print(
        f"Stock SGLang 0.5.23, its optional staging buffer off, to decode 0: {stock.kv_descriptors:,} KV descriptors "
        f"of at most {stock.kv_descriptor_bytes:,} bytes from each of {_ranks(stock.kv_senders)}, "
        f"{stock.state_descriptors:,} for the state from each of {_ranks(stock.state_senders)}."
    )
    for fault in stock.faults:
        console.print(f"Wrong there: {fault}.", style="yellow")


def speculation(explanation: Explanation) -> list[str]:
    """What differs between the two sides' speculation, and what comes of it, in sentences; none if it is the same."""
    said = []
    if explanation.unequal_drafts:
        said.append(f"Speculation on one side only: {explanation.unequal_drafts}.")
        if not explanation.row:
            said.append("The row with the first token: not known, the configuration does not say hidden_size.")
    slots = explanation.slot_rows
    if slots and slots.prefill != slots.decode:
        said.append(
            f"Conv slots have {slots.prefill} rows on prefill and {slots.decode} on decode: the last {slots.live} of "
            "them travel, decode's others keep what they had."
        )
    differing = [column for column in explanation.row if column.differs]
    if differing:
        said.append(
            f"The row with the first token: {len(explanation.row) - len(differing)} columns are the same on both "
            "sides and taken over; the others:"
        )
    return said


def show_roofline(bound: Roofline, links: Sequence[str]) -> None:
    """Print how long the bytes take at least, per layer and for the whole request."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    names = header(links)
    shown = _table(*names[:1], numbers=tuple(names[1:]))
    for row in bound.rows:
        shown.add_row(*cells(row, links))
    console.print(f"On paper, {bound.machine}, what arrives at decode {bound.decode_rank}, each layer and the request:")
    console.print(shown)
    console.print(
        "Bytes over a link and through memory, at the rates that docs/ascend.md names; the start of kernels and calls, "
        "and other use of link and memory, come on top."
    )


def _ranks(count: int) -> str:
    return f"{count} prefill rank{'' if count == 1 else 's'}"


def _sources(explanation: Explanation) -> Table:
    table = _table("from", "to", "on its way", numbers=("MiB", "KV descriptors", "state descriptors"))
    for source in explanation.sources:
        table.add_row(
            _name(source, explanation),
            f"decode {', '.join(str(route.decode_rank) for route in source.to)}" if source.to else "nobody",
            _way(source),
            f"{source.bytes / MIB:,.1f}",
            f"{source.kv_descriptors:,}",
            f"{source.state_descriptors:,}",
        )
    return table


def _parts(explanation: Explanation) -> Table:
    table = _table("from", "to", "what", "elements", numbers=("layers", "MiB", "descr"))
    for source in explanation.sources:
        for route in source.to:
            for part in route.parts:
                table.add_row(
                    _name(source, explanation),
                    f"decode {route.decode_rank}",
                    part.role.replace("_", " "),
                    _elements(part),
                    str(len(part.layers)),
                    f"{part.bytes / MIB:,.2f}",
                    f"{part.descriptors:,}",
                )
    return table


def _row(explanation: Explanation) -> Table:
    """Columns of the row with the first token that are not simply taken over."""
    table = _table("column", "prefill", "decode", "decode's is", numbers=())
    for column in explanation.row:
        if column.differs:
            sides = [
                f"{nbytes:,} bytes of {dtype}" if nbytes else "none"
                for nbytes, dtype in (
                    (column.prefill_bytes, column.prefill_dtype),
                    (column.decode_bytes, column.decode_dtype),
                )
            ]
            begun = "taken over" if column.taken else "begun there" if column.decode_bytes else ""
            table.add_row(column.name, *sides, begun)
    return table


def _way(source: Source) -> str:
    if not any(route.staged for route in source.to):
        return "as it is" if source.to else ""
    return "gathered, staged, merged" if source.packed else "staged, merged"


def _table(*columns: str, numbers: tuple[str, ...]) -> Table:
    """A table that folds what does not fit: a figure that is cut short is worse than an ugly line."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _name(source: Source, explanation: Explanation) -> str:
    """`prefill 2`, or with pipeline stages `prefill 1.2`: stage, then TP rank."""
    stages = {other.stage for other in explanation.sources}
    return f"prefill {source.rank}" if len(stages) == 1 else f"prefill {source.stage}.{source.rank}"


def _elements(part: Part) -> str:
    """The axis, then its blocks, one a line: first..last at the source -> first..last at the destination."""
    return f"{part.axis} " + "\n".join(
        f"{source}..{source + size - 1} -> {destination}..{destination + size - 1}"
        for source, destination, size in part.blocks
    )
