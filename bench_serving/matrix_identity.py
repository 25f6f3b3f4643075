"""What the figures of a matrix depend on, besides the cell: part of each result's key, and told in the report."""

import hashlib
import os
import platform
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import sglang_hetero
from bench_serving import matrix_client, matrix_data
from bench_serving.matrix_plan import RESERVED_TOKENS, WARM_UPS_PER_STREAM, Scale
from bench_serving.matrix_start import Command, Launcher
from sglang_hetero import models
from sglang_hetero.backend import options as transfer
from sglang_hetero.launcher.options import Options

PACKAGES = ("sglang", "sglang-router", "torch", "transformers", "mooncake-transfer-engine-non-cuda")
NEUTRAL = frozenset({"log_dir", "host", "port", "start_seconds"})
"""Options that change no figure."""
SECRET = re.compile(r"key|token(?!izer)|password|secret|user|auth", re.IGNORECASE)
"""In the name of a variable or flag of which only is told that it is set: results and reports are sent around."""
SET = "(set)"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def source_digest() -> str:
    """Of this package's code: its version number stays the same from one change to the next."""
    root = Path(sglang_hetero.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (file := folder / name).is_file():
            digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def processor() -> str:
    """The CPU's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def without_secrets(words: Iterable[str]) -> list[str]:
    """Words of a command line, without the values that follow `--api-key` or `API_KEY=` and their like."""
    found: list[str] = []
    follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        if follows and not word.startswith("--"):
            found.append(SET)
        else:
            found.append(f"{name}={SET}" if equals and SECRET.search(name) else word)
        follows = word.startswith("--") and not equals and SECRET.search(name) is not None
    return found


def _environment() -> dict[str, str]:
    """The options of the transfer, which the launcher passes on to the servers."""
    return {
        name: SET if SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if name in transfer.NAMES
    }


def _settings(starter: Launcher | Command, options: Options) -> dict[str, Any]:
    if isinstance(starter, Command):
        return {"start": shlex.join(without_secrets(shlex.split(starter.text)))}
    told = {
        name: value.value if isinstance(value, Enum) else value
        for name, value in asdict(options).items()
        if name not in NEUTRAL and name != "model"
    }
    told["server_arguments"] = without_secrets(options.server_arguments)
    for name in ("prefill_env", "decode_env"):
        told[name] = without_secrets(f"{variable}={value}" for variable, value in getattr(options, name))
    return told


def identity(starter: Launcher | Command, options: Options, scale: Scale) -> dict[str, Any]:
    """Ready for JSON. For a command of the user's, what it starts is known from the command's text only."""
    own = isinstance(starter, Launcher)
    return {
        "model": starter.model,
        "model_digest": models.fingerprint(starter.model) if own else _folder_digest(starter.tokenizer),
        "data": matrix_data.identity(scale.lengths),
        "client": {
            "backend": matrix_client.BACKEND,
            "seed": matrix_client.LOAD_SEED,
            "warm_ups_per_stream": WARM_UPS_PER_STREAM,
            "reserved_tokens": RESERVED_TOKENS,
        },
        "settings": _settings(starter, options),
        "environment": _environment(),
        "versions": {
            "sglang-hetero": f"{sglang_hetero.__version__} ({source_digest()})",
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
        "machine": {
            "processor": processor(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
        },
    }
