"""A device module as torch.npu and torch.cuda are, which notes who calls what; no device is behind it."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

FREE, TOTAL = 3 << 30, 8 << 30
PRESENT = 5
"""Number of the device that a thread of SGLang has taken."""


class FakeModule:
    """calls: (thread, what), in order. pending: what the streams have not done yet."""

    def __init__(self):
        self.calls = []
        self.pending = set()
        self.current = {}

    def note(self, what):
        self.calls.append((threading.current_thread().name, what))

    def of(self, thread):
        return [what for name, what in self.calls if name == thread]

    def set_device(self, device):
        self.note(("set_device", device.index))

    def current_device(self):
        return PRESENT

    def mem_get_info(self, device=None):
        self.note(("mem_get_info", device.index))
        return FREE, TOTAL

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="Ascend910B3", vector_core_num=40)

    def Stream(self, device=None):
        self.note(("Stream", device.index))
        return FakeStream(self)

    def Event(self):
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream):
        thread = threading.current_thread().name
        before = self.current.get(thread)
        self.current[thread] = stream
        try:
            yield
        finally:
            self.current[thread] = before

    def current_stream(self):
        return self.current.get(threading.current_thread().name)


class FakeStream:
    def __init__(self, module):
        self.module = module

    def synchronize(self):
        self.module.note(("synchronize", self))
        self.module.pending.discard(self)


class FakeEvent:
    def __init__(self, module):
        self.module, self.stream = module, None

    def record(self, stream=None):
        self.stream = stream or self.module.current_stream()
        self.module.pending.add(self.stream)

    def query(self):
        return self.stream not in self.module.pending
