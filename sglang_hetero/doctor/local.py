"""The caches of a server that does not run yet, on paper: from the options with which it would be started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import OptionError
from sglang_hetero.explain import checkpoint
from sglang_hetero.layout.config import geometry_from_config
from sglang_hetero.layout.manifest import Coordinates, Manifest, Side
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.router.pairing import Known

NPU_PAGE = 128
"""SGLang's --page-size on NPUs, unless given; 1 elsewhere."""
URL = "http://this-configuration"
"""Stands for the server that does not run yet."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"options of a server behind --: {message}")


def configured(given: Sequence[str], peer: Known, kind: str) -> Known:
    """The server that SGLang's options `given` would start, as a partner for `peer`. kind: of device, if no --device is
    given.

    Fingerprint of the model and columns of the first token's row are the peer's: a file does not tell them. Raises
    HeteroError for options that cannot be.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", dest="model", required=True)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", dest="tp", type=int, default=1)
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--device", default=kind)
    parser.add_argument("--disaggregation-mode", choices=[str(side) for side in Side])
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-num-draft-tokens", type=int, default=0)
    parser.add_argument("--served-model-name")
    found, _ = parser.parse_known_args(list(given))
    role = Side.DECODE if peer.instance.role is Side.PREFILL else Side.PREFILL
    if found.disaggregation_mode not in (None, str(role)):
        raise OptionError(f"--disaggregation-mode {found.disaggregation_mode}: the peer is one, too; give {role}")
    npu = found.device == "npu"
    drafts = max(0, found.speculative_num_draft_tokens - 1) if found.speculative_algorithm else 0
    options = PoolOptions(
        page_size=found.page_size or (NPU_PAGE if npu else 1),
        conv_layout=ConvLayout.WINDOW_FIRST if npu else ConvLayout.CHANNELS_FIRST,
        draft_rows=drafts,
    )
    geometry = geometry_from_config(checkpoint.read(found.model))
    other = peer.ranks[0]
    ranks = tuple(
        _like(
            manifest(
                geometry,
                role,
                Coordinates(tp_rank=rank, tp_size=found.tp),
                options,
                host="on paper",
                fingerprint=other.model,
                draft=bool(found.speculative_algorithm and geometry.draft_layers),
            ),
            other,
        )
        for rank in range(found.tp)
    )
    instance = Instance(
        role=role,
        url=URL,
        model=found.served_model_name or peer.instance.model,
        messages=peer.instance.messages,
    )
    return Known(instance, told=True, ranks=ranks, mode=peer.mode, backend=peer.backend, why="on paper")


def _like(made: Manifest, other: Manifest) -> Manifest:
    return msgspec.structs.replace(made, row=other.row)
