"""`sglang-hetero validate --device cpu` as a whole: every stage of a quick run that a CPU can run passes."""

import json
import os
import subprocess
import sys

import pytest

from sglang_hetero.validate import environment, kernels, table

SECONDS = 1800
"""Two fleets are started one after the other, on a machine that may be busy."""


@pytest.mark.timeout(SECONDS)
def test_a_cpu_passes(tmp_path):
    file, page = tmp_path / "v.json", tmp_path / "v.md"
    command = [sys.executable, "-m", "sglang_hetero", "validate", "--device", "cpu", "--quick"]
    command += ["--folder", str(tmp_path / "logs"), "--json", str(file), "--report", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = json.loads(file.read_text())["lines"]
    said = {(line["area"], line["name"]): line for line in lines}
    assert len(said) == len(lines)
    runs = [one for one in table.stages() if "cpu" in one.kinds and not one.slow]
    ran = {(one.name, name) for one in runs for name in one.promises}
    assert ran <= set(said)
    # Another library of this machine may be worth a warning; what this package does may not.
    bad = {key for key in ran if said[key]["status"] != "ok" and key[0] != environment.AREA}
    assert bad == {(kernels.AREA, "triton")}  # no processor of its own, no compiler for this one
    assert {line["status"] for line in lines if (line["area"], line["name"]) not in ran} <= {"skip"}
    assert all(said[kernels.AREA, name]["figures"]["copy GB/s"] > 0 for name in kernels.NAMES)
    assert said["overlap", "landed before the end"]["figures"]["share"] > 0
    assert page.read_text().startswith("# sglang-hetero validate: pass")
