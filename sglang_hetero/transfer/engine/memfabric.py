"""MemFabric (memfabric_hybrid 1.3.0), on NPUs: no byte has been moved with it here, only its calls are checked.

Known from its source and from calling it without an NPU: it registers in units of 2 MiB, merging what one batch brings;
it refuses an empty batch and descriptors of size 0 (we pass neither); it refuses addresses outside what the peer has
registered before it moves a byte. On prefill it connects at the first write, and registers then what
batch_register_memory only noted down: a registration that fails there fails the first write to each decode rank. Decode
cannot read from a prefill rank before that. ASCEND_MF_STORE_URL is not connected to (docs/ascend.md).
The port in a session's name need not be one that it listens on: earlier releases bind it and do not listen.
"""

import sys
from typing import Any

from .native import Code, Limits, NativeEngine

LIMITS = Limits(descriptors=16384, outstanding=1 << 20)
"""Its own limit is that of a 32-bit count, and SGLang hands it every page of a prompt at once. The bound keeps one
call's lists small. Not measured: there was no NPU."""


class MemFabric(NativeEngine):
    """On SGLang's AscendTransferEngine, whose batch_register logs a refusal at DEBUG level and goes on."""

    name = "MemFabric"
    sees_ends = False

    def __init__(self, upstream: Any, limits: Limits = LIMITS) -> None:
        super().__init__(upstream, limits)

    def _unregister(self, addresses: list[int]) -> int:
        return next((code for code in [self._native.unregister_memory(address) for address in addresses] if code), 0)

    def _register_remedy(self, code: Code) -> str:
        return (
            f"{_last_error()}; check that every region lies in device memory of this NPU, and with MemFabric 1.0 "
            "that ASCEND_MF_STORE_URL is the same on all hosts and its store runs"
        )

    def peer_gone(self, session: str) -> bool:
        return False  # it need not listen there, living or not

    def _transfer_remedy(self) -> str:
        return (
            f"{_last_error()}; the peer may be gone, its port out of reach (prefill connects to decode's), or another "
            "ASCEND_MF_TRANSFER_PROTOCOL be set there; MF_LOG_LEVEL=1 on both sides tells more"
        )


def _last_error() -> str:
    """MemFabric's text for the last failure of this thread. SGLang has imported it; where not, there is none."""
    module = sys.modules.get("memfabric_hybrid")
    text = module.get_and_clear_last_err_msg() if module else ""
    return f"its text: {text}" if text else "it gives no text"
