"""The caches of a server that does not run yet, on paper: from the options with which it would be started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import OptionError
from sglang_hetero.explain import checkpoint
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import ITEMSIZE, Role
from sglang_hetero.layout.config import AUTO, arithmetic_dtype, geometry_from_config, hidden_size, ssm_dtype
from sglang_hetero.layout.geometry import ModelGeometry
from sglang_hetero.layout.manifest import Coordinates, Manifest, Side
from sglang_hetero.layout.row import Column
from sglang_hetero.layout.synthetic import HIDDEN, PoolOptions, first_token_row, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.reshard.upstream import drafts
from sglang_hetero.router.pairing import Known

from .lines import Line, ok, warn

NPU_PAGE = 128
"""SGLang's --page-size on NPUs, unless given; 1 elsewhere."""
CONV_DTYPE, SSM_DTYPE = "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"
"""SGLang's variables of the environment for conv slots and SSM states."""
CONV_DEFAULT = "bfloat16"
URL = "http://this-configuration"
"""Stands for the server that does not run yet."""
MTP_ALGORITHMS = ("NEXTN", "EAGLE")
"""Of --speculative-algorithm: those by which SGLang drafts with the checkpoint's MTP module."""
PEERS = "fingerprint of the model and columns that SGLANG_ variables add to the row with the first token"
"""What no option tells."""


@dataclass(frozen=True)
class OnPaper:
    """A server that does not run yet. told: its speculation, from the options. unsure: what they do not tell, each with
    what was taken instead."""

    known: Known
    told: str
    unsure: tuple[str, ...]

    def line(self, area: str) -> Line:
        """What the plans with it rest on."""
        said = f"on paper: {self.told}; taken for the peer's: {PEERS}"
        if not self.unsure:
            return ok(area, self.known.instance.label, said)
        return warn(
            area,
            self.known.instance.label,
            f"{said}; not told by the options: {'; '.join(self.unsure)}",
            "give the options that say it, or start the server and ask it with --peer",
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"options of a server behind --: {message}")


def configured(given: Sequence[str], peer: Known, kind: str, sglang: str) -> OnPaper:
    """The server that SGLang's options `given` would start, as a partner for `peer`. kind: of device, if no --device is
    given. sglang: the release that would run it, empty if it is not known. Raises HeteroError for options that cannot
    be.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", dest="model", required=True)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", dest="tp", type=int, default=1)
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--device", default=kind)
    parser.add_argument("--disaggregation-mode", choices=[str(side) for side in Side])
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-num-steps", type=int)
    parser.add_argument("--speculative-eagle-topk", type=int, default=1)
    parser.add_argument("--speculative-num-draft-tokens", type=int)
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--dtype", default=AUTO)
    parser.add_argument("--kv-cache-dtype", default=AUTO)
    parser.add_argument("--mamba-ssm-dtype", default=os.environ.get(SSM_DTYPE, AUTO))
    found, _ = parser.parse_known_args(list(given))
    role = Side.DECODE if peer.instance.role is Side.PREFILL else Side.PREFILL
    if found.disaggregation_mode not in (None, str(role)):
        raise OptionError(f"--disaggregation-mode {found.disaggregation_mode}: the peer is one, too; give {role}")
    config = checkpoint.read(found.model)
    geometry = geometry_from_config(config)
    arithmetic = arithmetic_dtype(config, found.dtype)
    npu = found.device == "npu"
    speculation = _Speculation(found, geometry, peer)
    options = PoolOptions(
        page_size=found.page_size or (NPU_PAGE if npu else 1),
        conv_layout=ConvLayout.WINDOW_FIRST if npu else ConvLayout.CHANNELS_FIRST,
        draft_rows=speculation.depth,
        kv_dtype=_dtype("--kv-cache-dtype", found.kv_cache_dtype, arithmetic),
        conv_dtype=_dtype(CONV_DTYPE, os.environ.get(CONV_DTYPE, AUTO), CONV_DEFAULT),
        ssm_dtype=_dtype("--mamba-ssm-dtype", found.mamba_ssm_dtype, ssm_dtype(config)),
    )
    row = speculation.row(hidden_size(config), arithmetic)
    ranks = tuple(
        manifest(
            geometry,
            role,
            Coordinates(tp_rank=rank, tp_size=found.tp),
            options,
            host="on paper",
            fingerprint=peer.ranks[0].model,
            sglang=sglang or peer.ranks[0].sglang,
            draft=speculation.on,
            row=row,
        )
        for rank in range(found.tp)
    )
    instance = Instance(
        role=role,
        url=URL,
        model=found.served_model_name or peer.instance.model,
        messages=peer.instance.messages,
    )
    known = Known(instance, told=True, ranks=ranks, mode=peer.mode, backend=peer.backend, why="on paper")
    unsure = list(speculation.unsure)
    if not sglang:
        unsure.append(f"the release of SGLang (the peer's, {peer.ranks[0].sglang})")
    return OnPaper(known, speculation.told, tuple(unsure))


class _Speculation:
    """Whether the server drafts, how deep, and the row with the first token that comes of it.

    on, depth: as the options say, or else as the peer has it. unsure: what they do not say.
    """

    def __init__(self, found: argparse.Namespace, model: ModelGeometry, peer: Known) -> None:
        self._peer = peer.ranks
        self.unsure: list[str] = []
        self.on, self.depth, self._known = False, 0, True
        self.told = "no speculation"
        if not found.speculative_algorithm:
            return
        option = f"--speculative-algorithm {found.speculative_algorithm}"
        path = found.speculative_draft_model_path
        self._known = found.speculative_algorithm.upper() in MTP_ALGORITHMS and path in (None, found.model)
        if self._known and not model.draft_layers:
            raise OptionError(f"{option}: the model has no MTP module to draft with; leave it out")
        if not self._known:
            by = f" with --speculative-draft-model-path {path}" if path else ""
            self.unsure.append(f"what {option}{by} keeps of a draft (an MTP module's caches and the peer's row)")
        self.on = bool(model.draft_layers)
        self.told = f"speculation by {found.speculative_algorithm}"
        self._set_depth(found)

    def _set_depth(self, found: argparse.Namespace) -> None:
        """Draft tokens but the first: SGLang makes them of the steps where a step has one candidate."""
        steps, tokens = found.speculative_num_steps, found.speculative_num_draft_tokens
        if steps is not None and (found.speculative_eagle_topk == 1 or tokens is None):
            tokens = steps + 1
        if tokens is None:
            self.depth = _dead_rows(self._peer)
            self.unsure.append(f"the depth, which SGLang chooses (the peer's room for drafts, {self.depth} rows)")
            return
        if tokens < 1:
            raise OptionError(f"{tokens} draft tokens: a step has at least one")
        self.depth = tokens - 1
        self.told += f", depth {self.depth}"

    def row(self, size: int | None, dtype: str) -> tuple[Column, ...]:
        """The peer's columns, and of them the hidden state as this server's model has it."""
        row = self._peer[0].row
        if not self._known or not row:
            return row
        if self.on and size is None:
            self.unsure.append("the hidden state's size, which config.json does not say (the peer's column)")
            return row
        own = next(one for one in first_token_row((size, dtype) if self.on and size else None) if one.name == HIDDEN)
        self.told += f", {own} of hidden state in the row with the first token"
        if self.on and not drafts(self._peer):
            self.told += ", where the peer does not speculate"
        elif not self.on and drafts(self._peer):
            self.told += ", where the peer speculates"
        return tuple(own if column.name == HIDDEN else column for column in row)


def _dead_rows(ranks: Sequence[Manifest]) -> int:
    """Rows of a conv slot beside the live ones, which are for drafts."""
    windows = [one.axis(AxisName.WINDOW) for rank in ranks for one in rank.of(Role.CONV)]
    return max((window.size - window.live_rows[1] for window in windows), default=0)


def _dtype(option: str, given: str, otherwise: str) -> str:
    """torch's name of a cache's dtype. Raises OptionError for one that is not described."""
    name = otherwise if given == AUTO else arithmetic_dtype({}, given)
    if name not in ITEMSIZE:
        raise OptionError(f"{option} {name}: caches of this dtype are not handed over; there are {', '.join(ITEMSIZE)}")
    return name
