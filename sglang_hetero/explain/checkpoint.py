"""The configuration that `--model` names: a seeded or a published model, a checkpoint's folder, or a config.json."""

import json
from pathlib import Path
from typing import Any

from sglang_hetero import models
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.checks import shorten
from sglang_hetero.models.config import model_config

from . import published

CONFIG_FILE = "config.json"


def read(model: str) -> dict[str, Any]:
    """The content of that model's config.json. Raises HeteroError with the remedy if there is none to be read."""
    if model in models.names():
        return model_config(models.spec(model))
    if model in published.CONFIGS:
        return published.CONFIGS[model]
    shown = shorten(model)
    path = Path(model)
    try:
        if path.is_dir():
            path /= CONFIG_FILE
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        known = (*models.names(), *published.CONFIGS)
        raise HeteroError(
            f"--model {shown}: no seeded model has this name, and there is no such file or folder with a {CONFIG_FILE} "
            f"(nothing is downloaded); give one of {', '.join(known)}, a folder, or a file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise HeteroError(f"--model {shown} cannot be read as JSON: {shorten(str(error))}") from None
    if not isinstance(config, dict):
        raise HeteroError(f"--model {shown} holds {type(config).__name__}, a configuration is an object")
    return config
