"""The scripts validate.sh: the command with what an Ascend or a GPU host needs around it."""

import sys

import pytest

from tests.unit.launch.scripts import PLATFORMS, run

NEEDED = {"ascend": {"LAUNCH_CHIP": "a3"}, "cuda": {}}
DEVICES = {"ascend": "npu", "cuda": "cuda"}


def script(platform):
    return f"{platform}/validate.sh"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_it_calls_the_command_for_the_device(tmp_path, platform):
    """A stand-in for Python prints what it is called with."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "chip=$LAUNCH_CHIP" "python=$LAUNCH_PYTHON"\n')
    fake.chmod(0o755)
    options = ["--quick", "--json", "a b.json"]
    done = run(script(platform), *options, **NEEDED[platform], LAUNCH_PYTHON=str(fake))
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    fleet = words[words.index("--fleet") + 1]
    assert fleet.endswith("/lib/fleet.sh")
    wanted = ["-m", "sglang_hetero", "validate", "--device", DEVICES[platform], "--fleet", fleet, *options]
    chip = NEEDED[platform].get("LAUNCH_CHIP", "")
    assert words == [*wanted, f"chip={chip}", f"python={fake}"]


def test_an_ascend_host_must_say_which_chip_it_has():
    for extra in ({}, {"LAUNCH_CHIP": "910c"}):
        done = run(script("ascend"), "--list", **extra)
        assert done.returncode == 1
        assert "910b" in done.stderr and "a3" in done.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
def test_who_asks_for_help_need_not_say_that(platform):
    done = run(script(platform), "--help", LAUNCH_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "--only STAGE" in done.stdout


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_misspelt_setting_ends_it(platform):
    done = run(script(platform), "--list", **NEEDED[platform], LAUNCH_CHPI="a3")
    assert done.returncode == 1
    assert "LAUNCH_CHPI is no setting" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "usage"), (["tpu"], "unknown platform tpu")], ids=["none", "another"]
)
def test_a_platform_that_is_none(arguments, words):
    done = run("lib/validate.sh", *arguments)
    assert done.returncode == 1 and words in done.stderr


@pytest.mark.parametrize(
    ("platform", "own"), [("ascend", "loopback-device_rdma"), ("cuda", "loopback-mooncake")], ids=PLATFORMS
)
def test_it_lists_its_stages(platform, own):
    done = run(script(platform), "--list", **NEEDED[platform], LAUNCH_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert {"environment", "kernels", own, "serve-p2_d1-prepush"} <= set(done.stdout.split())
