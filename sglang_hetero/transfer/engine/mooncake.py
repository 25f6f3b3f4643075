"""Mooncake. Figures and behaviour are of mooncake 0.3.13.post1.

Why a failed batch is in doubt here (`EngineError.settled`): the native call returns at the FIRST descriptor that fails,
or after 30 s, while the others of the batch are still being moved; and over TCP the peer goes on applying what its
socket holds. So it is settled only if the peer's process is gone. For the same reason a batch is never repeated: the
repetition could succeed, its memory be used for something else, and then stragglers of the first attempt land in it.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .base import EngineError
from .native import Code, Limits, NativeEngine

TCP = Limits(descriptors=256, outstanding=1024, busy_waits=True)
"""Mooncake keeps 1,024 descriptors of a peer in a queue and 1,024 more in a waiting room whose guests are failed after
1 s; the next one is rejected. Measured: 2,060 pass, 3,000 are rejected, and after a rejection EVERY later call to that
peer fails (watched for 60 s). So all threads together stay within the queue. Within it the size of a call matters
little (256 MB as 1, 64, 256 or 1,024 descriptors: 1.15, 1.14, 0.88, 0.84 GB/s; small descriptors cost 25 us each in
calls of any size): a quarter of the queue lets four threads move at once, and the 0.1 ms of a call are 2 % of 256 small
ones."""
OTHER = Limits(descriptors=16384, outstanding=1 << 20)
"""RDMA and the NPU's transports have no such queue (SGLang hands them 500,000 descriptors in one call). The bound keeps
one call's lists small and its busy-waiting short. Not measured: there was no such device."""

QUEUE_OPTION = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
LEGACY_OPTION = "MC_TCP_PROTO"
OVERLAPPED = -7
"""Mooncake's code for a region that overlaps a registered one."""
CONNECT_SECONDS = 1.0
MAX_PORT = 65535
RDMA_DEVICES = Path("/sys/class/infiniband")


class Mooncake(NativeEngine):
    """On SGLang's MooncakeTransferEngine. A call occupies a core while it runs: the native code waits by spinning."""

    name = "Mooncake"

    def __init__(self, upstream: Any, limits: Limits | None = None) -> None:
        super().__init__(upstream, limits or limits_for(os.environ))

    def _unregister(self, addresses: list[int]) -> int:
        code: int = self._native.batch_unregister_memory(addresses)
        return code

    def _register_remedy(self, code: Code) -> str:
        if code == OVERLAPPED:
            return "a region overlaps one that is registered already: register every allocation once, in one batch"
        return (
            "on RDMA raise the limit of locked memory (ulimit -l unlimited) and load the accelerator's kernel module "
            "for peer memory; Mooncake's own lines in the log say which address failed"
        )

    def peer_gone(self, session: str) -> bool:
        return refuses_connections(session)

    def _transfer_remedy(self) -> str:
        return "the peer may be unreachable, or an address is outside what it has registered (then its log says so)"


def limits_for(environ: Mapping[str, str], *, rdma_devices: Path = RDMA_DEVICES) -> Limits:
    """Limits of the transport that Mooncake chooses in this environment; TCP's wherever it may be TCP.

    EngineError if the environment asks for TCP without acknowledgements.
    """
    ascend = environ.get("ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE", "").lower() in ("1", "true", "yes", "y")
    protocol = "ascend" if ascend else environ.get("MOONCAKE_PROTOCOL", "rdma")
    # Mooncake forces TCP if the variable is there at all, and takes TCP by itself where it finds no RDMA device.
    no_rdma = protocol == "rdma" and not (rdma_devices.is_dir() and any(rdma_devices.iterdir()))
    if not ("MC_FORCE_TCP" in environ or protocol == "tcp" or no_rdma):
        return OTHER
    if environ.get(LEGACY_OPTION) == "1":
        raise EngineError(
            f"{LEGACY_OPTION}=1 makes Mooncake report a write as done before its bytes are in the peer's memory: "
            f"unset {LEGACY_OPTION}",
            settled=True,
        )
    queued = environ.get(QUEUE_OPTION, "")
    outstanding = min(TCP.outstanding, int(queued)) if queued.isdecimal() and int(queued) else TCP.outstanding
    return replace(TCP, descriptors=min(TCP.descriptors, outstanding), outstanding=outstanding)


def refuses_connections(session: str) -> bool:
    """Whether the host of a session answers that nobody listens on its port: the process has ended.

    Mooncake's own send_probe gives one code for this and, after 60 s, for a peer that is merely stopped
    (measured). Anything but a refusal (time-out, no route, a session of another form) proves nothing.
    """
    host, _, port = session.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False
