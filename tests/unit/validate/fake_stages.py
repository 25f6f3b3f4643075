"""Stages that go wrong, for the runner; each is run in a process of its own."""

import os
import subprocess
import sys
import time

from sglang_hetero.doctor.lines import ok

AREA = "fake"


def fine(_settings, argument, say):
    for name in argument.split():
        say(ok(AREA, name, "well", ms=1.5))


def hangs(_settings, argument, say):
    """Says one line, then nothing, with a child of another session that hangs, too."""
    say(ok(AREA, "first", "well"))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(argument, "w") as file:
        file.write(str(child.pid))
    print("waiting for Godot", flush=True)
    time.sleep(600)


def crashes(_settings, _argument, say):
    say(ok(AREA, "first", "well"))
    print("it hurts here", flush=True)
    os.abort()


def raises(_settings, _argument, _say):
    raise RuntimeError("no such luck")


def says_nothing(_settings, _argument, _say):
    """Ends as if all were well."""


def leaves_early(_settings, _argument, say):
    """Exit status 0, and all promised lines, but never at its end: something ended the process."""
    say(ok(AREA, "first", "well"))
    say(ok(AREA, "second", "well"))
    os._exit(0)
