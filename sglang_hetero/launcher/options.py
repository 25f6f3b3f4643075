"""What a user can choose for a fleet, checked before anything starts. Pure: no torch, no SGLang, no sockets."""

import ipaddress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from sglang_hetero.discovery.settings import parse_endpoints
from sglang_hetero.errors import OptionError
from sglang_hetero.layout.window import ConvLayout

from .topology import Role

MAX_MTP_DEPTH = 16
# Prompt tokens of one prefill step: SGLang's usual figure.
DEFAULT_CHUNK = 8192


class Router(StrEnum):
    """What stands before prefill and decode servers."""

    MINI = "mini"
    """sglang-router's mini load balancer."""
    RUST = "rust"
    """Its production router."""
    HETERO = "hetero"
    """`sglang-hetero router` (docs/router.md)."""


class DType(StrEnum):
    """Arithmetic and KV-cache type of the model."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class HasDrafts(Protocol):
    """The part of a model's description that says whether it can speculate."""

    @property
    def name(self) -> str: ...
    @property
    def mtp_layers(self) -> int: ...


@dataclass(frozen=True)
class Options:
    """One fleet. Sizes are tokens unless said otherwise.

    mtp: depth of NEXTN speculation (drafts per step), 0 for none. prefill_mtp, decode_mtp: of the servers of one role,
    None for `mtp`. port: of the router (of the server, if mixed), 0 for
    a free one. chunk: largest number of prompt tokens in one prefill step, 0 for `default_chunk`. max_requests: those
    that run at the same time on one server; each has one linear-state slot, twice that exist. log_dir: made if missing.
    etcd: host:port where servers register and the router looks for them; empty: it is given their URLs.
    prefill_env, decode_env: variables of the environment of the servers of one role, names and values.
    """

    model: str = "tiny"
    mtp: int = 0
    prefill_mtp: int | None = None
    decode_mtp: int | None = None
    conv_layout: ConvLayout = ConvLayout.CHANNELS_FIRST
    dtype: DType = DType.FLOAT32
    page_size: int = 1
    chunk: int = 0
    radix_cache: bool = False
    max_tokens: int = 20480
    max_requests: int = 8
    router: Router = Router.MINI
    etcd: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    start_seconds: float = 600.0
    log_dir: Path | None = None
    server_arguments: tuple[str, ...] = field(default=())
    prefill_env: tuple[tuple[str, str], ...] = ()
    decode_env: tuple[tuple[str, str], ...] = ()

    @property
    def default_chunk(self) -> int:
        """The chunk where none was asked for: whole pages."""
        return -(-DEFAULT_CHUNK // self.page_size) * self.page_size

    @property
    def depths(self) -> dict[str, int]:
        """Depth of speculation by the option that it comes from; without those that were not given, but --mtp."""
        given = {"--mtp": self.mtp, "--prefill-mtp": self.prefill_mtp, "--decode-mtp": self.decode_mtp}
        return {option: depth for option, depth in given.items() if depth is not None}

    def mtp_of(self, role: Role) -> int:
        """Depth of speculation of the servers of one role."""
        own = {Role.PREFILL: self.prefill_mtp, Role.DECODE: self.decode_mtp}.get(role)
        return self.mtp if own is None else own

    def check(self) -> None:
        """Raise `OptionError` for what SGLang would refuse late or in many words."""
        for option, depth in self.depths.items():
            if not 0 <= depth <= MAX_MTP_DEPTH:
                raise OptionError(f"{option} {depth}: the depth is 0 (off) to {MAX_MTP_DEPTH}")
        positive = {
            "--page-size": self.page_size,
            "--max-tokens": self.max_tokens,
            "--max-requests": self.max_requests,
            "--start-seconds": self.start_seconds,
        }
        for option, value in positive.items():
            if not value > 0:  # this way round NaN is refused, too
                raise OptionError(f"{option} {value}: must be larger than 0")
        self._check_host()
        self._check_etcd()
        if self.radix_cache and self.page_size != 1:
            raise OptionError(
                f"--radix-cache with --page-size {self.page_size}: SGLang's prefix cache for linear state works with "
                "pages of 1 token on a CPU; leave one of the two out"
            )
        if self.chunk < 0:
            raise OptionError(f"--chunk {self.chunk}: must be 0 (the default) or larger")
        if self.chunk % self.page_size:
            raise OptionError(f"--chunk {self.chunk} is not a multiple of --page-size {self.page_size}")

    def check_model(self, model: HasDrafts) -> None:
        """Raise `OptionError` for what `model` cannot do."""
        for option, depth in self.depths.items():
            if depth and not model.mtp_layers:
                raise OptionError(f"{option} {depth}: {model.name} has no MTP layer; use {option} 0 or another model")

    def _check_etcd(self) -> None:
        if not self.etcd:
            return
        if self.router is not Router.HETERO:
            raise OptionError(
                f"--etcd {self.etcd}: the router {self.router.value} cannot follow it; add --router hetero"
            )
        try:
            parse_endpoints(self.etcd)
        except ValueError as error:
            raise OptionError(f"--etcd {self.etcd}: must be host:port of etcd, several with commas ({error})") from None

    def _check_host(self) -> None:
        try:
            address = ipaddress.IPv4Address(self.host)
        except ValueError:
            raise OptionError(
                f"--host {self.host}: must be an IPv4 address of this machine, such as 127.0.0.1"
            ) from None
        if address.is_unspecified:
            raise OptionError(f"--host {self.host}: prefill and decode meet at this address, so it must be a real one")
