"""The staging arena: which units belong to whom. Bookkeeping only; the memory is somebody else's, and so is the lock.

A unit is free, held by one owner (a request), or quarantined: its owner is gone, but a remote writer may still hit it.
An owner takes all of its units at once, so that nobody waits while holding some; in the order of asking, so that a
large request is not starved by small ones.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from sglang_hetero.errors import StagingError

STAGING_OPTION = "SGLANG_HETERO_STAGING_MB"
"""Sets the size of the arena; read by backend/options.py."""
WINDOW_OPTION = "SGLANG_HETERO_WINDOW"
FRACTION_OPTION = "--mem-fraction-static"
"""SGLang's: the share of a device's memory for weights and caches; what it leaves is what staging can have."""
ARENA_ALIGN = 2 << 20
"""Bytes. Memory that MemFabric registers begins and ends at multiples of 2 MiB."""
MIB = 1 << 20
FRACTION_STEPS = 1000
"""A fraction is suggested in steps of a thousandth, rounded to the safe side."""


@dataclass
class _Quarantined:
    units: tuple[int, ...]
    writers: set[Hashable]


class Arena:
    """Units of a rank's staging memory, as offsets in bytes from its start. Not thread-safe: the caller has a lock.

    Owners are any values; one that has been released may come back, so use a name per attempt, such as (room, epoch).
    """

    def __init__(self, total_bytes: int, unit_bytes: int) -> None:
        """Raises StagingError if not even one unit fits; what is left over at the end is not used."""
        if unit_bytes < 1 or total_bytes < unit_bytes:
            raise StagingError(
                f"a staging arena of {total_bytes} bytes holds no unit of {unit_bytes}; raise {STAGING_OPTION}"
            )
        self.unit_bytes = unit_bytes
        self._units = total_bytes // unit_bytes
        # Last in, first out: a unit that has just been merged from is still in the caches.
        self._free = [number * unit_bytes for number in reversed(range(self._units))]
        self._waiting: deque[tuple[Hashable, int]] = deque()
        self._held: dict[Hashable, tuple[int, ...]] = {}
        self._quarantine: dict[Hashable, _Quarantined] = {}

    def request(self, owner: Hashable, units: int) -> None:
        """Put an owner in the queue; `grants` says when it has its units.

        Raises StagingError for an owner that already waits or has units, and for more units than there are.
        """
        if owner in self._held or owner in self._quarantine or any(owner == waiting for waiting, _ in self._waiting):
            raise StagingError(f"{owner} has staging units or waits for them already")
        if not 1 <= units <= self._units:
            raise StagingError(
                f"a request needs {units} units of staging of {self.unit_bytes} bytes, the arena has {self._units}: "
                f"raise {STAGING_OPTION} to {_mebibytes(units * self.unit_bytes)} or more, or lower {WINDOW_OPTION}"
            )
        self._waiting.append((owner, units))

    def grants(self) -> list[tuple[Hashable, tuple[int, ...]]]:
        """Owners that have just been given their units, with the offsets. In the order of asking: nobody overtakes."""
        granted = []
        while self._waiting and self._waiting[0][1] <= len(self._free):
            owner, units = self._waiting.popleft()
            self._held[owner] = tuple(self._free.pop() for _ in range(units))
            granted.append((owner, self._held[owner]))
        return granted

    def cancel(self, owner: Hashable) -> bool:
        """Take an owner out of the queue; False if it does not wait."""
        for position, (waiting, _) in enumerate(self._waiting):
            if waiting == owner:
                del self._waiting[position]
                return True
        return False

    def release(self, owner: Hashable) -> None:
        """An owner is done and nobody can write to its units any more. Raises StagingError if it holds none."""
        self._free.extend(reversed(self._taken(owner)))

    def quarantine(self, owner: Hashable, writers: Iterable[Hashable]) -> None:
        """An owner is gone, but its units stay apart until each of these writers has drained or is gone.

        Raises StagingError if the owner holds none.
        """
        units, writers = self._taken(owner), set(writers)
        if writers:
            self._quarantine[owner] = _Quarantined(units, writers)
        else:
            self._free.extend(reversed(units))

    def drained(self, owner: Hashable, writer: Hashable) -> None:
        """A writer has no write of this owner in flight and starts none. Harmless where nobody waits for that."""
        held = self._quarantine.get(owner)
        if held is None:
            return
        held.writers.discard(writer)
        if not held.writers:
            del self._quarantine[owner]
            self._free.extend(reversed(held.units))

    @property
    def units(self) -> int:
        """All units."""
        return self._units

    @property
    def free(self) -> int:
        """Units that nobody has."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Units that owners work with."""
        return sum(len(units) for units in self._held.values())

    @property
    def quarantined(self) -> int:
        """Units that a writer may still hit. If that is all of them the rank can take no request."""
        return sum(len(one.units) for one in self._quarantine.values())

    @property
    def waiting(self) -> int:
        """Owners in the queue."""
        return len(self._waiting)

    @property
    def holders(self) -> dict[Hashable, tuple[int, ...]]:
        """Per owner that works with units, which these are."""
        return dict(self._held)

    @property
    def queue(self) -> tuple[Hashable, ...]:
        """Owners that wait, in the order of asking."""
        return tuple(owner for owner, _ in self._waiting)

    @property
    def in_doubt(self) -> dict[Hashable, frozenset[Hashable]]:
        """Per owner in quarantine the writers that are waited for; for messages."""
        return {owner: frozenset(one.writers) for owner, one in self._quarantine.items()}

    def check(self) -> None:
        """Raise StagingError unless every unit is in exactly one place."""
        places = [self._free, *self._held.values(), *(one.units for one in self._quarantine.values())]
        found = sorted(unit for place in places for unit in place)
        if found != [number * self.unit_bytes for number in range(self._units)]:
            raise StagingError(f"{self._units} units of {self.unit_bytes} bytes, but {found} are in use or free")
        owners = [*self._held, *self._quarantine, *(owner for owner, _ in self._waiting)]
        if len(set(owners)) != len(owners):
            raise StagingError(f"an owner is in two places: {owners}")
        if any(not one.writers for one in self._quarantine.values()):
            raise StagingError("units are quarantined from nobody")

    def _taken(self, owner: Hashable) -> tuple[int, ...]:
        units = self._held.pop(owner, None)
        if units is None:
            raise StagingError(f"{owner} holds no staging units")
        return units


def per_stage(offsets: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """An owner's units dealt to the stages, the same number to each. Raises StagingError if that leaves some over."""
    window, rest = divmod(len(offsets), stages) if stages > 0 else (0, len(offsets))
    if rest or not window:
        raise StagingError(f"{len(offsets)} units of staging cannot be dealt to {stages} stages of prefill")
    return tuple(offsets[start : start + window] for start in range(0, len(offsets), window))


def arena_bytes(unit_bytes: int, window: int, stages: int, requests: int) -> int:
    """Bytes of an arena in which `requests` requests are received at a time, each with its window for every stage."""
    need = unit_bytes * window * stages * requests
    if need < 1:
        raise StagingError(
            f"{requests} requests of {stages} stages, {window} units of {unit_bytes} bytes: all must be 1 or more"
        )
    return -(-need // ARENA_ALIGN) * ARENA_ALIGN


def check_budget(
    need: int, available: int, *, least: int, memory: int | None = None, fraction: float | None = None
) -> None:
    """Raise StagingError if the arena does not fit, naming what to set.

    need: bytes of the arena; available: what the device has left for it; least: with which one request still works
    (`arena_bytes` for one). memory: of the device, and fraction: the value of --mem-fraction-static; for the remedy.
    """
    if need < least:
        raise StagingError(
            f"a staging arena of {_mebibytes(need)} MiB is too small for one request, which needs {_mebibytes(least)} "
            f"MiB: raise {STAGING_OPTION} to {_mebibytes(least)} or more, or lower {WINDOW_OPTION}"
        )
    if need <= available:
        return
    remedies = [_lower_fraction(need - available, memory, fraction)]
    if least <= available:
        remedies.append(
            f"set {STAGING_OPTION} to {available // MIB} or less (at least {_mebibytes(least)}), so that fewer "
            "requests are received at a time"
        )
    else:
        remedies.append(f"lower {WINDOW_OPTION}")
    raise StagingError(
        f"the staging arena needs {_mebibytes(need)} MiB, {max(available, 0) // MIB} MiB are available: "
        f"{', or '.join(remedies)}"
    )


def _lower_fraction(lacking: int, memory: int | None, fraction: float | None) -> str:
    if memory is None or fraction is None:
        return f"lower {FRACTION_OPTION} so that {_mebibytes(lacking)} MiB more are left"
    # Exact integers: a float rounded the wrong way would suggest a value that fails again.
    steps = round(fraction * FRACTION_STEPS) - 1 - lacking * FRACTION_STEPS // memory
    if steps < 1:
        return f"use a device with more memory ({_mebibytes(lacking)} MiB are lacking)"
    return f"set {FRACTION_OPTION} to {steps / FRACTION_STEPS} or less (it is {fraction})"


def _mebibytes(nbytes: int) -> int:
    return -(-nbytes // MIB)
