"""A million damaged messages through the parsers, as one of the faults."""

import time
from collections.abc import Callable

from . import fuzz
from .result import FaultResult, Kind, name

COUNT, SEED = 1_000_000, 6
SAY_SECONDS = 10.0
FAULT, STEP, WHERE = f"{COUNT:,} damaged messages", "anywhere", "parsers"
NAME = name(FAULT, STEP, WHERE)


def run(say: Callable[[str], None]) -> FaultResult:
    """Nothing but our own error may come of them, and no text or number that is out of its range."""
    said = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            say(f"{done:,} of {of:,} messages")

    summary = fuzz.run(COUNT, SEED, progress)
    say(str(summary))
    short = () if summary.count == COUNT else (f"{summary.count} of {COUNT} messages were tried",)
    return FaultResult(
        FAULT,
        STEP,
        WHERE,
        Kind.HARNESS,
        "each is refused with an error of ours, or means something",
        wrong=(*summary.wrong, *short),
    )
