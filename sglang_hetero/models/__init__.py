"""Tiny checkpoints of the supported model families, seeded but for a trained one, made on first use (docs/models.md).

`names()` and `spec()` know no torch and answer at once; `path()` imports torch only when a checkpoint
has to be made.
"""

from pathlib import Path

from sglang_hetero.models import specs, store
from sglang_hetero.models.specs import ModelSpec

__all__ = ["ModelSpec", "fingerprint", "names", "path", "spec"]


def names() -> list[str]:
    """Names of all models, in the order of docs/models.md."""
    return list(specs.MODELS)


def spec(name: str) -> ModelSpec:
    """Geometry and scales of one model. HeteroError, listing the names, if there is no such model."""
    return specs.get(name)


def path(name: str) -> Path:
    """Folder of the model's checkpoint; makes it if it is not there yet.

    HeteroError if the name is unknown or the cache folder can't be written.
    """
    return store.path(specs.get(name))


def fingerprint(name: str) -> str:
    """Hex digest that changes whenever the checkpoint's bytes may change; a key for results derived from it."""
    return store.fingerprint(specs.get(name))
