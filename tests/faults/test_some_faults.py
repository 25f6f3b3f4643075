"""A few faults of the matrix in `make test`; and a trial notices what it is there for. `make faults` has the rest."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness import Harness, On
from tests.harness.sabotage import At, Do, Rule

from . import trial
from .cases import Case, End, Scene
from .matrix import cases
from .result import Verdict, complaints
from .stand import Stand
from .steps import Who
from .topologies import P2D1

CHOSEN = (
    "kill -9 of a prefill rank, mid-push [P2D1]",
    "kill -9 of a decode rank, mid-merge [P2D1]",
    "restart of prefill at once, after FirstGeneration [P2D1]",
    "restart of decode at once, mid-push [P2D1]",
    "the client goes away, decode is told, mid-push [P2D1]",
    "the client goes away, prefill is told, after the last chunk, before FirstGeneration [P2D1]",
    "Bind comes twice, Bind under way [P2D1]",
    "Ready is lost, Ready under way [P2D1]",
    "Ack is random bytes, and comes as well, Ack under way [P2D1]",
    "FirstGeneration is lost, FirstGeneration under way [P2D1]",
    "the fourth write fails, mid-push [P2D1]",
    "the fourth write fails, and lands later, mid-push [P2D1]",
    "the first merge raises, mid-merge [P2D1]",
)
REFUSED = "the first write fails, mid-push [P2D1]"
BY_NAME = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def stand(harness: Harness) -> Iterator[Stand]:
    with Stand(harness) as found:
        yield found


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_costs_its_request_and_nothing_else(stand: Stand, name: str) -> None:
    result = stand.run(BY_NAME[name])
    assert result.verdict is Verdict.RIGHT, "\n".join(complaints(result))


def _leave_units_behind(scene: Scene) -> None:
    scene.pair.prefill[0].call("sabotage", [Rule(At.WRITE, Do.DOUBT)])
    scene.pair.handoff(100)


@pytest.mark.parametrize(
    ("case", "verdict", "complaint"),
    [
        pytest.param(
            replace(BY_NAME[REFUSED], ends=dict.fromkeys(On, End.ARRIVES)),
            Verdict.WRONG,
            "the request failed",
            id="a-request-that-must-arrive-fails",
        ),
        pytest.param(
            replace(BY_NAME[REFUSED], rules=lambda room: [], meets=False),
            Verdict.WRONG,
            "the request arrived",
            id="a-request-that-must-fail-arrives",
        ),
        pytest.param(
            replace(BY_NAME[REFUSED], words=dict.fromkeys(On, ("the moon",))),
            Verdict.WRONG,
            "no reason has any of",
            id="the-reason-names-something-else",
        ),
        pytest.param(
            replace(BY_NAME[REFUSED], rules=lambda room: [(Who(On.PREFILL), Rule(At.WRITE, Do.REFUSE, room=room))]),
            Verdict.RIGHT,
            "",
            id="sound",
        ),
        pytest.param(
            replace(BY_NAME[REFUSED], rules=lambda room: [(Who(On.PREFILL), Rule(At.READ, Do.REFUSE, room=room))]),
            Verdict.WRONG,
            "never brought about",
            id="nothing-was-met",
        ),
        pytest.param(replace(BY_NAME[REFUSED], within=0.0), Verdict.HUNG, "the limit is 0.0 s", id="too-late"),
        pytest.param(
            Case("units in doubt", "never", P2D1, "", {}, script=_leave_units_behind),
            Verdict.LEAKED,
            "'units_quarantined': 2",
            id="units-are-left-behind",
        ),
    ],
)
def test_a_trial_notices(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, case: Case, verdict: Verdict, complaint: str
) -> None:
    monkeypatch.setattr(trial, "HOME_SECONDS", 1.0)
    result = stand.run(case)
    assert result.verdict is verdict, "\n".join(complaints(result))
    assert complaint in "\n".join(complaints(result))
