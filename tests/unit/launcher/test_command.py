"""Command lines of servers and routers: what the topology and options turn into."""

import argparse
from dataclasses import replace

import pytest

from sglang_hetero import models
from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV
from sglang_hetero.errors import OptionError
from sglang_hetero.launcher import command, topology
from sglang_hetero.launcher.command import Endpoint
from sglang_hetero.launcher.options import DType, Options, Router
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.router import command as routers

ENDPOINT = Endpoint("127.0.0.1", 20000, 20001, bootstrap_port=20002, dist_port=20010)


def server(name: str, index: int, options: Options) -> list[str]:
    return command.server_command("/models/tiny", options, topology.parse(name).instances[index], ENDPOINT)


def value(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_prefill_and_decode_servers():
    prefill = server("p2_d1", 0, Options())
    decode = command.server_command(
        "/models/tiny", Options(), topology.parse("p2_d1").instances[1], replace(ENDPOINT, bootstrap_port=None)
    )
    assert [value(line, "--disaggregation-mode") for line in (prefill, decode)] == ["prefill", "decode"]
    assert [value(line, "--tp-size") for line in (prefill, decode)] == ["2", "1"]
    assert value(prefill, "--disaggregation-bootstrap-port") == "20002"
    assert "--disaggregation-bootstrap-port" not in decode
    assert "--disaggregation-mode" not in server("mixed_tp2", 0, Options())


def test_attention_dp_gets_its_address():
    line = server("p1_d4dp2", 1, Options())
    assert value(line, "--tp-size") == "4"
    assert value(line, "--dp-size") == "2"
    assert value(line, "--dist-init-addr") == "127.0.0.1:20010"
    assert "--dp-size" not in server("p1_d4", 1, Options())


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_speculation_is_a_chain_of_the_asked_depth(depth):
    line = server("mixed_tp1", 0, Options(mtp=depth))
    assert value(line, "--speculative-num-steps") == str(depth)
    assert value(line, "--speculative-num-draft-tokens") == str(depth + 1)
    assert value(line, "--speculative-eagle-topk") == "1"


def test_the_two_roles_may_speculate_differently():
    prefill, decode = (
        command.server_command("/models/tiny", Options(mtp=3, prefill_mtp=0, decode_mtp=5), one, ENDPOINT)
        for one in topology.parse("p2_d1").instances
    )
    assert not [flag for flag in prefill if "speculative" in flag]
    assert value(decode, "--speculative-num-steps") == "5"
    only_decode = command.server_command(
        "/models/tiny", Options(mtp=3, decode_mtp=0), topology.parse("p2_d1").instances[0], ENDPOINT
    )
    assert value(only_decode, "--speculative-num-steps") == "3"


def test_without_speculation_no_flag_of_it():
    assert not [flag for flag in server("mixed_tp1", 0, Options()) if "speculative" in flag]


def test_speculation_needs_a_model_with_an_mtp_layer():
    Options(mtp=3).check_model(models.spec("tiny"))
    Options(mtp=0).check_model(models.spec("tiny-gqa"))
    with pytest.raises(OptionError, match="--decode-mtp 1: tiny-gqa has no MTP layer; use --decode-mtp 0 or another"):
        Options(decode_mtp=1).check_model(models.spec("tiny-gqa"))
    with pytest.raises(OptionError, match="--mtp 3: tiny-gqa has no MTP layer; use --mtp 0 or another model"):
        Options(mtp=3).check_model(models.spec("tiny-gqa"))


def test_no_server_asks_cuda_for_pinned_memory():
    """SGLang's default for decode is a pinned pool where a model has no linear state."""
    assert value(server("p2_d1", 1, Options()), "--disaggregation-decode-retraction-backup") == "cpu_tensor"
    assert "--disaggregation-decode-retraction-backup" not in server("p2_d1", 0, Options())


def test_prefix_cache():
    assert "--disable-radix-cache" in server("mixed_tp1", 0, Options())
    line = server("mixed_tp1", 0, Options(radix_cache=True))
    assert "--disable-radix-cache" not in line
    assert value(line, "--mamba-radix-cache-strategy") == "no_buffer"


def test_arguments_of_the_user_come_last():
    line = server("mixed_tp1", 0, Options(server_arguments=("--log-level", "debug")))
    assert line[-2:] == ["--log-level", "debug"]


def test_environment(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    prefill, decode = topology.parse("p4_d1").instances
    options = Options(conv_layout=ConvLayout.WINDOW_FIRST, dtype=DType.BFLOAT16)
    shell = {"SGLANG_PLUGINS": "another", "SGLANG_MAMBA_SSM_DTYPE": "bfloat16", "MC_STORE": "x", "MOONCAKE_CONFIG": "y"}
    env = command.server_env({"HOME": "/home/x"} | shell, options, prefill, 0)
    assert env["HOME"] == "/home/x"
    assert env[CONV_LAYOUT_ENV] == "window_first"
    assert env["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|0|1"
    assert not set(shell) & set(env), "a fleet is what its options say"
    # The fifth rank of the fleet: the CPUs go round.
    assert command.server_env({}, options, decode, 4)["SGLANG_CPU_OMP_THREADS_BIND"] == "0"


def test_options_of_the_transfer_reach_the_servers():
    shell = {"SGLANG_HETERO": "always", "SGLANG_HETERO_STATE": "push", "SGLANG_HETERO_CACHE": "/models"}
    options = Options(prefill_env=(("SGLANG_HETERO", "off"), ("OMP_NUM_THREADS", "2")), decode_env=(("X", "a=b"),))
    prefill, decode = (command.server_env(shell, options, i, 0) for i in topology.parse("p2_d1").instances)
    assert {name: prefill[name] for name in shell} == {**shell, "SGLANG_HETERO": "off"}
    assert {name: decode[name] for name in shell} == shell
    assert (prefill["OMP_NUM_THREADS"], decode["OMP_NUM_THREADS"]) == ("2", "1")
    assert "X" not in prefill
    assert decode["X"] == "a=b"


def test_a_wrong_option_of_the_transfer_is_refused():
    instance = topology.parse("p2_d1").instances[1]
    with pytest.raises(OptionError, match="SGLANG_HETERO_STATE='pusch'"):
        command.server_env({"SGLANG_HETERO_STATE": "pusch"}, Options(), instance, 0)
    with pytest.raises(OptionError, match="SGLANG_HETERO_STAET='push': no such option; is SGLANG_HETERO_STATE meant"):
        command.server_env({}, Options(decode_env=(("SGLANG_HETERO_STAET", "push"),)), instance, 0)


def test_every_server_of_a_fleet_has_cpus_of_its_own(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    instances = topology.parse("p2x2_d2").instances
    envs = [command.server_env({}, Options(), instance, 2 * i) for i, instance in enumerate(instances)]
    assert [env["SGLANG_CPU_OMP_THREADS_BIND"] for env in envs] == ["0|1", "2|3", "4|5"]


def router(options: Options) -> str:
    prefills = [ENDPOINT, replace(ENDPOINT, port=20100, bootstrap_port=20102)]
    decodes = [replace(ENDPOINT, port=20200, bootstrap_port=None)]
    return " ".join(command.router_command(options, 30000, prefills, decodes))


@pytest.mark.parametrize("kind", Router)
def test_every_router_is_given_the_urls(kind):
    line = router(Options(router=kind))
    assert "--host 127.0.0.1 --port 30000" in line
    assert "--prefill http://127.0.0.1:20000 20002 --prefill http://127.0.0.1:20100 20102" in line
    assert "--decode http://127.0.0.1:20200" in line
    assert ("--mini-lb" in line) == (kind is Router.MINI)
    assert ("sglang_hetero router" in line) == (kind is Router.HETERO)


def test_servers_and_router_meet_in_etcd():
    options = Options(router=Router.HETERO, etcd="127.0.0.1:2379")
    line = router(options)
    assert "--etcd 127.0.0.1:2379" in line and "20000" not in line and "20200" not in line
    prefill = topology.parse("p2_d1").instances[0]
    shell = {"SGLANG_HETERO_ETCD": "10.0.0.1:1", "SGLANG_HETERO_ETCD_PREFIX": "/team"}
    env = command.server_env(shell, options, prefill, 0)
    assert (env["SGLANG_HETERO_ETCD"], env["SGLANG_HETERO_ETCD_PREFIX"]) == ("127.0.0.1:2379", "/team")
    assert command.server_env(shell, Options(), prefill, 0)["SGLANG_HETERO_ETCD"] == "10.0.0.1:1"
    assert "SGLANG_HETERO_ETCD" not in command.server_env({}, Options(), prefill, 0)


def test_the_routers_own_command_takes_its_line():
    """What the launcher gives it are flags that it has."""
    parser = argparse.ArgumentParser()
    routers.add_parser(parser.add_subparsers())
    for options in (Options(router=Router.HETERO), Options(router=Router.HETERO, etcd="127.0.0.1:2379")):
        given = router(options).split()
        arguments = parser.parse_args(given[given.index("sglang_hetero") + 1 :])
        assert (arguments.host, arguments.port) == ("127.0.0.1", 30000)
        assert arguments.etcd == (options.etcd or None)
        assert [pair[1] for pair in arguments.prefill] == ([] if options.etcd else ["20002", "20102"])
