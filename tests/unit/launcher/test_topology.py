"""Names of topologies: what they mean, and one clear line for what they cannot mean."""

from types import SimpleNamespace

import pytest

from sglang_hetero.launcher.topology import EXAMPLES, Role, TopologyNameError, parse


@pytest.mark.parametrize(
    ("name", "servers"),
    [
        ("mixed_tp1", [("mixed", 1, 1)]),
        ("mixed_tp4", [("mixed", 4, 1)]),
        ("p2_d1", [("prefill", 2, 1), ("decode", 1, 1)]),
        ("p4_d1", [("prefill", 4, 1), ("decode", 1, 1)]),
        ("p2x2_d2", [("prefill", 2, 1), ("prefill", 2, 1), ("decode", 2, 1)]),
        ("p2p4_d1", [("prefill", 2, 1), ("prefill", 4, 1), ("decode", 1, 1)]),
        ("p1x2p3_d2", [("prefill", 1, 1), ("prefill", 1, 1), ("prefill", 3, 1), ("decode", 2, 1)]),
        ("p2_d2dp2", [("prefill", 2, 1), ("decode", 2, 2)]),
        ("p3x8_d16dp4", [("prefill", 3, 1)] * 8 + [("decode", 16, 4)]),
    ],
)
def test_name_gives_servers(name, servers):
    topology = parse(name)
    assert [(i.role.value, i.tp, i.dp) for i in topology.instances] == servers
    assert topology.is_mixed == (servers[0][0] == "mixed")
    assert topology.ranks == sum(tp for _, tp, _ in servers)
    names = [i.name for i in topology.instances]
    assert len(set(names)) == len(names)


def test_every_example_is_a_topology():
    for name in EXAMPLES:
        assert parse(name).name == name


@pytest.mark.parametrize(
    "name", ["", "p2", "p2d1", "P2_D1", "p2_d1 ", "mixed_tp", "mixed_tp2x2", "p2_d1x2", "p-1_d1", "p2x_d1", "p2_d1dp"]
)
def test_unknown_names_are_refused_with_the_grammar(name):
    with pytest.raises(TopologyNameError, match=r"unknown topology .*p<N>\[x<M>\].*_d<N>\[dp<M>\].*p2_d1"):
        parse(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("p0_d1", "prefill TP is 0, allowed are 1 to 16"),
        ("p2_d17", "decode TP is 17, allowed are 1 to 16"),
        ("mixed_tp99999", "TP is 99999, allowed are 1 to 16"),
        ("p2x9_d1", "number of prefill servers is 9, allowed are 1 to 8"),
        ("p2x0_d1", "number of prefill servers is 0"),
        ("p2x5p4x4_d1", "9 prefill servers, allowed are 1 to 8"),
        ("p2_d4dp3", "attention-DP 3 does not divide decode TP 4"),
    ],
)
def test_impossible_sizes_are_refused_with_the_rule(name, reason):
    with pytest.raises(TopologyNameError, match=reason):
        parse(name)


def model(attention=8, kv=4, key=4, value=8):
    return SimpleNamespace(
        name="some-model", attention_heads=attention, kv_heads=kv, linear_key_heads=key, linear_value_heads=value
    )


@pytest.mark.parametrize("name", ["mixed_tp1", "p2_d1", "p4_d1", "p1_d4", "p2_d4dp2"])
def test_heads_that_divide_are_accepted(name):
    parse(name).check_model(model())


def test_replicated_kv_heads_are_accepted():
    parse("p4_d1").check_model(model(kv=2))


@pytest.mark.parametrize(
    ("name", "heads", "reason"),
    [
        ("p3_d1", model(), "prefill0 splits heads over 3 ranks, but some-model has 8 attention heads"),
        ("p1_d8", model(), "decode0 splits heads over 8 ranks, but some-model has 4 linear key heads"),
        ("p1_d8", model(key=8, value=12), "12 linear value heads"),
        ("mixed_tp2", model(attention=6, kv=3), "3 kv heads: neither divides the other"),
    ],
)
def test_heads_that_do_not_divide_are_refused(name, heads, reason):
    with pytest.raises(TopologyNameError, match=reason):
        parse(name).check_model(heads)


def test_attention_dp_reduces_the_ranks_that_share_heads():
    topology = parse("p1_d8dp2")
    assert topology.instances[1].role is Role.DECODE
    topology.check_model(model())
