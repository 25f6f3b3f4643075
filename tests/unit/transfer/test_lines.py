"""Who goes next: least first, now and then who has waited longest; nothing is lost, nobody starves."""

import threading
import time

from sglang_hetero.transfer.lines import PATIENCE, Lines


class Owner:
    def __init__(self, name: str, size: int = 0) -> None:
        self.name, self.size = name, size


def taken(lines: Lines, count: int, limit: int = 1) -> list[tuple[str, list[int]]]:
    found = []
    for _ in range(count):
        owner, items = lines.take(limit)
        found.append((owner.name, items))
    return found


def test_items_of_an_owner_in_order_and_as_many_as_wanted():
    lines: Lines[Owner, int] = Lines()
    one = Owner("one")
    for number in range(5):
        lines.put(one, number)
    assert taken(lines, 3, limit=2) == [("one", [0, 1]), ("one", [2, 3]), ("one", [4])]


def test_who_has_least_goes_first():
    lines: Lines[Owner, int] = Lines()
    long, short = Owner("long"), Owner("short")
    for number in range(8):
        lines.put(long, number)
    lines.put(short, 100)
    lines.put(short, 101)
    assert taken(lines, 3, limit=1) == [("short", [100]), ("short", [101]), ("long", [0])]


def test_who_has_waited_longest_goes_now_and_then_however_short_the_others_are():
    lines: Lines[Owner, int] = Lines()
    long, short = Owner("long"), Owner("short")
    for number in range(20):
        lines.put(long, number)
    order = []
    for number in range(5 * PATIENCE):
        lines.put(short, number)
        order += [name for name, _ in taken(lines, 1)]
    # The short one's items heap up while it waits, so that it is the longer one in the end.
    assert all("long" in order[start : start + PATIENCE] for start in range(0, len(order), PATIENCE))


def test_a_size_of_its_own():
    lines: Lines[Owner, None] = Lines(lambda owner, waiting: owner.size)
    for owner in (Owner("large", 9), Owner("small", 1), Owner("middle", 5)):
        lines.put(owner, None)
    assert [name for name, _ in taken(lines, 3)] == ["small", "middle", "large"]


def test_two_owners_that_look_the_same_are_two():
    class Same(Owner):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    lines: Lines[Same, int] = Lines()
    lines.put(Same("a"), 1)
    lines.put(Same("b"), 2)
    assert sorted(taken(lines, 2, limit=9)) == [("a", [1]), ("b", [2])]


def test_stop_lets_what_is_there_be_taken_and_wakes_who_waits():
    lines: Lines[Owner, int] = Lines()
    one = Owner("one")
    found = []

    def run() -> None:
        while (got := lines.take(1)) is not None:
            found.append(got[1])

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.01)
    lines.put(one, 1)
    lines.put(one, 2)
    lines.stop()
    thread.join(5)
    assert not thread.is_alive() and found == [[1], [2]]
    assert lines.take(1) is None
