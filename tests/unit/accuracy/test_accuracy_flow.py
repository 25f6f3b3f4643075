"""`sglang-hetero accuracy` against endpoints that are right, wrong at a rate, noisy, failing, or gone."""

import json
import zlib

import pytest

from sglang_hetero import cli
from sglang_hetero.accuracy.asking import GIVE_UP, Teller
from tests.unit.accuracy.fake_endpoint import Fake, generated, serving, truth


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Recall of 20 questions, unless a test says otherwise; gives status, JSON, and both streams."""
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)

    def run(url, *arguments, reference=None):
        result = tmp_path / "result.json"
        result.unlink(missing_ok=True)
        status = cli.main(
            [
                "accuracy",
                *("--url", url, "--tasks", "recall", "--lengths", "400", "--depths", "4", "--per-depth", "5"),
                *(["--reference", reference] if reference else []),
                *("--json", str(result), *arguments),
            ]
        )
        done = capsys.readouterr()
        return status, json.loads(result.read_text()) if result.exists() else None, done.out, done.err

    return run


def chosen(prompt: str, of: int) -> bool:
    """One of so many prompts, always the same ones."""
    return zlib.crc32(prompt.encode()) % of == 0


def test_who_knows_everything_is_told_so(run):
    with serving(Fake(lambda prompt, _: generated(truth(prompt) + "\nmore", accept=3.0))) as fake:
        status, result, out, err = run(fake.url)
    (task,) = result["tasks"]
    one = task["passes"]["endpoint"][0]
    assert (status, result["ok"], result["broken"]) == (0, True, [])
    assert (one["right"]["count"], one["right"]["total"], one["failed"]) == (20, 20, 0)
    assert one["right"]["interval"]["low"] == pytest.approx(0.839, abs=1e-3)
    assert one["accept"]["mean"] == 3.0
    assert len(task["passes"]["endpoint"]) == 2
    assert len(fake.prompts()) == 40
    assert [(group["depth"], group["endpoint"]["right"]["count"]) for group in task["groups"]] == [
        (0.0, 5),
        (1 / 3, 5),
        (2 / 3, 5),
        (1.0, 5),
    ]
    assert task["comparison"] is None
    assert task["noise"]["endpoint"]["count"] == 0
    assert "endpoint     1       20       0      0     20  100.0 %  83.9-100.0  3.00 (3.00-3.00)" in out
    assert "Outputs: 0 of 20 (0.0 %) differ between the first two passes of the endpoint." in out
    assert "recall: 40/40 answers" in err


def test_a_pass_has_an_order_of_its_own_and_all_prompts(run):
    with serving(Fake()) as fake:
        run(fake.url, "--concurrency", "1")
    first, second = fake.prompts()[:20], fake.prompts()[20:]
    assert first != second
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 20


def test_one_depth_that_is_lost_shows_there_only(run):
    """As a server that has lost the state of the text's beginning."""

    def answer(prompt, _turn):
        first = next(line for line in prompt.split("\n") if "=" in line)
        return "00000000" if first.startswith(prompt.rsplit("\n", 1)[1]) else truth(prompt)

    with serving(Fake(answer)) as bad, serving(Fake()) as good:
        status, result, out, _ = run(bad.url, "--fail-if-worse", "--fail-under", "0.9", reference=good.url)
    (task,) = result["tasks"]
    assert [group["endpoint"]["right"]["count"] for group in task["groups"]] == [0, 5, 5, 5]
    assert [group["reference"]["right"]["count"] for group in task["groups"]] == [5, 5, 5, 5]
    assert task["comparison"]["outputs"]["between"]["count"] == 5
    assert {one["reference"]["right"] for one in task["differing"]} == {True}
    assert task["findings"] == {
        "score": "no difference found",
        "outputs": "more than noise",
        "accept": "cannot be told",
    }
    assert (status, result["broken"]) == (
        1,
        ["recall: a score of 75.0 % is under 90.0 %", "recall: outputs: more than noise (--fail-if-worse)"],
    )
    assert "0/5" in out


def test_noise_that_both_have_is_no_difference(run):
    """A third of the prompts gets another end every time, on both."""

    def noisy(prompt, turn):
        return truth(prompt) + ("\nab" if turn and chosen(prompt, 3) else "\nxy")

    with serving(Fake(noisy)) as one, serving(Fake(noisy)) as other:
        status, result, _, _ = run(one.url, "--fail-if-worse", "--per-depth", "20", reference=other.url)
    (task,) = result["tasks"]
    assert task["noise"]["endpoint"]["count"] == task["noise"]["reference"]["count"] > 10
    assert task["findings"]["outputs"] == "no difference found"
    assert status == 0
    assert task["comparison"]["outputs"]["between"]["count"] == 0


def test_outputs_that_always_differ_after_the_answer_are_found(run):
    with (
        serving(Fake(lambda prompt, _: truth(prompt) + "\nab")) as one,
        serving(Fake(lambda prompt, _: truth(prompt) + ("\naX" if chosen(prompt, 4) else "\nab"))) as other,
    ):
        status, result, out, _ = run(one.url, "--max-differences", "2", reference=other.url)
    outputs = result["tasks"][0]["comparison"]["outputs"]
    count = outputs["between"]["count"]
    assert count > 2
    assert outputs["positions"] == {"0": 0, "1": 0, "2-3": 0, "4-7": 0, "8-15": count}
    assert f"First difference at token (from 0) -> questions: 8-15: {count}" in out
    assert (status, result["broken"]) == (1, [f"recall: {count} outputs differ, 2 may (--max-differences)"])


def test_requests_that_fail_are_counted_apart(run):
    def answer(prompt, turn):
        return (500, b"no room") if chosen(prompt, 4) and turn == 0 else truth(prompt)

    with serving(Fake(answer)) as fake:
        status, result, out, err = run(fake.url)
        some = result["tasks"][0]["passes"]["endpoint"][0]
        lenient, *_ = run(fake.url, "--max-errors", "20")
    failed = some["failed"]
    assert failed > 1
    assert (some["right"]["count"], some["right"]["total"]) == (20 - failed, 20 - failed)
    assert result["tasks"][0]["passes"]["endpoint"][1]["failed"] == 0
    assert f"{failed} x {fake.url}/generate: HTTP 500: 'no room'" in out
    assert f"{failed} failed" in err
    assert (status, result["broken"]) == (1, [f"recall: {failed} requests failed, 0 may (--max-errors)"])
    assert lenient == 0


def test_an_endpoint_that_dies_is_not_asked_to_the_end(run):
    with serving(Fake(lambda *_: (503, b"gone"))) as fake:
        status, result, out, _ = run(fake.url, "--per-depth", "50", "--concurrency", "2", "--max-errors", "1000")
    asked = len(fake.prompts())
    assert 2 * GIVE_UP <= asked < 2 * (GIVE_UP + 2 * 2 + 2)
    assert status == 1
    assert "recall: the endpoint has answered nothing" in result["broken"]
    assert result["tasks"][0]["passes"]["endpoint"][0]["failed"] == 200
    assert "x not asked: 22 requests in a row had failed, the last with:" in out


def test_a_reference_that_answers_nothing_is_no_comparison(run):
    """However many failures are allowed: no output differs then, and no score is worse."""
    limits = ("--max-errors", "1000", "--max-differences", "0", "--fail-if-worse")
    with serving(Fake()) as good, serving(Fake(lambda *_: (503, b"gone"))) as dead:
        status, result, *_ = run(good.url, *limits, reference=dead.url)
    assert (status, result["broken"]) == (1, ["recall: no question has an answer from both, so nothing was compared"])


def test_accept_lengths_are_compared(run):
    def speculating(accept):
        return Fake(lambda prompt, _: generated(truth(prompt), accept=accept + (chosen(prompt, 2) and 0.25)))

    with serving(speculating(1.0)) as one, serving(speculating(2.5)) as other:
        status, result, _, _ = run(one.url, "--fail-if-worse", reference=other.url)
    task = result["tasks"][0]
    assert task["findings"]["accept"] == "lower than the reference"
    assert task["comparison"]["accept"]["mean"] == -1.5
    assert (status, result["broken"]) == (1, ["recall: accept: lower than the reference (--fail-if-worse)"])


def test_an_openai_reference_and_other_models_are_noted(run):
    with serving(Fake()) as one, serving(Fake(routes=("/v1/completions",), model="other")) as other:
        status, result, _, _ = run(one.url, reference=other.url)
    assert status == 0
    assert [note.split(":")[0] for note in result["notes"]] == [
        "the endpoints name different models",
        "they are asked by different routes, /generate and /v1/completions; --api makes it one",
    ]
    assert result["tasks"][0]["comparison"]["outputs"]["unit"] == "character"
    assert result["endpoints"]["reference"]["route"] == "/v1/completions"


def test_caches_are_dropped_before_each_pass_if_asked(run):
    with serving(Fake()) as fake:
        run(fake.url, "--flush-cache", "--repeat", "3")
    kinds = [path for path, body in fake.calls if path == "/flush_cache" or len(str(body)) > 200]
    assert kinds == (["/flush_cache"] + ["/generate"] * 20) * 3
    with serving(Fake(routes=("/generate",))) as fake:
        status, result, _, _ = run(fake.url, "--flush-cache")
    assert status == 1
    assert "/flush_cache: HTTP 404" in result["failed"]["recall"]


def test_keys_go_to_their_own_endpoint_and_are_written_nowhere(run, tmp_path):
    with serving(Fake(key="one")) as one, serving(Fake(key="other")) as other:
        keys = ("--api-key", "one", "--reference-api-key", "other")
        status, result, out, err = run(one.url, *keys, reference=other.url)
        assert status == 0
        status, _, _, refused = run(one.url, "--api-key", "one", reference=other.url)
    assert status == 1
    assert f"{other.url}/v1/models: HTTP 401: it wants its API key" in refused
    text = json.dumps(result["settings"]) + json.dumps(result["endpoints"]) + out + err
    assert "'one'" not in text
    assert '"one"' not in text


def test_who_is_not_there_is_refused_before_anything_is_asked(run):
    with serving(Fake()) as fake:
        status, result, _, err = run(fake.url, reference="http://127.0.0.1:1")
    assert (status, result) == (1, None)
    assert "http://127.0.0.1:1" in err
    assert "is a server or router running there?" in err
    assert fake.prompts() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "8"], "--tokens 8: an answer of recall has 8 digits"),
        (["--max-differences", "0"], "--max-differences compares with a reference"),
        (["--fail-if-worse"], "--fail-if-worse compares with a reference"),
        (["--per-depth", "100000"], "400000 questions of recall are more than 65536"),
        (["--lengths", "400,256"], "256 characters has 2 pairs, so several of 4 depths would ask for the same one"),
        (["--url", "ftp://a"], "'ftp://a' is no endpoint"),
        (["--json", "/nowhere/at/all/result.json"], "there is no such folder"),
    ],
)
def test_what_cannot_work_is_refused_at_once(run, arguments, said):
    status, _, _, err = run("http://127.0.0.1:1", *arguments)
    assert status == 1
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--depths", "33"], "32 pairs at most"),
        (["--lengths", "512,0"], "must be 1 or more"),
        (["--lengths", str(1 << 21)], "a prompt may have"),
        (["--repeat", "6"], "5 or less"),
        (["--tasks", "recall,--help"], "is no name of a task"),
        (["--fail-under", "95"], "from 0 to 1"),
    ],
)
def test_values_that_mean_nothing_are_refused(run, capsys, arguments, said):
    with pytest.raises(SystemExit) as caught:
        run("http://127.0.0.1:1", *arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_length_that_is_too_short_is_told(run):
    with serving(Fake()) as fake:
        status, _, _, err = run(fake.url, "--lengths", "10")
    assert status == 1
    assert "has no room" in err


def test_progress_is_not_told_too_often():
    class Log(list):
        def isatty(self):
            return False

        write = list.append

        def flush(self):
            pass

    clock, log = [0.0], Log()
    teller = Teller("recall", log, lambda: clock[0])
    for step in range(100):
        clock[0] += 0.5
        teller(f"{step + 1}/100")
    teller.close()
    assert log == ["recall: 20/100\n", "recall: 40/100\n", "recall: 60/100\n", "recall: 80/100\n", "recall: 100/100\n"]
