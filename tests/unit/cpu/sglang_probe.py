"""Run as a script: apply the plugin to the installed SGLang and print what is so afterwards, as JSON.

In a process of its own, because the rows patch SGLang for good, and because its import takes half a minute.
"""

import importlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from sglang_hetero import plugin
from sglang_hetero.cpu import gaps
from sglang_hetero.cpu.enable import SHIMS
from tests.harness import pools, scheduler
from tests.harness.geometry import Geometry
from tests.harness.sides import Shard, Side

MISSING = object()
REQUESTS = 2


def value(symbol_home, name):
    return vars(symbol_home).get(name, MISSING)


def apply_plugin():
    """Replace the rows; returns those that kept their value, and modules that kept an old function."""
    rows = [(gap, gaps._home(gap)) for gap in gaps.gaps()]
    before = [value(home, gap.name) for gap, home in rows]
    plugin.activate()
    kept = [gap.symbol for (gap, home), old in zip(rows, before, strict=True) if value(home, gap.name) is old]
    users = [(user, gap.name, home) for gap, home in rows for user in gap.bound_in]
    stale = [
        f"{user}.{name}"
        for user, name, home in users
        if getattr(importlib.import_module(user), name) is not getattr(home, name)
    ]
    return {"kept": kept, "stale": stale}


def conv_slots(mode, shard):
    """Shape of a conv slot in the pool that SGLang's own configurator builds for this side."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import get_context

    scheduler.publish(shard, Side(mode, "mooncake", bootstrap_port=1, shuffle_seed=0))
    get_context().override("test", max_mamba_cache_size=REQUESTS, disaggregation_decode_extra_slots=0)
    attributes = {
        "device": "cpu",
        "model_config": SimpleNamespace(context_len=16),
        "mambaish_config": SimpleNamespace(mamba2_cache_params=pools._cache_params(shard)),
        "layer_info": SimpleNamespace(start_layer=0, end_layer=shard.geometry.layers),
        "hybrid_gdn_config": None,
        "hybrid_kda_config": None,
    }
    # Its constructor wants a loaded model; a subclass may shadow its slots.
    configurator = object.__new__(type("Configurator", (KVCacheConfigurator,), attributes))
    built = configurator._build_req_to_token_pool(max_num_reqs=REQUESTS)
    (conv,) = built.mamba_pool.mamba_cache.conv
    return list(conv.shape[-2:])


def main():
    sys.path.append(str(SHIMS))
    importlib.import_module("sglang.srt.managers.scheduler")
    from sglang.srt.utils.common import cpu_has_amx_support, is_cpu

    facts = {"cpu": is_cpu(), "amx": cpu_has_amx_support(), **apply_plugin()}
    shard = Shard(replace(Geometry(), draft_tokens=4, conv_kernel=4), tp=1, rank=0)
    torch.set_num_threads(1)
    for mode in ("prefill", "decode"):
        facts[mode] = conv_slots(mode, shard)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
