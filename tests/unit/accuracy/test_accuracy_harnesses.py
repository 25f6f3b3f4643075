"""Tasks of sgl-eval and lm-eval, with programs that have their command lines and write their files."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang_hetero import cli
from sglang_hetero.accuracy import harnesses
from sglang_hetero.accuracy.endpoint import Endpoint
from sglang_hetero.accuracy.harnesses import HARNESSES, Settings
from tests.unit.accuracy.fake_endpoint import Fake, serving

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
LIMIT = 60.0


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Nothing is, until the fixture is called with names of programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)

    def install(*names):
        for name in names:
            program = folder / name
            program.write_text(f"#!{os.path.realpath(f'/proc/{os.getpid()}/exe')}\n{code}")
            program.chmod(0o755)

    code = Path(__file__).with_name("fake_harness.py").read_text()
    return install


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Of the command: status, JSON, both streams. fault: of the program that is run."""

    def run(url, *arguments, reference=None, fault=""):
        monkeypatch.setenv("FAKE_HARNESS", fault)
        result = tmp_path / "result.json"
        result.unlink(missing_ok=True)
        status = cli.main(
            [
                *("accuracy", "--url", url, "--json", str(result), "--examples", "5", "--depths", "1"),
                *("--per-depth", "1", "--lengths", "128", *(["--reference", reference] if reference else [])),
                *arguments,
            ]
        )
        done = capsys.readouterr()
        return status, json.loads(result.read_text()) if result.exists() else None, done.out, done.err

    return run


class Solver(Fake):
    """Knows the number of every problem, but for those in `wrong`; has no answer for those in `failing`."""

    def __init__(self, wrong=(), failing=(), **more):
        super().__init__(routes=ROUTES, **more)
        self.wrong, self.failing = wrong, failing

    def reply(self, path, body, headers):
        if path == "/v1/models" or "problem" not in str(body):
            return super().reply(path, body, headers)
        if self.key and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {"error": "no key"}
        self.calls.append((path, body))
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        number = int(prompt.split()[1])
        if number in self.failing:
            return 500, {"error": "no room"}
        text = f"It is {number + 10 if number in self.wrong else number}" + ("!" if number in self.wrong else "")
        choice = {"index": 0, "finish_reason": "stop", "text": text, "message": {"role": "assistant", "content": text}}
        return 200, {"choices": [choice]}


@pytest.mark.parametrize("program", list(HARNESSES))
def test_a_task_is_run_by_what_is_installed_against_both(installed, run, program):
    installed(program)
    with serving(Solver(wrong=(1, 3))) as one, serving(Solver()) as other:
        status, result, out, err = run(one.url, "--tasks", "gsm8k", "--max-differences", "1", reference=other.url)
    (task,) = result["tasks"]
    assert (task["task"], task["by"]) == ("gsm8k", program)
    assert [(one["right"]["count"], one["right"]["total"]) for one in task["passes"]["endpoint"]] == [(3, 5)] * 2
    assert [one["right"]["count"] for one in task["passes"]["reference"]] == [5, 5]
    assert task["comparison"]["scores"]["pairs"] == {"both": 3, "one": 0, "other": 2, "neither": 0}
    assert task["comparison"]["outputs"]["between"]["count"] == 2
    assert task["noise"]["endpoint"] == task["noise"]["reference"] | {"count": 0}
    assert (status, result["broken"]) == (1, ["gsm8k: 2 outputs differ, 1 may (--max-differences)"])
    assert f"gsm8k (asked by {program})" in out
    assert f"gsm8k: {program} against {one.url}, run 1 of 4" in err
    assert len(one.calls) == len(other.calls) == 2 * 5 + 1


def test_the_first_one_is_preferred_and_one_may_be_chosen(installed, run):
    installed("sgl-eval", "lm-eval")
    with serving(Solver()) as fake:
        assert run(fake.url, "--tasks", "gsm8k")[1]["tasks"][0]["by"] == "sgl-eval"
        assert run(fake.url, "--tasks", "gsm8k", "--harness", "lm-eval")[1]["tasks"][0]["by"] == "lm-eval"


def test_without_any_gsm8k_is_skipped_unless_it_is_asked_for(installed, run):
    with serving(Solver()) as fake:
        status, result, out, _ = run(fake.url)
        assert (status, list(result["skipped"]), result["failed"]) == (0, ["gsm8k"], {})
        assert [task["task"] for task in result["tasks"]] == ["recall"]
        assert "sgl-eval and lm-eval not installed: pip install 'sgl-eval' or pip install 'lm-eval[api]'" in out
        status, result, _, err = run(fake.url, "--tasks", "recall,gsm8k")
        assert (status, result["skipped"], list(result["failed"])) == (1, {}, ["gsm8k"])
        assert "broken: gsm8k: sgl-eval and lm-eval not installed" in err
        installed("sgl-eval")
        status, result, _, _ = run(fake.url)
        assert (status, [task["task"] for task in result["tasks"]]) == (0, ["recall", "gsm8k"])
        status, result, _, _ = run(fake.url, "--harness", "lm-eval", "--tasks", "gsm8k")
        assert result["failed"] == {"gsm8k": "lm-eval not installed: pip install 'lm-eval[api]'"}


def test_answers_that_sgl_eval_did_not_get_are_no_wrong_ones(installed, run):
    """Its own score counts them as wrong."""
    installed("sgl-eval")
    with serving(Solver(failing=(2,))) as fake:
        status, result, _, _ = run(fake.url, "--tasks", "gsm8k")
    one = result["tasks"][0]["passes"]["endpoint"][0]
    assert (one["right"]["count"], one["right"]["total"], one["failed"]) == (4, 4, 1)
    assert result["tasks"][0]["failures"] == {"sgl-eval got no answer: finish_reason 'error'": 2}
    assert status == 1


@pytest.mark.parametrize("program", list(HARNESSES))
def test_each_endpoint_gets_its_key(installed, run, program):
    installed(program)
    keys = ("--api-key", "one", "--reference-api-key", "other")
    with serving(Solver(key="one")) as one, serving(Solver(key="other")) as other:
        status, result, _, _ = run(one.url, "--tasks", "gsm8k", *keys, reference=other.url)
    assert (status, result["failed"]) == (0, {})


@pytest.mark.parametrize(
    ("program", "fault", "reason"),
    [
        ("sgl-eval", "crash", "| Loading | Traceback: no data set at \\x1bhttps://data.example"),
        ("sgl-eval", "partial", "ended before all questions were asked"),
        ("sgl-eval", "lost", "its metrics.json counts 5 questions, its answers are 4"),
        ("sgl-eval", "garbage", "missing required field `symbolic_correct`"),
        ("sgl-eval", "nothing", "it wrote 0 files sgl_eval_gsm8k_*/metrics.json"),
        ("lm-eval", "crash", "| Loading | Traceback: no data set at \\x1bhttps://data.example"),
        ("lm-eval", "bleu", "none of its metrics ['exact_match'] is 0 or 1"),
    ],
)
def test_a_run_that_failed_is_told_with_its_last_words(installed, run, program, fault, reason):
    installed(program)
    with serving(Solver()) as fake:
        status, result, _, err = run(fake.url, "--tasks", "recall,gsm8k", fault=fault)
    assert status == 1
    assert result["failed"]["gsm8k"].startswith(f"{program} run gsm8k against {fake.url}: ")
    assert reason in result["failed"]["gsm8k"]
    assert "broken: gsm8k: " in err
    assert [task["task"] for task in result["tasks"]] == ["recall"]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_that_takes_too_long_is_ended_with_what_it_started(installed, monkeypatch, tmp_path):
    installed("sgl-eval")
    child = tmp_path / "child"
    monkeypatch.setenv("FAKE_HARNESS", "hang")
    monkeypatch.setenv("FAKE_HARNESS_CHILD", str(child))
    # The time is over once it has started something.
    over = SimpleNamespace(monotonic=lambda: 1e9 if child.exists() and child.read_text() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(harnesses, "time", over)
    settings = Settings(examples=5, tokens=8, concurrency=1, seed=0, seconds=5.0)
    with pytest.raises(harnesses.AccuracyError, match=r"not done in 5 s \(--task-minutes\)"):
        harnesses.run(HARNESSES["sgl-eval"], Endpoint("http://127.0.0.1:1"), "gsm8k", settings, tmp_path / "run")
    end = time.monotonic() + LIMIT
    while alive(int(child.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_files_are_kept_where_asked(installed, run, tmp_path):
    installed("sgl-eval")
    with serving(Solver()) as fake:
        run(fake.url, "--tasks", "gsm8k", "--task-dir", str(tmp_path / "kept"), "--repeat", "1")
    kept = [path.name for path in (tmp_path / "kept").glob("gsm8k-*/run1/**/*") if path.is_file()]
    assert sorted(kept) == ["harness.log", "metrics.json", "output-rs0.jsonl"]


def test_a_proxy_does_not_see_the_endpoint(monkeypatch):
    monkeypatch.setenv("no_proxy", "internal")
    environment = harnesses._environment(Endpoint("http://10.0.0.1:8000", key="k"))
    assert environment["no_proxy"] == environment["NO_PROXY"] == "internal,10.0.0.1"
    assert environment["OPENAI_API_KEY"] == "k"
