"""The arena against a naive model under random events, and the sizes."""

import random
import re

import pytest

from sglang_hetero.errors import StagingError
from sglang_hetero.transfer.staging import ARENA_ALIGN, MIB, Arena, arena_bytes, check_budget, per_stage

UNIT = 4096


class Naive:
    """What an arena should do, with a row of names instead of books: one cell per unit."""

    def __init__(self, units):
        self.cells = [None] * units
        self.queue = []
        self.doubts = {}

    def grants(self):
        granted = []
        while self.queue and self.queue[0][1] <= self.cells.count(None):
            owner, units = self.queue.pop(0)
            granted.append((owner, units))
        return granted

    def settle(self):
        """Units of owners that nobody doubts any more."""
        for owner in [owner for owner, writers in self.doubts.items() if not writers]:
            del self.doubts[owner]
            self.cells = [None if cell == owner else cell for cell in self.cells]


class Pair:
    """An arena and its naive model, which are told the same."""

    WRITERS = tuple(f"writer {number}" for number in range(4))

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.count = self.draw.randint(1, 12)
        total = self.count * UNIT + self.draw.randint(0, UNIT - 1)
        self.arena, self.naive, self.names = Arena(total, UNIT), Naive(self.count), 0

    @property
    def held(self):
        return sorted({cell for cell in self.naive.cells if cell is not None and cell not in self.naive.doubts})

    def request(self):
        self.names += 1
        units = self.draw.randint(1, self.count)
        self.arena.request(self.names, units)
        self.naive.queue.append((self.names, units))

    def release(self):
        for owner in self.held[:1]:
            self.arena.release(owner)
            self.naive.cells = [None if cell == owner else cell for cell in self.naive.cells]

    def quarantine(self):
        for owner in self.held[-1:]:
            writers = self.draw.sample(self.WRITERS, self.draw.randint(0, 4))
            self.arena.quarantine(owner, writers)
            self.naive.doubts[owner] = set(writers)

    def drained(self):
        owner, writer = self.draw.choice([*self.naive.doubts, *self.held, -1]), self.draw.choice(self.WRITERS)
        self.arena.drained(owner, writer)
        self.naive.doubts.get(owner, set()).discard(writer)

    def cancel(self):
        waiting = [owner for owner, _ in self.naive.queue]
        owner = self.draw.choice([*waiting, *self.held, -1])
        assert self.arena.cancel(owner) == (owner in waiting)
        self.naive.queue = [one for one in self.naive.queue if one[0] != owner]

    def again(self):
        for owner in [*self.held, *self.naive.doubts, *(owner for owner, _ in self.naive.queue)]:
            with pytest.raises(StagingError, match="already"):
                self.arena.request(owner, 1)


EVENTS = {
    Pair.request: 6,
    Pair.release: 3,
    Pair.quarantine: 3,
    Pair.drained: 6,
    Pair.cancel: 1,
    Pair.again: 1,
}
"""How often each of them happens, relative to the others."""


@pytest.mark.parametrize("seed", range(60))
def test_random_events(seed):
    pair = Pair(seed)
    arena, naive = pair.arena, pair.naive
    for event in pair.draw.choices(list(EVENTS), list(EVENTS.values()), k=400):
        event(pair)
        naive.settle()
        arena.check()
        check_grants(arena, naive)
    for owner in pair.held:
        arena.release(owner)
    for owner, writers in arena.in_doubt.items():
        for writer in writers:
            arena.drained(owner, writer)
    for owner, _ in naive.queue:
        assert arena.cancel(owner)
    arena.check()
    assert (arena.free, arena.held, arena.quarantined, arena.waiting) == (pair.count, 0, 0, 0)


def check_grants(arena, naive):
    """Nobody overtakes, nobody gets a unit that is somebody's, and the counts agree."""
    for owner, offsets in arena.grants():
        expected, units = naive.queue[0]
        assert (owner, len(offsets)) == (expected, units) and units <= naive.cells.count(None)
        naive.queue.pop(0)
        for offset in offsets:
            number, rest = divmod(offset, UNIT)
            assert rest == 0 and naive.cells[number] is None
            naive.cells[number] = owner
    assert not naive.grants(), "somebody waits who could have been served"
    assert arena.grants() == []
    quarantined = sum(cell in naive.doubts for cell in naive.cells if cell is not None)
    assert arena.free == naive.cells.count(None)
    assert arena.quarantined == quarantined
    assert arena.held == len(naive.cells) - arena.free - quarantined
    assert arena.waiting == len(naive.queue)
    assert arena.in_doubt == {owner: frozenset(writers) for owner, writers in naive.doubts.items()}


def test_nobody_overtakes():
    """A small request behind a large one waits although it would fit: else the large one may wait for ever."""
    arena = Arena(4 * UNIT, UNIT)
    arena.request("first", 2)
    assert [owner for owner, _ in arena.grants()] == ["first"]
    arena.request("large", 4)
    arena.request("small", 1)
    assert arena.grants() == [] and arena.waiting == 2
    arena.release("first")
    assert [owner for owner, _ in arena.grants()] == ["large"]
    arena.release("large")
    assert [owner for owner, _ in arena.grants()] == ["small"]


def test_a_large_request_that_gives_up_makes_way():
    arena = Arena(2 * UNIT, UNIT)
    for owner, units in (("held", 1), ("large", 2), ("small", 1)):
        arena.request(owner, units)
    assert [owner for owner, _ in arena.grants()] == ["held"]
    assert arena.cancel("large") and not arena.cancel("large")
    assert [owner for owner, _ in arena.grants()] == ["small"]


def test_quarantine_ends_with_the_last_writer():
    arena = Arena(4 * UNIT, UNIT)
    for owner in "abc":
        arena.request(owner, 1)
    arena.grants()
    arena.quarantine("a", {"p0", "p1"})
    arena.quarantine("b", {"p1"})
    arena.quarantine("c", set())  # nobody was told where to write
    assert (arena.quarantined, arena.free) == (2, 2)
    arena.drained("a", "p1")
    arena.drained("a", "p1")
    arena.drained("a", "somebody else")
    arena.drained("never heard of", "p0")
    assert arena.in_doubt == {"a": {"p0"}, "b": {"p1"}}
    arena.drained("b", "p1")
    assert (arena.quarantined, arena.free) == (1, 3)
    arena.drained("a", "p0")
    assert (arena.quarantined, arena.free) == (0, 4)
    arena.check()


def test_what_can_never_be_is_refused():
    arena = Arena(4 * UNIT + 1, UNIT)
    for units in (0, 5, -1):
        with pytest.raises(StagingError, match=r"the arena has 4: raise SGLANG_HETERO_STAGING_MB to \d+ or more"):
            arena.request("a", units)
    arena.request("a", 1)
    with pytest.raises(StagingError, match="waits for them already"):
        arena.request("a", 1)
    for call in (arena.release, lambda owner: arena.quarantine(owner, {"p"})):
        with pytest.raises(StagingError, match="holds no"):
            call("a")
    arena.grants()
    arena.quarantine("a", {"p"})
    with pytest.raises(StagingError, match="holds no"):
        arena.release("a")
    with pytest.raises(StagingError, match="already"):
        arena.request("a", 1)
    with pytest.raises(StagingError, match="holds no unit"):
        Arena(UNIT - 1, UNIT)


def test_check_sees_a_lost_and_a_doubled_unit():
    arena = Arena(4 * UNIT, UNIT)
    lost = arena._free.pop()
    with pytest.raises(StagingError):
        arena.check()
    arena._free += [lost, lost]
    with pytest.raises(StagingError):
        arena.check()


def test_units_are_dealt_to_stages():
    assert per_stage((0, 1, 2, 3, 4, 5), 2) == ((0, 1, 2), (3, 4, 5))
    for offsets, stages in (((0, 1, 2), 2), ((), 1), ((0,), 0), ((0,), 2)):
        with pytest.raises(StagingError, match="dealt"):
            per_stage(offsets, stages)


def test_arena_holds_the_windows_of_all_requests():
    assert arena_bytes(2 * MIB, 16, 1, 4) == 128 * MIB
    odd = arena_bytes(2 * MIB + UNIT, 3, 2, 5)
    assert odd % ARENA_ALIGN == 0 and 0 <= odd - 30 * (2 * MIB + UNIT) < ARENA_ALIGN
    assert Arena(odd, 2 * MIB + UNIT).units >= 30
    with pytest.raises(StagingError, match="1 or more"):
        arena_bytes(2 * MIB, 16, 1, 0)


def test_budget():
    check_budget(64 * MIB, 64 * MIB, least=32 * MIB)
    with pytest.raises(StagingError) as refused:
        check_budget(1000 * MIB, 600 * MIB, least=32 * MIB, memory=64_000 * MIB, fraction=0.9)
    text = str(refused.value)
    assert "needs 1000 MiB, 600 MiB are available" in text
    assert "set SGLANG_HETERO_STAGING_MB to 600 or less (at least 32)" in text
    suggested = float(re.search(r"--mem-fraction-static to ([0-9.]+) or less", text)[1])
    # With what is suggested it fits: the static part shrinks by at least what is lacking.
    assert (0.9 - suggested) * 64_000 >= 400 and suggested > 0.89
    check_budget(1000 * MIB, int((600 + (0.9 - suggested) * 64_000) * MIB), least=32 * MIB)


def test_budget_that_no_option_saves():
    with pytest.raises(StagingError, match=r"too small for one request, which needs 32 MiB: raise SGLANG_HETERO_STAG"):
        check_budget(16 * MIB, 64 * MIB, least=32 * MIB)
    with pytest.raises(StagingError, match="needs 64 MiB, 0 MiB are available") as refused:
        check_budget(64 * MIB, -5 * MIB, least=32 * MIB)
    assert "lower SGLANG_HETERO_WINDOW" in str(refused.value) and "69 MiB more" in str(refused.value)
    with pytest.raises(StagingError, match="a device with more memory"):
        check_budget(64 * MIB, 0, least=32 * MIB, memory=65 * MIB, fraction=0.5)
