"""Room numbers are used again: which message opens a room, and which one only belongs to what it was before."""

from collections import OrderedDict


class Epochs:
    """At a source: the newest epoch of each room of each destination that was opened or ended here.

    A destination counts a room's epochs upwards. So a Bind opens its room only if its epoch is newer than all that was
    seen; a repeated one, one that was overtaken by its own Abort, and one of an earlier use must not: the units that it
    names are somebody else's by now. Other messages need no such memory, they go to the machine of exactly their
    incarnation, room and epoch, or nowhere.
    """

    def __init__(self, keep: int) -> None:
        """keep: number of rooms to remember, those used last; more than can be under way at a time."""
        self._keep = keep
        self._newest: OrderedDict[tuple[str, int], int] = OrderedDict()

    def late(self, incarnation: str, room: int, epoch: int) -> bool:
        """Whether a Bind with this epoch would not open its room; nothing changes."""
        return epoch <= self._newest.get((incarnation, room), -1)

    def open(self, incarnation: str, room: int, epoch: int) -> bool:
        """A Bind of the destination process `incarnation` has come: True if it opens the room, False if it is late."""
        opens = not self.late(incarnation, room, epoch)
        self.end(incarnation, room, epoch)
        return opens

    def end(self, incarnation: str, room: int, epoch: int) -> None:
        """This epoch is over, bound or not: a Bind of it that is still under way must not open it."""
        key = (incarnation, room)
        self._newest[key] = max(epoch, self._newest.get(key, epoch))
        self._newest.move_to_end(key)
        if len(self._newest) > self._keep:
            self._newest.popitem(last=False)
