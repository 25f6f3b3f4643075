"""What our path does not serve, and how each of these is found out (docs/support.md). Pure: no torch, no SGLang.

A server with one of them keeps upstream's path; a pair that needs ours is refused (pairing.py). Rows of `FEATURES` are
read off the configuration, those of `BY_LAYOUT` are found when caches are described or a plan is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sglang_hetero.errors import TransferRefused
from sglang_hetero.layout.manifest import Side


class Source(StrEnum):
    """Where a setting is read: SGLang's resolved configuration in the scheduler, or its environment variables."""

    PARALLEL = "get_parallel()"
    DISAGG = "get_disagg()"
    MEMORY = "get_memory()"
    ENV = "envs"


class PrefillInfo(Protocol):
    """The part of SGLang's PrefillServerInfo that is read: what GET /route says of a prefill server."""

    attn_cp_size: int
    decode_allocation_policy: str
    enable_kv_cache_sharding: bool


Read = Callable[[Source, str], object]
"""The value of a setting of this server; see sglang_reader()."""


@dataclass(frozen=True)
class Feature:
    """One setting. sides: where it stands in the way. supported: whether our path serves a server with this value."""

    name: str
    sides: frozenset[Side]
    source: Source
    setting: str
    supported: Callable[[object], bool]
    why: str
    remedy: str

    def reason(self) -> str:
        """Why a server is refused that does not have a supported value, and what to change."""
        return f"{self.name} is not served by this package's path: {self.why}; {self.remedy}"


_PREFILL, _DECODE = frozenset({Side.PREFILL}), frozenset({Side.DECODE})
_BOTH = _PREFILL | _DECODE

_CP = "Prefill context parallelism"
_SHARDING = "KV cache sharding"
_LATE = "Allocation of decode memory after prefill (prefill_complete)"
_EARLY = "early"
_RUST = "SGLang's Rust server"


def _is(value: object) -> Callable[[object], bool]:
    return lambda found: found == value


FEATURES: tuple[Feature, ...] = (
    Feature(
        _CP,
        _PREFILL,
        Source.PARALLEL,
        "attn_cp_size",
        _is(1),
        "a rank has some tokens of a request only",
        "start without --attn-cp-size",
    ),
    Feature(
        "Decode context parallelism",
        _BOTH,
        Source.PARALLEL,
        "attn_dcp_size",
        _is(1),
        "tokens are dealt out over ranks",
        "start without --dcp-size",
    ),
    Feature(
        _SHARDING,
        _BOTH,
        Source.PARALLEL,
        "enable_kv_cache_sharding",
        _is(False),
        "pages are dealt out over ranks",
        "start without --enable-kv-cache-sharding",
    ),
    Feature(
        "Optimistic prefill",
        _PREFILL,
        Source.DISAGG,
        "optimistic_prefill_attempts",
        _is(0),
        "a request may be computed again in other chunks",
        "start with --optimistic-prefill-attempts 0",
    ),
    Feature(
        _LATE,
        _BOTH,
        Source.DISAGG,
        "disaggregation_decode_allocation_policy",
        _is(_EARLY),
        "decode has no memory yet while prefill runs",
        f"start with --disaggregation-decode-allocation-policy {_EARLY}",
    ),
    Feature(
        "Role switch",
        _BOTH,
        Source.DISAGG,
        "enable_pd_role_switch",
        _is(False),
        "the caches are registered anew for another role",
        "start without --enable-pd-role-switch",
    ),
    Feature(
        "Decode prefix cache",
        _DECODE,
        Source.DISAGG,
        "disaggregation_decode_enable_radix_cache",
        _is(False),
        "prefill would send a part of the prompt only",
        "start decode without --disaggregation-decode-enable-radix-cache",
    ),
    Feature(
        "Receiving into host memory",
        _DECODE,
        Source.DISAGG,
        "disaggregation_decode_host_receive_threshold",
        _is(1.0),
        "pages of a request may not be in the device's pool",
        "start decode with --disaggregation-decode-host-receive-threshold 1",
    ),
    Feature(
        "HiSparse",
        _BOTH,
        Source.MEMORY,
        "enable_hisparse",
        _is(False),
        "a request's pages may be in host memory",
        "start without --enable-hisparse",
    ),
    Feature(
        "SGLang's own staging buffer",
        _BOTH,
        Source.ENV,
        "SGLANG_DISAGG_STAGING_BUFFER",
        _is(False),
        "it would take the same requests",
        "start without SGLANG_DISAGG_STAGING_BUFFER",
    ),
    Feature(
        _RUST,
        _PREFILL,
        Source.ENV,
        "SGLANG_RUST_SERVER",
        _is(False),
        "it starts no bootstrap server of a transfer backend, which is where the control service runs",
        "start prefill without SGLANG_RUST_SERVER",
    ),
)


@dataclass(frozen=True)
class ByLayout:
    """Something that shows in the caches. found: the module that refuses it."""

    name: str
    found: str


BY_LAYOUT: tuple[ByLayout, ...] = (
    ByLayout("Quantised K and V with scales of their own", "layout/known_pools.py"),
    ByLayout("Pools that are not known", "layout/known_pools.py"),
    ByLayout("Components that are not known, or that one side lacks", "reshard/compatibility.py"),
    ByLayout("Pipeline stages on decode", "reshard/compatibility.py"),
    ByLayout("Page sizes or dtypes that differ", "backend/pairing.py, reshard/compatibility.py"),
    ByLayout("Another draft model than the checkpoint's MTP module, on either side", "layout/pools.py"),
    ByLayout("Releases of SGLang that differ", "backend/pairing.py, reshard/compatibility.py"),
    ByLayout("Draft caches of two kinds", "reshard/compatibility.py"),
    ByLayout("Rows of metadata (with the first token) whose columns differ", "reshard/row.py"),
)


def reasons(side: Side, read: Read) -> tuple[str, ...]:
    """Why our path cannot serve this server, one line each; empty if it can."""
    found = ((feature, read(feature.source, feature.setting)) for feature in FEATURES if side in feature.sides)
    return tuple(feature.reason() for feature, value in found if not feature.supported(value))


def refuse_start(side: Side, read: Read) -> None:
    """Raise TransferRefused for a server that decode would take for one without this package, and not be told why."""
    rust = next(feature for feature in FEATURES if feature.name == _RUST)
    if side in rust.sides and not rust.supported(read(rust.source, rust.setting)):
        raise TransferRefused(f"{rust.reason()}, or with SGLANG_HETERO=off")


_ROUTE: dict[str, Callable[[PrefillInfo], object]] = {
    _CP: lambda info: info.attn_cp_size,
    _SHARDING: lambda info: info.enable_kv_cache_sharding,
    _LATE: lambda info: info.decode_allocation_policy,
}
"""Features that decode can see in what a prefill server's bootstrap route says, without this package there."""


def route_reasons(info: PrefillInfo) -> tuple[str, ...]:
    """The same of a prefill server, seen from decode."""
    found = ((feature, _ROUTE[feature.name](info)) for feature in FEATURES if feature.name in _ROUTE)
    return tuple(feature.reason() for feature, value in found if not feature.supported(value))


def sglang_reader() -> Read:
    """Reads the settings of the SGLang server that this process belongs to; its configuration must be published."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

    bags = {Source.PARALLEL: get_parallel, Source.DISAGG: get_disagg, Source.MEMORY: get_memory}

    def read(source: Source, setting: str) -> object:
        if source is Source.ENV:
            return getattr(envs, setting).get()
        return getattr(bags[source](), setting)

    return read
