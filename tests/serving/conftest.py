"""The fixture `served`: a fleet for one `Setup`, shared by all tests that ask for it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import fleets
from tests.serving.fleets import Served


@pytest.fixture(scope="session")
def server_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers log; $SGLANG_HETERO_TEST_LOGS keeps them in a known place."""
    chosen = os.environ.get("SGLANG_HETERO_TEST_LOGS")
    return Path(chosen) if chosen else tmp_path_factory.mktemp("servers")


# pytest orders the tests by the parameter of a session fixture, so that each fleet is started once and is the only one
# that runs.
@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, server_logs: Path) -> Iterator[Served]:
    fleet = fleets.start(request.param, server_logs / request.param.id)
    try:
        yield fleet
        fleets.stop(fleet)
    finally:
        fleet.end()
