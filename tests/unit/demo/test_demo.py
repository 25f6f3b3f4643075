"""The demo's verdict: PASS and 0 only when every output is the same."""

from dataclasses import replace

import pytest

from sglang_hetero import cli
from sglang_hetero.client import Generation
from sglang_hetero.demo import command
from sglang_hetero.errors import HeteroError

ANSWER = Generation(
    text="abc",
    tokens=[65, 66, 67],
    prompt_tokens=10,
    completion_tokens=3,
    seconds=0.5,
    meta={"spec_accept_length": 1.5, "spec_correct_drafts_histogram": [1, 1]},
)

DIFFERENCES = {
    "token": replace(ANSWER, tokens=[65, 66, 68]),
    "text": replace(ANSWER, text="abd"),
    "count": replace(ANSWER, completion_tokens=2),
    "accepted drafts": replace(ANSWER, meta={"spec_correct_drafts_histogram": [0, 2]}),
    "no speculation": replace(ANSWER, meta={}),
}


def test_equal_outputs_are_the_same_however_long_they_took():
    assert command.same(ANSWER, replace(ANSWER, seconds=9.0))


@pytest.mark.parametrize("other", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_any_difference_counts(other):
    assert not command.same(ANSWER, other)


def served(monkeypatch, answers):
    """Replace the servers by prepared answers per topology; gives the requests that were asked for."""
    asked = []

    def serve(name, options, todo, tokens):
        assert tokens == command.OUTPUT_TOKENS
        asked.append((name, options, todo))
        return [answers[name](i) for i in range(len(todo))]

    monkeypatch.setattr(command, "_serve", serve)
    monkeypatch.setattr(command, "raise_on_signals", lambda: None)
    return asked


def test_pass(monkeypatch, capsys):
    asked = served(monkeypatch, {"p2_d1": lambda _i: ANSWER, "mixed_tp1": lambda _i: ANSWER})
    assert cli.main(["demo"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("\nPASS")
    (divided, options, requests), (undivided, other_options, _) = asked
    assert (divided, undivided) == ("p2_d1", "mixed_tp1")
    assert options == other_options
    assert options.mtp == 3
    assert {request.endpoint for request in requests} == {"/v1/chat/completions", "/generate"}


def test_one_difference_fails(monkeypatch, capsys):
    wrong = DIFFERENCES["token"]
    served(monkeypatch, {"p2_d1": lambda i: wrong if i == 2 else ANSWER, "mixed_tp1": lambda _i: ANSWER})
    assert cli.main(["demo"]) == 1
    output = capsys.readouterr().out
    assert output.count("DIFFERENT") == 1
    assert output.rstrip().endswith("\nFAIL")


@pytest.mark.parametrize(
    ("flags", "depth", "compared"),
    [
        (["--prefill-mtp", "0"], 3, False),
        (["--mtp", "0", "--decode-mtp", "5"], 5, False),
        (["--prefill-mtp", "1", "--decode-mtp", "5"], 5, True),
        (["--decode-mtp", "0"], 0, True),
    ],
)
def test_the_undivided_server_drafts_as_decode_does(flags, depth, compared, monkeypatch, capsys):
    """Drafts are compared unless decode drafts without prefill's draft cache; tokens always are."""
    other = DIFFERENCES["accepted drafts"]
    asked = served(monkeypatch, {"p2_d1": lambda _i: other, "mixed_tp1": lambda _i: ANSWER})
    assert cli.main(["demo", *flags]) == compared
    output = capsys.readouterr().out
    assert ("accepted drafts are not" in output) is not compared
    alone = asked[1][1]
    assert (alone.mtp, alone.prefill_mtp, alone.decode_mtp) == (depth, None, None)
    served(monkeypatch, {"p2_d1": lambda _i: DIFFERENCES["token"], "mixed_tp1": lambda _i: ANSWER})
    assert cli.main(["demo", *flags]) == 1


def test_prompts_are_a_page_or_more():
    """A page is about 2,000 characters."""

    class Recorder:
        def generate(self, text, tokens):
            return text

    texts = [request.send(Recorder()) for request in command._requests(8) if request.endpoint == "/generate"]
    assert len(texts) >= 3
    assert min(len(text) for text in texts) >= 2000
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("answer", "mtp", "reason"),
    [
        (replace(ANSWER, completion_tokens=2), 0, "asked for 3 tokens, the answer has 2"),
        (replace(ANSWER, text="", tokens=[]), 0, "asked for 3 tokens"),
        (replace(ANSWER, text="", tokens=[65]), 0, "tells the ids of 1"),
        (replace(ANSWER, tokens=[65]), 0, "tells the ids of 1"),
        (replace(ANSWER, meta={}), 3, "tells no accepted drafts"),
    ],
)
def test_an_answer_that_tells_too_little_is_not_compared(answer, mtp, reason):
    with pytest.raises(HeteroError, match=reason):
        command.check_complete(answer, 3, mtp)


def test_complete_answers_are_accepted():
    command.check_complete(ANSWER, 3, 3)
    command.check_complete(replace(ANSWER, meta={}), 3, 0)
    command.check_complete(replace(ANSWER, tokens=[]), 3, 3)
    command.check_complete(replace(ANSWER, text=""), 3, 3)  # ids of special tokens, say


@pytest.mark.parametrize("tokens", ["0", "-1", "x"])
def test_a_number_of_tokens_that_compares_nothing_is_refused(tokens, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", "--tokens", tokens])
    assert end.value.code == 2
    assert "--tokens" in capsys.readouterr().err


def test_prompts_of_given_lengths_with_a_trace(monkeypatch, tmp_path):
    """The same ids for both topologies; only the pair records, and the undivided server has no roles to set."""
    asked = served(monkeypatch, {"p2_d1": lambda _i: ANSWER, "mixed_tp1": lambda _i: ANSWER})
    sent = []

    class Listener:
        def generate(self, prompt, tokens):
            sent.append((prompt, tokens))
            return ANSWER

    given = ["demo", "--prompt-tokens", "7,512", "--trace", str(tmp_path), "--decode-env", "SGLANG_HETERO_VERIFY=1"]
    assert cli.main(given) == 0
    (_, divided, requests), (_, undivided, others) = asked
    for request in (*requests, *others):
        request.send(Listener())
    assert [(len(prompt), tokens) for prompt, tokens in sent] == [(7, 64), (512, 64)] * 2
    assert sent[:2] == sent[2:] and len(set(sent[1][0])) > 100
    trace = ("SGLANG_HETERO_TRACE", str(tmp_path))
    assert divided.prefill_env == (trace,)
    assert divided.decode_env == (("SGLANG_HETERO_VERIFY", "1"), trace)
    assert undivided.prefill_env == undivided.decode_env == ()
