"""A short soak on real ranks: nothing wrong, nothing leaked, nothing hung, with a server restarted on the way."""

from contextlib import nullcontext

import pytest

from bench_serving import soak

from . import Harness, Pair
from .oracle import Component


@pytest.fixture
def soaked(harness: Harness, monkeypatch, capsys):
    """Runs the command with the ranks of this session's harness; returns its exit status and its last line."""
    monkeypatch.setattr(soak, "Harness", lambda: nullcontext(harness))
    monkeypatch.setattr(soak, "Stopping", lambda: lambda: False)  # pytest has handlers of its own

    def run(*arguments: str) -> tuple[int, str]:
        status = soak.main([*arguments, "--abort-share", "0.1", "--verify"])
        captured = capsys.readouterr()
        print(captured.err)
        return status, captured.out.splitlines()[-1]

    return run


def test_two_hundred_handoffs_and_a_restart(soaked):
    status, last = soaked("--handoffs", "200", "--restart-every", "150")
    assert last.startswith("200 handoffs, ") or int(last.split()[0]) > 200, last
    assert last.endswith(" 1 restarts: 0 wrong, 0 leaks, 0 hangs")
    assert status == 0


def test_a_flipped_bit_is_wrong(soaked, monkeypatch):
    """The comparison looks at each batch: a single bit of the SSM state of one decode server is enough."""
    real = Pair.quiet
    calls = []

    def quiet(pair: Pair, seconds: float) -> None:
        real(pair, seconds)
        calls.append(seconds)
        if len(calls) == 5:  # a batch behind the warm-up
            pair.decodes[0].ranks[0].call("poke", Component.SSM, 0, (1, 0, 0, 0), 1)

    monkeypatch.setattr(Pair, "quiet", quiet)
    status, last = soaked("--handoffs", "200", "--states", "push", "--prefill-tp", "2")
    assert status == 1
    assert last.endswith(" 0 restarts: 1 wrong, 0 leaks, 0 hangs")
