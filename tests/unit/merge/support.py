"""Tensors whose every byte is known, a comparison that says which byte differs, and the kernels without a device."""

import importlib.util

import torch
import triton

from sglang_hetero.merge import triton_kernels

POISON = 0xFF
DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]


def strided(shape, dtype, order=None, gaps=None):
    """(bytes uint8 [n], view `shape`): poisoned memory, and a tensor that lies in it.

    order: the axes from the outermost to the innermost in memory. gaps {axis: elements}: memory on both sides of the
    view in that axis, which belongs to nobody.
    """
    order = list(range(len(shape))) if order is None else order
    gaps = gaps or {}
    sizes = [shape[axis] + 2 * gaps.get(axis, 0) for axis in order]
    memory = torch.full((int(torch.tensor(sizes).prod()) * dtype.itemsize,), POISON, dtype=torch.uint8)
    view = memory.view(dtype).view(sizes)
    for position, axis in enumerate(order):
        view = view.narrow(position, gaps.get(axis, 0), shape[axis])
    return memory, view.permute([order.index(axis) for axis in range(len(shape))])


def random_fill(view, generator):
    """Random bytes: among them NaNs with payloads and zeros of both signs."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[view.element_size()]
    noise = torch.randint(0, 256, (view.numel() * view.element_size(),), dtype=torch.uint8, generator=generator)
    view.view(integers).copy_(noise.view(integers).view(view.shape))
    return view


def random_tensor(shape, dtype, generator, order=None, gaps=None):
    return random_fill(strided(shape, dtype, order, gaps)[1], generator)


def assert_same_bytes(actual, expected):
    """Both uint8 [n]."""
    different = (actual != expected).nonzero().flatten()
    if len(different):
        at = int(different[0])
        first = f"the first at {at}: {actual[at]:#04x}, expected {expected[at]:#04x}"
        raise AssertionError(f"{len(different)} of {len(actual)} bytes differ, {first}")


def offsets(widths):
    """The first head of each of shards that lie side by side."""
    return [sum(widths[:index]) for index in range(len(widths))]


def interpreted_kernels():
    """A second copy of the kernel module whose kernels Triton's interpreter runs.

    What a kernel becomes is decided when its decorator runs, so the knob is set while this copy is loaded, and only
    then: SGLang's own kernels and the module's ordinary copy, which live in this process too, stay what they are.
    """
    spec = importlib.util.spec_from_file_location("interpreted_triton_kernels", triton_kernels.__file__)
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module
