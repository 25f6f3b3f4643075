"""Names of topologies and what they mean. Pure: no torch, no SGLang, no sockets."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sglang_hetero.errors import HeteroError

# The TP range of the project (docs/design.md); a larger number is a typing error on one machine.
MAX_TP = 16
MAX_PREFILLS = 8

EXAMPLES = (
    "mixed_tp1",
    "mixed_tp2",
    "mixed_tp4",
    "p1_d1",
    "p2_d1",
    "p2_d2",
    "p1_d2",
    "p4_d1",
    "p2x2_d2",
    "p2p4_d1",
    "p2_d2dp2",
)
GRAMMAR = "mixed_tp<N> or p<N>[x<M>][p<N>...]_d<N>[dp<M>]"

_MIXED = re.compile(r"mixed_tp(\d+)")
_DISAGGREGATED = re.compile(r"((?:p\d+(?:x\d+)?)+)_d(\d+)(?:dp(\d+))?")
_PREFILLS = re.compile(r"p(\d+)(?:x(\d+))?")


class TopologyNameError(HeteroError):
    """The name of a topology cannot be understood, or means something that cannot run."""


class Role(StrEnum):
    """What a server does: both phases, or one of them."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class HeadCounts(Protocol):
    """The part of a model's description that limits its tensor-parallel size."""

    @property
    def name(self) -> str: ...
    @property
    def attention_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def linear_key_heads(self) -> int: ...
    @property
    def linear_value_heads(self) -> int: ...


@dataclass(frozen=True)
class Instance:
    """One server: `tp` ranks, of which groups of `tp / dp` share a request's attention (dp > 1: attention-DP)."""

    name: str
    role: Role
    tp: int
    dp: int = 1

    @property
    def attention_tp(self) -> int:
        """Ranks over which attention and linear-attention heads are split."""
        return self.tp // self.dp

    def check_model(self, model: HeadCounts) -> None:
        """Raise `TopologyNameError` where the heads of `model` cannot be split over this server's ranks.

        Query and linear heads must divide evenly; kv heads divide evenly or are replicated evenly (SGLang's own
        rule for attention TP).
        """
        tp = self.attention_tp
        divided = {
            "attention heads": model.attention_heads,
            "linear key heads": model.linear_key_heads,
            "linear value heads": model.linear_value_heads,
        }
        for what, count in divided.items():
            if count % tp:
                raise TopologyNameError(
                    f"{self.name} splits heads over {tp} ranks, but {model.name} has {count} {what}, which {tp} does "
                    "not divide; choose another TP size or model"
                )
        kv = model.kv_heads
        if kv % tp and tp % kv:
            raise TopologyNameError(
                f"{self.name} splits heads over {tp} ranks, but {model.name} has {kv} kv heads: neither divides the "
                "other; choose another TP size or model"
            )


@dataclass(frozen=True)
class Topology:
    """The servers of one deployment; a router stands before them unless it is one mixed server."""

    name: str
    instances: tuple[Instance, ...]

    @property
    def is_mixed(self) -> bool:
        return self.instances[0].role is Role.MIXED

    @property
    def has_unequal_tp(self) -> bool:
        """Whether prefill and decode split a request's heads over different numbers of ranks."""
        return len({instance.attention_tp for instance in self.instances}) > 1

    @property
    def ranks(self) -> int:
        """Worker processes of all servers together."""
        return sum(instance.tp for instance in self.instances)

    def check_model(self, model: HeadCounts) -> None:
        """Raise `TopologyNameError` where one of the servers cannot hold `model`."""
        for instance in self.instances:
            instance.check_model(model)


def _number(text: str | None, what: str, limit: int, name: str) -> int:
    value = int(text) if text else 1
    if not 1 <= value <= limit:
        raise TopologyNameError(f"topology {name!r}: {what} is {value}, allowed are 1 to {limit}")
    return value


def parse(name: str) -> Topology:
    """The topology that `name` stands for, e.g. `p2x2_d2`: two prefill servers of TP 2, a decode server of TP 2;
    `p2p4_d1`: prefill servers of TP 2 and of TP 4.

    Raises `TopologyNameError` with the grammar and examples.
    """
    if mixed := _MIXED.fullmatch(name):
        return Topology(name, (Instance("mixed", Role.MIXED, _number(mixed[1], "TP", MAX_TP, name)),))
    match = _DISAGGREGATED.fullmatch(name)
    if match is None:
        raise TopologyNameError(f"unknown topology {name!r}: a name is {GRAMMAR}, for example {', '.join(EXAMPLES)}")
    sizes: list[int] = []
    for group in _PREFILLS.finditer(match[1]):
        tp = _number(group[1], "prefill TP", MAX_TP, name)
        sizes += [tp] * _number(group[2], "the number of prefill servers", MAX_PREFILLS, name)
    if len(sizes) > MAX_PREFILLS:
        raise TopologyNameError(f"topology {name!r}: {len(sizes)} prefill servers, allowed are 1 to {MAX_PREFILLS}")
    decode_tp = _number(match[2], "decode TP", MAX_TP, name)
    decode_dp = _number(match[3], "attention-DP", MAX_TP, name)
    if decode_tp % decode_dp:
        raise TopologyNameError(f"topology {name!r}: attention-DP {decode_dp} does not divide decode TP {decode_tp}")
    instances = [Instance(f"prefill{i}", Role.PREFILL, tp) for i, tp in enumerate(sizes)]
    instances.append(Instance("decode0", Role.DECODE, decode_tp, decode_dp))
    return Topology(name, tuple(instances))
