"""The faults of `make mutants` still fit the code; whether the tests notice them is for `make mutants` to show."""

import ast

import pytest

from tests.mutants.faults import FAULTS
from tests.mutants.workshop import ROOT, Fault, Workshop


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_one_place_and_leaves_python(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    fault.check(text)
    broken = text.replace(fault.right, fault.wrong)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 20


def test_a_fault_that_no_longer_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places"):
        Fault("gone", "a.py", "x", "y").check("")
    with pytest.raises(ValueError, match="2 places"):
        Fault("twice", "a.py", "x", "y").check("x x")


def test_a_fault_is_in_the_copy_while_the_tests_run_and_mended_then(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[0]
    seen = []
    with Workshop() as workshop:
        path = workshop.root / fault.file
        right = path.read_text()
        monkeypatch.setattr(workshop, "run", lambda *_groups: seen.append(path.read_text()))
        workshop.with_fault(fault)
        assert seen == [right.replace(fault.right, fault.wrong)]
        assert path.read_text() == right


def test_the_copy_is_gone_afterwards_and_the_checkout_untouched() -> None:
    fault = FAULTS[0]
    before = (ROOT / fault.file).read_text()
    with Workshop() as workshop:
        root = workshop.root
        assert (root / fault.file).read_text() == before
    assert not root.exists()
    assert (ROOT / fault.file).read_text() == before
