"""One zygote for all tests of the harness."""

from collections.abc import Iterator

import pytest

from . import Harness


@pytest.fixture(scope="package")
def harness() -> Iterator[Harness]:
    with Harness() as running:
        yield running
