"""launch/ascend/validate.sh: the command with what an Ascend host needs around it."""

import sys

from tests.unit.launch.scripts import run

SCRIPT = "ascend/validate.sh"


def test_it_calls_the_command_for_npus(tmp_path):
    """A stand-in for Python prints what it is called with."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "chip=$LAUNCH_CHIP"\n')
    fake.chmod(0o755)
    done = run(SCRIPT, "--quick", "--json", "a b.json", LAUNCH_CHIP="a3", LAUNCH_PYTHON=str(fake))
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    fleet = words[words.index("--fleet") + 1]
    assert fleet.endswith("/lib/fleet.sh")
    wanted = ["-m", "sglang_hetero", "validate", "--device", "npu", "--fleet", fleet, "--quick", "--json", "a b.json"]
    assert words == [*wanted, "chip=a3"]


def test_a_host_must_say_which_chip_it_has():
    for extra in ({}, {"LAUNCH_CHIP": "910c"}):
        done = run(SCRIPT, "--list", **extra)
        assert done.returncode == 1
        assert "910b" in done.stderr and "a3" in done.stderr


def test_a_misspelt_setting_ends_it():
    assert "LAUNCH_CHPI is no setting" in run(SCRIPT, "--list", LAUNCH_CHIP="a3", LAUNCH_CHPI="a3").stderr


def test_it_lists_its_stages():
    done = run(SCRIPT, "--list", LAUNCH_CHIP="910b", LAUNCH_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert {"environment", "kernels", "loopback-device_rdma", "serve-p2_d1-prepush"} <= set(done.stdout.split())
