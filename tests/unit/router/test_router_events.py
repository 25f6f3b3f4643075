"""Streams in pieces, and what servers' answers mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hetero.router import events
from sglang_hetero.router.answers import Tried, error, error_event, exhausted
from sglang_hetero.router.events import EventTooLong, Splitter, failure_in, failure_of, payload, refusal, words_of
from tests.unit.router.fakes import aborted, event, token


@given(st.lists(st.binary(max_size=8).filter(lambda data: b"\n" not in data), max_size=8), st.data())
def test_events_are_the_same_however_they_are_cut(texts: list[bytes], data: st.DataObject) -> None:
    whole = [b"data: " + text + b"\n\n" for text in texts]
    stream = b"".join(whole) + b"data: re"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    splitter, found = Splitter(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += splitter.feed(stream[start:end])
    assert found == whole
    assert splitter.rest == b"data: re"


def test_events_may_end_as_a_proxy_writes_them() -> None:
    whole = b"data: a\r\n\r\n"
    for cut in range(len(whole) + 1):
        splitter = Splitter()
        assert splitter.feed(whole[:cut]) + splitter.feed(whole[cut:] + b"data: b\n\n") == [whole, b"data: b\n\n"]


def test_empty_lines_are_no_events_of_their_own() -> None:
    splitter = Splitter()
    assert splitter.feed(b"data: a\n\n" + b"\n\n" * 1000 + b"data: b\n\n") == [
        b"data: a\n\n" + b"\n\n" * 1000,
        b"data: b\n\n",
    ]
    assert splitter.rest == b""


# As SGLang writes them (disaggregation/decode.py and prefill.py).
WORDS = "Decode transfer failed for request rank={rank} decode_req.req.rid={rid!r} decode_req.req.bootstrap_room={room}"


def refused(rank: int = 0, rid: str = "5f" * 16, room: int = 2**62, end: str = "", status: int = 500) -> events.Failure:
    return refusal(status, WORDS.format(rank=rank, rid=rid, room=room) + end)


def test_words_are_the_same_in_each_attempt_but_for_its_id_and_room() -> None:
    first = refused(end=": no room for 3 pages")
    assert first.alike(refused(rid="it's 1", room=2**61 + 7, end=": no room for 3 pages"))
    for other in (refused(), refused(end=": no room for 4 pages"), refused(rank=1, end=": no room for 3 pages")):
        assert not first.alike(other)
    assert not refused().alike(refused(status=502))


def test_an_event_that_is_nested_without_end_is_none_and_has_no_words() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert failure_in(b'data: {"error": ' + deep + b"}\n\n") is None
    answer: object = "x"
    for _ in range(5000):
        answer = {"error": answer}
    assert events.words(answer) == "x"
    for _ in range(100_000):
        answer = [answer]
    assert "nested" in events.words(answer)


def test_an_event_without_an_end_is_not_collected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT", 100)
    splitter = Splitter()
    splitter.feed(b"x" * 100)
    with pytest.raises(EventTooLong):
        splitter.feed(b"x")


def test_the_data_of_an_event() -> None:
    assert payload(b"data: {}\n\n") == payload(b"event: x\ndata:{}\r\n\n") == b"{}"
    assert payload(b"data: a\ndata: b\n\n") == b"a\nb"
    assert payload(b": ping\n\n") is None
    assert payload(b"\n\n") is None


FINE = [
    token("a"),
    token("a", finish_reason={"type": "length", "length": 4}),
    aborted("Aborted", None),
    {"choices": [{"delta": {"content": 'the word "error" and {"error": 1}'}}]},
    {"choices": [], "error": None},
    [token("a"), token("b")],
    "[DONE]",
    7,
    {"meta_info": {"finish_reason": "abort"}},
]


@pytest.mark.parametrize("answer", FINE, ids=str)
def test_answers_without_a_failure(answer) -> None:
    assert failure_of(answer) is None
    assert failure_in(event(answer)) is None


FAILED = [
    (aborted("no units", 500), 500, "no units", True, True),
    (aborted("too long", 400), 400, "too long", False, False),
    (aborted("full", 503), 503, "full", True, False),
    ([token("a"), aborted("no units", 500)], 500, "no units", True, True),
    ({"error": {"message": "bad", "code": 400}}, 400, "bad", False, False),
    ({"error": {"object": "error", "message": "lost", "code": 500}}, 500, "lost", True, True),
    ({"error": "no words"}, 500, "no words", True, True),
    ({"error": {"message": "odd", "code": "x"}}, 500, "odd", True, True),
    ({"error": {"message": "odd", "code": True}}, 500, "odd", True, True),
]


@pytest.mark.parametrize(("answer", "status", "cause", "retry", "blame"), FAILED, ids=str)
def test_answers_with_a_failure(answer, status, cause, retry, blame) -> None:
    for failure in (failure_of(answer), failure_in(event(answer))):
        assert failure is not None
        assert (failure.status, failure.cause, failure.retry, failure.blame) == (status, cause, retry, blame)


@pytest.mark.parametrize(
    ("status", "retry", "blame"),
    [
        *((400, False, False), (401, False, False), (404, False, False), (429, True, False), (500, True, True)),
        *((502, True, True), (503, True, False), (504, True, True), (307, False, False)),
    ],
)
def test_what_a_status_means(status: int, retry: bool, blame: bool) -> None:
    failure = refusal(status, "x" * 10_000)
    assert (failure.retry, failure.blame) == (retry, blame)
    assert len(failure.cause) == events.SHOWN


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "a"}}', "a"),
        (b'{"object": "error", "message": "b", "code": 500}', "b"),
        (b'{"detail": "c"}', "c"),
        (b'{"detail": [{"loc": 1}]}', '[{"loc":1}]'),
        (b"plain", "plain"),
        (b"\xff", "\ufffd"),
        (b"[" * 100_000, "[" * events.SHOWN),
    ],
    ids=repr,
)
def test_an_errors_words_are_found_in_all_its_forms(body: bytes, said: str) -> None:
    assert words_of(body) == said


@given(st.binary(max_size=200))
def test_whatever_comes_nothing_is_raised(data: bytes) -> None:
    words_of(data)
    failure_in(data + b'"error"')
    failure_in(b'data: {"error": ' + data)


def test_an_error_is_read_by_clients_of_both_apis() -> None:
    tried = [Tried("http://p:1", "http://d:1", "decode http://d:1", "no units")]
    answer = error(502, exhausted(tried), tried)
    assert answer["error"]["message"].startswith("tried once, last with http://p:1 and http://d:1")
    assert answer["error"]["type"] == "server_error" and answer["error"]["code"] == 502
    assert answer["error"]["attempts"][0]["cause"] == "no units"
    lines = error_event(504, "late").split(b"\n\n")
    assert json.loads(lines[0][6:])["error"]["type"] == "timeout_error" and lines[1:] == [b"data: [DONE]", b""]
    assert "attempts" not in error(400, "x")["error"]
    assert error(520, "said by a proxy")["error"]["code"] == 520


def test_words_of_a_server_cannot_make_a_line_of_the_log_or_steer_a_terminal() -> None:
    evil = "no\n2026-11-30 WARNING forged \x1b[2J\u2028 日本"
    for text in (refusal(500, evil).cause, words_of(json.dumps({"error": evil}).encode()), words_of(evil.encode())):
        assert text == "no\\n2026-11-30 WARNING forged \\x1b[2J\\u2028 日本"


@pytest.mark.parametrize(
    ("status", "type_"),
    [
        *((400, "invalid_request_error"), (404, "invalid_request_error"), (422, "invalid_request_error")),
        *((401, "authentication_error"), (403, "permission_error"), (408, "timeout_error"), (429, "rate_limit_error")),
        *((500, "server_error"), (502, "server_error"), (503, "service_unavailable_error"), (504, "timeout_error")),
    ],
)
def test_the_type_of_an_error_says_whose_it_is(status: int, type_: str) -> None:
    """A client decides by it whether to send the request again: what is below 500 is not the server's."""
    assert error(status, "x")["error"]["type"] == type_
