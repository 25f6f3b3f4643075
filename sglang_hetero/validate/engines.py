"""Native engines outside a server, made as SGLang makes them: for the loop-back and the limits of registration.

SGLang's own classes want a server around them (its parallel state); what they call is the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sglang_hetero.errors import HeteroError
from sglang_hetero.transfer.engine.native import NativeEngine

HOST = "127.0.0.1"
MOONCAKE, SDMA, DEVICE_RDMA = "mooncake", "sdma", "device_rdma"
TRANSPORTS = (MOONCAKE, SDMA, DEVICE_RDMA)
PREFILL, DECODE = "Prefill", "Decode"
"""MemFabric's names of the two roles: a prefill writes to a decode."""


class NoEngine(HeteroError):
    """A native engine cannot be made."""


@dataclass
class Upstream:
    """What a NativeEngine wants of SGLang's object."""

    engine: Any
    session_id: str


def make(transport: str, *, role: str, device: int, store: str) -> Upstream:
    """A native engine. device: its number. store: URL of MemFabric's config store. Raises NoEngine."""
    try:
        native, session = _mooncake() if transport == MOONCAKE else _memfabric(transport, role, device, store)
    except NoEngine:
        raise
    except Exception as error:  # of native code
        raise NoEngine(f"{transport}: {type(error).__name__}: {error}") from error
    return Upstream(native, session)


def wrap(upstream: Upstream, transport: str) -> NativeEngine:
    """Our engine on it; may be made again after it was closed."""
    if transport == MOONCAKE:
        from sglang_hetero.transfer.engine.mooncake import Mooncake

        return Mooncake(upstream)
    from sglang_hetero.transfer.engine.memfabric import MemFabric

    return MemFabric(upstream)


def make_store(url: str) -> None:
    """MemFabric's config store in this process, where it lives as long as the process. Raises NoEngine."""
    try:
        from memfabric_hybrid import create_config_store

        create_config_store(url)
    except Exception as error:
        raise NoEngine(f"MemFabric's store at {url}: {type(error).__name__}: {error}") from error


def _mooncake() -> tuple[Any, str]:
    from mooncake.engine import TransferEngine

    from sglang_hetero.transfer.engine.mooncake import RDMA_DEVICES

    rdma = "MC_FORCE_TCP" not in os.environ and RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    native = TransferEngine()
    code = native.initialize(HOST, "P2PHANDSHAKE", "rdma" if rdma else "tcp", "")
    if code != 0:
        raise NoEngine(f"Mooncake cannot be initialised (code {code}); its own lines in the log say more")
    return native, f"{HOST}:{native.get_rpc_port()}"


def _memfabric(transport: str, role: str, device: int, store: str) -> tuple[Any, str]:
    from memfabric_hybrid import TransferEngine

    if transport == DEVICE_RDMA:
        _begin_hccl(device)
    native = TransferEngine()
    session = f"{HOST}:{native.get_rpc_port()}"
    kind = getattr(TransferEngine.TransDataOpType, transport.upper(), None)
    if kind is None:
        raise NoEngine(f"this release of MemFabric has no {transport}")
    code = native.initialize(store, session, role, device, kind)
    if code != 0:
        raise NoEngine(f"MemFabric cannot be initialised (code {code}); set MF_LOG_LEVEL=1 for more")
    return native, session


def _begin_hccl(device: int) -> None:
    """A collective of one rank: HCCL must be there before device_rdma is, or the two get into each other's way."""
    import torch
    from torch import distributed

    from sglang_hetero.launcher.ports import Ports

    place = torch.device("npu", device)
    if not distributed.is_initialized():
        address = f"tcp://{HOST}:{Ports(HOST).free()}"
        distributed.init_process_group("hccl", init_method=address, rank=0, world_size=1)
    one = torch.zeros(1, device=place)
    distributed.all_gather([torch.empty_like(one)], one)
