"""Memory that the native engine does not register."""

import pytest
from real_pair import REFUSED, NativeEngine, Pair, Shape, fault

BACKENDS = pytest.mark.parametrize("backend", ["mooncake", "ascend"])


def returns() -> int:
    return REFUSED


def raises() -> int:
    raise OSError("no more memory can be pinned")


@fault(r"^both servers start; then the first request: \['Failed: ")
@BACKENDS
@pytest.mark.parametrize("refusal", [returns, raises])
def test_a_refused_registration_stops_the_server(monkeypatch, caplog, backend, refusal):
    """Unpatched both servers start, and every request fails."""
    monkeypatch.setattr(NativeEngine, "refuses_to_register", staticmethod(refusal))
    try:
        pair = Pair(Shape(), 1, 1, backend)
    except RuntimeError as error:
        assert "prefill rank did not register its caches" in str(error)
        assert "regions" in str(error) and "bytes" in str(error) and f"ret={REFUSED}" in str(error)
        said = [record for record in caplog.records if record.levelname == "ERROR" and "registration" in record.message]
        assert said
        assert refusal is returns or "no more memory can be pinned" in str(said[0].exc_info[1])
    else:
        pytest.fail(f"both servers start; then the first request: {pair.hand_over().ends}")


@BACKENDS
def test_a_registration_that_succeeds_is_as_before(backend):
    pair = Pair(Shape(), 2, 1, backend)
    outcome = pair.hand_over()
    assert outcome.succeeded, outcome
    assert not pair.wrong(), pair.wrong()
