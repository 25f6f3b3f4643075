"""Stage: the environment, as `sglang-hetero doctor` sees it, and what only this kind of device needs."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from sglang_hetero.doctor import host
from sglang_hetero.doctor.command import guarded, sglang_lines
from sglang_hetero.doctor.lines import Line, Status, fail, ok, skip

from . import operators
from .child import Say
from .stage import Settings

AREA = "environment"
PAGE = 128
"""Tokens: SGLang's --page-size on NPUs and that of launch/ascend."""
PROMISES = ("device", "versions", "sglang", "libraries", "options", "page size", "torch device", operators.NAME)


def run(settings: Settings, _argument: str, say: Say) -> None:
    """See the module."""
    found = host.Device(settings.device, settings.count)
    say(_device(found))
    looks: list[tuple[str, Callable[[], list[Line]]]] = [
        ("versions", lambda: host.versions(found)),
        ("sglang", lambda: sglang_lines(None, found)[0]),
        ("libraries", lambda: host.libraries(found)),
        ("options", lambda: host.options(os.environ)),
    ]
    for name, look in looks:
        say(merged(name, guarded(name, look)))
    if settings.device == "npu":
        say(ok(AREA, "page size", f"{PAGE} tokens, by launch/ascend on both sides"))
    else:
        say(skip(AREA, "page size", f"only NPUs want pages of {PAGE} tokens; any will do here, the same on both sides"))
    usable = _torch_device(settings.device)
    say(usable)
    if settings.device != "npu":
        say(skip(AREA, operators.NAME, "only NPUs get theirs from several packages"))
    elif usable.status is Status.OK:
        (line,) = guarded(AREA, lambda: [operators.line(AREA)])
        say(msgspec.structs.replace(line, name=operators.NAME))
    else:
        say(skip(AREA, operators.NAME, "torch cannot use the device"))


def merged(name: str, lines: list[Line]) -> Line:
    """Several lines of the doctor as one: as bad as the worst of them, whose words it has."""
    for status in (Status.FAIL, Status.WARN):
        bad = [line for line in lines if line.status is status]
        if bad:
            seen = "; ".join(f"{line.name}: {line.seen}" for line in bad)
            return Line(area=AREA, name=name, status=status, seen=seen, remedy="; ".join(line.remedy for line in bad))
    told = [line for line in lines if line.status is Status.OK]
    return ok(AREA, name, ", ".join(f"{line.name} {line.seen}" for line in told) or "nothing to look at")


def _device(found: host.Device) -> Line:
    if found.count:
        return ok(AREA, "device", f"{found.count} of kind {found.kind}", count=found.count)
    return fail(
        AREA,
        "device",
        f"this host shows none of kind {found.kind}",
        "see that its driver runs: npu-smi info, or nvidia-smi",
    )


def _torch_device(kind: str) -> Line:
    """Whether torch can put something on the device and take it back."""
    import torch

    from sglang_hetero import device

    try:
        device.attach(kind)
        there = torch.arange(8, dtype=torch.int32).to(kind)
        back = (there + 1).cpu().tolist()
    except Exception as error:  # of a driver or a vendor's package, which may raise anything
        return fail(
            AREA,
            "torch device",
            f"torch cannot use the device: {type(error).__name__}: {error}",
            "install the torch build of this device (for an NPU torch_npu, with CANN's set_env.sh sourced)",
        )
    if back != list(range(1, 9)):
        return fail(AREA, "torch device", f"1 to 8 came back as {back}", "the device computes wrong: do not use it")
    return ok(AREA, "torch device", f"torch {torch.__version__} computes on {kind}")
