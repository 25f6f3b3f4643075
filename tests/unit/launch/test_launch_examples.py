"""The examples of launch/: compose, Kubernetes and systemd files, and the README, run as they stand.

Their environments go through the scripts (--print), and the command lines through SGLang's own parser. compose's and
Kubernetes's schemas are not here: launch/README.md says what was checked by hand.
"""

import configparser
import re
import shlex
import stat
import subprocess

import pytest
import yaml

from sglang_hetero.backend import options
from sglang_hetero.cli import _parser as our_parser
from sglang_hetero.discovery import settings
from tests.unit.launch.scripts import INSTALLED, LAUNCH, NEEDED, PLATFORMS, Command, env_file, printed

KNOWN = set(
    re.findall(r"LAUNCH_[A-Z_]+", re.search(r"known=\((.*?)\)", (LAUNCH / "lib/common.sh").read_text(), re.S)[1])
)
SCRIPTS = sorted(path.relative_to(LAUNCH).as_posix() for path in LAUNCH.rglob("*.sh"))
POD_IP = "10.0.0.7"
SOURCED = {"lib/common.sh", "lib/ascend.sh", "lib/cuda.sh"}


def check_variables(names) -> None:
    """Ours, all of them: a misspelt one stops the server or the script."""
    for name in names:
        assert not name.startswith("LAUNCH_") or name in KNOWN, name
        assert not name.startswith(options.PREFIX) or name in options.NAMES, name


def shown(command: list[str], variables: dict[str, str]) -> Command:
    """What the process of an example would run."""
    check_variables(variables)
    script = command[0].removeprefix(INSTALLED)
    assert script != command[0], command
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], one) for one in command[1:]]
    (found,) = printed(script, *arguments, **variables)
    return found


def plain(environment: dict) -> dict[str, str]:
    """As compose gives it to a process; ${NAME:-default} filled in from compose.env."""
    named = env_file(LAUNCH / "compose" / "compose.env")
    return {name: re.sub(r"\$\{(\w+)[^}]*\}", lambda found: named[found[1]], str(v)) for name, v in environment.items()}


# Shell


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_sound_and_can_be_run(script):
    path = LAUNCH / script
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    text = path.read_text()
    assert bool(path.stat().st_mode & stat.S_IXUSR) is (script not in SOURCED)
    assert text.startswith("# shellcheck shell=bash" if script in SOURCED else "#!/usr/bin/env bash")
    assert all(len(line) <= 120 for line in text.splitlines())


def test_no_option_of_sglang_stands_in_two_places():
    """Each rule once: an option is given by one line of lib/, and nowhere else but where the README explains it."""
    given: dict[str, list[str]] = {}
    for path in (*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.yaml"), *LAUNCH.rglob("*.service")):
        for line in path.read_text().splitlines():
            code = "" if line.lstrip().startswith("#") else line
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code):
                given.setdefault(flag, []).append(path.relative_to(LAUNCH).as_posix())
    of_servers = {flag: where for flag, where in given.items() if any(one.startswith("lib/") for one in where)}
    assert "--speculative-num-steps" in of_servers
    twice = {flag: where for flag, where in of_servers.items() if len(where) > 1}
    # The router and servers listen somewhere; --print is this scripts' own.
    assert set(twice) <= {"--host", "--port", "--print", "--prefill", "--decode", "--device"}, twice


# README


def test_the_readme_lists_every_setting():
    text = (LAUNCH / "README.md").read_text()
    table = text[text.index("| variable | default |") :]
    rows = re.findall(r"^\| (`LAUNCH_[^|]*) \|", table, flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"LAUNCH_[A-Z_]+", row)} == KNOWN
    check_variables(re.findall(r"LAUNCH_[A-Z_]+[A-Z]|SGLANG_HETERO_[A-Z_]+[A-Z]", text))


def test_the_readme_names_files_that_are_there():
    text = (LAUNCH / "README.md").read_text()
    root = LAUNCH.parent
    named = set(re.findall(r"(?<![\w/.-])((?:launch|docs|tests)/[\w./@-]+\w)", text))
    assert len(named) > 15
    missing = {name for name in named if not (root / name).exists() and not name.startswith("launch/compose/token")}
    assert not missing
    of_base = re.findall(r"`(base/[\w/.]+)`", text)
    assert len(of_base) == 2
    assert all((LAUNCH / "kubernetes" / name).exists() for name in of_base)


@pytest.mark.parametrize(("document", "least"), [("launch/README.md", 8), ("docs/ascend.md", 6)])
def test_commands_of_documents_can_be_run(document, least, sglang_parser):
    """Those with a script of launch/ascend, launch/cuda or launch/lib in them, with their variables."""
    text = (LAUNCH.parent / document).read_text().replace("\\\n", " ")
    found = 0
    for line in re.findall(r"^    +(.*launch/(?:ascend|cuda|lib)/\w+\.sh.*)$", text, flags=re.MULTILINE):
        if "/validate.sh" in line:
            continue  # starts no server; tests/unit/docs has its options
        words = [word for word in shlex.split(line, comments=True) if word != "--print"]
        at = next(i for i, word in enumerate(words) if word.startswith("launch/"))
        variables = dict(word.split("=", 1) for word in words[:at])
        for command in printed(words[at].removeprefix("launch/"), *words[at + 1 :], **NEEDED | variables):
            if command.module == "sglang.launch_server":
                sglang_parser.parse_args(command.options)
                found += 1
            elif command.module == "sglang_hetero":
                our_parser().parse_args(command.options)
                found += 1
    assert found >= least


# systemd


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(LAUNCH / "systemd" / "sglang-hetero@.service")
    return parser


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed", "router", "store"])
def test_the_unit_starts_every_role_with_the_settings_of_its_files(role, sglang_parser):
    variables = env_file(LAUNCH / "systemd" / "fleet.env") | env_file(LAUNCH / "systemd" / "host.env")
    check_variables(variables)
    command = unit()["Service"]["ExecStart"].replace("${LAUNCH_PLATFORM}", variables["LAUNCH_PLATFORM"])
    command = command.replace("%i", role).replace(INSTALLED, "").split()
    (found,) = printed(*command, **variables)
    if role in ("prefill", "decode", "mixed"):
        sglang_parser.parse_args(found.options)


def test_the_settings_of_systemd_are_those_of_an_etcd():
    """As a server would read them; files are looked at when it starts."""
    variables = env_file(LAUNCH / "systemd" / "fleet.env")
    for one in settings.SETTINGS:
        if one.variable in variables:
            one.parse(variables[one.variable])


# docker compose


@pytest.fixture(params=PLATFORMS)
def compose(request):
    """Both files as one, as far as the services here go: the second one's keys win, environments are joined."""
    folder = LAUNCH / "compose"
    base = yaml.safe_load((folder / "compose.yaml").read_text())
    over = yaml.safe_load((folder / f"compose.{request.param}.yaml").read_text())
    for name, service in over["services"].items():
        mine = base["services"][name]
        environment = mine["environment"] | service.get("environment", {})
        base["services"][name] = mine | service | {"environment": environment}
    return base


def test_compose_starts_p2_d1_and_a_router(compose, sglang_parser):
    services = compose["services"]
    assert set(services) == {"etcd", "prefill", "decode", "router"}
    tp = {}
    for role in ("prefill", "decode"):
        found = shown(services[role]["command"], plain(services[role]["environment"]))
        arguments = sglang_parser.parse_args(found.options)
        assert (arguments.disaggregation_mode, arguments.served_model_name) == (role, "Qwen3.5-2B")
        assert arguments.host == services[role]["networks"]["fleet"]["ipv4_address"]
        assert f":{arguments.port}/health" in services[role]["healthcheck"]["test"][-1]
        (volume,) = [one for one in services[role]["volumes"] if one.split(":")[-2] == arguments.model_path]
        assert volume.endswith(":ro")
        tp[role] = arguments.tp_size
    assert tp == {"prefill": 2, "decode": 1}
    router = shown(services["router"]["command"], plain(services["router"]["environment"]))
    port = our_parser().parse_args(router.options).port
    assert services["router"]["ports"][0].endswith(f":{port}")
    assert f":{port}/readiness" in services["router"]["healthcheck"]["test"][-1]


def test_compose_lets_nobody_but_the_router_be_reached(compose):
    assert {name for name, service in compose["services"].items() if "ports" in service} == {"router"}
    for name in ("prefill", "decode"):
        service = compose["services"][name]
        assert service["secrets"] == ["token"]
        assert service["environment"]["SGLANG_HETERO_TOKEN_FILE"] == "/run/secrets/token"
    etcd = compose["services"]["etcd"]["networks"]["fleet"]["ipv4_address"]
    for name in ("prefill", "decode", "router"):
        assert compose["services"][name]["environment"]["SGLANG_HETERO_ETCD"] == f"{etcd}:2379"


def test_compose_gives_no_device_to_two(compose):
    taken: list[int] = []
    for name in ("prefill", "decode"):
        service = compose["services"][name]
        first, tp = (int(service["environment"][one]) for one in ("LAUNCH_FIRST_DEVICE", "LAUNCH_TP"))
        if "deploy" in service:
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert (first, len(device["device_ids"])) == (0, tp)
            taken += map(int, device["device_ids"])
        else:
            taken += range(first, first + tp)
    assert len(set(taken)) == len(taken) == 3


def test_compose_has_no_variable_that_its_example_of_settings_lacks():
    named = set(env_file(LAUNCH / "compose" / "compose.env"))
    for path in (LAUNCH / "compose").glob("*.yaml"):
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        assert set(re.findall(r"(?<!\$)\$\{(\w+)", text)) <= named | {"ETCD_IMAGE"}


# Kubernetes


def patched(one: dict, operations: list[dict]) -> dict:
    """With the operations of a JSON patch, those that the examples use."""
    for operation in operations:
        *path, last = operation["path"].strip("/").split("/")
        at = one
        for step in path:
            at = at[int(step)] if isinstance(at, list) else at[step]
        assert operation["op"] in ("add", "replace")
        if last == "-":
            at.append(operation["value"])
            continue
        key = int(last) if isinstance(at, list) else last
        assert operation["op"] == "add" or isinstance(at, list) or key in at, operation
        at[key] = operation["value"]
    return one


def manifests(folder: str) -> dict[tuple[str, str], dict]:
    """kind and name -> object, of all resources of a kustomization, those of its base included, patches applied."""
    made: list[dict] = []
    at = (LAUNCH / "kubernetes" / folder).resolve()
    kustomization = yaml.safe_load((at / "kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        if name.endswith(".yaml"):
            made += yaml.safe_load_all((at / name).read_text())
        else:
            made += manifests(str(at / name)).values()
    for patch in kustomization.get("patches", []):
        chosen = [one for one in made if one["kind"] == patch["target"]["kind"]]
        assert chosen
        for one in chosen:
            patched(one, yaml.safe_load(patch["patch"]))
    return {(one["kind"], one["metadata"]["name"]): one for one in made}


def fleet_settings(platform: str) -> dict[str, str]:
    """The config map: what the base has, and the platform's over it."""
    found: dict[str, str] = {}
    for folder in ("base", platform):
        text = (LAUNCH / "kubernetes" / folder / "kustomization.yaml").read_text()
        (made,) = yaml.safe_load(text)["configMapGenerator"]
        found |= dict(one.split("=", 1) for one in made["literals"])
    return found


def pod(one: dict) -> dict:
    if one["kind"] == "LeaderWorkerSet":
        return one["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    return one["spec"]["template"]["spec"]


def variables_of(container: dict, common: dict[str, str]) -> dict[str, str]:
    found = dict(common) if "envFrom" in container else {}
    for one in container.get("env", []):
        found[one["name"]] = one.get("value", POD_IP)
    return {name: value.replace("$(POD_IP)", POD_IP) for name, value in found.items()}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_kubernetes_starts_servers_on_all_their_nodes(platform, sglang_parser):
    found, common = manifests(platform), fleet_settings(platform)
    tp = {}
    for role in ("prefill", "decode"):
        made = found["LeaderWorkerSet", role]
        (container,) = pod(made)["containers"]
        nodes = made["spec"]["leaderWorkerTemplate"]["size"]
        for node in range(nodes):
            lws = {
                "LWS_GROUP_SIZE": str(nodes),
                "LWS_WORKER_INDEX": str(node),
                "LWS_LEADER_ADDRESS": f"{role}-0.{role}",
            }
            command = shown(container["command"], variables_of(container, common) | lws)
            arguments = sglang_parser.parse_args(command.options)
            assert (arguments.disaggregation_mode, arguments.nnodes) == (role, nodes)
            assert (arguments.node_rank if nodes > 1 else node) == node
            assert arguments.host == POD_IP
            assert [port["containerPort"] for port in container["ports"]] == [arguments.port]
            # All devices of its nodes, and no more.
            (asked,) = container["resources"]["limits"].values()
            assert arguments.tp_size == int(asked) * nodes
            assert pod(made)["volumes"][-1]["name"] == container["volumeMounts"][-1]["name"]
        tp[role] = arguments.tp_size
    assert tp == {"prefill": 16, "decode": 8}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_kubernetes_has_a_router_that_pairs_servers_of_several_nodes(platform):
    found, common = manifests(platform), fleet_settings(platform)
    (container,) = pod(found["Deployment", "router"])["containers"]
    command = shown([*container["command"], *container["args"]], variables_of(container, common))
    arguments = our_parser().parse_args(command.options)
    assert arguments.allow_unknown == "any"
    ports = [container["ports"][0]["containerPort"], found["Service", "router"]["spec"]["ports"][0]["port"]]
    assert ports == [arguments.port] * 2
    assert pod(found["Deployment", "router"])["terminationGracePeriodSeconds"] > arguments.shutdown_grace_period_secs
    (etcd,) = found["Service", "etcd"]["spec"]["ports"]
    assert common["SGLANG_HETERO_ETCD"] == f"etcd:{etcd['port']}"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_pod_keeps_kubernetes_variables_out_and_every_selector_fits(platform):
    """A service called sglang-hetero would make SGLANG_HETERO_PORT, which stops a server; one called etcd ETCD_PORT."""
    found = manifests(platform)
    for (kind, name), one in found.items():
        if kind == "Service":
            assert not name.startswith("sglang")
            app = one["spec"]["selector"]["app"]
            assert found["Deployment", app]["spec"]["template"]["metadata"]["labels"] == {"app": app}
        else:
            assert pod(one)["enableServiceLinks"] is False, name
        if kind == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]


def test_the_token_can_be_read_by_its_owner_only():
    for role in ("prefill", "decode"):
        made = pod(manifests("ascend")["LeaderWorkerSet", role])
        (volume,) = [one for one in made["volumes"] if one["name"] == "token"]
        assert volume["secret"]["defaultMode"] == 0o400
        (container,) = made["containers"]
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "token"]
        (variable,) = [one for one in container["env"] if one["name"] == "SGLANG_HETERO_TOKEN_FILE"]
        assert variable["value"] == f"{mount['mountPath']}/token"


def test_the_store_of_memfabric_has_the_address_of_its_pod():
    found, common = manifests("ascend"), fleet_settings("ascend")
    (container,) = pod(found["Deployment", "mf-store"])["containers"]
    command = shown(container["command"], variables_of(container, {}))
    assert command.environment == {"MF_CONFIG_STORE_URL": f"tcp://{POD_IP}:24669"}
    assert common["ASCEND_MF_STORE_URL"] == "tcp://mf-store:24669"
    assert found["Service", "mf-store"]["spec"]["clusterIP"] == "None"


def test_a_container_with_npus_sees_what_memfabric_reads_of_the_host():
    """It refuses to begin without the driver's release, and looks up the NPUs' addresses (docs/ascend.md)."""
    needed = {"/usr/local/Ascend/driver", "/etc/ascend_install.info", "/etc/hccn.conf"}
    for role in ("prefill", "decode"):
        made = pod(manifests("ascend")["LeaderWorkerSet", role])
        (container,) = made["containers"]
        of_host = {one["name"]: one["hostPath"]["path"] for one in made["volumes"] if "hostPath" in one}
        mounted = {one["mountPath"]: of_host.get(one["name"]) for one in container["volumeMounts"]}
        assert needed <= {path for path, source in mounted.items() if path == source}
    over = yaml.safe_load((LAUNCH / "compose" / "compose.ascend.yaml").read_text())
    text = (LAUNCH.parent / "docs" / "ascend.md").read_text().replace("\\\n", " ")
    (by_hand,) = re.findall(r"^ +docker run (.*)$", text, flags=re.MULTILINE)
    assert {"--privileged", "--ulimit memlock=-1"} <= set(re.findall(r"--privileged|--ulimit \S+", by_hand))
    for role in ("prefill", "decode"):
        _, *mounts = over["services"][role]["volumes"]  # the first one is the checkpoint
        assert all(re.fullmatch(r"(/\S+):\1:ro", one) for one in mounts)
        assert needed <= {one.split(":")[1] for one in mounts}
        assert {*mounts, "/models:/models:ro"} == set(re.findall(r"-v (\S+)", by_hand))


def test_an_image_for_npus_gets_memfabric():
    """SGLang's own has another release of it (docs/ascend.md)."""
    text = (LAUNCH / "Dockerfile").read_text()
    assert text.index("FROM") < text.index("\nARG EXTRA\n"), "what stands before it is forgotten"
    (wanted,) = re.findall(r'pip install --no-cache-dir ("\S+")', text)
    for extra, package in (("", "."), ("ascend", ".[ascend]")):
        shell = ["bash", "-c", f"echo {wanted}"]
        done = subprocess.run(shell, env={"EXTRA": extra}, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == package
    assert "--build-arg EXTRA=ascend" in (LAUNCH / "README.md").read_text()


def test_the_image_has_what_it_is_made_of():
    text = (LAUNCH / "Dockerfile").read_text()
    root = LAUNCH.parent
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE) for name in line.split()]
    let_in = re.findall(r"^!(\S+)$", (LAUNCH / "Dockerfile.dockerignore").read_text(), flags=re.MULTILINE)
    assert sorted(copied) == sorted(let_in)
    assert all((root / name).exists() for name in copied)
    # What pip needs to build this package is among them.
    pyproject = (root / "pyproject.toml").read_text()
    for name in re.findall(r'(?:file = \[|readme = |license-files = \[)"([^"/]+)', pyproject):
        assert name in copied
    assert f"WORKDIR {INSTALLED.removesuffix('/launch/')}\n" in text
