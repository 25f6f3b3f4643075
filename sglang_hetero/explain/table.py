"""An explanation as tables for a person."""

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_hetero.reshard.explain import Explanation, Part, Source

MIB = 1 << 20


def show(explanation: Explanation) -> None:
    """Print who sends what to whom, then what stock SGLang would do."""
    console = Console()
    stock = explanation.upstream
    plural = "" if explanation.chunks == 1 else "s"
    console.print(
        f"{explanation.tokens:,} tokens in {explanation.pages:,} pages, {explanation.chunks} prefill chunk{plural}."
    )
    console.print(_sources(explanation))
    console.print(_parts(explanation))
    for rank, fingerprint in enumerate(explanation.fingerprints):
        console.print(f"Fingerprint of the plan of D{rank}: {fingerprint}")
    console.print(
        f"Stock SGLang 0.5.23, for D0: {stock.senders} prefill rank{'' if stock.senders == 1 else 's'} with "
        f"{stock.kv_descriptors:,} KV descriptors of at most {stock.kv_descriptor_bytes:,} bytes and "
        f"{stock.state_descriptors:,} for the state each."
    )
    for fault in stock.faults:
        console.print(f"  wrong there: {fault}", style="yellow")


def _sources(explanation: Explanation) -> Table:
    table = _table("from", "to", "on its way", numbers=("MiB", "KV descriptors", "state descriptors"))
    for source in explanation.sources:
        table.add_row(
            _name(source, explanation),
            ", ".join(f"D{route.decode_rank}" for route in source.to) or "nobody",
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
                    f"D{route.decode_rank}",
                    part.role,
                    _elements(part),
                    str(len(part.layers)),
                    f"{part.bytes / MIB:,.2f}",
                    f"{part.descriptors:,}",
                )
    return table


def _way(source: Source) -> str:
    if not any(route.staged for route in source.to):
        return "as it is" if source.to else ""
    return "gathered, staged, merged" if source.packed else "staged, merged"


def _table(*columns: str, numbers: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _name(source: Source, explanation: Explanation) -> str:
    """`P2`, or with pipeline stages `P1.2`: stage, then TP rank."""
    stages = {other.stage for other in explanation.sources}
    return f"P{source.rank}" if len(stages) == 1 else f"P{source.stage}.{source.rank}"


def _elements(part: Part) -> str:
    """The blocks, one a line: axis, first..last at the source -> first..last at the destination."""
    return "\n".join(
        f"{part.axis} {source}..{source + size - 1} -> {destination}..{destination + size - 1}"
        for source, destination, size in part.blocks
    )
