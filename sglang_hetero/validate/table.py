"""The stages of a run, in the order in which they run."""

from __future__ import annotations

from sglang_hetero.transfer.pieces import StateMode

from . import engines, environment, kernels, loopback, serving
from .stage import Stage

PACKAGE = "sglang_hetero.validate"
LOOK_SECONDS, KERNEL_SECONDS, LOOP_SECONDS = 600.0, 900.0, 600.0
SERVE_SECONDS = 3600.0
"""Of a stage that starts servers; what they may take to start is in serving.py."""
OF_TRANSPORT = {engines.MOONCAKE: ("cpu", "cuda"), engines.SDMA: ("npu",), engines.DEVICE_RDMA: ("npu",)}
MATRIX = ("mixed_tp2", "mixed_tp4", "p2_d2", "p2x2_d2")
"""Of the five topologies those that are not served anyway."""
DEVICES = {"mixed_tp1": 1, "mixed_tp2": 2, "mixed_tp4": 4, "p2_d1": 3, "p2_d2": 4, "p2x2_d2": 6}


def stages(*, matrix: bool = False) -> tuple[Stage, ...]:
    """All of them; matrix: the five-topology matrix, too."""
    found = [
        Stage(environment.AREA, f"{PACKAGE}.environment:run", environment.PROMISES, LOOK_SECONDS, devices=0),
        Stage(kernels.AREA, f"{PACKAGE}.kernels:run", kernels.PROMISES, KERNEL_SECONDS),
    ]
    for transport in engines.TRANSPORTS:
        kinds = OF_TRANSPORT[transport]
        found += [
            Stage(
                loopback.area_of(transport),
                f"{PACKAGE}.loopback:run",
                loopback.PROMISES,
                LOOP_SECONDS,
                kinds=kinds,
                argument=transport,
            ),
            Stage(
                loopback.limits_area(transport),
                f"{PACKAGE}.loopback:limits",
                loopback.LIMIT_PROMISES,
                LOOP_SECONDS,
                kinds=kinds,
                argument=transport,
            ),
        ]
    found.append(_serve(serving.UNDIVIDED, "", slow=False))
    modes = sorted(StateMode, key=lambda mode: mode is not StateMode.PREPUSH)  # the default first
    found += [_serve(serving.DIVIDED, mode.value, slow=mode is not StateMode.PREPUSH) for mode in modes]
    prepush = serving.area_of(serving.DIVIDED, StateMode.PREPUSH.value)
    found.append(
        Stage(
            "overlap",
            f"{PACKAGE}.serving:overlap",
            serving.OVERLAP_PROMISES,
            LOOK_SECONDS,
            argument=prepush,
            servers=True,
            after=(prepush,),
        )
    )
    if matrix:
        found += [_serve(name, "", slow=True) for name in MATRIX]
    return tuple(found)


def _serve(name: str, mode: str, *, slow: bool) -> Stage:
    whole = name == serving.UNDIVIDED
    return Stage(
        serving.area_of(name, mode),
        f"{PACKAGE}.serving:{'reference' if whole else 'run'}",
        serving.promises_of(name),
        SERVE_SECONDS,
        devices=DEVICES[name],
        argument=f"{name} {mode}".strip(),
        slow=slow,
        servers=True,
        after=() if whole else (serving.area_of(serving.UNDIVIDED),),
    )
