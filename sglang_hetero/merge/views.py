"""Cache memory as tensors: from a description (layout/) and the bytes behind it.

All views are of integers as wide as the elements, so that whatever is moved through them keeps its bits.
"""

import torch

from sglang_hetero.errors import ManifestError
from sglang_hetero.layout.component import AxisName, Component
from sglang_hetero.reshard.share import Share

from .checks import INTEGER


def item_view(memory: torch.Tensor, component: Component) -> torch.Tensor:
    """All items of one layer, [items, *axes as the component lists them], over its bytes.

    memory: uint8, one-dimensional, beginning at the layer's address; strides are the component's, not the memory's.
    Raises ManifestError if the memory is too short or its address does not suit the dtype.
    """
    span = (component.items - 1) * component.item_stride + component.item_span
    strides = [component.item_stride, *(axis.stride for axis in component.axes)]
    sizes = [component.items, *(axis.size for axis in component.axes)]
    return _view(memory, component.itemsize, sizes, strides, what=component.role, span=span)


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


def cut_dimension(component: Component) -> int:
    """Dimension of an item view along which tensor-parallel ranks share the item."""
    return 1 + component.axes.index(component.cut_axis)


def paged_view(items: torch.Tensor, component: Component) -> torch.Tensor:
    """An item view of a paged component as [items, token, cut axis, the rest]; the rest is 1 where nothing is left."""
    token = 1 + [axis.name for axis in component.axes].index(AxisName.TOKEN)
    cut = cut_dimension(component)
    rest = [dimension for dimension in range(1, items.dim()) if dimension not in (token, cut)]
    view = items.permute(0, token, cut, *rest)
    return view if rest else view.unsqueeze(-1)


def _view(
    memory: torch.Tensor, itemsize: int, sizes: list[int], strides: list[int], *, what: str, span: int
) -> torch.Tensor:
    if memory.dtype is not torch.uint8 or memory.dim() != 1:
        raise ManifestError(
            f"{what}: memory must be a row of uint8, it is {memory.dtype} of shape {tuple(memory.shape)}"
        )
    if memory.numel() < span:
        raise ManifestError(f"{what}: needs {span} bytes, the memory has {memory.numel()}")
    if memory.data_ptr() % itemsize or any(stride % itemsize for stride in strides):
        raise ManifestError(f"{what}: address and strides must be multiples of the element size {itemsize}")
    elements = memory[: memory.numel() // itemsize * itemsize].view(INTEGER[itemsize])
    steps = [stride // itemsize for stride in strides]
    return elements.as_strided(sizes, steps, elements.storage_offset())
