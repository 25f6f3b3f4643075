"""The classes that SGLang gets for its transfer backends: its own ones, with ours in front."""

from __future__ import annotations

from functools import cache
from typing import Any

from .options import Mode

BACKENDS = ("mooncake", "ascend")
"""Values of --disaggregation-transfer-backend that this package serves; others keep SGLang's classes."""


def hetero_class(upstream: type, kind: str, mode: Mode) -> type:
    """The class for one of SGLang's KVClassType; SGLang's own where nothing of ours belongs in front."""
    return _made(upstream, kind, mode)


@cache
def _made(upstream: type, kind: str, mode: Mode) -> type:
    from .bootstrap import BootstrapMixin
    from .endpoints import ReceiverMixin, SenderMixin
    from .manager import ManagerMixin

    mixins: dict[str, Any] = {
        "manager": ManagerMixin,
        "sender": SenderMixin,
        "receiver": ReceiverMixin,
        "bootstrap_server": BootstrapMixin,
    }
    mixin = mixins.get(kind)
    if mixin is None:
        return upstream
    return type(f"Hetero{upstream.__name__}", (mixin, upstream), {"hetero_mode": mode})
