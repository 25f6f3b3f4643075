"""Streams and their completion, the same for a CPU, an NPU and a GPU: the only place of the transfer that asks which.

torch's generic device module (`torch.get_device_module`) gives streams and events by device type, so that nothing here
names a vendor. On a CPU work is complete when the call returns.
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


def on_device(device: torch.device) -> None:
    """Make a device the present thread's: events and streams of another one are not to be asked from it."""
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)


class Lane:
    """A stream of its own on which one worker thread puts copies, apart from the model's forward passes."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._stream: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Copies that are enqueued inside go to this lane; they are complete when the block is left."""
        if self._module is None:
            yield
            return
        if self._stream is None:
            self._stream = self._module.Stream(device=self._device)
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
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
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
        if values.device.type == "cpu":
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
