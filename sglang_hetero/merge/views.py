"""Cache memory as tensors: from a description (layout/) and the bytes behind it.

All views are of integers as wide as the elements, so that whatever is moved through them keeps its bits.
"""

import torch

from sglang_hetero.errors import MergeError
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Component, Item
from sglang_hetero.reshard.share import Share

from .checks import INTEGER


def item_view(memory: torch.Tensor, component: Component) -> torch.Tensor:
    """All items of one layer, [items, *axes as the component lists them], over its bytes.

    memory: uint8, one-dimensional, beginning at the layer's address; strides are the component's, not the memory's.
    Raises MergeError if the memory is too short or its address does not suit the dtype.
    """
    strides = [component.item_stride, *(axis.stride for axis in component.axes)]
    sizes = [component.items, *(axis.size for axis in component.axes)]
    return _view(memory, component.itemsize, sizes, strides, what=component.role, span=component.buffer_span)


def live_view(items: torch.Tensor, component: Component) -> torch.Tensor:
    """An item view without rows that hold nothing, such as the room for draft tokens in a conv window."""
    for dimension, axis in enumerate(component.axes, start=1):
        items = items.narrow(dimension, *axis.live_rows)
    return items


def staged_view(area: torch.Tensor, share: Share, items: int) -> torch.Tensor:
    """What a source sent of `items` items, [items, *axes as the destination's component lists them].

    area: uint8, one-dimensional, beginning where the source wrote, with room for whole items even where the last page
    is not full; the end of that page is of no meaning.
    """
    by_name = {axis.name: axis for axis in share.staged_axes}
    axes = [by_name[axis.name] for axis in share.destination_component.axes]
    sizes = [items, *(axis.size for axis in axes)]
    strides = [share.staged_bytes, *(axis.stride for axis in axes)]
    component, span = share.source_component, items * share.staged_bytes
    return _view(area, component.itemsize, sizes, strides, what=f"staged {share.role}", span=span)


def arranged(items: torch.Tensor, component: Component) -> torch.Tensor:
    """An item view in the order that the operations take, whatever order the component lists its axes in.

    [items, token, cut axis, the rest] for pages, where the rest is 1 if nothing is left; [items, cut axis, the rest]
    for slots.
    """
    names = [axis.name for axis in component.axes]
    first = [AxisName.TOKEN] if component.item is Item.PAGE else []
    first.append(component.cut_axis.name)
    leading = [1 + names.index(name) for name in first]
    rest = [dimension for dimension in range(1, items.dim()) if dimension not in leading]
    view = items.permute(0, *leading, *rest)
    return view if rest else view.unsqueeze(-1)


def _view(
    memory: torch.Tensor, itemsize: int, sizes: list[int], strides: list[int], *, what: str, span: int
) -> torch.Tensor:
    if not isinstance(memory, torch.Tensor):
        raise MergeError(f"{what}: memory must be a tensor, it is {type(memory).__name__}")
    if memory.dtype is not torch.uint8 or memory.dim() != 1 or memory.stride(0) != 1:
        raise MergeError(
            f"{what}: memory must be a row of uint8 without gaps, it is {memory.dtype} of shape {tuple(memory.shape)} "
            f"with strides {memory.stride()}"
        )
    if memory.numel() < span:
        raise MergeError(f"{what}: needs {span} bytes, the memory has {memory.numel()}")
    if memory.data_ptr() % itemsize or memory.storage_offset() % itemsize:
        raise MergeError(f"{what}: the memory does not begin at a multiple of {itemsize}, the size of an element")
    elements = memory[: memory.numel() // itemsize * itemsize].view(INTEGER[itemsize])
    steps = [stride // itemsize for stride in strides]
    return elements.as_strided(sizes, steps, elements.storage_offset())
