"""`sglang-hetero up` when something goes wrong with a real server: the last log lines, and nothing left running."""

import subprocess
import sys

from tests.serving.fleets import START_SECONDS


def test_a_server_that_dies_is_quoted(tmp_path):
    command = [sys.executable, "-m", "sglang_hetero", "up", "mixed_tp1", "--log-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--", "--no-such-option"], capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert done.returncode == 1
    assert "READY" not in done.stdout
    assert "mixed ended with exit code" in done.stderr
    assert "--no-such-option" in done.stderr
    assert str(tmp_path / "mixed.log") in done.stderr
