"""How far the model has come with a chunk: what both the order of pieces and the forward pass are counted in."""

from enum import IntEnum
from typing import NamedTuple


class Group(IntEnum):
    """Parts of a chunk's sequence, in order; layers are in order inside each."""

    TARGET = 0
    """Attention KV of the model, and in StateMode.PREPUSH the linear state between."""
    STATE = 1
    """Linear state in StateMode.PUSH."""
    DRAFT = 2
    """Caches of the draft model, which runs behind the model."""


class Mark(NamedTuple):
    """A place in the sequence of a chunk: everything up to it, itself included, has been computed or enqueued."""

    group: int
    layer: int


NOTHING = Mark(-1, 0)
"""Before the first layer."""
COMPLETE = Mark(max(Group) + 1, 0)
"""Model and draft model have run."""


def layer_done(layer: int) -> Mark:
    """The model has written its caches of this layer, and so those of all layers before: they run in order."""
    return Mark(Group.TARGET, layer)
