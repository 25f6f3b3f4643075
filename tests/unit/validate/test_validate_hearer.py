"""What a child says is heard line by line, however it arrives."""

import subprocess
import sys
import threading
import time

import pytest

from sglang_hetero.validate.hearer import KEPT_CHARACTERS, Hearer

SECONDS = 30
PIPE_BYTES = 1 << 16
"""More than a pipe of Linux holds is written below."""


@pytest.fixture
def say():
    """Starts a process that runs a line of Python."""
    processes = []

    def start(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import os, time\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def soon() -> float:
    return time.monotonic() + SECONDS


def test_two_lines_of_one_write_are_both_heard_while_the_process_lives_on(say):
    hearer = Hearer(say("os.write(1, b'one\\ntwo\\n')\ntime.sleep(600)"))
    assert [hearer.line(soon()), hearer.line(soon())] == ["one\n", "two\n"]


def test_a_line_of_two_writes_is_one(say):
    hearer = Hearer(say("os.write(1, b'on')\ntime.sleep(0.3)\nos.write(1, b'e\\n')\ntime.sleep(600)"))
    assert hearer.line(soon()) == "one\n"


def test_silence_ends_with_the_time_and_the_line_may_come_later(say):
    process = say("input()\nprint('late', flush=True)\ntime.sleep(600)")
    hearer = Hearer(process)
    assert hearer.line(time.monotonic() + 0.05) is None
    process.stdin.write("\n")
    process.stdin.flush()
    assert hearer.line(soon()) == "late\n"


def test_the_end_is_told_as_often_as_one_asks(say):
    hearer = Hearer(say("print('last')"))
    assert [hearer.line(soon()) for _ in range(3)] == ["last\n", "", ""]


def test_what_is_no_text_does_not_end_it(say):
    hearer = Hearer(say("os.write(1, b'\\xff\\xfe\\nand\\n')\ntime.sleep(600)"))
    assert [hearer.line(soon()), hearer.line(soon())] == ["\ufffd\ufffd\n", "and\n"]


def test_a_process_that_is_not_asked_any_more_can_go_on_talking(say):
    process = say(f"print('READY')\nfor _ in range({PIPE_BYTES // 64 * 4}): print('x' * 63)")
    assert Hearer(process).line(soon()) == "READY\n"
    assert process.wait(SECONDS) == 0


def heard_after_its_end(process) -> list[str]:
    """What is left of all that a process has said while nobody asked."""
    hearer = Hearer(process)
    assert process.wait(SECONDS) == 0
    for thread in threading.enumerate():
        if thread.name == f"hearer-{process.pid}":
            thread.join(SECONDS)
    heard = []
    while line := hearer.line(soon()):
        heard.append(line)
    return heard


def test_of_a_process_that_is_not_asked_only_the_latest_is_kept(say):
    """A fleet that serves goes on logging for as long as it runs."""
    lines = KEPT_CHARACTERS // 64 * 3
    process = say(
        f"for number in range({lines}): print(f'{{number:063d}}')\nprint('x' * {KEPT_CHARACTERS * 2})\nprint('end')"
    )
    heard = heard_after_its_end(process)
    assert heard[-1] == "end\n"
    assert sum(map(len, heard)) <= KEPT_CHARACTERS


def test_the_latest_lines_are_heard_in_order_and_whole(say):
    lines = KEPT_CHARACTERS // 64 * 3
    process = say(f"for number in range({lines}): print(f'{{number:063d}}')")
    heard = [int(line) for line in heard_after_its_end(process)]
    assert heard == list(range(lines - len(heard), lines)) and len(heard) == KEPT_CHARACTERS // 64
