"""`make mutants`: put in one fault after the other and see that the tests notice it.

Prints a line per fault, and ends with `caught N/N`; status 1 if one was missed.
"""

import argparse
import sys
import time

from .faults import FAULTS
from .workshop import Outcome, Workshop

EXAMPLES = """examples:
  python -m tests.mutants              all faults, about a quarter of an hour on 2 cores
  python -m tests.mutants swap page    those with `swap` or `page` in their names"""


def main() -> int:
    """Run the chosen faults."""
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
    with Workshop() as workshop:
        print("mutants: the tests without a fault", file=sys.stderr, flush=True)
        sound = workshop.run()
        if not sound.passed:
            print(f"mutants: the tests fail without any fault, at {sound.first}; mend that first", file=sys.stderr)
            return 1
        outcomes: list[Outcome] = []
        for number, fault in enumerate(chosen, 1):
            started = time.monotonic()
            outcome = workshop.with_fault(fault)
            outcomes.append(outcome)
            said = "MISSED" if outcome.passed else f"caught by {outcome.first}"
            seconds = time.monotonic() - started
            print(f"{number:2}/{len(chosen)} {fault.name}: {said} ({seconds:.0f} s)", flush=True)
    caught = sum(not outcome.passed for outcome in outcomes)
    print(f"caught {caught}/{len(chosen)}")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
