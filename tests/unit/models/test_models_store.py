"""Making checkpoints: same bytes every time, atomically, and with clear errors."""

import contextlib
import hashlib
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hetero import models
from sglang_hetero.errors import HeteroError
from sglang_hetero.models import store

NAME = "tiny-gqa2"
# Waits after its imports, so that two of these do collide.
MAKE_ON_SIGNAL = f"""
import os, time, torch, safetensors.torch, tokenizers
from sglang_hetero import models
print("ready", flush=True)
while not os.path.exists({{go!r}}):
    time.sleep(0.001)
print(models.path({NAME!r}))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for this test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SGLANG_HETERO_CACHE", str(folder))
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root writes into read-only folders too: become nobody for a while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(before)


def start(code: str, cache: Path, **extra: str) -> subprocess.Popen[str]:
    environment = os.environ | {"SGLANG_HETERO_CACHE": str(cache), "OMP_NUM_THREADS": "1"} | extra
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_two_processes_at_once_take_one_checkpoint_with_the_same_bytes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    pair = [start(MAKE_ON_SIGNAL.format(go=str(go)), cache, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    for process in pair:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    first, second = (finish(process) for process in pair)
    assert first == second
    made = Path(first)
    assert made.parent == cache and store.is_complete(made)
    assert [entry.name for entry in cache.iterdir()] == [made.name], "temporary folders were left behind"

    monkeypatch.setenv("SGLANG_HETERO_CACHE", str(tmp_path / "other"))
    assert digests(models.path(NAME)) == digests(made)


def test_a_complete_checkpoint_is_taken_as_it_is(cache: Path) -> None:
    made = models.path(NAME)
    before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    assert models.path(NAME) == made
    assert {file.name: file.stat().st_mtime_ns for file in made.iterdir()} == before


@pytest.mark.parametrize("damage", ["no manifest", "no weights", "short weights", "broken manifest", "a file"])
def test_a_half_made_folder_is_replaced(cache: Path, damage: str) -> None:
    made = models.path(NAME)
    whole = digests(made)
    weights = made / "model.safetensors"
    match damage:
        case "no manifest":
            (made / "complete.json").unlink()
        case "no weights":
            weights.unlink()
        case "short weights":
            os.truncate(weights, weights.stat().st_size - 1)
        case "broken manifest":
            (made / "complete.json").write_text('{"config.json": ')
        case "a file":
            for file in made.iterdir():
                file.unlink()
            made.rmdir()
            made.write_text("")
    assert not store.is_complete(made)
    assert models.path(NAME) == made
    assert digests(made) == whole
    assert [entry.name for entry in cache.iterdir()] == [made.name]


def test_a_failure_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path, content: bytes) -> None:
        if file.name == "model.safetensors":
            raise KeyboardInterrupt
        file.write_bytes(content)

    monkeypatch.setattr(store, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.path(NAME)
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_is_removed_once_old(cache: Path) -> None:
    made = models.path(NAME)
    fresh, old = (cache / f".{made.name}.{suffix}" for suffix in ("fresh", "old"))
    for leftover in (fresh, old):
        (leftover / "new").mkdir(parents=True)
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    (made / "complete.json").unlink()
    models.path(NAME)
    assert not old.exists(), "an hour-old leftover must go"
    assert fresh.exists(), "a fresh one may belong to a running process"


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where a folder is needed fails for every user, root included; permissions do not.
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("SGLANG_HETERO_CACHE", str(blocker / "cache"))
    with pytest.raises(HeteroError) as error:
        models.path(NAME)
    message = str(error.value)
    assert "\n" not in message
    assert str(blocker / "cache") in message and "SGLANG_HETERO_CACHE" in message and NAME in message


def test_a_read_only_folder_is_one_clear_line(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    with as_ordinary_user(), pytest.raises(HeteroError, match=r"Permission denied; set SGLANG_HETERO_CACHE"):
        models.path(NAME)
    assert list(cache.iterdir()) == []


def test_a_write_that_does_not_fit_is_one_clear_line_and_leaves_nothing(cache: Path) -> None:
    # A file-size limit stands in for a full disk: the same write fails, with EFBIG instead of ENOSPC.
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from sglang_hetero import models\nfrom sglang_hetero.errors import HeteroError\n"
        f"try:\n  models.path({NAME!r})\nexcept HeteroError as error:\n  print(error)"
    )
    lines = finish(start(code, cache)).splitlines()
    assert len(lines) == 1, lines
    assert "File too large" in lines[0] and "SGLANG_HETERO_CACHE" in lines[0] and "free space" in lines[0]
    assert list(cache.iterdir()) == []


def test_order_of_cache_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SGLANG_HETERO_CACHE", str(tmp_path / "ours"))
    assert store.root() == tmp_path / "ours"
    monkeypatch.delenv("SGLANG_HETERO_CACHE")
    assert store.root() == tmp_path / "xdg" / "sglang-hetero"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.root() == tmp_path / "home" / ".cache" / "sglang-hetero"


def test_names_and_specs_need_no_torch() -> None:
    code = (
        "import sys; from sglang_hetero import models; [models.spec(n) for n in models.names()]; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
