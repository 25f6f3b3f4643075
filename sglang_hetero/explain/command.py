"""`sglang-hetero explain`: who sends what to whom for one request, before anything is started."""

import argparse
import json
from dataclasses import replace

import numpy as np

from sglang_hetero.errors import HeteroError, TopologyError
from sglang_hetero.layout.axes import cut_size
from sglang_hetero.layout.checks import shorten
from sglang_hetero.layout.component import ITEMSIZE
from sglang_hetero.layout.config import arithmetic_dtype, config_fingerprint, geometry_from_config, hidden_size
from sglang_hetero.layout.geometry import LatentAttention, ModelGeometry
from sglang_hetero.layout.manifest import Coordinates, Manifest, Side
from sglang_hetero.layout.synthetic import PoolOptions, first_token_row, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.reshard import plan
from sglang_hetero.reshard.bind import chunk_pages
from sglang_hetero.reshard.explain import Explanation, Request, explain

from . import checkpoint, roofline, table

MAX_TOKENS = 1 << 24
"""Sixteen million: beyond every context length, and still bound in seconds in chunks of the default size."""
MAX_CHUNKS = 1 << 12
MAX_PAGES = 1 << 17
MAX_MTP = 64
INPUTS = (
    "model",
    "prefill_tp",
    "prefill_pp",
    "decode_tp",
    "tokens",
    "page",
    "chunk",
    "scattered",
    "conv_layout",
    "mtp",
    "prefill_mtp",
    "decode_mtp",
    "kv_dtype",
    "conv_dtype",
    "ssm_dtype",
)
"""Options that JSON output repeats."""
MAX_TP = 128
SLOT = 1

EXAMPLES = """examples:
  sglang-hetero explain --model qwen35-2b-cache --prefill-tp 2 --decode-tp 1 --tokens 18592
  sglang-hetero explain --model qwen35-2b-cache --prefill-tp 2 --decode-tp 1 --tokens 18592 --scattered --json
  sglang-hetero explain --model ./Qwen3-Next-80B-A3B --prefill-tp 8 --decode-tp 2 --tokens 32768
  sglang-hetero explain --model ./Kimi-Linear/config.json --prefill-tp 4 --prefill-pp 2 --decode-tp 1 --tokens 4096
  sglang-hetero explain --model qwen35-2b-cache --prefill-tp 2 --decode-tp 1 --tokens 18592 --prefill-mtp 0
  sglang-hetero explain --model Qwen3.5-35B-A3B --prefill-tp 4 --decode-tp 2 --tokens 18592 --roofline 910B

Nothing is started and no weights are read: a checkpoint's config.json is enough. Descriptors are counted for pages in
one run, or with --scattered for pages of which no two are neighbours. Requests of a busy server are in between."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        "explain",
        help="show who sends what to whom for a model, two TP sizes and a prompt",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, help="name of a seeded or published model, checkpoint folder, or config.json"
    )
    parser.add_argument("--prefill-tp", type=_count, required=True, metavar="N", help="attention TP ranks of prefill")
    parser.add_argument("--decode-tp", type=_count, required=True, metavar="N", help="attention TP ranks of decode")
    parser.add_argument("--prefill-pp", type=_count, default=1, metavar="N", help="pipeline stages of prefill")
    parser.add_argument("--tokens", type=_count, required=True, metavar="N", help="tokens of the prompt")
    parser.add_argument(
        "--page",
        type=_count,
        default=128,
        metavar="N",
        help="tokens per page, as --page-size (default %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=_count,
        default=8192,
        metavar="N",
        help="tokens per prefill chunk, as --chunked-prefill-size (default %(default)s)",
    )
    parser.add_argument("--scattered", action="store_true", help="no two pages of the request are neighbours")
    parser.add_argument(
        "--conv-layout",
        choices=[layout.value for layout in ConvLayout],
        default=ConvLayout.WINDOW_FIRST.value,
        help="order of a conv slot in memory: window_first on an NPU, channels_first on CUDA; Kimi-Linear's is always "
        "window_first (default %(default)s)",
    )
    parser.add_argument(
        "--mtp",
        type=_depth,
        default=3,
        metavar="DEPTH",
        help="draft steps, as --speculative-num-steps; 0 for none (default %(default)s)",
    )
    for side in Side:
        parser.add_argument(
            f"--{side}-mtp",
            type=_depth,
            metavar="DEPTH",
            help=f"the same of {side}, where the two differ (docs/speculation.md)",
        )
    for name, dtype in (("kv", "bfloat16"), ("conv", "bfloat16"), ("ssm", "float32")):
        parser.add_argument(
            f"--{name}-dtype",
            choices=sorted(ITEMSIZE),
            default=dtype,
            metavar="DTYPE",
            help=f"torch's name of the {name} cache's dtype (default %(default)s)",
        )
    parser.add_argument(
        "--roofline",
        choices=sorted(roofline.MACHINES),
        help="also show how long the bytes take at least on these machines, on paper",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, bind and print."""
    explanation = _explain(arguments)
    bound = None
    if arguments.roofline:
        bound = roofline.roofline(explanation, roofline.MACHINES[arguments.roofline])
    if arguments.json:
        inputs = {name: getattr(arguments, name) for name in INPUTS}
        shown = {"roofline": bound.as_json()} if bound else {}
        print(json.dumps({"inputs": inputs, **explanation.as_json(), **shown}))
    else:
        table.show(explanation)
        if bound:
            table.show_roofline(bound, [link.name for link in roofline.MACHINES[arguments.roofline].links])
    return 0


def _explain(arguments: argparse.Namespace) -> Explanation:
    """Manifests on paper, a plan for each decode rank, and what it comes to for one request."""
    _check(arguments)
    config = checkpoint.read(arguments.model)
    geometry = geometry_from_config(config)
    layers = {*geometry.attention_layers, *geometry.linear_layers}
    if arguments.prefill_pp > len(layers):
        raise HeteroError(f"--prefill-pp {arguments.prefill_pp}: the model has only {len(layers)} layers")
    if arguments.chunk % arguments.page and arguments.tokens > arguments.chunk:
        raise HeteroError(
            f"--chunk {arguments.chunk} is no multiple of --page {arguments.page}: prefill sends whole pages; choose "
            "one that is"
        )
    npu = arguments.conv_layout == ConvLayout.WINDOW_FIRST.value
    if isinstance(geometry.attention, LatentAttention):
        # Kimi-Linear's states are [window, channels] everywhere (sglang/srt/configs/mamba_utils.py).
        arguments.conv_layout = ConvLayout.WINDOW_FIRST.value
    if not geometry.draft_layers:
        arguments.mtp = 0
    for side in Side:
        depth = getattr(arguments, f"{side}_mtp")
        if depth and not geometry.draft_layers:
            raise HeteroError(f"--{side}-mtp {depth}: the model has no MTP layer; use --{side}-mtp 0 or another model")
        if depth is None:
            setattr(arguments, f"{side}_mtp", arguments.mtp)
    chunks = chunk_pages(arguments.tokens, arguments.chunk, arguments.page)
    pages = chunks[-1].stop
    # Every second page: no page of the request follows another one.
    ids = np.arange(1, 2 * pages, 2) if arguments.scattered else np.arange(1, pages + 1)
    options = PoolOptions(
        page_size=arguments.page,
        pages=int(ids[-1]),
        conv_layout=ConvLayout(arguments.conv_layout),
        kv_dtype=arguments.kv_dtype,
        conv_dtype=arguments.conv_dtype,
        ssm_dtype=arguments.ssm_dtype,
    )
    _check_tp(geometry, arguments)
    paper = _Paper(config, geometry, options, npu=npu, drafts=max(arguments.prefill_mtp, arguments.decode_mtp) > 0)
    prefill = [
        paper.manifest(Side.PREFILL, place, arguments.prefill_mtp)
        for place in _places(arguments.prefill_tp, arguments.prefill_pp)
    ]
    decode = [paper.manifest(Side.DECODE, place, arguments.decode_mtp) for place in _places(arguments.decode_tp, 1)]
    plans = [plan(prefill, rank) for rank in decode]
    request = Request(pages=ids, slot=SLOT, tokens=arguments.tokens, chunks=chunks)
    return explain(plans, request)


def _check_tp(geometry: ModelGeometry, arguments: argparse.Namespace) -> None:
    """Raise TopologyError for a TP size that SGLang cannot shard the model's heads over, naming those that it can."""
    attention = geometry.attention
    segments = [] if isinstance(attention, LatentAttention) else [*attention.segments]
    if geometry.linear is not None:
        segments += [*geometry.linear.conv_segments, *geometry.linear.ssm_segments]

    def fits(tp: int) -> bool:
        try:
            cut_size(segments, tp, 0, "")
        except TopologyError:
            return False
        return True

    for side, tp in (("prefill", arguments.prefill_tp), ("decode", arguments.decode_tp)):
        if not fits(tp):
            sizes = ", ".join(str(size) for size in range(1, MAX_TP + 1) if fits(size))
            raise TopologyError(f"--{side}-tp {tp} cannot shard this model's heads; TP sizes that can: {sizes}")


def _places(tp: int, pp: int) -> list[Coordinates]:
    return [
        Coordinates(tp_rank=rank, tp_size=tp, pp_rank=stage, pp_size=pp) for stage in range(pp) for rank in range(tp)
    ]


class _Paper:
    """The manifests of two servers of one model, which may differ in their depth of speculation."""

    def __init__(
        self, config: object, geometry: ModelGeometry, options: PoolOptions, *, npu: bool, drafts: bool
    ) -> None:
        """drafts: one of the two speculates. Then their rows with the first token are known if the model says how large
        a hidden state is."""
        self._geometry, self._options, self._npu = geometry, options, npu
        self._fingerprint = config_fingerprint(config)
        size = hidden_size(config) if drafts else None
        self._hidden = None if size is None else (size, arithmetic_dtype(config))
        self._row_known = not drafts or size is not None

    def manifest(self, side: Side, place: Coordinates, depth: int) -> Manifest:
        """One rank's."""
        hidden = self._hidden if depth else None
        return manifest(
            self._geometry,
            side,
            place,
            replace(self._options, draft_rows=depth),
            host="on paper",
            fingerprint=self._fingerprint,
            draft=depth > 0,
            row=first_token_row(hidden, npu=self._npu) if self._row_known else (),
        )


def _check(arguments: argparse.Namespace) -> None:
    """Raise HeteroError for sizes that no server has."""
    limits = {
        "tokens": MAX_TOKENS,
        "page": MAX_TOKENS,
        "prefill_tp": MAX_TP,
        "decode_tp": MAX_TP,
        "prefill_pp": MAX_TP,
    }
    for name, limit in limits.items():
        if getattr(arguments, name) > limit:
            raise HeteroError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: more than {limit}")
    if -(-arguments.tokens // arguments.chunk) > MAX_CHUNKS:
        raise HeteroError(
            f"--tokens {arguments.tokens} in chunks of --chunk {arguments.chunk}: more than {MAX_CHUNKS} chunks"
        )
    if -(-arguments.tokens // arguments.page) > MAX_PAGES:
        raise HeteroError(
            f"--tokens {arguments.tokens} in pages of --page {arguments.page}: more than {MAX_PAGES} pages"
        )


def _count(text: str) -> int:
    return _whole(text, 1, None)


def _depth(text: str) -> int:
    return _whole(text, 0, MAX_MTP)


def _whole(text: str, least: int, most: int | None) -> int:
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is no whole number, must be {limits}") from None
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"{shorten(value)} must be {limits}")
    return value
