"""The table of gaps: its mechanism on made-up modules, and its rows on the installed SGLang."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_hetero.cpu import gaps
from sglang_hetero.cpu.gaps import Gap, close_gaps
from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.window import ConvLayout

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.parametrize("error", [ImportError("no name"), RuntimeError("cannot")])
def test_a_replacement_that_cannot_be_made_leaves_everything_as_it_was(upstream, error):
    def fail(old):
        raise error

    with pytest.raises(HeteroError, match=f"fake_home.Thing.limit.*{error}"):
        close_gaps(
            (gap("op", None, bound_in=("fake_user",)), gap("flag", True), Gap("fake_home", "limit", "", fail, "Thing"))
        )
    assert upstream.home.op is upstream.user.op is upstream.op
    assert upstream.home.flag is False


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


def make_pool(layout, drafts):
    class Pool:
        def __init__(self, *, size, cache_params, speculative_num_draft_tokens=None):
            self.mamba_cache = SimpleNamespace(conv=[torch.ones(2, size + 1, 10, 3, dtype=torch.bfloat16)])

    Pool.__init__ = gaps._pool_with_layout(Pool.__init__, layout)
    return Pool(size=4, cache_params=None, speculative_num_draft_tokens=drafts).mamba_cache.conv[0]


@pytest.mark.parametrize(
    ("layout", "drafts", "shape"),
    [("channels_first", 4, (10, 3)), ("window_first", None, (3, 10)), ("window_first", 4, (6, 10))],
)
def test_pool_layout(layout, drafts, shape):
    conv = make_pool(ConvLayout(layout), drafts)
    assert conv.shape == (2, 5, *shape)
    assert conv.dtype is torch.bfloat16
    assert conv.is_contiguous()


@pytest.mark.parametrize("upstream_skips", [True, False])
def test_a_window_first_prefill_keeps_the_rows_of_the_drafts(upstream_skips):
    def skips():
        return upstream_skips

    assert gaps._prefill_keeps_draft_rows(skips, ConvLayout.CHANNELS_FIRST) is skips
    assert gaps._prefill_keeps_draft_rows(skips, ConvLayout.WINDOW_FIRST)() is False


def test_an_invalid_layout_is_no_table(monkeypatch):
    monkeypatch.setenv(CONV_LAYOUT_ENV, "sideways")
    with pytest.raises(HeteroError, match="sideways"):
        gaps.gaps()


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What sglang_probe.py sees with window_first; the real SGLang is imported once for all tests that ask."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "PYTHONPATH": str(ROOT),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        CONV_LAYOUT_ENV: "window_first",
    }
    command = [sys.executable, str(Path(__file__).with_name("sglang_probe.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_table_fits_the_installed_sglang(probed):
    assert (probed["cpu"], probed["amx"]) == (True, False)
    assert not probed["kept"]


def test_modules_that_imported_a_symbol_by_name_have_the_new_one(probed):
    assert not probed["stale"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_window_first_slots_of_both_sides_have_the_rows_of_the_drafts(probed, side):
    """SGLang's own pools, 4 draft tokens and K = 4: (K-1) + (4-1) rows, as on an NPU; q, k and v have 64 channels."""
    assert probed[side] == [6, 64]
