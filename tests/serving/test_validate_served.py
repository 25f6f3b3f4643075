"""`sglang-hetero validate --device cpu` as a whole: every stage that a CPU can run passes."""

import json
import os
import subprocess
import sys

import pytest

from sglang_hetero.validate import table

SECONDS = 1800
"""Two fleets are started one after the other, on a machine that may be busy."""


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
def test_a_cpu_passes(tmp_path):
    file, page = tmp_path / "v.json", tmp_path / "v.md"
    command = [sys.executable, "-m", "sglang_hetero", "validate", "--device", "cpu", "--quick"]
    command += ["--folder", str(tmp_path / "logs"), "--json", str(file), "--report", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = json.loads(file.read_text())["lines"]
    runs = [one for one in table.stages() if "cpu" in one.kinds and not one.slow]
    for one in runs:
        said = {line["name"]: line for line in lines if line["area"] == one.name}
        assert set(said) == set(one.promises)
        if one.servers:
            assert {line["status"] for line in said.values()} == {"ok"}, said
    (overlap,) = [line for line in lines if line["area"] == "overlap"]
    assert overlap["figures"]["share"] > 0
    assert page.read_text().startswith("# sglang-hetero validate: pass")
