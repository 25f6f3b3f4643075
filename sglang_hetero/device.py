"""Devices, their streams and the completion of work, the same for a CPU, an NPU and a GPU.

The only place that asks which of them it is, and the only one that calls a vendor's module: torch's generic device
module (`torch.get_device_module`) gives all of it by device type, so that nothing here names a vendor. What is called
of torch_npu's module is listed in docs/ascend.md and compared with its release. On a CPU work is complete when the
call returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Done = Callable[[], bool]
"""Whether work that was enqueued before is complete; never blocks."""


def at_once() -> bool:
    """The `Done` of work that is complete already."""
    return True


def attach(kind: str) -> None:
    """Have torch know devices of this kind ("cpu", "cuda", "npu"). Raises ImportError, or whatever the vendor's package
    raises while it is imported: that is what registers its devices."""
    if kind == "npu":
        import torch_npu  # noqa: F401


def on_device(device: torch.device) -> None:
    """Make a device the present thread's. Every thread of ours that touches a device or an engine begins with this.

    A new thread's device is number 0 whatever the process uses: streams, events and an engine's copies of another one
    are not to be asked for from it, and the first call would put a context on device 0 besides.
    """
    module = _module(device)
    if module is None:
        return
    if device.index is None:
        raise ValueError(f"the device {device} has no number, so that a thread cannot take it; see `numbered`")
    module.set_device(device)


def numbered(device: torch.device) -> torch.device:
    """The same device with its number, if it has none the present thread's: SGLang's pools say npu, whichever it is.

    From SGLang's own thread, which has taken its device. Only a numbered one can be taken by other threads.
    """
    module = _module(device)
    if module is None or device.index is not None:
        return device
    return torch.device(device.type, module.current_device())


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device, for a CPU of its host."""
    module = _module(device)
    if module is None:
        import psutil

        found = psutil.virtual_memory()
        return int(found.available), int(found.total)
    free, total = module.mem_get_info(device)
    return int(free), int(total)


def properties(device: torch.device) -> Any:
    """What a device's vendor says of it (`name`, and its processors under a name of the vendor's); None for a CPU."""
    module = _module(device)
    return None if module is None else module.get_device_properties(device)


class Lane:
    """A stream of its own on which one worker thread puts copies, apart from the model's forward passes."""

    def __init__(self, device: torch.device) -> None:
        self._module = _module(device)
        self.device = device
        self._stream: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Copies that are enqueued inside go to this lane; they are complete when the block is left."""
        if self._module is None:
            yield
            return
        if self._stream is None:
            self._stream = self._module.Stream(device=self.device)
        try:
            with self._module.stream(self._stream):
                yield
        finally:
            # Also after an error: what was enqueued before it still copies.
            self._stream.synchronize()


class ForwardLane:
    """The stream of the model's forward passes; what is enqueued here runs between two of them."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        """stream: the one that forward passes run on; None for the current one."""
        self._module = _module(device)
        self._stream = stream

    @property
    def immediate(self) -> bool:
        """Whether work is complete when its call returns."""
        return self._module is None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Copies that are enqueued inside go between the forward passes."""
        if self._module is None or self._stream is None:
            yield
            return
        with self._module.stream(self._stream):
            yield

    def done(self) -> Done:
        """Tells when all that was enqueued up to now is complete."""
        if self._module is None:
            return at_once
        event = self._module.Event()
        event.record(self._stream) if self._stream is not None else event.record()
        query: Done = event.query
        return query


class HostCopy:
    """A few integers on their way from the device to the host; nobody waits for them."""

    def __init__(self, values: torch.Tensor) -> None:
        """values: any integer dtype and shape. The copy is enqueued on the current stream."""
        self._done: Done = at_once
        if _module(values.device) is None:
            self._host = values.clone()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._source = values  # kept until the copy is done
        self._done = ForwardLane(values.device).done()

    def ready(self) -> bool:
        """Whether they have arrived."""
        return self._done()

    def array(self) -> npt.NDArray[np.int64]:
        """The values, int64, one-dimensional; only when they are ready."""
        return self._host.reshape(-1).numpy().astype(np.int64)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array where work on the current stream reads it. Whoever has enqueued that work may forget it at once.

    torch's allocators see to that, torch_npu's as well as those for CUDA: pinned memory that is copied from without
    waiting is not given out again before the copy is complete (the copy records an event with the allocator), and what
    was allocated with a stream current goes to work of that stream only, which comes behind. So the array must be made,
    and the work that reads it enqueued, with one and the same stream current.
    """
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _module(device: torch.device) -> Any:
    """torch's module of a kind of device, such as torch.npu; None for a CPU, which needs none."""
    return None if device.type == "cpu" else torch.get_device_module(device)
