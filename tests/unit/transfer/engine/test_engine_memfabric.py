"""The wrapper's calls, made on the real MemFabric: it takes their form. Bytes move on NPUs only."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_hetero.transfer.engine import EngineError
from sglang_hetero.transfer.engine.memfabric import MemFabric

PYTHON = Path(__file__).parents[4] / ".venv-ascend" / "bin" / "python"
CALLER = Path(__file__).with_name("memfabric_calls.py")
SECONDS = 60
NOT_INITIALISED = "smem trans not initialized yet"
HIGH = 2**64 - 2**20
"""An address that a signed 64-bit integer does not hold."""


class Recorder:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append([name, arguments]) or 0


@pytest.fixture(scope="module")
def wrapper_calls():
    native = Recorder()
    engine = MemFabric(SimpleNamespace(engine=native, session_id="127.0.0.1:1"))
    engine.register([(4096, 100), (8192, 200)])
    columns = (np.array([4096, HIGH], np.uint64), np.array([HIGH, 4096], np.uint64), np.array([10, 20], np.uint64))
    engine.write("127.0.0.1:2", *columns)
    engine.read("127.0.0.1:2", *columns)
    engine.close()
    return native.calls


def ask(calls, folder):
    if not PYTHON.exists():
        pytest.fail("there is no .venv-ascend with MemFabric: run `make test` or `make ascend-env`")
    asked, answered = folder / "calls.json", folder / "answers.json"
    asked.write_text(json.dumps(calls))
    done = subprocess.run(
        [PYTHON, "-I", CALLER, asked, answered],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"`make ascend-env` repairs .venv-ascend where it is broken:\n{done.stdout}"
    return json.loads(answered.read_text())


def test_memfabric_takes_the_form_of_our_calls(wrapper_calls, tmp_path):
    names = [name for name, _ in wrapper_calls]
    assert names == [
        "batch_register_memory",
        "batch_transfer_sync_write",
        "batch_transfer_sync_read",
        "unregister_memory",
        "unregister_memory",
    ]
    answers = ask(wrapper_calls, tmp_path)
    for (name, arguments), (answer, _) in zip(wrapper_calls, answers, strict=True):
        assert type(answer) is int, f"{name}{arguments}: {answer}"
    # It answers 0 to a registration before it is initialised: it takes it down and registers at the first connection.
    assert [answer for answer, _ in answers] == [0, -1, -1, 0, 0]
    assert {text for answer, text in answers if answer} == {NOT_INITIALISED}


def test_other_forms_are_found_out(tmp_path):
    calls = [
        ["batch_transfer_sync_write", [["127.0.0.1:2"], [1], [1], [1]]],
        ["batch_transfer_sync_write", ["127.0.0.1:2", 1, 1, 1]],
        ["batch_register_memory", [[1]]],
        ["batch_register_memory", [[-1], [1]]],
        ["batch_unregister_memory", [[1]]],
    ]
    assert [answer for answer, _ in ask(calls, tmp_path)] == [*["TypeError"] * 4, "AttributeError"]


def test_its_own_text_reaches_the_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", SimpleNamespace(get_and_clear_last_err_msg=lambda: "no store"))
    native = SimpleNamespace(batch_register_memory=lambda *_: -1, batch_transfer_sync_write=lambda *_: -2004)
    engine = MemFabric(SimpleNamespace(engine=native, session_id="127.0.0.1:1"))
    with pytest.raises(EngineError, match=r"code -1.*its text: no store; check that every region.*ASCEND_MF_STORE_URL"):
        engine.register([(4096, 100)])
    with pytest.raises(EngineError, match=r"code -2004.*its text: no store; .*prefill connects to decode"):
        engine.write("127.0.0.1:2", [4096], [4096], [1])
