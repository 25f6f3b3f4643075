"""What a client of the router sees of a streamed request, and what the servers see of the client."""

import asyncio
import json

import aiohttp
import pytest

from sglang_hetero.layout.manifest import Side
from sglang_hetero.router import events, proxy
from tests.unit.router.fakes import DONE, FakeServer, aborted, event, run, soon, standing, token, until

BODY = {"text": "What is a shard?", "sampling_params": {"max_new_tokens": 4}, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}


def pair() -> tuple[FakeServer, FakeServer]:
    return FakeServer(Side.PREFILL), FakeServer(Side.DECODE)


def test_each_piece_is_passed_on_before_the_next_one_is_there() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:

            async def client() -> list[bytes]:
                got = []
                async with stand.client.post(stand.url + "/generate", json=BODY) as response:
                    while piece := await response.content.readany():
                        got.append(piece)
                        pieces.put_nowait(piece)
                    assert response.headers["X-From"] == "decode"
                    assert response.headers["Content-Type"] == "text/event-stream"
                return got

            pieces: asyncio.Queue[bytes] = asyncio.Queue()
            task = asyncio.create_task(client())
            before, now = await soon(prefill.calls.get()), await soon(decode.calls.get())
            before.finish(event(token("a")))
            for text in ("a", "ab", "abc"):
                now.send(event(token(text)))
                assert await soon(pieces.get()) == event(token(text))
            now.finish()
            assert b"".join(await soon(task)).endswith(DONE)
            await until(lambda: before.over.is_set() and now.over.is_set())
            assert not before.left and not now.left
            assert await stand.figure("sglang_hetero:router_time_to_first_token_seconds_count") == 1

    run(test)


def test_an_event_that_comes_in_parts_is_passed_on_whole() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task, before, now = await _asked(stand, prefill, decode)
            before.finish(event(token("a")))
            data = event(token("a"))
            for byte in range(0, len(data), 7):
                now.send(data[byte : byte + 7])
            now.finish()
            assert await soon(task) == (200, data + DONE)

    run(test)


async def _read(stand, body, path="/generate", **headers):
    async with stand.client.post(stand.url + path, json=body, headers=headers) as response:
        return response.status, await response.read()


async def _asked(stand, prefill, decode):
    """BODY is on its way: the client's task, and the call that each of the two servers has got."""
    task = asyncio.create_task(_read(stand, BODY))
    return task, await soon(prefill.calls.get()), await soon(decode.calls.get())


@pytest.mark.parametrize(
    ("begun", "streamed"),
    [(False, True), (True, True), (False, False)],
    ids=["before the first token", "in the middle of the stream", "not streamed"],
)
def test_a_client_that_leaves_is_noticed_by_both_servers(begun: bool, streamed: bool) -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task = asyncio.create_task(_read(stand, BODY | {"stream": streamed}))
            before, now = await soon(prefill.calls.get()), await soon(decode.calls.get())
            if begun:
                now.send(event(token("a")))
                await asyncio.sleep(0.05)
            task.cancel()
            await soon(before.over.wait())
            await soon(now.over.wait())
            assert before.left and now.left
            await _nothing_outstanding(stand)
            assert await stand.figure('sglang_hetero:router_requests_total{route="/generate",status="499"}') == 1

    run(test)


async def _nothing_outstanding(stand) -> None:
    async with asyncio.timeout(60):
        while await stand.figure("sglang_hetero:router_outstanding"):
            await asyncio.sleep(0.01)


FAILURES = {
    "prefill answers 500": ("prefill", lambda call: call.answer({"error": {"message": "no memory"}}, 500)),
    "decode answers 500": ("decode", lambda call: call.answer({"error": {"message": "no memory"}}, 500)),
    "prefill's connection breaks": ("prefill", lambda call: call.die()),
    "decode's connection breaks": ("decode", lambda call: call.die()),
    "prefill's stream says abort": ("prefill", lambda call: call.finish(event(aborted("no memory")))),
    "decode's stream says abort": ("decode", lambda call: call.finish(event(aborted("no memory")))),
    "decode's stream says error": (
        "decode",
        lambda call: call.finish(event({"error": {"message": "no memory", "code": 500}})),
    ),
    "decode's connection breaks within its first event": ("decode", lambda call: (call.send(b"data: {"), call.die())),
    "decode's stream is empty": ("decode", lambda call: call.end()),
    "prefill's queue is full": ("prefill", lambda call: call.answer({"error": {"message": "full"}}, 503)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_before_the_first_token_is_not_seen_by_the_client(name: str) -> None:
    async def test() -> None:
        side, fail = FAILURES[name]
        servers = [FakeServer(role) for role in (Side.PREFILL, Side.PREFILL, Side.DECODE, Side.DECODE)]
        async with standing(*servers) as stand:
            task = asyncio.create_task(_read(stand, BODY))
            first = await _pair_of_calls(servers)
            fail(first[side])
            other = first["decode" if side == "prefill" else "prefill"]
            await soon(other.over.wait())
            assert other.left, "the other side's request was not ended"
            second = await _pair_of_calls(servers)
            assert second["prefill"].room == second["decode"].room != first["prefill"].room
            assert second[side] is not first[side]
            assert first[side + " server"] is not second[side + " server"], "it was tried with the same server again"
            second["prefill"].finish(event(token("a")))
            second["decode"].finish(event(token("a")))
            assert await soon(task) == (200, event(token("a")) + DONE)
            assert await stand.figure("sglang_hetero:router_retries_total") == 1
            await _nothing_outstanding(stand)

    run(test)


async def _pair_of_calls(servers):
    """The next request of each role, with the servers that have it."""
    found = {}
    while len(found) < 4:
        for server in servers:
            if not server.calls.empty():
                found[server.role.value] = server.calls.get_nowait()
                found[f"{server.role.value} server"] = server
        await asyncio.sleep(0.005)
    return found


def test_a_stream_that_breaks_off_is_not_tried_again_and_says_so() -> None:
    async def test() -> None:
        servers = [FakeServer(role) for role in (Side.PREFILL, Side.PREFILL, Side.DECODE, Side.DECODE)]
        async with standing(*servers) as stand:
            task = asyncio.create_task(_read(stand, BODY))
            calls = await _pair_of_calls(servers)
            calls["prefill"].finish(event(token("a")))
            calls["decode"].send(event(token("a")))
            await asyncio.sleep(0.05)
            calls["decode"].die()
            status, data = await soon(task)
            assert status == 200
            first, error, done, rest = data.split(b"\n\n")
            assert (first + b"\n\n", done, rest) == (event(token("a")), DONE.strip(), b"")
            message = json.loads(error.removeprefix(b"data: "))["error"]["message"]
            assert calls["decode server"].url in message and "again" in message
            assert sum(len(server.seen) for server in servers) == 2
            assert await stand.figure("sglang_hetero:router_streams_broken_total") == 1

    run(test)


def test_a_stream_that_would_break_off_again_says_nothing_of_another_try(monkeypatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(events, "MAX_EVENT", 1000)
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task, before, now = await _asked(stand, prefill, decode)
            before.finish(event(token("a")))
            now.send(event(token("a")))
            await soon(before.over.wait())
            now.send(b"data: " + b"x" * 2000)
            status, data = await soon(task)
            message = json.loads(data.split(b"\n\n")[1].removeprefix(b"data: "))["error"]["message"]
            assert status == 200 and message.endswith("an event of more than 1000 bytes")

    run(test)


def test_a_prefill_that_breaks_after_the_first_token_harms_nobody() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task, before, now = await _asked(stand, prefill, decode)
            now.send(event(token("a")))
            await asyncio.sleep(0.05)
            before.die()
            await soon(before.over.wait())
            now.finish(event(token("ab")))
            assert await soon(task) == (200, event(token("a")) + event(token("ab")) + DONE)

    run(test)


def test_a_refusal_of_the_request_itself_is_passed_on_and_not_tried_again() -> None:
    async def test() -> None:
        said = {"object": "error", "message": "too long", "code": 400}
        prefill = FakeServer(Side.PREFILL, script=lambda call: call.answer(said, 400))
        decode = FakeServer(Side.DECODE)
        async with standing(prefill, decode) as stand:
            status, data = await soon(_read(stand, CHAT, "/v1/chat/completions"))
            assert (status, json.loads(data)) == (400, said)
            assert len(prefill.seen) == 1
            await soon(decode.seen[0].over.wait())
            assert (await stand.get("/readiness"))[0] == 200

    run(test)


REFUSED = {"error": {"message": "longer than the context", "type": "invalid_request_error", "code": 400}}


@pytest.mark.parametrize("said", [REFUSED, aborted("longer than the context", 400)], ids=["error", "abort"])
@pytest.mark.parametrize("first", [Side.PREFILL, Side.DECODE])
def test_a_refusal_in_a_stream_has_its_status_whoever_says_it_first(first: Side, said) -> None:
    """SGLang's /generate answers 200 to a request that it refuses, and tells it in the stream."""

    async def test() -> None:
        prefill, decode = (
            FakeServer(side, script=(lambda call: call.finish(event(said))) if side is first else None)
            for side in (Side.PREFILL, Side.DECODE)
        )
        async with standing(prefill, decode) as stand:
            status, data = await soon(_read(stand, BODY))
            error = json.loads(data)["error"]
            assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
            assert "longer than the context" in error["message"]
            assert (len(prefill.seen), len(decode.seen)) == (1, 1)
            other = decode if first is Side.PREFILL else prefill
            await soon(other.seen[0].over.wait())
            assert (await stand.get("/readiness"))[0] == 200

    run(test)


def test_a_prompt_of_a_batch_that_decode_refuses_leaves_the_others_alone() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            batch = BODY | {"text": ["x", "y"]}
            task = asyncio.create_task(_read(stand, batch))
            before, now = await soon(prefill.calls.get()), await soon(decode.calls.get())
            events = [event(aborted("too long", 400) | {"index": 1}), event(token("a") | {"index": 0})]
            before.finish()
            for one in events:
                now.send(one)
            now.finish()
            assert await soon(task) == (200, b"".join(events) + DONE)

    run(test)


def test_an_abort_that_the_client_asked_for_is_passed_on() -> None:
    async def test() -> None:
        gone = event(aborted("Aborted", None))
        prefill = FakeServer(Side.PREFILL, script=lambda call: call.finish(gone))
        decode = FakeServer(Side.DECODE, script=lambda call: call.finish(gone))
        async with standing(prefill, decode) as stand:
            assert await soon(_read(stand, BODY)) == (200, gone + DONE)
            assert len(decode.seen) == 1

    run(test)


def test_when_all_attempts_fail_the_client_is_told_who_and_why() -> None:
    async def test() -> None:
        prefill = FakeServer(Side.PREFILL)
        decode = FakeServer(Side.DECODE, script=lambda call: call.finish(event(aborted("staging is full"))))
        async with standing(prefill, decode, retries=2) as stand:
            status, data = await soon(_read(stand, CHAT, "/v1/chat/completions"))
            error = json.loads(data)["error"]
            assert (status, error["code"], len(error["attempts"])) == (500, 500, 3)
            assert error["attempts"][0] == {
                "prefill": prefill.url,
                "decode": decode.url,
                "server": f"decode {decode.url}",
                "cause": "staging is full",
            }
            for needed in (prefill.url, decode.url, "staging is full", "/hetero/state", "3 times"):
                assert needed in error["message"]
            assert len({call.room for call in prefill.seen}) == 3

    run(test)


@pytest.fixture
def limits(monkeypatch) -> list[asyncio.Timeout]:
    """The limits of requests, which end when the test says so."""
    made: list[asyncio.Timeout] = []

    def limit(seconds: float) -> asyncio.Timeout:
        made.append(asyncio.timeout(seconds))
        return made[-1]

    monkeypatch.setattr(proxy, "limit", limit)
    return made


def test_a_request_has_a_limit_before_its_first_token_and_after(limits: list[asyncio.Timeout]) -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task = asyncio.create_task(_read(stand, BODY))
            await soon(prefill.calls.get())
            await soon(decode.calls.get())
            limits[-1].reschedule(0)
            status, data = await soon(task)
            assert status == 504 and prefill.url in json.loads(data)["error"]["message"]
            await soon(prefill.seen[0].over.wait())
            await soon(decode.seen[0].over.wait())
            assert prefill.seen[0].left and decode.seen[0].left
            task = asyncio.create_task(stand.client.post(stand.url + "/generate", json=BODY))
            (await soon(decode.calls.get())).send(event(token("a")))
            async with await soon(task) as response:
                assert await soon(response.content.readany()) == event(token("a"))
                limits[-1].reschedule(0)
                data = await soon(response.read())
            assert response.status == 200 and b'"code":504' in data and data.endswith(DONE)

    run(test)


def test_the_limit_holds_for_a_body_that_does_not_come(limits: list[asyncio.Timeout]) -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rsplit(":", 1)[1]))
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await until(lambda: limits)
            await until(lambda: limits[-1].when() is not None)
            limits[-1].reschedule(0)
            assert b" 408 " in await soon(reader.readline())
            writer.close()
            assert not prefill.seen

    run(test)


def test_a_stream_that_stands_still_is_ended() -> None:
    async def test() -> None:
        prefill, decode = pair()
        decode.script = lambda call: call.send(event(token("a")))
        async with standing(prefill, decode, idle=0.2) as stand:
            status, data = await soon(_read(stand, BODY))
            assert status == 200 and b"nothing came for 0.2 s" in data
            await soon(decode.seen[0].over.wait())
            assert decode.seen[0].left

    run(test)


def numbered(index: int, text: str, logprobs: list) -> bytes:
    return event(token(text, input_token_logprobs=logprobs) | {"index": index})


def test_log_probabilities_of_a_streamed_batch_are_those_of_each_prompt() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task = asyncio.create_task(_read(stand, BODY | {"text": ["A", "B"], "return_logprob": True}))
            before, now = await soon(prefill.calls.get()), await soon(decode.calls.get())
            # The second prompt is ready first, and prefill has not said yet what is about the first one.
            before.send(numbered(1, "b", [[-2.0, 2, None]]))
            now.send(numbered(1, "b", []), numbered(0, "a", []))
            now.finish(numbered(0, "ab", []), numbered(1, "bc", []))
            await soon(now.over.wait())
            before.finish(numbered(0, "a", [[-1.0, 1, None]]), numbered(1, "bc", [[-9.0, 9, None]]))
            status, data = await soon(task)
            assert status == 200 and data.endswith(DONE)
            said = [json.loads(one[6:]) for one in data.split(b"\n\n") if one.startswith(b"data: {")]
            assert [(one["index"], one["meta_info"]["input_token_logprobs"]) for one in said] == [
                *((1, [[-2.0, 2, None]]), (0, [[-1.0, 1, None]])),
                *((0, [[-1.0, 1, None]]), (1, [[-2.0, 2, None]])),
            ]

    run(test)


@pytest.mark.parametrize("how", ["dies", "ends"])
def test_a_prefill_that_does_not_say_it_of_each_prompt_ends_the_stream(how: str) -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task = asyncio.create_task(_read(stand, BODY | {"text": ["A", "B"], "return_logprob": True}))
            before, now = await soon(prefill.calls.get()), await soon(decode.calls.get())
            before.send(numbered(0, "a", [[-1.0, 1, None]]))
            now.send(numbered(0, "a", []))
            now.finish(numbered(1, "b", []))
            await soon(now.over.wait())
            before.die() if how == "dies" else before.finish()
            status, data = await soon(task)
            first, error, done, _ = data.split(b"\n\n")
            assert status == 200 and b"-1.0" in first and done == DONE.strip()
            assert f"prefill {prefill.url} broke off" in json.loads(error[6:])["error"]["message"]

    run(test)


@pytest.mark.parametrize("status", [400, 500])
def test_a_prompt_that_prefill_fails_in_a_stream_that_has_begun_takes_no_log_probabilities_of_others(status) -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task = asyncio.create_task(_read(stand, BODY | {"text": ["x", "y", "z"], "return_logprob": True}))
            before, now = await soon(prefill.calls.get()), await soon(decode.calls.get())
            before.send(numbered(0, "a", [[-1.0, 1, None]]))
            now.send(numbered(0, "a", []))
            await until(lambda: before.say.empty() and now.say.empty())
            await asyncio.sleep(0.05)
            refused = event(aborted("not this one", status) | {"index": 1})
            before.send(refused)
            now.send(refused)
            before.finish(numbered(2, "c", [[-2.0, 2, None]]))
            now.finish(numbered(2, "c", []))
            got, data = await soon(task)
            assert (got, b"broke off" in data, data.count(b"data: "), data.endswith(DONE)) == (200, False, 4, True), (
                data
            )
            said = [json.loads(one.removeprefix(b"data: ")) for one in data.split(b"\n\n")[:3]]
            assert [one["index"] for one in said] == [0, 1, 2]
            assert said[1]["meta_info"]["finish_reason"]["status_code"] == status
            assert said[2]["meta_info"]["input_token_logprobs"] == [[-2.0, 2, None]]

    run(test)


def test_a_break_within_an_event_leaves_only_whole_ones() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task, before, now = await _asked(stand, prefill, decode)
            before.finish(event(token("a")))
            now.send(event(token("a")), event(token("ab"))[:20])
            await until(now.say.empty)
            await _one_loop_is_still()
            now.die()
            status, data = await soon(task)
            first, error, done, rest = data.split(b"\n\n")
            assert status == 200 and (first + b"\n\n", done, rest) == (event(token("a")), DONE.strip(), b"")
            assert "broke off" in json.loads(error.removeprefix(b"data: "))["error"]["message"]

    run(test)


def test_a_failure_that_comes_in_two_pieces_is_one() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            task, before, now = await _asked(stand, prefill, decode)
            before.finish(event(token("a")))
            failure = event(aborted("no units"))
            half = failure.index(b'"abort"') + 3
            now.send(event(token("a")), failure[:half])
            await until(now.say.empty)
            await _one_loop_is_still()
            now.finish(failure[half:])
            assert await soon(task) == (200, event(token("a")) + failure + DONE)
            assert await stand.figure("sglang_hetero:router_streams_broken_total") == 1
            assert await stand.figure('sglang_hetero:router_failures_total{kind="refused",role="decode"') == 1

    run(test)


async def _one_loop_is_still(progress=lambda: None) -> None:
    """Return when servers, router and client, which share this loop, have nothing left to do."""
    still = 0
    while still < STILL:
        before = progress()
        await asyncio.sleep(0)
        still = still + 1 if progress() == before else 0


STILL = 1000
"""Turns of the loop. A piece needs a few from one end to the other."""


def test_log_probabilities_of_the_prompt_come_from_prefill() -> None:
    async def test() -> None:
        prompt, first = [[None, 5, None], [-0.5, 6, None]], [[-0.1, 7, None]]
        prefill = FakeServer(
            Side.PREFILL, script=lambda call: call.finish(event(token("a", input_token_logprobs=prompt)))
        )
        decode = FakeServer(Side.DECODE)
        async with standing(prefill, decode) as stand:
            task = asyncio.create_task(_read(stand, BODY | {"return_logprob": True}))
            now = await soon(decode.calls.get())
            now.send(b": ping\n\n")
            now.finish(event(token("a", input_token_logprobs=first)), event(token("ab", input_token_logprobs=first)))
            status, data = await soon(task)
            events = [json.loads(one[6:]) for one in data.split(b"\n\n") if one.startswith(b"data: {")]
            assert status == 200 and data.endswith(DONE)
            assert [one["meta_info"]["input_token_logprobs"] for one in events] == [prompt + first] * 2
            assert [one["text"] for one in events] == ["a", "ab"]

    run(test)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_log_probabilities_that_prefill_fails_to_give_are_asked_for_elsewhere(streamed: bool) -> None:
    async def test() -> None:
        servers = [FakeServer(role) for role in (Side.PREFILL, Side.PREFILL, Side.DECODE)]
        async with standing(*servers) as stand:
            task = asyncio.create_task(_read(stand, BODY | {"stream": streamed, "return_logprob": True}))
            for last in (False, True):
                calls = await _pair_of_calls(servers)
                if streamed:
                    calls["decode"].finish(event(token("a", input_token_logprobs=[])))
                else:
                    calls["decode"].answer(token("a", input_token_logprobs=[]))
                await soon(calls["decode"].over.wait())  # the hand-over is done, and its answer is there
                if not last:
                    calls["prefill"].die()
                    failed = calls["prefill server"]
                elif streamed:
                    calls["prefill"].finish(event(token("a", input_token_logprobs=[[-1.0, 1, None]])))
                else:
                    calls["prefill"].answer(token("a", input_token_logprobs=[[-1.0, 1, None]]))
            status, data = await soon(task)
            assert status == 200 and b"[[-1.0,1,null]]" in data
            assert calls["prefill server"] is not failed
            assert await stand.figure('sglang_hetero:router_failures_total{kind="lost"') == 1

    run(test)


def test_a_client_that_reads_slowly_does_not_fill_the_router() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            _, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rsplit(":", 1)[1]), limit=1 << 12)
            data = json.dumps(BODY).encode()
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            writer.write(head + data)
            now = await soon(decode.calls.get())
            piece = event(token("x" * (1 << 20)))
            for _ in range(64):  # more than the kernel takes on both ways
                now.send(piece)
            await _one_loop_is_still(now.say.qsize)
            assert now.say.qsize() > 8, "a stream that nobody reads was taken from decode"
            writer.close()
            await soon(now.over.wait())
            assert now.left

    run(test)


def test_the_connection_of_a_client_can_be_used_again() -> None:
    async def test() -> None:
        finish = event(token("a"))
        prefill = FakeServer(Side.PREFILL, script=lambda call: call.finish(finish))
        decode = FakeServer(Side.DECODE, script=lambda call: call.finish(finish))
        async with standing(prefill, decode) as stand, aiohttp.ClientSession() as client:
            for _ in range(3):
                async with client.post(stand.url + "/generate", json=BODY) as response:
                    assert await response.read() == finish + DONE
            await _nothing_outstanding(stand)

    run(test)
