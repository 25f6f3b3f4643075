"""A tensor as plain numbers: where it starts, and its shape and strides. No torch is needed to read one.

A cache pool's tensors are read once; everything after that is arithmetic on these numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol, Self

from sglang_hetero.errors import ManifestError

from .axes import Axis, AxisName, Segment
from .component import PLAIN, Component, Item, Role


class Storage(Protocol):
    """The part of torch's UntypedStorage that is read."""

    def data_ptr(self) -> int: ...

    def nbytes(self) -> int: ...


class Tensor(Protocol):
    """The part of torch's Tensor that is read. stride() counts elements; str(dtype) is torch's name of it."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    def stride(self) -> Sequence[int]: ...

    def data_ptr(self) -> int: ...

    def element_size(self) -> int: ...

    def untyped_storage(self) -> Storage: ...


@dataclass(frozen=True)
class Strided:
    """Elements of `itemsize` bytes at address + sum(index * stride); strides in bytes. `what` names it in errors."""

    what: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def span(self) -> int:
        """Bytes from the first to the last element, gaps included; 0 if there is none."""
        if not prod(self.shape):
            return 0
        return self.itemsize + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def unbind(self) -> list[Self]:
        """One view per index of the outermost axis."""
        return [
            replace(
                self,
                address=self.address + index * self.strides[0],
                shape=self.shape[1:],
                strides=self.strides[1:],
            )
            for index in range(self.shape[0])
        ]

    def without(self, axis: int) -> Self:
        """The view without an axis that must have one element."""
        if self.shape[axis] != 1:
            raise ManifestError(f"{self.what}: shape {self.shape} must have one element along axis {axis}")
        return replace(
            self,
            shape=self.shape[:axis] + self.shape[axis + 1 :],
            strides=self.strides[:axis] + self.strides[axis + 1 :],
        )

    def pages(self, page_size: int, rows: int) -> Self:
        """[rows or more, ...] seen as [pages, tokens, ...], of which `rows` tokens belong to the pool.

        Raises ManifestError unless that is a whole number of pages.
        """
        if rows % page_size or self.shape[0] < rows:
            raise ManifestError(
                f"{self.what}: {rows} token rows of {self.shape[0]} must be a whole number of pages of {page_size}"
            )
        return replace(
            self,
            shape=(rows // page_size, page_size, *self.shape[1:]),
            strides=(page_size * self.strides[0], *self.strides),
        )

    def transposed(self, *order: int) -> Self:
        """The view with its axes in another order."""
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in order),
            strides=tuple(self.strides[axis] for axis in order),
        )

    def expect(self, names: str, *expected: int | None) -> Self:
        """Itself. Raises ManifestError that says both where the shape is another; None stands for any size."""
        wrong = len(self.shape) != len(expected) or any(
            want is not None and size != want for size, want in zip(self.shape, expected, strict=False)
        )
        if wrong:
            wanted = ", ".join("any" if size is None else str(size) for size in expected)
            raise ManifestError(f"{self.what}: found shape {list(self.shape)}, expected [{wanted}] for [{names}]")
        return self


def read(tensor: Tensor, what: str) -> Strided:
    """The numbers of a live tensor. Raises ManifestError where they point outside its own storage."""
    itemsize = tensor.element_size()
    view = Strided(
        what,
        tensor.data_ptr(),
        tuple(int(size) for size in tensor.shape),
        tuple(int(stride) * itemsize for stride in tensor.stride()),
        dtype_name(tensor.dtype),
        itemsize,
    )
    storage = tensor.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if view.span and not (start <= view.address and view.address + view.span <= end):
        raise ManifestError(
            f"{what}: {view.span} bytes at {view.address:#x} are not within its storage of {end - start} at {start:#x}"
        )
    return view


def dtype_name(dtype: object) -> str:
    """torch's name of a dtype without the module: torch.bfloat16 -> bfloat16."""
    return str(dtype).removeprefix("torch.")


def component_of(
    role: Role,
    item: Item,
    views: Mapping[int, Strided],
    names: Sequence[AxisName],
    *,
    segments: Mapping[AxisName, tuple[Segment, ...]],
    live: Mapping[AxisName, tuple[int, int]] | None = None,
    dtype: str | None = None,
    encoding: str = PLAIN,
) -> Component:
    """One role as a component.

    views: by layer id, each [item, *names]. dtype: what the elements are, where the tensors only store them as bytes.
    Raises ManifestError where layers differ, which no pool's do.
    """
    layers = sorted(views)
    first = views[layers[0]]
    for layer in layers:
        view = views[layer]
        if (view.shape, view.strides, view.dtype) != (first.shape, first.strides, first.dtype):
            raise ManifestError(
                f"{view.what}: shape {view.shape}, strides {view.strides} and dtype {view.dtype} differ from those of "
                f"{first.what}: {first.shape}, {first.strides}, {first.dtype}"
            )
    axes = tuple(
        Axis(name, size, stride, segments.get(name, ()), (live or {}).get(name))
        for name, size, stride in zip(names, first.shape[1:], first.strides[1:], strict=True)
    )
    return Component(
        role=role,
        item=item,
        dtype=dtype or first.dtype,
        layers=tuple(layers),
        axes=axes,
        items=first.shape[0],
        item_stride=first.strides[0],
        addresses=tuple(views[layer].address for layer in layers),
        encoding=encoding,
    )


class Registered(Protocol):
    """A pool that says what SGLang registers and transfers of it: addresses, bytes, and bytes per item."""

    def get_contiguous_buf_infos(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]: ...


def check_complete(pool: Registered, components: Sequence[Component], what: str) -> None:
    """Raise ManifestError unless the components are exactly what SGLang itself would transfer of this pool."""
    ours = sorted(
        (address, component.items * component.item_span, component.item_span)
        for component in components
        for address in component.addresses
    )
    theirs = sorted(zip(*pool.get_contiguous_buf_infos(), strict=True))
    if ours == theirs:
        return
    missing = sorted(set(theirs) - set(ours))
    extra = sorted(set(ours) - set(theirs))
    shown = "; ".join(
        f"{len(group)} {word}, the first at {group[0][0]:#x} with {group[0][1]} bytes in items of {group[0][2]}"
        for word, group in (("not described", missing), ("unknown to SGLang", extra))
        if group
    )
    raise ManifestError(
        f"{what}: SGLang transfers {len(theirs)} buffers, the description has {len(ours)}: {shown}; "
        "this version of sglang-hetero does not know this pool, use one made for your SGLang version"
    )
