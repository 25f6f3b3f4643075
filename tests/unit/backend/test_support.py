"""Settings that our path does not serve: each is found on its sides, and only there."""

from types import SimpleNamespace

import pytest

from sglang_hetero.backend import support
from sglang_hetero.backend.support import FEATURES, reasons, route_reasons
from sglang_hetero.errors import TransferRefused
from sglang_hetero.layout import Side

FINE = {
    "attn_cp_size": 1,
    "attn_dcp_size": 1,
    "enable_kv_cache_sharding": False,
    "optimistic_prefill_attempts": 0,
    "disaggregation_decode_allocation_policy": "early",
    "enable_pd_role_switch": False,
    "disaggregation_decode_enable_radix_cache": False,
    "disaggregation_decode_host_receive_threshold": 1.0,
    "enable_hisparse": False,
    "SGLANG_DISAGG_STAGING_BUFFER": False,
    "SGLANG_RUST_SERVER": False,
}
REFUSED = {
    **{name: True for name, value in FINE.items() if value is False},
    "attn_cp_size": 2,
    "attn_dcp_size": 2,
    "optimistic_prefill_attempts": 3,
    "disaggregation_decode_allocation_policy": "prefill_complete",
    "disaggregation_decode_host_receive_threshold": 0.5,
}


def found(side, **changes):
    return reasons(side, lambda _source, setting: (FINE | changes)[setting])


@pytest.mark.parametrize("side", Side)
def test_a_server_with_none_of_them(side):
    assert found(side) == ()


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.setting)
def test_each_is_found_where_it_matters(feature, side):
    lines = found(side, **{feature.setting: REFUSED[feature.setting]})
    assert lines == ((feature.reason(),) if side in feature.sides else ())


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.setting)
def test_a_reason_says_what_to_change(feature):
    assert "\n" not in feature.reason()
    assert feature.name in feature.reason()
    assert feature.remedy in feature.reason()
    flag = feature.setting if feature.source is support.Source.ENV else "--" + feature.setting.replace("_", "-")
    assert flag.replace("attn-dcp", "dcp") in feature.remedy


def test_all_reasons_are_told():
    assert len(found(Side.DECODE, enable_hisparse=True, enable_pd_role_switch=True)) == 2


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("attn_cp_size", 2, "context parallelism"),
        ("decode_allocation_policy", "prefill_complete", "prefill_complete"),
        ("enable_kv_cache_sharding", True, "sharding"),
    ],
)
def test_what_decode_sees_of_a_prefill_server(field, value, word):
    info = SimpleNamespace(attn_cp_size=1, decode_allocation_policy="early", enable_kv_cache_sharding=False)
    assert route_reasons(info) == ()
    setattr(info, field, value)
    (line,) = route_reasons(info)
    assert word in line


@pytest.mark.parametrize(
    ("side", "rust", "stops"), [(Side.PREFILL, True, True), (Side.PREFILL, False, False), (Side.DECODE, True, False)]
)
def test_a_rust_server_is_stopped_at_start_on_prefill(side, rust, stops):
    def read(_source, setting):
        assert setting == "SGLANG_RUST_SERVER"
        return rust

    if stops:
        with pytest.raises(TransferRefused, match="without SGLANG_RUST_SERVER, or with SGLANG_HETERO=off"):
            support.refuse_start(side, read)
    else:
        support.refuse_start(side, read)
