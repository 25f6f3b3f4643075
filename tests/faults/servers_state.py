"""What a server says of itself at /hetero/state (docs/state.md), and what of it is not back at its start value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_hetero.errors import StateError
from sglang_hetero.state.report import decode_state

from .trial import EXTRA_SOCKETS

OK = 200
AT_MOST = {"threads": 0, "sockets": EXTRA_SOCKETS, "peers": 0, "rss_bytes": 512 * 1000**2}
"""Figures that may be less than at the start, and by how much they may be more: buffers of long prompts stay. All
others must be what they were."""
UNUSED = ("files",)
"""Figures that are not compared: open files contain the sockets."""


@dataclass(frozen=True)
class State:
    """figures: every number, by rank and name, such as `prefill TP0/2: pages_free`. faults: what the server says."""

    figures: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[str] = ()

    @classmethod
    def read(cls, body: bytes, status: int) -> "State":
        """From an answer. One that is none is a fault."""
        if status != OK:
            return cls(faults=(f"HTTP {status}: {body[:200]!r}",))
        try:
            state = decode_state(body)
        except StateError as error:
            return cls(faults=(str(error),))
        figures = (
            {"control: parked": state.control.parked, "control: ranks": state.control.ranks} if state.control else {}
        )
        for rank in state.ranks:
            label = f"TP{rank.tp_rank}/{rank.tp_size}"
            for group in (rank.ours, rank.sglang, rank.process):
                figures |= {f"{label}: {name}": value for name, value in group.items() if name not in UNUSED}
        return cls(figures, [*state.faults, *state.problems])

    def started_again(self, now: "State") -> "State":
        """Start values of a server's new processes: threads, sockets and memory are theirs, all else is as before."""
        return State(
            {**self.figures, **{name: value for name, value in now.figures.items() if _allowance(name) is not None}}
        )


def _allowance(figure: str) -> int | None:
    """By how much a figure may be more than at the start; None if it must be the same."""
    return AT_MOST.get(figure.rpartition(" ")[2])


def differences(start: Mapping[str, State], now: Mapping[str, State]) -> Iterator[str]:
    """What each server holds that it did not hold at the start, and what it calls a fault; a line each."""
    for server, state in now.items():
        yield from (f"{server} says: {fault}" for fault in state.faults)
        for name, before in start[server].figures.items():
            value = state.figures.get(name)
            if value is None:
                yield f"{server} {name} is not told any more"
                continue
            allowance = _allowance(name)
            if value != before if allowance is None else value > before + allowance:
                yield f"{server} {name} is {value}, was {before}"
