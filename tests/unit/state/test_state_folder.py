"""The folder that the processes of one server share: whose it is, and what becomes of it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_hetero.errors import StateError
from sglang_hetero.state import folder
from sglang_hetero.state.report import Report

CHILD = """
import os, signal, sys
from sglang_hetero.state import folder
print(folder.make(os.environ), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "waits":
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.undo()
    tempfile.tempdir = None


def server(how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_it_is_only_for_this_user_and_named_to_children(temporary):
    environ: dict[str, str] = {folder.VARIABLE: "another server's"}
    made = folder.make(environ)
    assert folder.given(environ) == made and made.parent == temporary
    assert made.stat().st_mode & 0o777 == 0o700
    assert folder.given({}) is None


def test_what_is_written_is_read_and_the_last_word_counts(tmp_path):
    folder.write(tmp_path, Report(side="decode", rank="a", pid=1))
    folder.write(tmp_path, Report(side="decode", rank="b", pid=2))
    folder.write(tmp_path, Report(side="decode", rank="c", pid=1))
    reports, problems = folder.read(tmp_path)
    assert (sorted(one.rank for one in reports), problems) == (["b", "c"], [])


def test_what_cannot_be_read_is_told_and_keeps_nothing_else(tmp_path):
    folder.write(tmp_path, Report(side="decode", rank="a", pid=1))
    (tmp_path / "2.json").write_bytes(b'{"side"')
    reports, (problem,) = folder.read(tmp_path)
    assert [one.rank for one in reports] == ["a"]
    assert problem.startswith("the report 2.json cannot be read: ")


def test_a_folder_that_is_gone_is_told(tmp_path):
    assert folder.read(tmp_path / "gone")[1] == [
        f"the folder with the reports of the ranks is gone ({tmp_path / 'gone'}); restart the server"
    ]


def test_it_goes_with_its_process(temporary):
    child = server("ends")
    made, _ = child.communicate()
    assert made.strip().startswith(str(temporary)) and not Path(made.strip()).exists()


def test_one_of_a_killed_server_is_removed_by_the_next_and_no_other(temporary):
    with server("waits") as alive:
        lives = Path(alive.stdout.readline().strip())
        left, _ = server("killed").communicate()
        assert Path(left.strip()).is_dir()
        stranger = temporary / f"{folder.PREFIX}stranger"
        stranger.mkdir()
        folder.make({})
        assert not Path(left.strip()).exists()
        assert lives.is_dir() and stranger.is_dir()
        alive.stdin.close()


def test_a_forked_child_leaves_it_to_its_owner(temporary):
    made = folder.make({})
    child = os.fork()
    if child == 0:
        folder._remove(made, os.getppid())
        os._exit(0)
    os.waitpid(child, 0)
    assert made.is_dir()


def test_no_folder_can_be_made(monkeypatch, temporary):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(StateError, match="set TMPDIR"):
        folder.make({})
