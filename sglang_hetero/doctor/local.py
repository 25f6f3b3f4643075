"""The caches of a server that does not run yet, on paper: from the options with which it would be started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import OptionError
from sglang_hetero.explain import checkpoint
from sglang_hetero.layout.component import ITEMSIZE
from sglang_hetero.layout.config import geometry_from_config
from sglang_hetero.layout.manifest import Coordinates, Manifest, Side
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.router.pairing import Known

NPU_PAGE = 128
"""SGLang's --page-size on NPUs, unless given; 1 elsewhere."""
AUTO = "auto"
DTYPE = "bfloat16"
"""Of arithmetic, and so of caches, where no option says another one."""
CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"
"""SGLang's variable of the environment for conv slots."""
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
    parser.add_argument("--dtype", default=AUTO)
    parser.add_argument("--kv-cache-dtype", default=AUTO)
    parser.add_argument("--mamba-ssm-dtype", default="float32")
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
        kv_dtype=_dtype("--kv-cache-dtype", found.kv_cache_dtype, found.dtype),
        conv_dtype=_dtype(CONV_DTYPE, os.environ.get(CONV_DTYPE, AUTO), AUTO),
        ssm_dtype=_dtype("--mamba-ssm-dtype", found.mamba_ssm_dtype, AUTO),
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


def _dtype(option: str, given: str, otherwise: str) -> str:
    """torch's name of a cache's dtype. Raises OptionError for one that is not described."""
    for name in (given, otherwise, DTYPE):
        if name != AUTO:
            break
    short = {"bf16": "bfloat16", "half": "float16", "float": "float32"}.get(name, name)
    if short not in ITEMSIZE:
        raise OptionError(f"{option} {name}: caches of this dtype are not handed over; there are {', '.join(ITEMSIZE)}")
    return short


def _like(made: Manifest, other: Manifest) -> Manifest:
    return msgspec.structs.replace(made, row=other.row)
