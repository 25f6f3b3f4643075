"""What the kernel says of a process: counted against what the test does."""

import mmap
import os
import socket
import subprocess
import sys
import threading

from sglang_hetero.state import process


def test_threads_sockets_files_and_memory_are_counted():
    before = process.figures()
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name=f"{process.OURS}test")
    thread.start()
    pair = socket.socketpair()
    # Pages of its own: Python's allocator may have some left that count already.
    data = mmap.mmap(-1, 32 << 20)
    data.write(b"\x01" * len(data))
    now = process.figures()
    assert process.threads() == [f"{process.OURS}test"]
    gate.set()
    thread.join()
    for each in pair:
        each.close()
    assert [now[name] - before[name] for name in ("threads", "sockets", "files")] == [1, 2, 2]
    assert now["rss_bytes"] - before["rss_bytes"] > len(data) // 2
    assert process.threads() == []
    data.close()


def test_a_process_lives_until_it_ends_also_before_its_parent_has_noticed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.alive(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not process.alive(child.pid)
    child.wait()
    assert not process.alive(child.pid)


def test_the_processes_above():
    found = process.parents(os.getpid())
    assert found[0] == os.getppid() and found[-1] in (0, 1)
    assert process.parents(2**31 - 1) == []
