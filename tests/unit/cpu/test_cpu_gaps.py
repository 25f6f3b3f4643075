"""The table of gaps: its mechanism on made-up modules, and its rows on the installed SGLang."""

import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_hetero.cpu import gaps
from sglang_hetero.cpu.gaps import Gap, close_gaps
from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV
from sglang_hetero.errors import HeteroError


@pytest.fixture
def upstream(monkeypatch):
    """A module with a function, a flag and a class, and a second one that imported the function by name."""

    def op(x, y):
        return x + y

    home, user = ModuleType("fake_home"), ModuleType("fake_user")
    home.op = user.op = op
    home.flag = False
    home.Thing = type("Thing", (), {"limit": 3})
    monkeypatch.setitem(sys.modules, "fake_home", home)
    monkeypatch.setitem(sys.modules, "fake_user", user)
    return SimpleNamespace(home=home, user=user, op=op)


def gap(name, new, **other):
    return Gap("fake_home", name, "test", lambda old: new, **other)


def test_replaces_at_home_and_where_it_was_imported(upstream):
    def new(x, y):
        return x - y

    close_gaps((gap("op", new, parameters=("x", "y"), bound_in=("fake_user", "not_loaded")), gap("flag", True)))
    assert upstream.home.op is upstream.user.op is new
    assert upstream.home.flag is True


def test_a_name_that_a_module_rebound_itself_is_left(upstream):
    upstream.user.op = other = lambda: 0
    close_gaps((gap("op", None, bound_in=("fake_user",)),))
    assert upstream.user.op is other


def test_a_class_attribute(upstream):
    close_gaps((gap("limit", 5, owner="Thing"), gap("extra", 1, owner="Thing", absent=True)))
    assert (upstream.home.Thing.limit, upstream.home.Thing.extra) == (5, 1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Gap("no_such_module", "x", "", str), "no_such_module.x is missing"),
        (gap("gone", 1), "fake_home.gone is missing"),
        (gap("x", 1, owner="Gone"), "fake_home.Gone.x is missing"),
        (gap("op", 1, parameters=("x", "z")), "no parameter z"),
        (gap("flag", 1, absent=True), "exists upstream now"),
    ],
)
def test_a_changed_upstream_stops_before_anything_is_replaced(upstream, row, reason):
    with pytest.raises(HeteroError, match=reason):
        close_gaps((gap("op", None), row))
    assert upstream.home.op is upstream.op


def test_the_process_stops_with_one_line(upstream, monkeypatch, capsys):
    """SystemExit, because SGLang's load_plugins goes on after any Exception."""
    monkeypatch.setattr(gaps, "gaps", lambda: (gap("gone", 1),))
    with pytest.raises(SystemExit) as stop:
        gaps.close_gaps_or_stop()
    assert stop.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "fake_home.gone is missing" in lines[0]
    assert "0.5.23" in lines[0]


def test_an_invalid_layout_stops_too(monkeypatch, capsys):
    monkeypatch.setenv(CONV_LAYOUT_ENV, "sideways")
    with pytest.raises(SystemExit):
        gaps.close_gaps_or_stop()
    assert "sideways" in capsys.readouterr().err


class ModelConfig:
    def __init__(self, heads, kv_heads):
        self.num_attention_heads, self.kv_heads = heads, kv_heads
        self.hf_config, self.hf_text_config = SimpleNamespace(), SimpleNamespace()

    def get_total_num_kv_heads(self):
        return self.kv_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "seen"),
    [(8, 2, 4, 4), (8, 2, 2, 2), (8, 4, 2, 4), (8, 3, 4, 3), (6, 2, 4, 2)],
    ids=["replicate", "equal", "fewer ranks", "kv do not divide", "heads do not divide"],
)
def test_kv_heads_are_replicated_where_they_divide(heads, kv_heads, tp, seen):
    """`seen` is what upstream takes as the number of KV heads; it pads unless that is a multiple of tp."""
    record = []

    def adjust(model_config, load_config, tp_size):
        record.append(model_config.get_total_num_kv_heads())
        return model_config

    config = gaps._replicate_kv_heads(adjust)(ModelConfig(heads, kv_heads), None, tp)
    assert record == [seen]
    assert config.get_total_num_kv_heads() == kv_heads
    if seen != kv_heads:
        assert config.hf_config.original_total_num_kv_heads == kv_heads


def make_pool(drafts):
    class Pool:
        def __init__(self, *, size, cache_params, speculative_num_draft_tokens=None):
            self.mamba_cache = SimpleNamespace(conv=[torch.ones(2, size + 1, 10, 3, dtype=torch.bfloat16)])

    new = gaps._pool_with_layout(Pool.__init__)
    Pool.__init__ = new
    return Pool(size=4, cache_params=None, speculative_num_draft_tokens=drafts).mamba_cache.conv[0]


@pytest.mark.parametrize(
    ("layout", "drafts", "shape"),
    [("channels_first", 4, (10, 3)), ("window_first", None, (3, 10)), ("window_first", 4, (6, 10))],
)
def test_pool_layout(monkeypatch, layout, drafts, shape):
    monkeypatch.setenv(CONV_LAYOUT_ENV, layout)
    conv = make_pool(drafts)
    assert conv.shape == (2, 5, *shape)
    assert conv.dtype is torch.bfloat16
    assert conv.is_contiguous()


PROBE = """
import sys
sys.path.append(SHIMS)
import sglang.srt.managers.scheduler
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.srt.model_executor import model_runner
from sglang.srt.utils.common import cpu_has_amx_support, is_cpu
from sglang_hetero import plugin
assert is_cpu() and not cpu_has_amx_support()
plugin.activate()
from sglang_hetero.cpu.ops import commit
assert hybrid.fused_mamba_state_scatter_with_mask is commit.scatter_state_with_mask
assert hybrid.scatter_mamba_states_after_mtp_verify.func is commit.scatter_states_after_verify
assert hybrid.scatter_mamba_states_after_mtp_verify.keywords["layout"].value == "window_first"
assert model_runner.adjust_config_with_unaligned_cpu_tp.__module__.startswith("sglang.")
assert hasattr(model_runner.adjust_config_with_unaligned_cpu_tp, "__wrapped__")
from sglang.srt.models import qwen2_moe
assert qwen2_moe.fused_gate_sigmoid_mul_add.__module__ == "sglang_hetero.cpu.ops.gates"
from sglang.srt.mem_cache.memory_pool import MambaPool
assert hasattr(MambaPool.__init__, "__wrapped__")
print("all rows fit")
"""


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_table_fits_the_installed_sglang(tmp_path):
    """In a process of its own: the rows patch SGLang for good, and its import takes half a minute."""
    from sglang_hetero.cpu.enable import SHIMS

    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        CONV_LAYOUT_ENV: "window_first",
    }
    code = PROBE.replace("SHIMS", repr(str(SHIMS)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "all rows fit" in done.stdout, done.stderr[-2000:]
