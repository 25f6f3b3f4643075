"""What a stage is, and what the lines that it said are worth. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from sglang_hetero.doctor.lines import Line, fail, one_line, skip

SHOWN = 400
"""Characters of a stage's last words in a line."""
ITSELF = "stage"
"""Name of a line about the stage as a whole."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run. device: cpu, npu or cuda. count: how many of them. folder: where stages keep what they leave. fleet: the
    script that starts servers on accelerators, launch/lib/fleet.sh; empty if it was not given. chip: of an Ascend host,
    as LAUNCH_CHIP has it."""

    device: str
    count: int
    folder: str
    quick: bool = False
    fleet: str = ""
    chip: str = ""


@dataclass(frozen=True)
class Stage:
    """name: its lines' area. run: `module:function` that takes Settings, arguments and something to say lines with.
    promises: names of the lines that it says, each once. seconds: after which it is stopped. devices: accelerators that
    it needs, if it is not for a CPU. kinds: of device that it is for. argument: for the function. slow: left out of a
    quick run. servers: it starts some. after: stages whose files it reads."""

    name: str
    run: str
    promises: tuple[str, ...]
    seconds: float
    devices: int = 1
    kinds: tuple[str, ...] = ("cpu", "npu", "cuda")
    argument: str = ""
    slow: bool = False
    servers: bool = False
    after: tuple[str, ...] = ()


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record of what a stage says: a line, or that it has come to its end."""

    line: Line | None = None
    end: bool = False


@dataclass(frozen=True)
class Ended:
    """How a stage's process ended. code: exit status, negative for a signal. stopped: after how many seconds it was
    stopped for taking too long, 0 if it was not. words: last lines of its log."""

    code: int
    stopped: float = 0.0
    words: str = ""


def obstacle(stage: Stage, settings: Settings) -> str:
    """Why a stage cannot run here; empty if it can."""
    device = settings.device
    if device not in stage.kinds:
        return f"it is for {' and '.join(stage.kinds)}, this run is for {device}"
    if device != "cpu" and settings.count < stage.devices:
        plural = "s" if stage.devices > 1 else ""
        return f"it needs {stage.devices} {device} device{plural}, this host has {settings.count}"
    if settings.quick and stage.slow:
        return "left out by --quick"
    if stage.servers and device != "cpu" and not settings.fleet:
        return (
            "it starts servers with launch/lib/fleet.sh, which was not given: use --fleet, or the validate.sh of "
            "launch/ascend or launch/cuda"
        )
    return ""


def judge(stage: Stage, output: bytes, ended: Ended) -> list[Line]:
    """The lines of a stage: what it said, as far as that can be believed, and what became of it.

    A stage that crashed, hung, said something that is no line, or ended without what it had promised, fails.
    """
    said, faults, complete = _read(stage, output)
    lines = list(said.values())
    missing = [name for name in stage.promises if name not in said]
    whole = _whole(stage, ended, complete)
    if whole is not None:
        lines.append(whole)
        lines += [skip(stage.name, name, "the stage ended before") for name in missing]
    else:
        lines += [_broken(stage, name, "it ended as if all were well, and said nothing of this") for name in missing]
    return lines + [_broken(stage, f"record {number}", fault) for number, fault in enumerate(faults, 1)]


def _read(stage: Stage, output: bytes) -> tuple[dict[str, Line], list[str], bool]:
    """Lines by name, what cannot be believed, and whether the stage says that it has come to its end."""
    found: dict[str, Line] = {}
    faults: list[str] = []
    complete = False
    for record in output.splitlines():
        try:
            said = msgspec.json.decode(record, type=Said)
        except (msgspec.MsgspecError, ValueError) as error:
            faults.append(f"a record is no line: {one_line(str(error))[:SHOWN]}")
            continue
        complete = complete or said.end
        line = said.line
        if line is None:
            continue
        if line.area != stage.name or line.name not in (*stage.promises, ITSELF):
            faults.append(f"it said a line that is not its own: {line.area}, {line.name}")
        elif line.name in found:
            faults.append(f"it said two lines about {line.name}: {found[line.name].status}, then {line.status}")
        else:
            found[line.name] = line
    return found, faults, complete


def _whole(stage: Stage, ended: Ended, complete: bool) -> Line | None:
    """What is wrong with the end of a stage; None if nothing is."""
    words = f"; its last words: {one_line(ended.words)[-SHOWN:]}" if ended.words.strip() else ""
    if ended.stopped:
        what = f"stopped after {ended.stopped:.0f} s, with all that it had started{words}"
    elif ended.code < 0:
        what = f"ended by signal {-ended.code}{words}"
    elif ended.code:
        what = f"ended with exit status {ended.code}{words}"
    elif not complete:
        what = f"ended before its end{words}"
    else:
        return None
    return _broken(stage, f"{stage.name} as a whole", what)


def _broken(stage: Stage, name: str, what: str) -> Line:
    return fail(stage.name, name, what, f"see its log, {stage.name}.log, and run it alone: --only {stage.name}")


def left_out(stage: Stage, why: str) -> list[Line]:
    """The lines of a stage that does not run."""
    return [skip(stage.name, name, why) for name in stage.promises]


def chosen(stages: Iterable[Stage], only: Iterable[str]) -> list[Stage]:
    """The stages that were asked for and those whose files they read, in the order of the table; all if none was.
    Raises KeyError for a name that is none, with that name."""
    every, wanted = list(stages), set(only)
    unknown = wanted - {stage.name for stage in every}
    if unknown:
        raise KeyError(min(unknown))
    for stage in reversed(every):  # what a stage reads stands before it
        wanted |= set(stage.after) if stage.name in wanted else set()
    return [stage for stage in every if not wanted or stage.name in wanted]
