"""What is installed on this host: releases, libraries, device, options, ports. Asks and imports as little as it can."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path

from sglang_hetero import __version__
from sglang_hetero.errors import HeteroError, UpstreamChanged
from sglang_hetero.transfer import messages

from .lines import Line, fail, ok, skip, warn
from .source import Release

LEAST_PYTHON = (3, 11)
MIB = 1 << 20
IMPORT_SECONDS = 120.0
"""For a library's import in a process of its own; cold, on a busy host, torch_npu takes a minute."""
PACKAGES = ("torch", "triton", "torch_npu", "triton-ascend", "sgl-kernel-npu", "transformers", "sglang-router")
"""Releases that are told, whichever of them are there."""
MEMFABRIC = "memfabric_hybrid"
MEMFABRIC_MADE_FOR = "1.3.0"
HTTP_PORT, BOOTSTRAP_PORT = 30000, 8998
"""SGLang's defaults, and those of launch/."""
MAX_PORT = 65535
STORE_URL, STORE_PORT = "ASCEND_MF_STORE_URL", 24669
CANN_FOLDERS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit")
"""Where CANN is installed, with its set_env.sh: from 8.5 on, and before."""
CANN_VERSION, CANN_RELEASE = "version.cfg", r"=\[([^:\]]*)"
"""A file in CANN's folder with lines like `toolkit_running_version=[8.3.RC1:8.3.RC1]`."""
DRIVER_VERSION = Path("/usr/local/Ascend/driver/version.info")
DEVICES = {
    "npu": ("davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
    "cuda": ("nvidia[0-9]*", "CUDA_VISIBLE_DEVICES"),
}
"""The files of each kind's driver, and the variable that leaves only some of the devices to a process."""
DEV = Path("/dev")


@dataclass(frozen=True)
class Device:
    """kind: cpu, npu or cuda. count: of devices that the kernel shows; for a CPU 1."""

    kind: str
    count: int


def device(folder: Path = DEV, environ: Mapping[str, str] = os.environ) -> Device:
    """The accelerators that this process may use: by the files that their drivers make, and the vendor's variable."""
    for kind, (pattern, variable) in DEVICES.items():
        if count := len(list(folder.glob(pattern))):
            chosen = environ.get(variable)
            return Device(kind, count if chosen is None else min(count, _chosen(chosen)))
    return Device("cpu", 1)


def _chosen(given: str) -> int:
    """How many devices a vendor's variable leaves: those before the first number that is none, such as -1."""
    return len(list(takewhile(lambda one: not one.strip().startswith("-"), filter(str.strip, given.split(",")))))


def installed() -> Release:
    """The installed SGLang, without importing it. Raises UpstreamChanged if there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise UpstreamChanged(f"this Python has no SGLang ({sys.executable})")
    return Release(Path(next(iter(spec.submodule_search_locations))))


def release_of(name: str) -> str:
    """The installed release of a distribution; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def versions(found: Device) -> list[Line]:
    """Python and the packages; SGLang's own line is with its symbols."""
    area = "versions"
    said = f"{platform.python_version()} ({sys.executable})"
    least = ".".join(map(str, LEAST_PYTHON))
    lines = [
        ok(area, "python", said)
        if sys.version_info >= LEAST_PYTHON
        else fail(area, "python", said, f"use Python {least} or newer"),
        ok(area, "sglang-hetero", f"{__version__}, messages of version {messages.VERSION}"),
    ]
    lines += [ok(area, name, told) for name in PACKAGES if (told := release_of(name))]
    if found.kind == "npu" and not release_of("torch_npu"):
        lines.append(fail(area, "torch_npu", "not installed, and NPUs need it", "install torch_npu for your CANN"))
    if not release_of("torch"):
        lines.append(fail(area, "torch", "not installed", "install SGLang with its dependencies (docs/setup.md)"))
    return lines


def libraries(found: Device) -> list[Line]:
    """The engines that can move bytes here, each imported in a process of its own, and what they need of the host."""
    area = "libraries"
    return [_mooncake(area, found), _memfabric(area, found), *_cann(area, found), _locked_memory(area, found)]


def _mooncake(area: str, found: Device) -> Line:
    from sglang_hetero.transfer.engine.mooncake import DISTRIBUTIONS, LEAST_RELEASE, RDMA_DEVICES, too_old

    name = next((one for one in DISTRIBUTIONS if release_of(one)), "")
    if not name:
        why = "Mooncake is not installed"
        if found.kind == "npu":
            return skip(area, "mooncake", f"{why}; NPUs are served by MemFabric")
        return fail(area, "mooncake", why, f"pip install {DISTRIBUTIONS[0]} (without CUDA: {DISTRIBUTIONS[1]})")
    if old := too_old():
        least = ".".join(map(str, LEAST_RELEASE))
        return fail(
            area, "mooncake", f"{name} {old} says of a write that it has landed too early", f"install {least} or newer"
        )
    if problem := import_problem("mooncake.engine"):
        return fail(
            area, "mooncake", f"{name} {release_of(name)} cannot be imported: {problem}", "install what it lacks"
        )
    rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    return ok(area, "mooncake", f"{name} {release_of(name)}, {'RDMA devices' if rdma else 'no RDMA device: TCP'}")


def _memfabric(area: str, found: Device) -> Line:
    told = release_of(MEMFABRIC)
    if not told:
        if found.kind != "npu":
            return skip(area, "memfabric", "not installed, and this host has no NPU")
        return fail(area, "memfabric", "not installed", f"pip install {MEMFABRIC}=={MEMFABRIC_MADE_FOR}")
    if problem := import_problem(MEMFABRIC):
        return fail(
            area, "memfabric", f"{told} cannot be imported: {problem}", "install CANN, and source its set_env.sh"
        )
    if told != MEMFABRIC_MADE_FOR:
        return warn(
            area, "memfabric", f"{told}, not {MEMFABRIC_MADE_FOR}", f"pip install {MEMFABRIC}=={MEMFABRIC_MADE_FOR}"
        )
    return ok(area, "memfabric", told)


def _cann(area: str, found: Device, environ: Mapping[str, str] = os.environ) -> list[Line]:
    if found.kind != "npu":
        return [skip(area, "cann", "this host has no NPU")]
    home = environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH") or ""
    lines = []
    if home and Path(home).is_dir():
        lines.append(ok(area, "cann", f"{home}{_told(Path(home) / CANN_VERSION, CANN_RELEASE)}"))
    else:
        there = next((folder for folder in CANN_FOLDERS if Path(folder).is_dir()), "")
        seen = f"ASCEND_TOOLKIT_HOME={home or '(not set)'}"
        lines.append(fail(area, "cann", seen, f"source {there or CANN_FOLDERS[0]}/set_env.sh in this shell"))
    driver = _told(DRIVER_VERSION, r"Version=(\S+)")
    lines.append(
        ok(area, "driver", f"release{driver}")
        if driver
        else warn(
            area, "driver", f"{DRIVER_VERSION} cannot be read", "see that the NPU's driver is installed: npu-smi info"
        )
    )
    return lines


def _told(file: Path, pattern: str) -> str:
    """What a vendor's file says of its release, behind a space; empty if it does not."""
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return f" {found[1]}" if found else ""


def _locked_memory(area: str, found: Device) -> Line:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok(area, "locked memory", "no limit")
    if found.kind == "cpu":
        return ok(area, "locked memory", f"{soft // MIB} MiB, which TCP does not need")
    return warn(
        area, "locked memory", f"{soft // MIB} MiB", "ulimit -l unlimited: registering memory for RDMA locks it"
    )


def import_problem(module: str, seconds: float = IMPORT_SECONDS) -> str:
    """Why a module cannot be imported, in a process of its own: a library may end or stop the one that loads it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its import takes more than {seconds:.0f} s"
    if done.returncode == 0:
        return ""
    words = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"its import is ended by signal {-done.returncode}"
    return words[-1] if words else f"its import ends with exit status {done.returncode}"


def options(environ: Mapping[str, str]) -> list[Line]:
    """The options of the transfer that are set, read as a server reads them (docs/options.md)."""
    from sglang_hetero.backend.options import NAMES, read
    from sglang_hetero.backend.secret import seal_of

    area = "options"
    try:
        given = read(environ)
        seal_of(given.token_file)
        _ = given.etcd
    except HeteroError as error:
        return [fail(area, "environment", str(error), "correct the variable: a server would not start")]
    names = sorted(NAMES & environ.keys())
    return [
        ok(area, "environment", ", ".join(f"{name}={environ[name]}" for name in names) or "all as by default"),
        ok(
            area,
            "token",
            "peers need the same token"
            if given.token_file
            else "no token: whoever reaches the ports is believed (docs/security.md)",
        ),
    ]


def layouts(found: Device, environ: Mapping[str, str] = os.environ) -> Line:
    """How conv slots lie in memory on this platform, which is what SGLang's own path gets wrong on NPUs."""
    from sglang_hetero.cpu.layout import CONV_LAYOUT_ENV, conv_layout_from_env
    from sglang_hetero.layout.window import ConvLayout

    area, name = "layouts", "conv slots"
    if found.kind == "npu":
        return ok(area, name, f"{ConvLayout.WINDOW_FIRST.value}, with rows for drafts (memory_pool_npu.py)")
    if found.kind == "cuda":
        return ok(area, name, f"{ConvLayout.CHANNELS_FIRST.value} (memory_pool.py)")
    if environ is os.environ:
        try:
            chosen = conv_layout_from_env()
        except HeteroError as error:
            return fail(area, name, str(error), f"correct {CONV_LAYOUT_ENV}")
        return ok(area, name, f"{chosen.value} on the CPU reference platform (docs/cpu.md)")
    return skip(area, name, "another environment than this process's")


def platform_line(found: Device) -> Line:
    """What this host serves on."""
    area, name = "platform", "device"
    if found.kind != "cpu":
        return ok(area, name, f"{found.count} of kind {found.kind}")
    from sglang_hetero.cpu import enable

    try:
        state = enable.status()
    except HeteroError as error:
        return fail(area, name, str(error), "install torch")
    if state.enabled and state.conflict is None:
        return ok(area, name, str(state))
    return warn(area, name, f"no NPU or GPU; {state}", "for tests on this host: sglang-hetero cpu enable (docs/cpu.md)")


def reference_platform(found: Device) -> bool:
    """Whether servers on this host run on the CPU reference platform."""
    if found.kind != "cpu":
        return False
    from sglang_hetero.cpu import enable

    try:
        return enable.status().enabled
    except HeteroError:
        return False


def ports(wanted: Iterable[int], found: Device, environ: Mapping[str, str]) -> list[Line]:
    """Whether a server could listen on these ports now; with NPUs on that of MemFabric's store, too, if it is here."""
    from sglang_hetero.launcher.ports import ephemeral_start, is_free, owner

    lines, area, start = [], "ports", ephemeral_start()
    for port in wanted:
        name = str(port)
        if not is_free(port, "127.0.0.1"):
            lines.append(warn(area, name, f"in use{owner(port)}", "stop it, or give the server another port"))
        elif port >= start:
            seen = f"free, but from {start} on the kernel gives ports to outgoing connections"
            lines.append(warn(area, name, seen, f"choose a port below {start}"))
        else:
            lines.append(ok(area, name, "free"))
    if found.kind == "npu":
        url = environ.get(STORE_URL, "")
        lines.append(
            ok(area, "store", f"{STORE_URL}={url}")
            if re.fullmatch(r"tcp://[0-9.]+:\d+", url)
            else warn(
                area,
                "store",
                f"{STORE_URL}={url or '(not set)'}",
                f"set {STORE_URL}=tcp://ADDRESS:{STORE_PORT}, the same for all servers (launch/README.md)",
            )
        )
    return lines
