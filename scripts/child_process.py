"""Run pip, venv and apt-get so that they end with us and say in one line why they failed.

Used by setup_env.py: standard library only, and a syntax that an old Python can still parse.
"""

import contextlib
import os
import signal
import subprocess

# How long a child may take to tidy up after each signal.
PATIENCE_SECONDS = 10


def run_child(command, lock, on_line=None, env=None):
    """Run a program to its end; gives (exit status, lines of output, stderr among them).

    It inherits the open file `lock`: if we are killed, the next set-up waits for it. It has a session of its own, so
    that Ctrl-C reaches it once, from us, and not again while it tidies up.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        pass_fds=[lock.fileno()],
        start_new_session=True,
    )
    lines = []
    try:
        for raw in process.stdout:
            line = raw.decode(errors="replace").strip()
            if line:
                lines.append(line)
                if on_line is not None:
                    on_line(line)
        return process.wait(), lines
    finally:
        if process.poll() is None:
            end_child(process)


def end_child(process):
    """SIGINT first: pip then removes its temporary files and puts back what it was replacing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.communicate(timeout=PATIENCE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


def met_full_disk(lines):
    return any(sign in line for line in lines for sign in ("No space left", "Errno 28]", "Disk quota", "Errno 122]"))


def met_no_index(lines):
    """pip's line about a package index that it could not reach, or None; what follows is "no such version"."""
    found = [line for line in lines if "connection broken by" in line or "Could not fetch URL" in line]
    return found[-1] if found else None


def met_no_version(lines):
    """Whether pip found no package of the version that it was asked for."""
    return any(sign in line for line in lines for sign in ("No matching distribution", "ResolutionImpossible"))


def reason(status, lines):
    """Why a child failed, as far as its exit status (negative: a signal) and its output tell, in one line."""
    if status < 0:
        return "it was ended by signal {}".format(-status)
    errors = [line for line in lines if "ERROR" in line or "Errno" in line]
    if errors and errors[0] == "ERROR: Exception:":  # a traceback follows
        errors = lines[-1:]
    return met_no_index(lines) or (errors or lines[-1:] or ["no output"])[0]
