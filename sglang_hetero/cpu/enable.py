"""Switch the CPU reference platform on and off in a virtual environment.

On means: site-packages holds `sglang_hetero_cpu.pth` with one line, the folder of the stand-in packages. Python
appends that folder at the END of sys.path, so any real `sgl_kernel` or `torchvision` is found first.

Nothing here imports torch: the build is read from the text of torch/version.py.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from sglang_hetero.errors import HeteroError

PTH_NAME = "sglang_hetero_cpu.pth"
SHIMS = Path(__file__).resolve().parent / "shims"

# A platform that brings one of these has kernels of its own; stand-ins have no place beside them.
_REAL_KERNELS = ("sgl_kernel", "sgl_kernel_npu", "torch_npu")
# Fields of torch/version.py that name an accelerator build.
_ACCELERATORS = ("cuda", "hip", "xpu")


@dataclass(frozen=True)
class Status:
    """State of one environment.

    enabled: the .pth file is there and names this installation's stand-ins. conflict: why enable() would refuse, or
    None.
    """

    enabled: bool
    pth: Path
    shims: Path
    conflict: str | None

    def __str__(self) -> str:
        if self.enabled:
            state = f"CPU reference platform: on ({self.pth})"
        elif self.conflict is None:
            state = "CPU reference platform: off"
        else:
            state = f"CPU reference platform: off, and it cannot be switched on: {self.conflict}"
        if self.enabled and self.conflict is not None:
            state += f"; warning: {self.conflict}"
        return state


def enable(site_packages: Path | None = None) -> Path:
    """Switch the platform on; no change if it is on already. Returns the path of the .pth file.

    site_packages: the folder to write to; the running interpreter's own by default.
    Rule of refusal (HeteroError): the environment has no torch, or a torch built for an accelerator, or one of
    sgl_kernel, sgl_kernel_npu, torch_npu from elsewhere; or the folder cannot be written.
    """
    folder = _site_packages(site_packages)
    conflict = _conflict(folder)
    if conflict is not None:
        raise HeteroError(f"the CPU reference platform stays off: {conflict}")
    pth = folder / PTH_NAME
    if not _names_our_shims(pth):
        _write_atomically(pth, f"{SHIMS}\n")
    return pth


def disable(site_packages: Path | None = None) -> bool:
    """Switch the platform off. Returns whether it was on. Processes that run already are not affected."""
    pth = _site_packages(site_packages) / PTH_NAME
    try:
        pth.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise HeteroError(f"cannot remove {pth} ({error.strerror}); remove it as the owner of the folder") from error
    return True


def status(site_packages: Path | None = None) -> Status:
    """Whether the platform is on, and whether it could be."""
    folder = _site_packages(site_packages)
    pth = folder / PTH_NAME
    return Status(enabled=_names_our_shims(pth), pth=pth, shims=SHIMS, conflict=_conflict(folder))


def _site_packages(given: Path | None) -> Path:
    folder = Path(sysconfig.get_path("purelib") if given is None else given)
    if not folder.is_dir():
        raise HeteroError(f"{folder} is not a folder; give the site-packages folder of a virtual environment")
    return folder


def _names_our_shims(pth: Path) -> bool:
    try:
        return pth.read_text(encoding="utf-8").strip() == str(SHIMS)
    except FileNotFoundError:
        return False


def _conflict(folder: Path) -> str | None:
    """Why the stand-ins must not be switched on in this environment, with the remedy; None if they may."""
    search = _search_path(folder)
    importlib.invalidate_caches()
    for name in _REAL_KERNELS:
        spec = PathFinder.find_spec(name, search)
        if spec is not None:
            return f"{name} is installed ({spec.origin}); uninstall it, or use the platform that it belongs to"
    torch = PathFinder.find_spec("torch", search)
    if torch is None or torch.origin is None:
        return f"torch is not installed in {folder}; install requirements/cpu.lock first"
    accelerator = next(_accelerators(Path(torch.origin).parent / "version.py"), None)
    if accelerator is not None:
        return f"torch is built for {accelerator}; use an environment with the CPU build of torch"
    return None


def _search_path(folder: Path) -> list[str]:
    """Where the environment of `folder` would find packages, without our own stand-ins."""
    entries = [str(folder)]
    for pth in sorted(folder.glob("*.pth")):
        lines = pth.read_text(encoding="utf-8", errors="replace").splitlines()
        entries += [str(folder / line) for line in lines if line and not line.startswith(("#", "import ", "import\t"))]
    if folder == Path(sysconfig.get_path("purelib")):
        entries += sys.path
    return [entry for entry in entries if Path(entry).resolve() != SHIMS]


def _accelerators(version_file: Path) -> Iterator[str]:
    """The accelerators that torch/version.py names, e.g. "cuda 12.8"."""
    try:
        tree = ast.parse(version_file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise HeteroError(f"cannot read the build of torch from {version_file} ({error}); reinstall torch") from error
    for node in tree.body:
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            for target in targets:
                if isinstance(target, ast.Name) and target.id in _ACCELERATORS:
                    yield f"{target.id} {node.value.value!s}"


def _write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)  # mkstemp makes it private; other users of the environment must read it
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise HeteroError(f"cannot write {path} ({error.strerror}); run as the owner of the folder") from error
