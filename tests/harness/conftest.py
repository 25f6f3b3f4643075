"""One zygote for all tests of the harness."""

from collections.abc import Iterator

import pytest

pytest.importorskip("sglang", reason="the harness runs SGLang's own managers (docs/setup.md)")
pytest.importorskip("mooncake", reason="upstream's transfer path needs Mooncake (docs/setup.md)")

from . import Harness


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    with Harness() as running:
        yield running
