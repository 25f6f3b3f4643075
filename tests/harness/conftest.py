"""One zygote for all tests of the harness."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from . import Harness


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    missing = [name for name in ("sglang", "mooncake") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed (docs/setup.md)")
    with Harness() as running:
        yield running
