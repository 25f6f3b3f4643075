"""Attributes that can be imported, but not called."""

from collections.abc import Callable
from typing import Any

from sglang_hetero.errors import HeteroError


def getattr_of(module: str) -> Callable[[str], Any]:
    """A module-level __getattr__ that gives, for every name, a function which raises HeteroError when called."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise HeteroError(
                f"{module}.{name}: the CPU reference platform has no image processing; install torchvision to use it"
            )

        return missing

    return __getattr__
