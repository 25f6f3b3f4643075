"""A short soak on real servers (docs/soak.md), one of them killed on the way."""

import pytest

from bench_serving import soak

LIMIT_SECONDS = 1800
"""Servers start twice; a busy machine needs minutes for each."""


@pytest.mark.full
@pytest.mark.timeout(LIMIT_SECONDS)
def test_a_hundred_requests_and_a_restart(server_logs, monkeypatch, capsys):
    monkeypatch.setattr(soak, "Stopping", lambda: lambda: False)  # pytest has handlers of its own
    options = ["--servers", "--topology", "p2_d1", "--mtp", "0", "--handoffs", "100", "--restarts", "1"]
    status = soak.main([*options, "--log-dir", str(server_logs / "soak")])
    captured = capsys.readouterr()
    print(captured.err)
    assert captured.out.splitlines()[-1].endswith(" 1 restarts: 0 wrong, 0 leaks, 0 hangs")
    assert status == 0
