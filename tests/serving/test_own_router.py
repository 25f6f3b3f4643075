"""The router of this package before real servers, which it finds in a real etcd (docs/router.md, docs/discovery.md)."""

import http.client
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from sglang_hetero.client import RequestFailed
from tests.serving.fleets import CHUNK, LOGPROB_TOLERANCE, OUTPUT_TOKENS, REST_SECONDS, Served, check_at_rest
from tests.serving.test_equality import OWN_ROUTER, TWO_PREFILLS

TEXTS = ["Why are there as many stoves", "as cutting boards?"]
WORDS = 12
LONG_OUTPUT = 15000
"""Tokens that nobody waits for: at a hundred in a second they take longer than a server may take to be at rest."""
LONG_PROMPT = 40 * CHUNK
"""Tokens whose prefill is still under way when its client leaves."""
SOME_STEPS = 3
"""Of a server, after which it is at work on a request."""

on_both = pytest.mark.parametrize(
    "served",
    [OWN_ROUTER, pytest.param(TWO_PREFILLS, marks=pytest.mark.full)],
    ids=lambda setup: setup.id,
    indirect=True,
)


@contextmanager
def asked(served: Served, path: str, body: dict[str, Any] | None = None) -> Iterator[requests.Response]:
    """The answer to a POST, or a GET without a body, not read yet. Leaving the block closes the connection."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy of the environment must not see loopback
        method = "GET" if body is None else "POST"
        response = session.request(method, served.client.url + path, json=body, stream=True, timeout=REST_SECONDS)
        try:
            yield response
        finally:
            response.close()


def answer(served: Served, path: str, body: dict[str, Any] | None = None) -> Any:
    with asked(served, path, body) as response:
        assert response.status_code == requests.codes.ok, response.text
        return response.json()


def metric(served: Served, name: str, **labels: str) -> float:
    """The sum of the router's samples of this name that have these labels."""
    with asked(served, "/metrics") as response:
        lines = [line for line in response.text.splitlines() if re.match(rf"sglang_hetero:router_{name}[ {{]", line)]
    assert lines or labels, f"no metric {name}"
    chosen = [line for line in lines if all(f'{label}="{value}"' in line for label, value in labels.items())]
    return sum(float(line.rpartition(" ")[2]) for line in chosen)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + REST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.1)


def steps(served: Served, role: str) -> int:
    """How many batches the servers of one role have run."""
    return served.log(role).count(f"{role.capitalize()} batch")


@contextmanager
def one_that_leaves(served: Served, prompt: list[int], tokens: int, *, stream: bool) -> Iterator[None]:
    """A request under way. Leaving the block closes its connection before it is answered to its end."""
    at = urlsplit(served.client.url)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": stream,
    }
    connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=REST_SECONDS)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        yield
    finally:
        connection.close()


def router_log(served: Served) -> str:
    return Path(served.described["router"]["log"]).read_text()


@on_both
def test_every_pair_is_found_in_etcd_and_usable(served):
    assert answer(served, "/readiness") == {"status": "ready"}
    by_url = {server["url"]: server for server in served.described["servers"]}
    until(lambda: len(answer(served, "/hetero/pairs")["servers"]) == len(by_url))
    until(lambda: all(pair["usable"] for pair in answer(served, "/hetero/pairs")["pairs"]))
    shown = answer(served, "/hetero/pairs")
    for server in shown["servers"]:
        started = by_url[server["url"]]
        assert (server["role"], server["tp_size"]) == (started["role"], started["tp"])
        assert server["bootstrap_port"] == (started["bootstrap_port"] or 0)
        assert server["fingerprint"] and server["incarnation"] and server["state"] == "healthy"
    prefills = sum(server["role"] == "prefill" for server in by_url.values())
    assert len(shown["pairs"]) == prefills
    if served.setup is OWN_ROUTER:
        assert shown["pairs"][0]["reason"].endswith("a hand-over between TP 2 and TP 1 can be planned")


@pytest.mark.full
@pytest.mark.parametrize("served", [TWO_PREFILLS], ids=lambda setup: setup.id, indirect=True)
def test_both_prefill_servers_get_requests(served):
    until(lambda: sum(pair["usable"] for pair in answer(served, "/hetero/pairs")["pairs"]) == 2)
    before = len(router_log(served))
    for length in range(40, 50):
        prompt = served.prompt(length, seed=9)
        served.check(prompt, served.ask(prompt))
    taken = Counter(re.findall(r": prefill (http:\S+) and decode", router_log(served)[before:]))
    assert taken == {server["url"]: 5 for server in served.described["servers"] if server["role"] == "prefill"}


@on_both
def test_a_stream_has_the_tokens_in_pieces_and_log_probabilities_if_asked(served):
    prompt = served.prompt(150, seed=9)
    expected = served.reference(prompt)
    assert served.client.generate(prompt, OUTPUT_TOKENS).tokens == expected.tokens
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True},
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    with asked(served, "/generate", body) as response:
        events = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    assert len(events) > 2, "the stream was collected on its way"
    last = json.loads(events[-1])["meta_info"]
    told = [entry[0] for entry in last["output_token_logprobs"]]
    off = max(abs(a - b) for a, b in zip(told, expected.logprobs, strict=True))
    assert off < LOGPROB_TOLERANCE
    # What prefill says of the prompt stands before decode's own.
    assert [entry[1] for entry in last["input_token_logprobs"]] == prompt


@on_both
def test_completions_say_what_generate_says(served):
    expected = [served.client.generate(text, WORDS).text for text in TEXTS]
    body = {"model": served.setup.model, "max_tokens": WORDS, "temperature": 0, "ignore_eos": True}
    for prompt, wanted in ((TEXTS[0], expected[:1]), (TEXTS, expected)):
        said = answer(served, "/v1/completions", body | {"prompt": prompt})
        assert [choice["text"] for choice in said["choices"]] == wanted
    with asked(served, "/v1/completions", body | {"prompt": TEXTS[0], "stream": True}) as response:
        events = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    assert events.pop() == b"[DONE]"
    pieces = [json.loads(event)["choices"] for event in events]
    assert "".join(choice["text"] for choices in pieces for choice in choices) == expected[0]


@on_both
def test_questions_are_answered_by_the_servers(served):
    assert [model["id"] for model in answer(served, "/v1/models")["data"]] == [served.setup.model]
    assert answer(served, "/model_info")["served_model_name"] == served.setup.model
    info = answer(served, "/server_info")
    roles = Counter(server["role"] for server in served.described["servers"])
    assert (len(info["prefill"]), len(info["decode"])) == (roles["prefill"], roles["decode"])
    assert info["internal_states"][0]["disaggregation_mode"] == "decode"


@on_both
def test_what_servers_refuse_is_told_in_their_words_and_what_they_cannot_do_is_refused(served):
    with pytest.raises(RequestFailed, match=r"HTTP 400: .*longer than the model's context length"):
        served.client.generate("a" * 100_000, 1)
    with asked(served, "/generate", {"text": "a", "sampling_params": {"n": 2}}) as response:
        assert response.status_code == requests.codes.bad
        assert "n is 2, but SGLang gives all samples of a prompt the same room" in response.json()["error"]["message"]


@on_both
@pytest.mark.parametrize("stream", [True, False])
def test_both_servers_are_told_when_a_client_leaves(served, stream):
    """While prefill runs, and while decode does: soon nothing of it is left anywhere."""
    left = metric(served, "requests_total", status="499")
    for role, prompt, tokens in (("decode", served.prompt(60), LONG_OUTPUT), ("prefill", [300] * LONG_PROMPT, 1)):
        before = steps(served, role)
        with one_that_leaves(served, prompt, tokens, stream=stream):
            until(lambda role=role, before=before: steps(served, role) > before + SOME_STEPS)
    until(lambda: metric(served, "requests_total", status="499") == left + 2)
    check_at_rest(served)
    assert metric(served, "outstanding_requests") == metric(served, "outstanding_tokens") == 0
    prompt = served.prompt(60)
    served.check(prompt, served.ask(prompt))


@on_both
def test_figures_count_requests(served):
    # A request is counted when it is over for the router, which is a moment after its client has read [DONE].
    until(lambda: metric(served, "outstanding_requests") == 0)
    before = metric(served, "requests_total", route="/generate", status="200")
    streams = metric(served, "time_to_first_token_seconds_count", route="/generate")
    prompt = served.prompt(30, seed=9)
    served.ask(prompt)
    served.client.generate(prompt, WORDS)
    until(lambda: metric(served, "requests_total", route="/generate", status="200") == before + 2)
    assert metric(served, "time_to_first_token_seconds_count", route="/generate") == streams + 1
    assert metric(served, "servers", state="healthy") == len(served.described["servers"])
    assert metric(served, "retries_total") == 0


@on_both
def test_etcd_may_go_and_come_back(served):
    assert served.etcd is not None
    served.etcd.kill()
    try:
        until(lambda: answer(served, "/hetero/pairs")["trouble"])
        prompt = served.prompt(70, seed=9)
        served.check(prompt, served.ask(prompt))
        assert answer(served, "/readiness") == {"status": "ready"}
    finally:
        served.etcd.start()
    until(lambda: not answer(served, "/hetero/pairs")["trouble"])
    served.check(prompt, served.ask(prompt))
    assert "Traceback" not in router_log(served), "the router has caught an error of its own, and gone on"
