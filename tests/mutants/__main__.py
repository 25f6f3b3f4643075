"""`make mutants`: put in one fault after the other and see that the tests notice it.

Prints a line per fault, and ends with `caught N/N`; status 1 if one was missed.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from .faults import FAULTS
from .workshop import Fault, Outcome, Workshop

EXAMPLES = """examples:
  python -m tests.mutants              all faults, about ten minutes on 2 cores
  python -m tests.mutants swap page    those with `swap` or `page` in their names"""


def main() -> int:
    """Run the chosen faults, as many at a time as there are cores."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="parts of names; all faults if there is none")
    names = parser.parse_args().names
    chosen = [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]
    if not chosen:
        parser.error(f"no fault is named like {' or '.join(names)}; there are: {', '.join(f.name for f in FAULTS)}")
    workers = min(len(os.sched_getaffinity(0)), len(chosen))
    with ExitStack() as stack:
        idle: SimpleQueue[Workshop] = SimpleQueue()
        workshops = [stack.enter_context(Workshop()) for _ in range(workers)]
        print("mutants: the tests without a fault", file=sys.stderr, flush=True)
        sound = workshops[0].run()
        if not sound.passed:
            print(f"mutants: the tests fail without any fault, at {sound.first}; mend that first", file=sys.stderr)
            return 1
        for workshop in workshops:
            idle.put(workshop)

        def with_fault(fault: Fault) -> tuple[Outcome, float]:
            workshop, started = idle.get(), time.monotonic()
            try:
                return workshop.with_fault(fault), time.monotonic() - started
            finally:
                idle.put(workshop)

        caught = 0
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        for number, (fault, (outcome, seconds)) in enumerate(zip(chosen, pool.map(with_fault, chosen), strict=True), 1):
            caught += not outcome.passed
            said = "MISSED" if outcome.passed else f"caught by {outcome.first}"
            print(f"{number:2}/{len(chosen)} {fault.name}: {said} ({seconds:.0f} s)", flush=True)
    print(f"caught {caught}/{len(chosen)}")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
