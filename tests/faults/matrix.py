"""All faults that the harness tries."""

from .cases import Case
from .crashes import crashes
from .failures import failures
from .scripts import scripts


def cases() -> list[Case]:
    """In the order of running: by topology, since a pair is shared."""
    found = [*crashes(), *failures(), *scripts()]
    order = {topology: number for number, topology in enumerate(dict.fromkeys(case.topology for case in found))}
    return sorted(found, key=lambda case: order[case.topology])
