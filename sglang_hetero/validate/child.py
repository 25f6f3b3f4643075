"""`python -m sglang_hetero.validate.child FUNCTION SETTINGS ARGUMENT FILE`: one stage, in a process of its own.

What the stage says goes to FILE, a JSON record a line, at once: what was said before a crash counts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import msgspec

from sglang_hetero.doctor.lines import Line

from .stage import Said, Settings

Say = Callable[[Line], None]
Run = Callable[[Settings, str, Say], None]


def main(arguments: Sequence[str]) -> int:
    """Run the stage. What it raises ends the process with a traceback, which its log then has."""
    function, settings, argument, file = arguments
    module, _, name = function.partition(":")
    with open(file, "ab", buffering=0) as output:

        def write(said: Said) -> None:
            output.write(msgspec.json.encode(said) + b"\n")

        def say(line: Line) -> None:
            write(Said(line=line))

        run: Run = getattr(importlib.import_module(module), name)
        run(msgspec.json.decode(settings.encode(), type=Settings), argument, say)
        write(Said(end=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
