"""launch/*.sh: each is named after a topology and hands it, and every option, to `sglang-hetero up`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hetero.launcher import topology

LAUNCH = Path(__file__).parents[3] / "launch"
NAMES = sorted(path.stem for path in LAUNCH.glob("*.sh") if path.stem != "up")
WANTED = {"mixed_tp1", "mixed_tp2", "mixed_tp4", "p1_d1", "p2_d1", "p2_d2", "p1_d2", "p4_d1", "p2x2_d2"}


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run([script, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_common_topologies_have_a_script():
    assert set(NAMES) == WANTED
    for name in NAMES:
        topology.parse(name)


@pytest.mark.parametrize("name", [*NAMES, "up"])
def test_a_script_gives_its_name_and_all_options_on(name):
    """An impossible option is refused by `up` after it has understood the topology, and before anything starts."""
    more = ("p2_d1",) if name == "up" else ()
    done = run(LAUNCH / f"{name}.sh", *more, "--max-requests", "0")
    assert done.returncode == 1
    assert "--max-requests 0: must be larger than 0" in done.stderr


def test_a_script_asks_for_mtp_depth_3_unless_told_otherwise(tmp_path):
    """A stand-in for the command prints what it was called with."""
    (tmp_path / "launch").mkdir()
    script = tmp_path / "launch" / "p2_d1.sh"
    script.write_bytes((LAUNCH / "up.sh").read_bytes())
    script.chmod(0o755)
    command = tmp_path / ".venv" / "bin" / "sglang-hetero"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    assert run(script, "--mtp", "0").stdout.split() == ["up", "p2_d1", "--mtp", "3", "--mtp", "0"]


def test_without_an_installation_it_says_what_to_do(tmp_path):
    (tmp_path / "launch").mkdir()
    script = tmp_path / "launch" / "p2_d1.sh"
    script.write_bytes((LAUNCH / "up.sh").read_bytes())
    script.chmod(0o755)
    done = subprocess.run(
        [script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "make setup" in done.stderr
