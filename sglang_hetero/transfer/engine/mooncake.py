"""Mooncake. Figures and behaviour are of mooncake 0.3.13.post1.

What is known of a failed write (`EngineError.settled`). Over TCP each descriptor is begun by a call of its own and
asked about until it has ended. One that has *landed* was acknowledged by the peer after its last byte was in the
peer's memory. One that has *failed* may still land: its connection is closed then, but the peer goes on applying what
the two kernels hold of it. So a write is settled when all that was begun has landed. Where a peer merely stands still,
or the network does, everything lands in the end.

Other transports, and reads, have a call for a whole batch, which returns at the FIRST descriptor that fails, or after
30 s, while the others are still being moved, and cannot be asked about afterwards: never settled. Over RDMA it may also
move on another rail.

In all these cases only the end of the peer's process ends the doubt. A port that refuses connections does not prove
that: a connection that is there, or a queue pair, lives on without it. backend/doubts.py collects more evidence.

We never repeat a batch: the repetition could succeed, its memory be used for something else, and then stragglers of the
first attempt land in it. Mooncake does that itself in its call for a batch, once for each RDMA device of this host.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy.typing as npt

from .asked import Calls
from .base import EngineError, check_batch
from .native import Code, Limits, NativeEngine, call

TCP = Limits(descriptors=256, outstanding=1024, asks=True)
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
DEADLINE_OPTIONS = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")
"""After so long without progress (30 s each unless set) Mooncake closes a connection and calls its descriptor failed.
What the two kernels hold of it lands all the same, later, and nobody can tell when (measured). Without them a
descriptor ends when the peer has acknowledged it, which it does after its last byte, or when the kernel ends the
connection."""
DEADLINE = 3600
"""Seconds: longer than Linux keeps a connection whose peer acknowledges nothing (tcp_retries2, about 15 minutes), which
ends by itself then. One that the peer alone has given up would never end without it; it is of no use for so long."""
REFUSALS = (0, (1 << 64) - 1)
"""Instead of the number of a transfer that was not begun; the second is -1 in releases before LEAST_RELEASE."""
LEAST_RELEASE = (0, 3, 12)
"""Before it, a transfer over TCP can have ended before its bytes are in the peer's memory, and one that was refused
cannot be told from one that was begun."""
DISTRIBUTIONS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
)
"""Names under which Mooncake is released."""
PATIENCE = 30.0
"""Seconds without a descriptor's end after which a write fails; Mooncake's own measure for a call that waits."""
OVERLAPPED = -7
"""Mooncake's code for a region that overlaps a registered one."""
CONNECT_SECONDS = 1.0
MAX_PORT = 65535
RDMA_DEVICES = Path("/sys/class/infiniband")


class Mooncake(NativeEngine):
    """On SGLang's MooncakeTransferEngine. A call occupies a core while it runs: the native code waits by spinning."""

    name = "Mooncake"

    def __init__(self, upstream: Any, limits: Limits | None = None, *, patience: float = PATIENCE) -> None:
        super().__init__(upstream, limits or limits_for(os.environ))
        if self._limits.asks and (found := too_old()):
            raise EngineError(
                f"Mooncake {found} acknowledges a write over TCP before its bytes are there: install "
                f"{'.'.join(map(str, LEAST_RELEASE))} or newer on both sides",
                settled=True,
            )
        self._patience = patience
        if self._limits.asks:
            for option in DEADLINE_OPTIONS:  # read anew for every transfer
                os.environ.setdefault(option, str(DEADLINE))

    def write(self, session: str, sources: npt.ArrayLike, destinations: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        if not self._limits.asks:
            return super().write(session, sources, destinations, sizes)
        batch = check_batch(sources, destinations, sizes)
        begin, ask = self._native.transfer_submit_write, self._native.transfer_check_status
        calls = Calls(begin, ask, self._patience, REFUSALS)
        self._write_asking(calls, session, batch)

    def _probe(self, session: str) -> None:
        """Before the first transfer Mooncake asks a peer for its regions, and all calls of this process wait for the
        answer: 61 s if the peer's process has stopped (measured). A probe waits as long, and holds up nobody.

        Nothing else is behind it: a peer that stops between the probe and the transfer has that effect."""
        probe = getattr(self._native, "send_probe", None)  # not in every build for NPUs
        code = 0 if probe is None else call(probe, session)
        if code == 0:
            return
        remedy = (
            "nobody listens there: the server there has ended, its log says why"
            if self.peer_gone(session)
            else "something listens there and does not answer: see that its process is not stopped, its host up and no "
            "firewall between the two"
        )
        raise EngineError(f"Mooncake of {self.session} cannot reach {session} (code {code}): {remedy}", settled=True)

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


def too_old() -> str:
    """The installed release, if it is older than LEAST_RELEASE; else, or if it is not known, an empty text."""
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", found)[: len(LEAST_RELEASE)])
        return found if numbers < LEAST_RELEASE else ""
    return ""


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
