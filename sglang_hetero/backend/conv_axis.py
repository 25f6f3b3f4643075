"""The axis along which upstream's own transfer cuts conv slots between unequal TP sizes, made right.

SGLang announces axis 0 of a slot for every model but Kimi-Linear (memory_pool.py, MambaPool.__init__), whatever the
pool looks like. On an NPU a slot is [window, channels], so that the window is taken for the channels: the q/k/v split
is skipped without a word, rows are scrambled, and a rank writes into other requests' slots (docs/upstream_faults.md).
With axis 1 upstream's code for Kimi is right for these slots, too: per window row one block for each of q, k and v.

Both sides must announce the right axis. What a server without this package announces is for pairing.py to refuse.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any, Protocol

from sglang_hetero import releases
from sglang_hetero.backend import selfcheck
from sglang_hetero.backend.pairing import Conv
from sglang_hetero.backend.selfcheck import MEMORY_POOL, UTILS
from sglang_hetero.errors import ManifestError
from sglang_hetero.layout.state_pools import window_axis_of
from sglang_hetero.releases.symbol import MOONCAKE, Symbol

INIT = Symbol(MEMORY_POOL, "MambaPool.__init__", "cache_params speculative_num_draft_tokens")
SYMBOLS: tuple[Symbol, ...] = (
    INIT,
    Symbol(MEMORY_POOL, "MambaPool._iter_transfer_state_entries", digest="6e6896f3810a4885"),
    Symbol(MEMORY_POOL, "MambaPool.get_state_dim_per_tensor", digest="6d042d0e718ba867"),
    Symbol(MEMORY_POOL, "MambaPool.get_state_slice_outer_counts", digest="031ba7408ed13792"),
    Symbol(MEMORY_POOL, "MambaPool.get_state_conv_shard_groups", digest="85748216f82f0dfe"),
    Symbol(UTILS, "compute_mamba_state_slice_blocks", digest="8fb4c204da580a3c"),
    Symbol(UTILS, "compute_mamba_state_slice_byte_blocks", digest="8d21bf55c8504a78"),
    Symbol(MOONCAKE, "MooncakeKVManager._send_mamba_state_slice", digest="590f9b574ccc717e"),
)
"""INIT is replaced; of the others it is relied on what they do with the axis."""

_REPAIRED = "hetero_conv_axis_repaired"


class Slots(Protocol):
    """The part of a conv tensor [layers, slots, rows, columns] that is read."""

    @property
    def shape(self) -> Sequence[int]: ...

    def stride(self) -> Sequence[int]: ...


def channel_axis(slots: Slots, channels: int, live: int) -> int | None:
    """The axis of a slot's shape, 0 or 1, along which its channels lie; None if the shape alone does not tell.

    channels: what this rank has of them. live: K-1, the rows that a window has at least.
    """
    rows, columns = slots.shape[-2:]
    try:
        return 1 - window_axis_of((rows, columns), channels, live)
    except ManifestError:
        return None


def repair() -> None:
    """From now on a pool announces the axis that its conv slots have.

    Call it after whatever else replaces MambaPool.__init__ (cpu/gaps.py), and before a pool is made. Raises
    UpstreamChanged, with nothing replaced, if SGLang is not as expected.
    """
    selfcheck.require(releases.installed().rows(SYMBOLS))
    pool, name = selfcheck.find(INIT)
    if not hasattr(getattr(pool, name), _REPAIRED):
        setattr(pool, name, _announcing(getattr(pool, name)))


def _announcing(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_and_announce(self: Any, **kwargs: Any) -> None:
        init(self, **kwargs)
        announce(self, kwargs["cache_params"].shape.conv)

    setattr(init_and_announce, _REPAIRED, True)
    return init_and_announce


def announce(pool: Any, shapes: Sequence[Sequence[int]]) -> None:
    """Set pool.conv_slice_axis to the axis of the channels. shapes: of each conv slot as the model means it.

    Upstream's value stays where tensors disagree or none tells: conv_of() then says that they cannot be cut.
    """
    announced = pool.conv_slice_axis
    axes = {
        channel_axis(slots, shape[announced], shape[1 - announced])
        for slots, shape in zip(pool.mamba_cache.conv, shapes, strict=True)
    }
    if len(axes) == 1 and (axis := axes.pop()) is not None and axis != announced:
        pool.conv_slice_axis = axis
        setattr(pool, _REPAIRED, True)


def conv_of(pool: Any, tp: int) -> Conv:
    """What upstream's transfer can do with the conv slots of this MambaPool between TP `tp` and another size."""
    tensors = [slots for slots in pool.mamba_cache.conv if prod(slots.shape)]
    if not tensors:
        return Conv.NONE
    groups = pool.conv_shard_groups
    # Without declared segments, or where their sum is another, upstream moves one block (disaggregation/utils.py,
    # compute_mamba_state_slice_blocks): channels end up in each other's places.
    if groups is None or any(slots.shape[2 + pool.conv_slice_axis] * tp != sum(groups) for slots in tensors):
        return Conv.UNCUTTABLE
    if any(group % tp for group in groups) or not all(_dense(slots) for slots in tensors):
        return Conv.UNCUTTABLE
    return Conv.REPAIRED if getattr(pool, _REPAIRED, False) else Conv.ANNOUNCED


def _dense(slots: Slots) -> bool:
    """Whether bytes lie in the order of the shape: upstream counts offsets by it. Not so on a CPU with AMX."""
    rows, columns = slots.shape[-2:]
    return tuple(slots.stride()[-3:]) == (rows * columns, columns, 1)
