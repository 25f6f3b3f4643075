"""What the tests of launch/ share: scripts run with --print, and what they print."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LAUNCH = Path(__file__).parents[3] / "launch"
PLATFORMS = ("ascend", "cuda")
TOPOLOGIES = ("mixed_tp2", "mixed_tp4", "p2_d1", "p2_d2", "p2x2_d2")
INSTALLED = "/opt/sglang-hetero/launch/"
"""Where the examples have it."""
NEEDED = {"LAUNCH_CHIP": "910b", "ASCEND_MF_STORE_URL": "tcp://10.0.0.1:24669"}
"""What an Ascend server cannot do without."""


@dataclass(frozen=True)
class Command:
    """One process. name: of the fleet's process, if there is a fleet. environment: what the script sets."""

    name: str
    environment: dict[str, str]
    argv: list[str]

    @property
    def module(self) -> str:
        """What Python runs."""
        assert self.argv[1] == "-m"
        return self.argv[2]

    @property
    def options(self) -> list[str]:
        return self.argv[3:]

    def value(self, flag: str) -> str:
        """The only value of the only `flag`."""
        assert self.argv.count(flag) == 1, f"{flag} in {self.argv}"
        return self.argv[self.argv.index(flag) + 1]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """A shell without anything that could change what scripts do, but for `extra`."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {"LAUNCH_PYTHON": sys.executable} | dict(extra)


def run(script: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """A script of launch/, by its path in there."""
    return subprocess.run(
        [LAUNCH / script, *arguments],
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def printed(script: str, *arguments: str, **extra: str) -> list[Command]:
    """The processes that a script would start. Behind lib/ --print comes third, after what every one of these needs."""
    own = 2 if script.startswith("lib/") else 0
    done = run(script, *arguments[:own], "--print", *arguments[own:], **extra)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def parse(text: str) -> list[Command]:
    """What --print wrote."""
    found: list[Command] = []
    name, exported = "", {}
    for line in text.splitlines():
        if line.startswith("# "):
            name = line[2:]
        elif line.startswith("export "):
            variable, _, value = shlex.split(line)[1].partition("=")
            exported[variable] = value
        else:
            found.append(Command(name, exported, shlex.split(line)))
            name, exported = "", {}
    return found


def env_file(path: Path) -> dict[str, str]:
    """NAME=VALUE lines, as systemd and docker compose read them, those that are commented out included."""
    return dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", path.read_text(), flags=re.MULTILINE))
