"""The pairs that faults are tried on: mostly two servers of each side, so that others' requests can go on meanwhile."""

from dataclasses import dataclass, replace

from sglang_hetero.transfer.lifetime.repetition import FIRST_SECONDS
from sglang_hetero.transfer.pieces import StateMode
from tests.harness import Geometry, Harness, Pair
from tests.harness.product import SIXES, geometry

STALL_SECONDS = 2 * FIRST_SECONDS
"""SGLANG_HETERO_STALL_TIMEOUT: a transfer that stands still so long fails. What was lost is said again before."""
WINDOW_SECONDS = 3.0
"""SGLANG_HETERO_WINDOW_TIMEOUT: so does a request that waits so long for units."""
BOOTSTRAP_SECONDS = 8
"""SGLang's limit of a handshake; it must be longer than ours."""
GRACE_SECONDS = 6.0
"""By which a limit may be passed: two cores are shared with whatever else runs, and limits are looked at in turns."""
HEARTBEAT_SECONDS = 2.0
"""Between SGLang's looks at a prefill server; it takes no less."""
PAGE = 64
WINDOW = 2
"""Units per request: few, so that a request is under way for some time."""
SCARCE_MIB = 8
"""Staging for two requests, each with a window of units of 2 MiB."""

LIMITS = {
    "SGLANG_HETERO_STALL_TIMEOUT": str(STALL_SECONDS),
    "SGLANG_HETERO_WINDOW_TIMEOUT": str(WINDOW_SECONDS),
    "SGLANG_HETERO_WINDOW": str(WINDOW),
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(BOOTSTRAP_SECONDS),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(BOOTSTRAP_SECONDS),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(HEARTBEAT_SECONDS),
}
"""Short, so that a fault takes seconds."""


@dataclass(frozen=True)
class Topology:
    """One kind of pair. servers: prefill servers, and as many decode servers."""

    prefill_tp: int
    decode_tp: int
    mode: StateMode = StateMode.PREPUSH
    servers: int = 2
    scarce: bool = False
    slots: int = 6

    @property
    def name(self) -> str:
        """As in results and in the table."""
        mode = "" if self.mode is StateMode.PREPUSH else f" {self.mode}"
        return f"P{self.prefill_tp}D{self.decode_tp}{mode}"

    @property
    def geometry(self) -> Geometry:
        sixes = SIXES if 3 in (self.prefill_tp, self.decode_tp) else {}
        found = replace(geometry(PAGE, **sixes), slots=self.slots)
        return replace(found, pages=max(found.pages, 2 * self.slots))

    def pair(self, harness: Harness) -> Pair:
        """Start one."""
        decode = {**LIMITS, "SGLANG_HETERO_STATE": str(self.mode)}
        if self.scarce:
            decode["SGLANG_HETERO_STAGING_MB"] = str(SCARCE_MIB)
        return harness.pair(
            self.geometry,
            prefill_tp=[self.prefill_tp] * self.servers,
            decode_tp=self.decode_tp,
            decode_env=[decode] * self.servers,
            prefill_env=LIMITS,
        )


P2D1 = Topology(2, 1)
P1D2 = Topology(1, 2)
P2D3 = Topology(2, 3, servers=1)
P3D2 = Topology(3, 2, servers=1)
P4D2 = Topology(4, 2, servers=1)


def with_mode(topology: Topology, mode: StateMode) -> Topology:
    """The same with another state mode."""
    return replace(topology, mode=mode)
