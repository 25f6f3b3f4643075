"""The answer of the lifetime machines to every event in every state, as docs/lifetime.md shows it.

    python -m tests.model_check.table           print the tables
    python -m tests.model_check.table --write   put them into docs/lifetime.md

Nothing here is written down by hand: real machines are driven through everything that can happen to them in a small
world, and a cell holds all answers that were seen. States that differ only in numbers are one column.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hetero.transfer.lifetime import (
    Receiving,
    ReceivingStatus,
    Sending,
    SendingStatus,
    Settle,
    Stage,
)

from .machines import Machines, Refused

DOC = Path(__file__).parents[2] / "docs" / "lifetime.md"
BEGIN, END = "<!-- from python -m tests.model_check.table -->", "<!-- end of the tables -->"
NOTHING, REFUSED = "-", "ProtocolError"

BOTH = frozenset({0, 1})
TOTALS = (1, 2)
Call = tuple[Any, ...]


class Count(dict[int, int]):
    """What FirstGeneration counts, as an argument that can be hashed."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(frozen=True)
class Event:
    """name, meaning: as in the document; calls: method and arguments of everything that it stands for."""

    name: str
    meaning: str
    calls: tuple[Call, ...]


SENDING_EVENTS = (
    Event("produced", "the source holds more pieces", (("produced", 1, ()), ("produced", 1, (0,)))),
    Event("close", "no more follow", (("close",),)),
    Event("acked", "pieces below n are merged", tuple(("acked", upto) for upto in range(3))),
    Event("take", "what may be written now", (("take", 1), ("take", 2))),
    Event("wrote", "the write has ended well", (("wrote",),)),
    Event("take_back", "it has, but SGLang had moved the request", (("take_back",),)),
    Event("write_failed", "it has not", (("write_failed", "engine", False),)),
    Event("write_failed, in doubt", "bytes may still arrive", (("write_failed", "engine", True),)),
    Event("finished", "the destination has everything", (("finished",),)),
    Event("abort", "whoever gives up", (("abort", "abort"),)),
)
RECEIVING_EVENTS = (
    Event("bound", "units are granted, sources are told", (("bound",),)),
    Event(
        "ready",
        "a source has written a piece",
        tuple(("ready", source, seq, "piece", BOTH) for source in (0, 1) for seq in (0, 1)),
    ),
    Event(
        "ready, otherwise",
        "a source means another piece by the number",
        tuple(("ready", source, 0, "other", BOTH) for source in (0, 1)),
    ),
    Event(
        "total",
        "a source says how many there are",
        tuple(("total", source, total) for source in (0, 1) for total in TOTALS),
    ),
    Event("first_generation", "prefill has run", tuple(("first_generation", Count({0: total})) for total in TOTALS)),
    Event("merged", "a merge has ended", tuple(("merged", 0, seq) for seq in (0, 1))),
    Event("pulled", "the read has ended", (("pulled",),)),
    Event("fail", "this rank gives up", (("fail", "fail"),)),
    Event("peer_failed", "a source gives up", tuple(("peer_failed", source, "failed") for source in (0, 1))),
    Event("drained", "a source writes no more", tuple(("drained", source) for source in (0, 1))),
    Event("gone", "a source's process is no more", tuple(("gone", source) for source in (0, 1))),
)
MOST_PIECES = 2
"""That a source holds: enough for one behind a window of one unit."""


def sending_state(machine: Sending) -> str:
    under_way = ", a write under way" * machine.in_flight
    if machine.status is SendingStatus.FAILED and not machine.in_flight:
        return "failed, in doubt" if machine.in_doubt else "failed, drained"
    return machine.status + under_way


def receiving_state(machine: Receiving[str]) -> str:
    busy = "merging" if machine.merging else "reading" if machine.pulling else ""
    if machine.status is ReceivingStatus.FAILED:
        waits = [*(["sources"] if machine.may_write else []), *([busy] if busy else [])]
        return "failed, units home" if machine.units_home else f"failed, waits for {' and '.join(waits)}"
    return machine.status + (f", {busy}" if busy else "")


def told(result: Any) -> list[str]:
    """What a call has given, in words."""
    if isinstance(result, range):
        return ["a batch"] if result else []
    names = []
    for action in result or ():
        end = " well" if action == Settle(None) else " failed" if isinstance(action, Settle) else ""
        names.append(type(action).__name__ + end)
    return names


def explored(
    starts: Sequence[Any], events: Sequence[Event], name: Callable[[Any], str], within: Callable[[Any], bool]
) -> tuple[dict[tuple[str, str], set[str]], int]:
    """By event and state all answers, and how many machines were seen."""
    machines, cells = Machines(), defaultdict[tuple[str, str], set[str]](set)
    todo = [machines.add(start) for start in starts]
    seen = set(todo)
    while todo:
        number = todo.pop()
        before = name(machines.look(number))
        for event in events:
            for method, *arguments in event.calls:
                try:
                    after, result = machines.call(number, method, *arguments)
                except Refused:
                    cells[event.name, before].add(REFUSED)
                    continue
                answer = told(result)
                state = name(machines.look(after))
                if state != before:
                    answer.append(f"now {state}")
                cells[event.name, before].add(", ".join(answer) or (NOTHING if after == number else "noted"))
                if after not in seen and within(machines.look(after)):
                    seen.add(after)
                    todo.append(after)
    return cells, len(seen)


def markdown(cells: dict[tuple[str, str], set[str]], events: Sequence[Event]) -> str:
    """Per state what each event does; what does nothing, and what cannot be, in a line each."""
    lines = []
    for state in sorted({state for _, state in cells}):
        answers = {event.name: cells[event.name, state] for event in events}
        late = [name for name, answer in answers.items() if answer == {NOTHING}]
        refused = [name for name, answer in answers.items() if answer == {REFUSED}]
        lines += ["", f"**{state}**", ""]
        if len(late) + len(refused) < len(answers):
            lines += ["| event | answers |", "|---|---|"]
            lines += [
                f"| {name} | {'; '.join(sorted(answer))} |"
                for name, answer in answers.items()
                if name not in (*late, *refused)
            ]
            lines.append("")
        if late:
            lines.append(f"Nothing happens: {', '.join(late)}.  ")
        if refused:
            lines.append(f"ProtocolError: {', '.join(refused)}.")
    return "\n".join(lines)


def legend(events: Sequence[Event]) -> str:
    return "\n".join(f"* `{event.name}`: {event.meaning}." for event in events)


def tables() -> str:
    """The part of the document that is made here."""
    sending, senders = explored(
        [Sending(1), Sending(2)],
        SENDING_EVENTS,
        sending_state,
        lambda machine: len(machine._owed) <= MOST_PIECES and machine._produced <= MOST_PIECES,
    )
    receiving, receivers = explored(
        [
            Receiving((Stage((0, 1), 2),)),
            Receiving((Stage((0, 1), 1),), pulls=True),
            Receiving((Stage((0, 1), 1),), lacking=_incomplete),
        ],
        RECEIVING_EVENTS,
        receiving_state,
        lambda machine: True,
    )
    return "\n".join(
        [
            BEGIN,
            f"### Sending ({senders} machines)",
            "",
            legend(SENDING_EVENTS),
            markdown(sending, SENDING_EVENTS),
            "",
            f"### Receiving ({receivers} machines)",
            "",
            legend(RECEIVING_EVENTS),
            markdown(receiving, RECEIVING_EVENTS),
            "",
            END,
        ]
    )


def _incomplete() -> str:
    return "nothing brought the last page"


def written(text: str) -> str:
    """The document with these tables."""
    document = DOC.read_text()
    head, rest = document.split(BEGIN)
    return head + text + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/lifetime.md")
    if parser.parse_args().write:
        DOC.write_text(written(tables()))
    else:
        print(tables())


if __name__ == "__main__":
    main()
