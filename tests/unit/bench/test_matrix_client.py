"""What a result of sglang.benchmark.serving must hold."""

import json
from pathlib import Path

import pytest

from bench_serving import matrix_client
from bench_serving.matrix_client import FIGURES, Load, NoResult, arguments, check, figures, progress, read

LOAD = Load("measured", Path("set.jsonl"), (300, 257, 319), 8, 2)


def result(**changes):
    """As SGLang writes it, with everything as it must be. It sends in another order than the data set has."""
    return {
        "completed": 3,
        "max_concurrency": 2,
        "total_input_tokens": 876,
        "total_output_tokens": 24,
        "errors": ["", "", ""],
        "ttfts": [0.1, 0.2, 0.3],
        "generated_texts": ["a", "b", "c"],
        "output_lens": [8, 8, 8],
        "input_lens": [319, 300, 257],
        **dict.fromkeys(FIGURES.values(), 1.5),
        "accept_length": None,
    } | changes


def test_a_sound_result():
    check(result(), LOAD)
    assert figures(result()) == {**dict.fromkeys(FIGURES, 1.5), "accept_length": None}
    assert figures(result(accept_length=1.8))["accept_length"] == 1.8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_lens": [8, 7, 8]}, "not exactly 8 output tokens in 1 of 3 requests: 1: 7"),
        ({"output_lens": [8, 8, 9]}, "not exactly 8 output tokens in 1 of 3 requests: 2: 9"),
        ({"output_lens": [8, 8]}, "3 requests were to be sent, the result has 2 output_lens"),
        ({"errors": ["", "Trace\nValueError: bad", ""]}, "an error in 1 of 3 requests: 1: ValueError: bad"),
        ({"errors": None}, "the result has no errors"),
        # What SGLang's client makes of a stream that ends before any text: a success of the length that was asked for.
        ({"ttfts": [0.1, 0.0, 0.3]}, "no output at all in 1 of 3 requests: 1"),
        ({"generated_texts": ["a", "b", ""]}, "no output at all in 1 of 3 requests: 2"),
        ({"input_lens": [319, 300, 258]}, "877 tokens, not 876; 257, 258 on one side only"),
        ({"completed": 2}, "completed is 2, not 3"),
        ({"total_output_tokens": 23}, "total_output_tokens is 23, not 24"),
        ({"total_input_tokens": 877}, "total_input_tokens is 877, not 876"),
        ({"max_concurrency": None}, "max_concurrency is None, not 2"),
    ],
)
def test_no_result(changes, reason):
    with pytest.raises(NoResult, match=reason):
        check(result(**changes), LOAD)


def test_many_wrong_requests_are_counted_and_a_few_named():
    load = Load("measured", Path(), (9,) * 20, 8, 2)
    found = result(
        errors=[""] * 20, ttfts=[0.1] * 20, generated_texts=["a"] * 20, output_lens=[7] * 20, input_lens=[9] * 20
    )
    with pytest.raises(NoResult, match=r"in 20 of 20 requests: 0: 7, 1: 7, 2: 7, 3: 7, 4: 7 and 15 more"):
        check(found, load)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 0, -1.0, "2"])
def test_what_is_no_figure(value):
    with pytest.raises(NoResult, match=r"mean_tpot_ms is .*: no figure"):
        figures(result(mean_tpot_ms=value))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "wrote 0 results, not 1"),
        ("", "wrote 0 results, not 1"),
        ("{}\n{}\n", "wrote 2 results, not 1"),
        ("{", "is no JSON"),
        ("[]", "no JSON object"),
    ],
)
def test_files_that_hold_no_result(tmp_path, text, reason):
    path = tmp_path / "result.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NoResult, match=reason):
        read(path)


def test_the_file_of_a_result(tmp_path):
    path = tmp_path / "result.jsonl"
    path.write_text(json.dumps(result()) + "\n")
    assert read(path) == result()


def test_sglangs_own_warm_up_is_off():
    line = arguments(LOAD, "http://127.0.0.1:1", "tiny", Path("/model"), Path("/result"))
    given = dict(zip(line[:-1:2], line[1:-1:2], strict=True))
    assert given["--warmup-requests"] == "0" and given["--num-prompts"] == "3" and given["--max-concurrency"] == "2"
    assert given["--sharegpt-output-len"] == "8" and line[-1] == "--output-details"
    assert "--disable-ignore-eos" not in line


def test_progress_is_that_of_the_last_phase():
    assert progress("warning\n") == "loading SGLang"
    first = "[1/2] python -m sglang.benchmark.serving --x\n 0%| | 0/4 [00:00<?]\r100%| | 4/4 [00:01<00:00]\n"
    assert progress(first) == "phase 1/2, 4 of 4 requests"
    second = first + "[2/2] python -m sglang.benchmark.serving --x\n"
    assert progress(second) == "phase 2/2"
    assert progress(second + "\r 15%|# | 2/13 [00:00<00:01, 3it/s]") == "phase 2/2, 2 of 13 requests"


def test_the_client_gets_no_variables_of_sglang(monkeypatch):
    monkeypatch.setenv("SGLANG_IS_IN_CI", "1")
    monkeypatch.setenv("PATH_OF_MINE", "kept")
    found = matrix_client._env()
    assert "SGLANG_IS_IN_CI" not in found and found["PATH_OF_MINE"] == "kept"
