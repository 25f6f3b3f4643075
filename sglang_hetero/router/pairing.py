"""Which prefill and decode servers fit together. Pure: no sockets, no threads.

The rules of a hand-over are those of `reshard.plan`; here it is only asked, for every rank of decode and every replica
of prefill. What a server has not told decides, too: see `Unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from sglang_hetero.backend.options import Mode
from sglang_hetero.backend.pairing import same_layouts
from sglang_hetero.discovery.record import Description, Instance, fingerprint_of
from sglang_hetero.errors import HeteroError, RecordError
from sglang_hetero.layout.manifest import Manifest, digest
from sglang_hetero.reshard import plan
from sglang_hetero.reshard.upstream import speculation_faults

from .options import Unknown

__all__ = ["Fit", "Known", "Pairing", "Unknown", "Verdict", "described", "stock"]

MAX_REMEMBERED = 4096
"""Pairs of layouts whose verdict is kept. A fleet has a handful; restarted servers have the same ones."""


MAX_WHY = 2000
"""Characters of a reason, which is shown with each pair of the server: the longest of plan() are below it."""
MAX_PLANS = 256
"""For one verdict, some ms each, while other pairs wait. A replica of 64 ranks of which no two are alike needs 64."""


class Fit(StrEnum):
    """What becomes of a pair."""

    YES = "yes"
    NO = "no"
    PENDING = "pending"
    """One of the two has not told yet what its caches are. It gets no requests together with this one."""


@dataclass(frozen=True)
class Known:
    """What is known of one server.

    instance: its record, completed by what it says itself. ranks: manifests of all its ranks, sorted by place; empty if
    it has told none. mode, backend: SGLANG_HETERO and the transfer backend. unsupported: why it takes SGLang's own path
    only. told: whether it was asked successfully; a stock server has been when it answers that there is no such route.
    why: of one that has not told, why not; of one without manifests, what it says about it.
    """

    instance: Instance
    told: bool = False
    ranks: tuple[Manifest, ...] = ()
    mode: str = ""
    backend: str = ""
    unsupported: tuple[str, ...] = ()
    why: str = "it has not been asked yet"

    @property
    def ours(self) -> bool:
        """Whether it can take our path, as far as it says."""
        return bool(self.ranks) and self.mode != Mode.OFF and not self.unsupported

    @cached_property
    def layout(self) -> str:
        """Digest of all that a verdict depends on; servers of one role with the same one are interchangeable.

        Made from the manifests themselves: a fingerprint in a record is somebody's word.
        """
        ranks = [(one.coordinates, one.fingerprint) for one in self.ranks]
        one = self.instance
        return digest((one.role, one.model, one.messages, self.told, self.mode, self.backend, self.unsupported, ranks))


def stock(instance: Instance) -> Known:
    """A server that answers, but has no `GET /hetero/instance`."""
    return Known(instance, told=True, why="it has no GET /hetero/instance, so that its layout is not known")


def described(instance: Instance, description: Description) -> Known:
    """A server of which `description` is the answer; `instance` is how it was found, and how it is reached.

    Raises RecordError for manifests that are none, and for a server of the other role.
    """
    said = description.instance
    if said.role is not instance.role:
        raise RecordError(f"{instance.label} says that it is a {said.role} server; correct the router's list")
    ranks = description.ranks()
    # Of what it has shown, whatever it says: servers with the same one stand in for each other.
    fingerprint = (
        fingerprint_of(said.role, description.mode, description.backend, ranks, description.unsupported)
        if ranks
        else ""
    )
    told = Instance(
        role=instance.role,
        url=instance.url,
        bootstrap_port=instance.bootstrap_port or said.bootstrap_port,
        model=said.model or instance.model,
        tp_size=said.tp_size or instance.tp_size,
        dp_size=said.dp_size or instance.dp_size,
        pp_size=said.pp_size or instance.pp_size,
        fingerprint=fingerprint,
        requests=said.requests or instance.requests,
        tokens=said.tokens or instance.tokens,
        incarnation=said.incarnation or instance.incarnation,
        release=said.release or instance.release,
        messages=said.messages or instance.messages,
        lease=instance.lease,
    )
    why = "; ".join(description.unsupported + description.notes)[:MAX_WHY]
    if not (ranks or description.unsupported or description.final):
        return Known(told, why=why or "it has no manifests yet")
    return Known(
        told,
        told=True,
        ranks=ranks,
        mode=description.mode,
        backend=description.backend,
        unsupported=description.unsupported,
        why=why or (f"SGLANG_HETERO={description.mode}" if ranks or description.mode == Mode.OFF else "no manifests"),
    )


@dataclass(frozen=True)
class Verdict:
    """reason: why, as one line; of a refusal it names both sides, the rule and the remedy."""

    fit: Fit
    reason: str

    def between(self, prefill: Known, decode: Known) -> Verdict:
        """The same for these two, by name."""
        return Verdict(self.fit, f"{prefill.instance.label} and {decode.instance.label}: {self.reason}")


def pending(prefill: Known, decode: Known) -> Verdict | None:
    """Why there is no verdict; None if both have told what their caches are."""
    for one in (prefill, decode):
        if not one.told:
            return Verdict(Fit.PENDING, f"{one.instance.label} has not told what its caches are: {one.why}")
    return None


class Pairing:
    """Says who fits whom. Verdicts are remembered by the two layouts, since a plan of a deep model takes a while.

    Not thread-safe.
    """

    def __init__(self, unknown: Unknown = Unknown.LIKE) -> None:
        self._unknown = unknown
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    def judge(self, prefill: Known, decode: Known) -> Verdict:
        """Whether a request may be given to these two. Raises nothing."""
        return pending(prefill, decode) or self.by_layout(prefill, decode).between(prefill, decode)

    def by_layout(self, prefill: Known, decode: Known) -> Verdict:
        """The same of two that have told, with a reason that holds for all pairs of their layouts."""
        key = (prefill.layout, decode.layout)
        if key not in self._verdicts:
            if len(self._verdicts) >= MAX_REMEMBERED:
                self._verdicts.clear()
            self._verdicts[key] = self._judge(prefill, decode)
        return self._verdicts[key]

    def _judge(self, prefill: Known, decode: Known) -> Verdict:
        if difference := _different(prefill, decode):
            return Verdict(Fit.NO, difference)
        if prefill.ranks and decode.ranks:
            replicas = _replicas(prefill.ranks)
            if all(same_layouts(ranks, rank) for ranks in replicas for rank in decode.ranks):
                return Verdict(Fit.YES, "they have the same layout, rank for rank")
            if prefill.ours and decode.ours:
                return _planned(replicas, decode.ranks)
        return self._not_ours(prefill, decode)

    def _not_ours(self, prefill: Known, decode: Known) -> Verdict:
        """A pair of which at least one takes SGLang's own path only, or has no layout to be asked."""
        if fault := _stock_fault(prefill, decode):
            return Verdict(Fit.NO, fault)  # whatever is allowed of what is unknown: this is known
        limited = [one for one in (prefill, decode) if not one.ours]
        why = "; ".join(f"{one.instance.role}: {one.why}" for one in limited)
        if self._unknown is Unknown.ANY:
            return Verdict(Fit.YES, f"allowed by --allow-unknown any ({why})")
        if self._unknown is Unknown.LIKE and len(limited) == 2:
            return Verdict(Fit.YES, f"both take SGLang's own path, which decides itself ({why})")
        remedy = "install sglang-hetero on both, without SGLANG_HETERO=off, or start the router with --allow-unknown"
        if self._unknown is Unknown.NEVER:
            return Verdict(Fit.NO, f"refused by --allow-unknown never ({why}); {remedy} like")
        return Verdict(Fit.NO, f"only one of them can take this package's path ({why}); {remedy} any")


def _different(prefill: Known, decode: Known) -> str:
    """What both say and must say alike, with the remedy; empty if nothing differs."""
    for what, left, right, remedy in (
        ("model", prefill.instance.model, decode.instance.model, "give both the same --served-model-name"),
        (
            "messages of version",
            prefill.instance.messages,
            decode.instance.messages,
            "install the same release of sglang-hetero on both",
        ),
        (
            "transfer backend",
            prefill.backend,
            decode.backend,
            "start both with the same --disaggregation-transfer-backend",
        ),
    ):
        if left and right and left != right:
            return f"prefill has {what} {left}, decode {right}; {remedy}"
    return ""


def _stock_fault(prefill: Known, decode: Known) -> str:
    """What SGLang's own path would do wrong, as far as both have told their caches; empty if nothing is known."""
    if not (prefill.ranks and decode.ranks):
        return ""
    kinds = {rank.fingerprint: rank for rank in decode.ranks}
    for ranks in _replicas(prefill.ranks):
        for rank in kinds.values():
            for fault in speculation_faults(ranks, rank):
                why = "; ".join(f"{one.instance.role}: {one.why}" for one in (prefill, decode) if not one.ours)
                return (
                    f"SGLang's own path cannot serve them: {fault} ({why}); start both with the same speculative "
                    "decoding, or both so that they take sglang-hetero's path (docs/support.md)"
                )[:MAX_WHY]
    return ""


def _replicas(ranks: Sequence[Manifest]) -> list[tuple[Manifest, ...]]:
    """The ranks of each attention-DP replica. Replicas that are cut in the same way are given once."""
    by_replica: dict[int, list[Manifest]] = {}
    for rank in ranks:
        by_replica.setdefault(rank.coordinates.dp_rank, []).append(rank)
    kinds: dict[str, tuple[Manifest, ...]] = {}
    for replica in by_replica.values():
        shape = digest([(one.coordinates.pp_rank, one.coordinates.tp_rank, one.fingerprint) for one in replica])
        kinds.setdefault(shape, tuple(replica))
    return list(kinds.values())


def _planned(replicas: Sequence[Sequence[Manifest]], ranks: Sequence[Manifest]) -> Verdict:
    """What `plan` says of every replica of prefill and every kind of rank of decode."""
    kinds = {rank.fingerprint: rank for rank in ranks}
    if (count := len(replicas) * len(kinds)) > MAX_PLANS:
        return Verdict(
            Fit.NO,
            f"prefill has {len(replicas)} kinds of replicas and decode {len(kinds)} kinds of ranks, which would take "
            f"{count} plans, {MAX_PLANS} at most are made; start all replicas of a server with the same settings",
        )
    for replica in replicas:
        for rank in kinds.values():
            try:
                plan(replica, rank)
            except HeteroError as error:
                return Verdict(Fit.NO, str(error)[:MAX_WHY])
            except Exception as error:
                # Manifests come from the network. One that plan() cannot take must cost its own pair only.
                return Verdict(
                    Fit.NO, f"no plan can be made: {type(error).__name__}: {error}"[:MAX_WHY] + "; report it"
                )
    sizes = f"TP {replicas[0][0].coordinates.tp_size} and TP {ranks[0].coordinates.tp_size}"
    return Verdict(Fit.YES, f"a hand-over between {sizes} can be planned")
