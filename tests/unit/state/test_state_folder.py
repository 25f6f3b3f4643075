"""The folder that the processes of one server share: whose it is, and what becomes of it."""

import errno
import multiprocessing
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
        f"the folder with the reports of the ranks is gone ({tmp_path / 'gone'}), until a restart"
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
    environ = {folder.VARIABLE: "another server's"}
    with pytest.raises(StateError, match="set TMPDIR"):
        folder.make(environ)
    assert folder.given(environ) is None and folder.VARIABLE in environ, "the children need not try it, too"


def test_no_temporary_folder_can_be_written(monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(StateError, match=r"in any temporary folder: .*No usable.*set TMPDIR"):
        folder.make({})


def test_nothing_is_left_of_a_folder_that_could_not_be_finished(monkeypatch, temporary):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder.fcntl, "flock", full)
    with pytest.raises(StateError, match="No space"):
        folder.make({})
    assert list(temporary.iterdir()) == []


def made_by_a_child(pipe):
    pipe.send(folder.make({}))


def test_it_goes_with_a_process_that_multiprocessing_has_started(temporary):
    """Where atexit is not heard."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=made_by_a_child, args=(theirs,))
    process.start()
    assert ours.poll(60)
    made = ours.recv()
    process.join()
    assert made.parent == temporary and not made.exists()


def test_whether_it_can_be_written(tmp_path):
    folder.write(tmp_path, Report(side="decode", rank="a", pid=1))
    before = sorted(tmp_path.iterdir())
    assert folder.unwritable(tmp_path) == ""
    assert sorted(tmp_path.iterdir()) == before
    assert "No such file" in folder.unwritable(tmp_path / "gone")


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    """With a limit of the size of files in its place: a report of the size of the largest does not go in any more."""
    folder.write(tmp_path, Report(side="decode", rank="a" * 9000, pid=1))
    code = """
import resource, signal, sys
from pathlib import Path
from sglang_hetero.state import folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
print(folder.unwritable(Path(sys.argv[1])))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]
