"""launch/ascend and launch/cuda: SGLang and our router understand the scripts, which do what they promise.

Nothing is started: every script is run with --print, and its command lines go through the parsers of SGLang itself.
"""

import argparse
import re
import subprocess

import pytest

from sglang_hetero.cli import _parser as our_parser
from sglang_hetero.doctor.host import CANN_FOLDERS
from sglang_hetero.router import source
from tests.unit.launch.scripts import LAUNCH, NEEDED, PLATFORMS, TOPOLOGIES, Command, environment, parse, printed, run

SGLANG, ROUTER, STORE = "sglang.launch_server", "sglang_hetero", "memfabric_hybrid.launch_ascend_mf_store"
ROLES = ("prefill", "decode", "mixed")
SERVERS = [(platform, name) for platform in PLATFORMS for name in (*TOPOLOGIES, *ROLES)]
FLEETS = [(platform, name) for platform in PLATFORMS for name in TOPOLOGIES]
SIZES = {
    "mixed_tp2": [("null", 2)],
    "mixed_tp4": [("null", 4)],
    "p2_d1": [("prefill", 2), ("decode", 1)],
    "p2_d2": [("prefill", 2), ("decode", 2)],
    "p2x2_d2": [("prefill", 2), ("prefill", 2), ("decode", 2)],
}
"""The five topologies of docs/design.md's figures: mode and TP of each server."""


def parsed(parser: argparse.ArgumentParser, command: Command):
    """SGLang's record of one server. Raises where it has no such flag, or no such value."""
    from sglang.srt.server_args import ServerArgs

    assert command.module == SGLANG
    for flag in (one for one in command.options if one.startswith("--")):
        # argparse would take an abbreviation; and SGLang still takes some flags that it is about to drop.
        assert flag in parser._option_string_actions, f"SGLang has no {flag}"
        assert "deprecated" not in str(parser._option_string_actions[flag].help).lower(), flag
    return ServerArgs.from_cli_args(parser.parse_args(command.options))


def servers(commands: list[Command]) -> list[Command]:
    return [one for one in commands if one.module == SGLANG]


@pytest.mark.parametrize(("platform", "script"), SERVERS)
def test_sglang_understands_every_server(platform, script, sglang_parser):
    found = servers(printed(f"{platform}/{script}.sh", **NEEDED))
    assert found
    for command in found:
        made = parsed(sglang_parser, command)
        # The seed's settings.
        assert made.speculative_algorithm == "NEXTN"
        assert (made.speculative_num_steps, made.speculative_eagle_topk, made.speculative_num_draft_tokens) == (3, 1, 4)
        assert made.chunked_prefill_size == 8192
        assert made.disable_radix_cache
        assert not made.disable_overlap_schedule
        if made.disaggregation_mode == "prefill":
            assert made.cuda_graph_bs_decode is None
        else:
            assert made.cuda_graph_backend_decode == "full"
            assert made.cuda_graph_bs_decode == list(range(1, made.max_running_requests + 1))
        # What docs/support.md lists is refused by our transfer.
        assert made.disaggregation_decode_allocation_policy == "early"
        assert made.optimistic_prefill_attempts == 0
        assert not made.disaggregation_decode_enable_radix_cache
        # And the platform's.
        assert made.device == {"ascend": "npu", "cuda": "cuda"}[platform]
        assert made.page_size == {"ascend": 128, "cuda": 64}[platform]
        # The NPUs' decode kernel takes states for bf16 whatever they are (docs/ascend.md).
        assert made.mamba_ssm_dtype == {"ascend": "bfloat16", "cuda": None}[platform]
        if made.disaggregation_mode != "null":
            assert made.disaggregation_transfer_backend == {"ascend": "ascend", "cuda": "mooncake"}[platform]


@pytest.mark.parametrize(("platform", "topology"), FLEETS)
def test_a_fleet_has_the_servers_of_its_name_and_a_router_for_them(platform, topology, sglang_parser):
    commands = printed(f"{platform}/{topology}.sh", **NEEDED)
    made = [parsed(sglang_parser, command) for command in servers(commands)]
    assert [(one.disaggregation_mode, one.tp_size) for one in made] == SIZES[topology]
    devices = [one.base_gpu_id + rank for one in made for rank in range(one.tp_size)]
    assert devices == list(range(len(devices))), "each rank its own, one behind the other"

    routers = [command for command in commands if command.module == ROUTER]
    if topology.startswith("mixed"):
        assert not routers
        assert made[0].port == 30000
        return
    (router,) = routers
    arguments = our_parser().parse_args(router.options)
    assert arguments.port == 30000
    url = "http://{0.host}:{0.port}".format
    assert source.prefills(arguments.prefill) == [
        (url(one), one.disaggregation_bootstrap_port) for one in made if one.disaggregation_mode == "prefill"
    ]
    assert arguments.decode == [[url(one)] for one in made if one.disaggregation_mode == "decode"]
    ports = [one.port for one in made] + [one.nccl_port for one in made] + [arguments.port]
    ports += [port for _, port in source.prefills(arguments.prefill)]
    assert len(set(ports)) == len(ports)
    # What must be equal on both sides for a hand-over.
    for field in ("model_path", "served_model_name", "page_size", "speculative_num_steps", "dtype", "kv_cache_dtype"):
        assert len({getattr(one, field) for one in made}) == 1, field
    assert {command.environment["SGLANG_HOST_IP"] for command in servers(commands)} == {made[0].host}


def test_sglang_has_no_option_for_a_draft_at_tp1(sglang_parser):
    """The seed kept the draft's body at TP1. On the day SGLang can, this fails, and serve.sh should say so."""
    names = [name for name in sglang_parser._option_string_actions if re.search(r"(draft|mtp|spec)", name)]
    assert len(names) > 10
    assert not [name for name in names if re.search(r"\btp\b|tensor|parallel", name)]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_router_script_listens_where_it_is_told_and_passes_flags_on(platform):
    (command,) = printed(f"{platform}/router.sh", "--etcd", "10.0.0.9:2379", LAUNCH_ROUTER_PORT="9000")
    arguments = our_parser().parse_args(command.options)
    assert (arguments.host, arguments.port, arguments.etcd) == ("0.0.0.0", 9000, "10.0.0.9:2379")


def test_options_behind_a_script_win(sglang_parser):
    for script in ("cuda/decode.sh", "cuda/mixed_tp2.sh"):
        (command,) = printed(script, "--page-size", "32", "--log-level", "debug")
        made = parsed(sglang_parser, command)
        assert (made.page_size, made.log_level) == (32, "debug")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("role", "mode", "tp"), [("prefill", "prefill", 2), ("decode", "decode", 1), ("mixed", "null", 2)]
)
def test_a_server_alone_is_the_one_of_p2_d1(platform, role, mode, tp, sglang_parser):
    (command,) = printed(f"{platform}/{role}.sh", **NEEDED)
    made = parsed(sglang_parser, command)
    assert (made.disaggregation_mode, made.tp_size, made.base_gpu_id, made.nnodes) == (mode, tp, 0, 1)
    assert (made.host, made.port, made.disaggregation_bootstrap_port) == ("0.0.0.0", 30000, 8998)


def test_settings_become_options(sglang_parser):
    (command,) = printed(
        "cuda/prefill.sh",
        LAUNCH_MODEL="/models/a b's",
        LAUNCH_TP="4",
        LAUNCH_FIRST_DEVICE="2",
        LAUNCH_IP="10.0.0.7",
        LAUNCH_PORT="31000",
        LAUNCH_BOOTSTRAP_PORT="9001",
        LAUNCH_MTP="0",
        LAUNCH_CHUNK="4096",
        LAUNCH_PAGE="32",
        LAUNCH_REQUESTS="8",
        LAUNCH_MEMORY="0.7",
        LAUNCH_IB_DEVICE="mlx5_0,mlx5_1",
        LAUNCH_NIC="eth1",
    )
    made = parsed(sglang_parser, command)
    assert (made.model_path, made.served_model_name) == ("/models/a b's", "a b's")
    assert (made.tp_size, made.base_gpu_id, made.host, made.port) == (4, 2, "10.0.0.7", 31000)
    assert (made.disaggregation_bootstrap_port, made.disaggregation_ib_device) == (9001, "mlx5_0,mlx5_1")
    assert (made.chunked_prefill_size, made.page_size, made.max_running_requests) == (4096, 32, 8)
    assert (made.mem_fraction_static, made.speculative_algorithm) == (0.7, None)
    assert command.environment == {
        "SGLANG_HOST_IP": "10.0.0.7",
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
    }


@pytest.mark.parametrize(
    "named",
    [
        {"LAUNCH_NODES": "2", "LAUNCH_NODE": "1", "LAUNCH_LEADER": "10.0.0.1:20000"},
        {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "10.0.0.1"},
    ],
    ids=["settings", "LeaderWorkerSet"],
)
def test_a_server_on_two_nodes(named, sglang_parser):
    (command,) = printed("ascend/prefill.sh", LAUNCH_TP="16", **NEEDED, **named)
    made = parsed(sglang_parser, command)
    assert (made.nnodes, made.node_rank, made.dist_init_addr, made.tp_size) == (2, 1, "10.0.0.1:20000", 16)


@pytest.mark.parametrize(("chip", "protocol"), [("910b", "device_rdma"), ("a3", "sdma")])
def test_memfabric_is_told_its_way_and_its_store(chip, protocol):
    for script in ("prefill", "decode"):
        (command,) = printed(f"ascend/{script}.sh", **NEEDED | {"LAUNCH_CHIP": chip})
        assert command.environment["ASCEND_MF_TRANSFER_PROTOCOL"] == protocol
        assert command.environment["ASCEND_MF_STORE_URL"] == NEEDED["ASCEND_MF_STORE_URL"]


def test_what_the_caller_has_set_stays():
    (command,) = printed("ascend/decode.sh", **NEEDED, ASCEND_MF_TRANSFER_PROTOCOL="sdma", STREAMS_PER_DEVICE="8")
    assert command.environment["ASCEND_MF_TRANSFER_PROTOCOL"] == "sdma"
    assert command.environment["STREAMS_PER_DEVICE"] == "8"


def test_several_prefill_servers_get_a_store_of_their_own():
    """A store lives in the process that made it, and would end with that prefill server."""
    stores = {
        name: [one for one in printed(f"ascend/{name}.sh", LAUNCH_CHIP="a3") if one.module == STORE]
        for name in TOPOLOGIES
    }
    assert {name for name, found in stores.items() if found} == {"p2x2_d2"}
    (store,) = stores["p2x2_d2"]
    assert store.environment == {"MF_CONFIG_STORE_URL": "tcp://127.0.0.1:24669"}
    (alone,) = printed("ascend/store.sh", **NEEDED)
    assert (alone.module, alone.environment) == (STORE, {"MF_CONFIG_STORE_URL": NEEDED["ASCEND_MF_STORE_URL"]})


@pytest.mark.parametrize(
    ("script", "named", "said"),
    [
        ("cuda/prefill.sh", {"LAUNCH_PROT": "30001"}, "LAUNCH_PROT is no setting"),
        ("cuda/p2_d1.sh", {"LAUNCH_PROT": "30001"}, "LAUNCH_PROT is no setting"),
        ("cuda/decode.sh", {"LAUNCH_PORT": "http"}, "LAUNCH_PORT=http: must be a whole number from 1 on"),
        ("cuda/decode.sh", {"LAUNCH_TP": "0"}, "LAUNCH_TP=0: must be a whole number from 1 on"),
        ("cuda/decode.sh", {"LAUNCH_REQUESTS": "08"}, "LAUNCH_REQUESTS=08: must be"),
        ("cuda/decode.sh", {"LAUNCH_CHUNK": "x[$(touch hacked)]"}, "must be a whole number"),
        ("cuda/prefill.sh", {"LAUNCH_NODES": "2"}, "LAUNCH_LEADER"),
        ("ascend/decode.sh", {"ASCEND_MF_STORE_URL": NEEDED["ASCEND_MF_STORE_URL"]}, "must be 910b"),
        ("ascend/decode.sh", {"LAUNCH_CHIP": "a3"}, "must be tcp://ADDRESS:PORT"),
        ("ascend/decode.sh", NEEDED | {"ASCEND_MF_STORE_URL": "10.0.0.1:24669"}, "must be tcp://ADDRESS:PORT"),
        ("ascend/store.sh", {}, "set ASCEND_MF_STORE_URL"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_right(script, named, said):
    done = run(script, "--print", **named)
    assert done.returncode == 1
    assert said in done.stderr
    assert not done.stdout
    assert not (LAUNCH / "hacked").exists()


def test_an_unknown_platform_role_or_topology_is_refused():
    for arguments, said in (
        (("rocm", "prefill"), "unknown platform rocm"),
        (("cuda", "proxy"), "unknown role proxy"),
        (("cuda", "store"), "only MemFabric"),
        (("cuda",), "usage"),
    ):
        done = run("lib/serve.sh", *arguments)
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    for topology, said in (("p3", "unknown topology 'p3'"), ("p2_d2dp2", "attention-DP")):
        done = run("lib/fleet.sh", "cuda", topology)
        assert (done.returncode, said in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_has_the_same_scripts_as_the_other(platform):
    wanted = {*TOPOLOGIES, *ROLES, "router", "validate"} | ({"store"} if platform == "ascend" else set())
    assert {path.stem for path in (LAUNCH / platform).glob("*.sh")} == wanted


def test_a_script_is_found_through_a_link(tmp_path):
    link = tmp_path / "prefill"
    link.symlink_to(LAUNCH / "cuda" / "prefill.sh")
    done = run(str(link), "--print")
    assert parse(done.stdout)[0].value("--disaggregation-mode") == "prefill"


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize(
    "script",
    [
        *(f"{platform}/{name}.sh" for platform in PLATFORMS for name in ("p2_d1", "mixed_tp2", *ROLES, "router")),
        "ascend/store.sh",
        "lib/serve.sh",
        "lib/fleet.sh",
        "lib/serve.sh ascend",
        "lib/fleet.sh ascend",
        "lib/fleet.sh ascend p2_d1",
    ],
)
def test_who_asks_for_help_gets_it_and_starts_nothing(script, asked, tmp_path):
    """No setting is needed for that, and SGLang, which would start to be stopped again, is not asked."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    python.chmod(0o755)
    done = run(*script.split(), asked, LAUNCH_PYTHON=str(python), LAUNCH_LOGS=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"(serve|fleet)\.sh PLATFORM .*\[--print\] \[OPTIONS\]: ", done.stdout)
    assert "launch/README.md" in done.stdout
    assert "shellcheck" not in done.stdout
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("installed", "given", "sourced"),
    [
        (("cann", "nnal/atb"), {}, ["cann", "nnal/atb"]),
        (("ascend-toolkit", "nnal/atb"), {}, ["ascend-toolkit", "nnal/atb"]),
        (("cann", "ascend-toolkit"), {}, ["cann"]),
        ((), {}, []),
        (("cann", "nnal/atb"), {"ASCEND_TOOLKIT_HOME": "/opt/cann"}, []),
        (("cann", "nnal/atb"), {"ASCEND_HOME_PATH": "/opt/cann"}, []),
    ],
    ids=["8.5 and later", "before 8.5", "both", "none", "the shell has them", "the shell has them, by the other name"],
)
def test_canns_variables_are_taken_from_where_it_is_installed(installed, given, sourced, tmp_path):
    for name in installed:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "set_env.sh").write_text(f"echo {name}; : $NOT_SET\n")
    steps = [". common.sh", ". ascend.sh", f"ascend_folder={tmp_path}", "platform_settings", "set -o | grep nounset"]
    done = subprocess.run(
        ["bash", "-c", "; ".join(steps)],
        cwd=LAUNCH / "lib",
        env=environment(given),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *found, nounset = done.stdout.splitlines()
    assert found == sourced
    assert nounset.split() == ["nounset", "on"]


def test_canns_folders_are_those_of_the_doctor():
    text = (LAUNCH / "lib" / "ascend.sh").read_text()
    (root,) = re.findall(r"^ascend_folder=(\S+)$", text, flags=re.MULTILINE)
    named = [f"{root}/{name}" for name in re.findall(r"toolkit=\$ascend_folder/([\w-]+)", text)]
    assert named == list(CANN_FOLDERS)
