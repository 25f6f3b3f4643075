"""The harness for the tests of this folder."""

from tests.harness.conftest import harness

__all__ = ["harness"]
