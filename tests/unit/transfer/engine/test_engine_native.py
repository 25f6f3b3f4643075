"""What the native engines share: books of peers are bounded, and those in use stay."""

import threading
from types import SimpleNamespace

import numpy as np

from sglang_hetero.transfer.engine import native
from sglang_hetero.transfer.engine.mooncake import Limits, Mooncake

ONE = np.array([4096], np.uint64)


def test_peers_of_former_times_are_forgotten_and_those_in_use_are_not(monkeypatch):
    monkeypatch.setattr(native, "MAX_PEERS", 3)
    go_on, begun = threading.Event(), threading.Event()

    def write(session, *_):
        if session == "busy:1":
            begun.set()
            go_on.wait(10)
        return 0

    upstream = SimpleNamespace(engine=SimpleNamespace(batch_transfer_sync_write=write), session_id="own:1")
    engine = Mooncake(upstream, Limits(descriptors=1, outstanding=1))
    thread = threading.Thread(target=engine.write, args=("busy:1", ONE, ONE, ONE))
    thread.start()
    assert begun.wait(10)
    busy = engine._peers["busy:1"]
    for number in range(10):
        engine.write(f"peer:{number}", ONE, ONE, ONE)
        engine.write("often:1", ONE, ONE, ONE)
    assert list(engine._peers) == ["busy:1", "peer:9", "often:1"]
    assert engine._peers["busy:1"] is busy, "its limit counts what is under way"
    go_on.set()
    thread.join()
    engine.write("peer:10", ONE, ONE, ONE)
    assert "busy:1" not in engine._peers
