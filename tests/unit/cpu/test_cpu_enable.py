"""Switching the platform on and off, in made-up site-packages folders and one real interpreter start."""

import subprocess
import sys

import pytest

from sglang_hetero.cpu import enable as platform
from sglang_hetero.errors import HeteroError

CPU_BUILD = (
    "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
)


def add_package(folder, name, text=""):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)


@pytest.fixture
def site(tmp_path):
    """A site-packages folder with a CPU build of torch."""
    folder = tmp_path / "site-packages"
    add_package(folder, "torch")
    (folder / "torch" / "version.py").write_text(CPU_BUILD)
    return folder


def test_enable_disable_and_again(site):
    assert not platform.status(site).enabled
    pth = platform.enable(site)
    assert pth.read_text() == f"{platform.SHIMS}\n"
    assert platform.status(site).enabled
    stamp = pth.stat().st_mtime_ns
    assert platform.enable(site) == pth
    assert pth.stat().st_mtime_ns == stamp
    assert pth.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in site.iterdir() if not file.is_dir()] == [platform.PTH_NAME]
    assert platform.disable(site)
    assert not pth.exists()
    assert not platform.disable(site)


def test_status_reads_as_one_line(site):
    assert str(platform.status(site)) == "CPU reference platform: off"
    pth = platform.enable(site)
    assert str(platform.status(site)) == f"CPU reference platform: on ({pth})"
    add_package(site, "torch_npu")
    assert "warning: torch_npu is installed" in str(platform.status(site))
    platform.disable(site)
    assert "cannot be switched on: torch_npu" in str(platform.status(site))


def test_a_stale_file_is_replaced(site):
    (site / platform.PTH_NAME).write_text("/somewhere/else\n")
    assert not platform.status(site).enabled
    platform.enable(site)
    assert platform.status(site).enabled


@pytest.mark.parametrize("name", ["sgl_kernel", "sgl_kernel_npu", "torch_npu"])
def test_real_kernels_are_left_alone(site, name):
    add_package(site, name)
    with pytest.raises(HeteroError, match=f"{name} is installed.*uninstall"):
        platform.enable(site)
    assert not (site / platform.PTH_NAME).exists()
    assert name in platform.status(site).conflict


def test_real_kernels_behind_a_pth_file_are_found(site, tmp_path):
    add_package(tmp_path / "editable", "sgl_kernel")
    (site / "kernels.pth").write_text(f"# comment\nimport sys\n{tmp_path / 'editable'}\n")
    with pytest.raises(HeteroError, match="sgl_kernel is installed"):
        platform.enable(site)


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.8'", "hip = '6.3'", "xpu: Optional[str] = '2025'"])
def test_accelerator_builds_are_refused(site, line):
    (site / "torch" / "version.py").write_text(f"from typing import Optional\n{line}\n")
    with pytest.raises(HeteroError, match="torch is built for"):
        platform.enable(site)
    assert not (site / platform.PTH_NAME).exists()


def test_no_torch_and_no_folder(tmp_path):
    with pytest.raises(HeteroError, match="torch is not installed"):
        platform.enable(tmp_path)
    with pytest.raises(HeteroError, match="not a folder"):
        platform.enable(tmp_path / "absent")


def test_an_unreadable_torch_is_named(site):
    (site / "torch" / "version.py").unlink()
    with pytest.raises(HeteroError, match=r"version\.py"):
        platform.enable(site)


def test_a_failed_write_leaves_no_trace(site, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(platform.os, "replace", refuse)
    with pytest.raises(HeteroError, match="cannot write"):
        platform.enable(site)
    assert [file.name for file in site.iterdir()] == ["torch"]


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "real one wins"])
def test_what_python_imports(site, real):
    """site.addsitedir does with the folder what an interpreter does with its site-packages at start."""
    platform.enable(site)
    if real:
        add_package(site, "torchvision", "IS_HETERO_CPU_REFERENCE = False\n")
    (site / "torch" / "__init__.py").unlink()  # only version.py matters here, and a fake torch must not be imported
    code = (
        "import sys, site; sys.path = [p for p in sys.path if 'cpu/shims' not in p];"
        f"sys.path.insert(0, {str(site)!r}); site.addsitedir({str(site)!r}); import torchvision;"
        "print(torchvision.IS_HETERO_CPU_REFERENCE, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(not real), "False"], done.stderr
