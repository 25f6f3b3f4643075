"""Run as a script: what the backend's tables and the conv repair say of the installed SGLang, as JSON.

In a process of its own, because the repair patches SGLang for good, and because its import takes ten seconds.
"""

import ctypes
import json
import sys
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import numpy as np
import torch

from sglang_hetero import releases
from sglang_hetero.backend import conv_axis, instance, selfcheck, support
from sglang_hetero.cpu.enable import SHIMS
from sglang_hetero.layout.manifest import Side
from tests.harness import pools
from tests.harness.geometry import Geometry
from tests.harness.sides import Shard

SLOTS, SOURCE, DESTINATION, POISON = 6, 2, 3, 0x7FFF
DRAFT_TOKENS = 3
MOST_ROWS = 5  # (K - 1) + (draft tokens - 1)
PAIRS = [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1)]


def no_change(conv, _shapes, _draft_tokens):
    return conv


def as_on_an_npu(conv, shapes, draft_tokens):
    from sglang.srt.hardware_backend.npu.memory_pool_npu import _init_npu_conv_state

    return _init_npu_conv_state(conv[0], shapes, draft_tokens)


def as_with_amx(conv, _shapes, _draft_tokens):
    from sglang.srt.layers.amx_utils import _init_amx_conv_state

    return _init_amx_conv_state(conv)


class Platforms:
    """MambaPool.__init__ of another platform: its own function makes the conv tensors."""

    def __init__(self):
        from sglang.srt.mem_cache.memory_pool import MambaPool

        self.make, self.draft_tokens = no_change, DRAFT_TOKENS
        init = MambaPool.__init__

        @wraps(init)
        def init_on_platform(pool, **kwargs):
            init(pool, **kwargs)
            conv = self.make(pool.mamba_cache.conv, kwargs["cache_params"].shape.conv, self.draft_tokens)
            pool.mamba_cache.conv[:] = conv

        MambaPool.__init__ = init_on_platform


def pool(geometry, tp, rank, **shape):
    from sglang.srt.mem_cache.memory_pool import MambaPool

    params = pools._cache_params(Shard(geometry, tp, rank))
    if shape:
        params = replace(params, shape=replace(params.shape, **shape))
    layers = list(geometry.linear_layers)
    made = MambaPool(size=SLOTS, spec_state_size=1, cache_params=params, mamba_layer_ids=layers, device="cpu")
    for slots in (*made.mamba_cache.conv, made.mamba_cache.temporal):
        bits(slots).fill(POISON)
    return made


class Ranks:
    """Makes the pool of a rank; draft_tokens: of both sides."""

    def __init__(self, platforms, geometry, prefill=DRAFT_TOKENS, decode=DRAFT_TOKENS):
        self.platforms, self.geometry = platforms, geometry
        self.draft_tokens = {"prefill": prefill, "decode": decode}

    def __call__(self, side, tp, rank):
        self.platforms.draft_tokens = self.draft_tokens[side]
        return pool(self.geometry, tp, rank)


def bits(tensor):
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32).numpy()


def conv_shard(geometry, tp, rank, layer, rows):
    """[rows, channels] of a rank: value = f(layer, row, channel of the whole model)."""
    parts, first = [], 0
    for segment in geometry.conv_segments:
        size = segment.heads * segment.head_width
        parts.append(first + np.arange(size * rank // tp, size * (rank + 1) // tp))
        first += size
    return (1000 * layer + 200 * np.arange(rows)[:, None] + np.concatenate(parts)[None, :]).astype(np.int16)


class Sender:
    """What MooncakeKVManager._send_mamba_state_slice asks of its manager; copies memory at once."""

    pp_size = 1

    def __init__(self, tp, rank, allowed):
        self.state_tp_size = self.attn_tp_size = tp  # the second one in SGLang 0.5.22
        self.kv_args, self.allowed = SimpleNamespace(engine_rank=rank), allowed
        self.blocks = self.astray = 0

    def _transfer_data(self, _session, blocks):
        self.blocks += len(blocks)
        for source, destination, length in blocks:
            if any(low <= destination and destination + length <= high for low, high in self.allowed):
                ctypes.memmove(destination, source, length)
            else:
                self.astray += 1
        return 0


def fill(made, geometry, tp, rank, slot):
    """Write one request's conv window to a slot of a rank, unused rows included; of two pools the last rows agree."""
    slots = bits(made.mamba_cache.conv[0])
    window_first = slots.shape[-1] != geometry.live_window
    rows = slots.shape[-2] if window_first else slots.shape[-1]
    for layer in range(len(geometry.linear_layers)):
        shard = conv_shard(geometry, tp, rank, layer, MOST_ROWS)[-rows:]
        slots[layer, slot] = shard if window_first else shard.T


def hand_over(geometry, prefill_tp, decode_tp, make):
    """Conv elements that are not as they must be after upstream's own code has sent one request to every rank.

    make: makes the pool of one rank of a side.
    """
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    sources = [make("prefill", prefill_tp, rank) for rank in range(prefill_tp)]
    destinations = [make("decode", decode_tp, rank) for rank in range(decode_tp)]
    for rank, source in enumerate(sources):
        fill(source, geometry, prefill_tp, rank, SOURCE)
    wrong = astray = blocks = 0
    for decode_rank, destination in enumerate(destinations):
        tensors = (*destination.mamba_cache.conv, destination.mamba_cache.temporal)
        allowed = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        theirs, _, their_lens = destination.get_contiguous_buf_infos()
        for rank, source in enumerate(sources):
            if prefill_tp > decode_tp and rank // (prefill_tp // decode_tp) != decode_rank:
                continue
            if prefill_tp < decode_tp and decode_rank // (decode_tp // prefill_tp) != rank:
                continue
            sender = Sender(prefill_tp, rank, allowed)
            ours, _, our_lens = source.get_contiguous_buf_infos()
            MooncakeKVManager._send_mamba_state_slice(
                sender,
                SimpleNamespace(mooncake_session_id="s"),
                [SOURCE],
                ours,
                our_lens,
                source.get_state_dim_per_tensor(),
                theirs,
                [DESTINATION],
                their_lens,
                destination.get_state_dim_per_tensor(),
                decode_rank,
                decode_tp,
                source.get_state_conv_shard_groups(),
                source.get_state_slice_outer_counts(),
                source.get_state_layer_ids(),
                destination.get_state_layer_ids(),
            )
            astray += sender.astray
            blocks += sender.blocks
        found = bits(destination.mamba_cache.conv[0]).copy()
        bits(destination.mamba_cache.conv[0]).fill(POISON)
        fill(destination, geometry, decode_tp, decode_rank, DESTINATION)
        wrong += int((found != bits(destination.mamba_cache.conv[0])).sum())
    return {"wrong": wrong, "astray": astray, "blocks": blocks}


def facts_of_pools(platforms, geometry):
    """Per platform: the axis that a pool announces, what it can be cut like, and the handover of each pair."""
    found = {}
    for name, make in (("plain", no_change), ("npu", as_on_an_npu), ("amx", as_with_amx)):
        platforms.make = make
        made = pool(geometry, 2, 0)
        found[name] = {
            "axis": made.conv_slice_axis,
            "dims": made.get_state_dim_per_tensor()[0],
            "outer": made.get_state_slice_outer_counts()[0],
            "conv": conv_axis.conv_of(made, 2),
            "undeclared": conv_axis.conv_of(pool(geometry, 2, 0, conv_shard_groups=None), 2),
        }
        if name != "amx":
            ranks = Ranks(platforms, geometry)
            found[name]["pairs"] = {f"{p}->{d}": hand_over(geometry, p, d, ranks) for p, d in PAIRS}
    platforms.make = as_on_an_npu
    other = Ranks(platforms, geometry, decode=1)
    found["other depth"] = {"pairs": {f"{p}->{d}": hand_over(geometry, p, d, other) for p, d in PAIRS}}
    return found


def read_settings():
    """Which settings of the table SGLang does not have, and what it says of a server with defaults."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import ParallelContext
    from sglang.srt.server_args import ServerArgs

    spaces = namespace_of(ServerArgs)
    bags = {support.Source.PARALLEL: "parallel", support.Source.DISAGG: "disagg", support.Source.MEMORY: "memory"}
    missing = []
    for feature in support.FEATURES:
        if feature.source is support.Source.ENV:
            known = hasattr(envs, feature.setting)
        elif feature.source is support.Source.PARALLEL and hasattr(ParallelContext, feature.setting):
            known = True
        else:
            known = spaces.get(feature.setting) == bags[feature.source]
        if not known:
            missing.append(feature.setting)
    return missing


def defaults():
    """Reasons of both sides on a published configuration of defaults."""
    from tests.harness import scheduler
    from tests.harness.sides import Side as HarnessSide

    found = {}
    for side in Side:
        scheduler.publish(Shard(Geometry(), 1, 0), HarnessSide(side.value, "mooncake", 1, 0))
        found[side.value] = support.reasons(side, support.sglang_reader())
    return found


def sigterm():
    """What happens, in this order, when SGLang hears SIGTERM and this server has registered."""
    from sglang.srt.managers.tokenizer_manager import SignalHandler

    done = []

    class Manager:
        def __setattr__(self, name, value):
            done.append(f"{name} = {value}")

    instance.leave_at_sigterm(SimpleNamespace(leave=lambda: done.append("leave")))
    SignalHandler(Manager()).sigterm_handler()
    return done


def main():
    sys.path.append(str(SHIMS))
    torch.set_num_threads(1)
    tables = selfcheck.BOOTSTRAP + selfcheck.SERVING + selfcheck.RANK + conv_axis.SYMBOLS
    facts = {"check": selfcheck.check(releases.installed().rows(tables))}
    platforms = Platforms()
    geometry = replace(Geometry(), draft_tokens=DRAFT_TOKENS)
    facts["stock"] = facts_of_pools(platforms, geometry)
    conv_axis.repair()
    conv_axis.repair()  # once is enough, and twice does no harm
    facts["repaired"] = facts_of_pools(platforms, geometry)
    facts["missing_settings"] = read_settings()
    facts["defaults"] = defaults()
    facts["sigterm"] = sigterm()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
