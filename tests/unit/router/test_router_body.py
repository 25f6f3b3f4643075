"""What the router reads in requests and adds to them."""

import random

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import RouterError
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router import body as bodies

PREFILL = Instance(role=Side.PREFILL, url="http://10.0.0.7:30000", bootstrap_port=8998)


def meet(body, path="/generate", prefill=PREFILL):
    return bodies.meet(body, path, prefill, random.Random(1).randrange)


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ({"text": "a"}, None),
        ({"text": ["a"]}, 1),
        ({"text": ["a", "b"]}, 2),
        ({"input_ids": [1, 2, 3]}, None),
        ({"input_ids": [[1, 2], [3]]}, 2),
        ({"text": None, "input_ids": [[1]]}, 1),
        ({"input_embeds": [[0.5, 0.5]]}, None),
        ({"input_embeds": [[[0.5], [0.5]], [[0.5]]]}, 2),
        ({}, None),
    ],
)
def test_batches_are_told_from_single_prompts(body, size) -> None:
    assert bodies.batch_size(body) == size
    met = meet(body)
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        assert (len(met[name]) if isinstance(met[name], list) else None) == size
    assert {name: met[name] for name in body} == body


@pytest.mark.parametrize("body", [{"text": []}, {"input_ids": []}, {"input_ids": 5}, {"text": {}}])
def test_an_empty_batch_is_refused(body) -> None:
    with pytest.raises(RouterError, match="must be a text or a list"):
        bodies.batch_size(body)


def test_every_request_has_a_room_of_its_own_that_sglang_can_number_on_from() -> None:
    draw = random.Random(7).randrange
    rooms = [bodies.meet({"text": "a"}, "/generate", PREFILL, draw)["bootstrap_room"] for _ in range(100)]
    assert len(set(rooms)) == 100 and all(0 <= room < 2**63 - bodies.MAX_PROMPTS for room in rooms)
    highest = bodies.meet({"text": "a"}, "/generate", PREFILL, lambda below: below - 1)
    assert highest["bootstrap_room"] + bodies.MAX_PROMPTS <= 2**63 - 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}),
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": "2"}),
        ("/v1/chat/completions", {"messages": [], "n": 2.0}),
    ],
)
def test_several_samples_of_a_prompt_are_refused_with_the_remedy(path: str, body) -> None:
    """tests/unit/backend/test_several_samples.py: what SGLang does with them."""
    with pytest.raises(RouterError, match=r"n is 2, .* the same room, .*; send 2 requests, or the prompt 2 times"):
        bodies.check(body, path)


@pytest.mark.parametrize("n", [0, 1, True, "1", 1.0, None, "two", "nan", float("inf"), [2], {}])
def test_one_sample_is_taken_and_what_is_no_number_is_left_to_sglang(n) -> None:
    bodies.check({"text": "a", "n": 2, "sampling_params": {"n": n}}, "/generate")
    bodies.check({"prompt": "a", "n": n, "sampling_params": {"n": 2}}, "/v1/completions")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://10.0.0.7:1", "10.0.0.7"),
        ("http://[::1]:1", "[::1]"),
        ("http://[fe80::7]:1/x", "[fe80::7]"),
        ("http://prefill-0.svc:1", "prefill-0.svc"),
    ],
)
def test_the_bootstrap_server_is_at_prefills_host(url: str, host: str) -> None:
    met = meet({"prompt": "a"}, "/v1/completions", Instance(role=Side.PREFILL, url=url))
    assert (met["bootstrap_host"], met["bootstrap_port"]) == (host, None)


@pytest.mark.parametrize(
    "value",
    [
        *(True, False, 0, 1, 2, 0.0, 1.0, 0.5, None, [], [True], {}, ""),
        *(
            "false",
            "False",
            "FALSE",
            "true",
            "True",
            "0",
            "1",
            "no",
            "Yes",
            "off",
            "ON",
            "n",
            "y",
            "t",
            "f",
            "2",
        ),
    ],
    ids=repr,
)
def test_a_flag_says_what_sglang_reads_in_it(value) -> None:
    try:
        said = pydantic.TypeAdapter(bool).validate_python(value)
    except pydantic.ValidationError:
        said = False  # SGLang refuses it
    assert bodies.is_stream({"stream": value}) is said
    if not isinstance(value, list):
        assert bodies.wants_logprobs({"return_logprob": value}) is said
        assert bodies.wants_logprobs({"return_logprob": ["false", value]}) is said


def test_the_body_that_was_given_is_left_alone() -> None:
    body = {"text": "a", "rid": "x"}
    meet(body)
    bodies.again(body, 2)
    assert body == {"text": "a", "rid": "x"}


def test_request_ids_of_further_attempts_are_others() -> None:
    assert bodies.again({"rid": "x"}, 2) == {"rid": "r2-x"}
    assert bodies.again({"rid": ["x", "y"]}, 1) == {"rid": ["r1-x", "r1-y"]}
    assert bodies.again({"rid": ["rx", 7]}, 1) == {"rid": ["s1-rx", "s1-7"]}
    assert bodies.again({"text": "a"}, 1) == {"text": "a"}


@pytest.mark.parametrize("rid", ["x", "r", "r1", "r1-", "1", ["x", "r", "s1-x", "r1-r"]], ids=str)
def test_what_ends_an_attempt_does_not_end_a_later_one(rid) -> None:
    """SGLang's scheduler aborts each request whose id starts with the given one (Scheduler.abort_request)."""
    sent: list[str] = []
    for attempt in range(12):
        now = bodies.again({"rid": rid}, attempt)["rid"] if attempt else rid
        new = now if isinstance(now, list) else [now]
        assert not [(one, old) for one in new for old in sent if one.startswith(old)]
        sent += new


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"input_ids": [1] * 10}, 10),
        ({"input_ids": [[1] * 10, [1] * 5]}, 15),
        ({"text": "x" * 40}, 10),
        ({"text": ["x" * 40, "x"]}, 11),
        ({"text": "日本語の文字"}, 5),
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": "x" * 8}, 2),
        ({"messages": [{"role": "user", "content": "x" * 40}, {"role": "user", "content": "x" * 40}]}, 20),
        (
            {"messages": [{"content": [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": "x"}]}]},
            10,
        ),
        ({"input_embeds": [[0.1, 0.2]] * 7}, 7),
        ({}, 0),
    ],
)
def test_the_length_of_prompts(body, tokens: int) -> None:
    assert bodies.prompt_tokens(body) == tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"sampling_params": {"max_new_tokens": 7}}, 7),
        ({"sampling_params": {"max_new_tokens": 10**400}}, 4096),
        ({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 10**15}}, 8192),
        ({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 7}}, 14),
        ({"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 7}, {"max_new_tokens": 1}]}, 8),
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"prompt": ["a", "b"], "max_tokens": 9}, 18),
        ({}, bodies.DEFAULT_NEW_TOKENS),
        ({"max_tokens": None}, bodies.DEFAULT_NEW_TOKENS),
        ({"max_tokens": -1}, bodies.DEFAULT_NEW_TOKENS),
    ],
)
def test_how_many_tokens_are_asked_for(body, tokens: int) -> None:
    assert bodies.new_tokens(body) == tokens


TEXT = st.text("abnt_ é語", max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
NAMES = st.sampled_from(
    ["text", "input_ids", "input_embeds", "prompt", "messages", "sampling_params", "max_tokens", "stream", "rid", "n"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_whatever_a_body_has_it_is_refused_or_taken(body) -> None:
    try:
        for path in ("/generate", "/v1/completions"):
            bodies.check(body, path)
    except RouterError:
        return
    assert bodies.prompt_tokens(body) >= 0 and bodies.new_tokens(body) >= 0
    for path in ("/generate", "/v1/completions"):
        assert "bootstrap_room" in meet(body, path)
    bodies.is_stream(body), bodies.wants_logprobs(body), bodies.again(body, 1)


def answer(**meta):
    return {"text": "a", "meta_info": meta}


def test_log_probabilities_are_put_before_decodes_own() -> None:
    merged = bodies.merge_logprobs(answer(input_token_logprobs=[1, 2]), answer(input_token_logprobs=[3], id="x"))
    assert merged == answer(input_token_logprobs=[1, 2, 3], id="x")
    assert bodies.merge_logprobs(answer(input_token_logprobs=[1]), answer(id="x")) == answer(
        input_token_logprobs=[1], id="x"
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON, JSON)
def test_whatever_servers_answer_decodes_is_kept(prefill, decode) -> None:
    assert bodies.merge_logprobs(prefill, decode) == decode


def test_a_batch_of_which_prefill_tells_less_keeps_its_length() -> None:
    two = [answer(input_token_logprobs=[3]), answer(input_token_logprobs=[4])]
    assert bodies.merge_logprobs([answer(input_token_logprobs=[1])], two) == [
        answer(input_token_logprobs=[1, 3]),
        two[1],
    ]


def test_a_batch_has_rooms_in_a_row_below_the_end_and_an_endless_one_is_refused() -> None:
    drawn = []

    def draw(below: int) -> int:
        drawn.append(below)
        return below - 1

    rooms = bodies.meet({"text": [""] * bodies.MAX_PROMPTS}, "/generate", PREFILL, draw)["bootstrap_room"]
    assert len(drawn) == 1 and len(set(rooms)) == bodies.MAX_PROMPTS and max(rooms) < 2**63
    bodies.check({"text": [""] * bodies.MAX_PROMPTS}, "/generate")
    for path, body in (
        ("/generate", {"text": [""] * (bodies.MAX_PROMPTS + 1)}),
        ("/v1/completions", {"prompt": [""] * (bodies.MAX_PROMPTS + 1)}),
    ):
        with pytest.raises(RouterError, match=r"65537 prompts.*send it in parts"):
            bodies.check(body, path)
