"""Where checkpoints live and how they get there: a cache folder outside the repository, filled atomically.

A checkpoint is written into a temporary folder beside its final place and renamed; whoever renames first wins
and the others take the winner's. The last file written, _MANIFEST, lists the sizes of the others: a folder
without it, or with another size, is not a checkpoint and is replaced.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from sglang_hetero.errors import HeteroError
from sglang_hetero.models.config import generation_config, model_config
from sglang_hetero.models.specs import ModelSpec

# Raise it whenever the code in this package makes other bytes from the same spec.
GENERATOR_VERSION = 2

_MANIFEST = "complete.json"
_ABANDONED_S = 3600  # making a model takes seconds: an older temporary folder belongs to a killed process
_DIGITS = 12  # of the fingerprint in a folder's name; enough to tell a handful of versions apart

log = logging.getLogger(__name__)


def root() -> Path:
    """The cache folder: $SGLANG_HETERO_CACHE, else sglang-hetero in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("SGLANG_HETERO_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-hetero"


def fingerprint(spec: ModelSpec) -> str:
    """SHA-256 in hex over the spec and GENERATOR_VERSION, and over the weights if they are not made from these."""
    fields = asdict(spec)
    if fields.pop("trained"):
        fields["weights"] = hashlib.sha256(trained_weights(spec)).hexdigest()
    text = json.dumps([GENERATOR_VERSION, fields], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def trained_weights(spec: ModelSpec) -> bytes:
    """The file with the weights of a trained model, as it is in this package. HeteroError if it is not there."""
    file = resources.files(__package__) / "trained" / f"{spec.name}.safetensors"
    try:
        return file.read_bytes()
    except OSError as error:
        raise HeteroError(
            f"the weights of model {spec.name} are missing from this installation ({file}): {error.strerror}; "
            "install sglang-hetero again"
        ) from error


def path(spec: ModelSpec) -> Path:
    """Folder of a complete checkpoint, made if needed. HeteroError if it can't be written."""
    final = root() / f"{spec.name}-{fingerprint(spec)[:_DIGITS]}"
    try:
        if not is_complete(final):
            _create(spec, final)
    except OSError as error:
        raise HeteroError(
            f"cannot make model {spec.name} in {final.parent}: {error.strerror or error}; "
            "set SGLANG_HETERO_CACHE to a writable folder with free space"
        ) from error
    return final


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a whole checkpoint: the manifest is there and every file has its size."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def _create(spec: ModelSpec, final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{final.name}."
    _sweep(final.parent, prefix)
    log.info("making model %s in %s", spec.name, final)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=final.parent) as scratch:
        partial = Path(scratch) / "new"
        partial.mkdir()
        sizes = {}
        for name, content in _files(spec):
            _write(partial / name, content)
            sizes[name] = len(content)
        _write(partial / _MANIFEST, json.dumps(sizes, indent=1).encode())
        _publish(partial, final, Path(scratch) / "old")


def _publish(partial: Path, final: Path, aside: Path) -> None:
    """Rename `partial` to `final`; a half-made `final` goes to `aside`, a complete one stays.

    rename() of a folder onto one that is not empty fails, so a complete folder is never overwritten.
    """
    while True:
        try:
            partial.rename(final)
        except OSError:
            # Another process was faster, or a half-made folder is in the way; anything else is an error.
            if is_complete(final):
                return
            if not final.exists():
                raise
            shutil.rmtree(aside, ignore_errors=True)
            try:
                final.rename(aside)
            except FileNotFoundError:
                continue  # another process moved it; try again
        else:
            return


def _sweep(folder: Path, prefix: str) -> None:
    """Remove what killed processes left; another process may be removing it too."""
    for leftover in folder.glob(f"{prefix}*"):
        try:
            abandoned = time.time() - leftover.stat().st_mtime > _ABANDONED_S
        except FileNotFoundError:
            continue
        if abandoned:
            shutil.rmtree(leftover, ignore_errors=True)


def _files(spec: ModelSpec) -> Iterator[tuple[str, bytes]]:
    from sglang_hetero.models.tokenizer import tokenizer_files

    yield "config.json", json.dumps(model_config(spec), indent=1).encode()
    yield "generation_config.json", json.dumps(generation_config(spec), indent=1).encode()
    yield from tokenizer_files(spec).items()
    yield "model.safetensors", trained_weights(spec) if spec.trained else seeded_weights(spec)


def seeded_weights(spec: ModelSpec) -> bytes:
    """A file with the weights that come from the spec's seed; of a trained model, those of an untrained one."""
    import safetensors.torch

    from sglang_hetero.models.weights import state_dict

    return safetensors.torch.save(state_dict(spec), metadata={"format": "pt"})


def _write(file: Path, content: bytes) -> None:
    """Write and flush to disk, so that a folder that was renamed also survives a crash."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
