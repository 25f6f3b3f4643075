"""Everything of the router but streams: whole answers, batches, headers, who is asked what, and who is told what."""

import asyncio
import socket

import pytest

from sglang_hetero.layout.manifest import Side
from sglang_hetero.router import body as bodies
from sglang_hetero.router.exchange import connector
from sglang_hetero.router.health import Limits
from sglang_hetero.router.pairing import Unknown
from tests.unit.router.fakes import Call, FakeServer, aborted, run, soon, standing, token, until

BODY = {"text": "What is a shard?", "sampling_params": {"max_new_tokens": 4}}


def answering(role: Side, answer: object = None, status: int = 200, **options: object) -> FakeServer:
    said = token(str(role)) if answer is None else answer
    return FakeServer(role, script=lambda call: call.answer(said, status), **options)


def pair() -> tuple[FakeServer, FakeServer]:
    return answering(Side.PREFILL), answering(Side.DECODE)


def test_both_servers_get_the_request_and_the_client_decodes_answer() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            assert await stand.post("/generate", BODY) == (200, token("decode"))
            (before,), (now,) = prefill.seen, decode.seen
            assert before.body == now.body
            added = {name: before.body[name] for name in before.body.keys() - BODY.keys()}
            assert added == {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": before.room}
            assert 0 <= before.room < 2**63

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_routes_of_openai_get_one_room(path: str) -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            assert (await stand.post(path, {"prompt": ["a", "b"], "text": ["x"]}))[0] == 200
            assert isinstance(decode.seen[0].room, int) and decode.seen[0].path == prefill.seen[0].path == path

    run(test)


def test_a_batch_gets_lists_and_its_log_probabilities_are_merged_one_by_one() -> None:
    async def test() -> None:
        prompt = [[[-1.0, 1, None]], [[-2.0, 2, None], [-3.0, 3, None]]]
        prefill = answering(Side.PREFILL, [token("p", input_token_logprobs=one) for one in prompt])
        decode = answering(Side.DECODE, [token("d", input_token_logprobs=[[-9.0, 9, None]]) for _ in prompt])
        async with standing(prefill, decode) as stand:
            status, answer = await stand.post("/generate", {"text": ["a", "b"], "return_logprob": True})
            assert status == 200
            merged = [one["meta_info"]["input_token_logprobs"] for one in answer]
            assert merged == [[*one, [-9.0, 9, None]] for one in prompt]
            body = prefill.seen[0].body
            assert body["bootstrap_host"] == ["127.0.0.1"] * 2 and body["bootstrap_port"] == [8998] * 2
            assert len(set(body["bootstrap_room"])) == 2
            # Without a wish for them, decode's answer is not touched.
            assert (await stand.post("/generate", {"text": ["a", "b"]}))[1] == [
                token("d", input_token_logprobs=[[-9.0, 9, None]]) for _ in prompt
            ]

    run(test)


def test_headers_are_passed_on_both_ways_and_those_of_a_connection_are_not() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode, key="own") as stand:
            headers = {"Authorization": "Bearer mine", "X-Request-Id": "7", "Connection": "close, X-Hop", "X-Hop": "1"}
            async with stand.client.post(stand.url + "/generate", json=BODY, headers=headers) as response:
                assert response.headers["X-From"] == "decode"
            for call in (prefill.seen[0], decode.seen[0]):
                assert call.headers["Authorization"] == "Bearer mine"
                assert call.headers["X-Request-Id"] == "7"
                assert "X-Hop" not in call.headers
            # The router's own key is for /hetero/instance only, and is lent to nobody.
            await stand.post("/generate", BODY)
            assert "Authorization" not in decode.seen[1].headers
            own = {(path, headers.get("Authorization")) for _, path, headers in decode.others}
            assert own == {("/health", None), ("/hetero/instance", "Bearer own")}

    run(test)


def test_a_server_that_refuses_is_passed_over_and_a_refusal_of_the_request_is_passed_on() -> None:
    async def test() -> None:
        prefill, broken = answering(Side.PREFILL), answering(Side.DECODE, {"detail": "hand-over failed"}, 500)
        decode = answering(Side.DECODE)
        async with standing(prefill, broken, decode, limits=Limits(interval=60.0, backoff=60.0)) as stand:
            for _ in range(3):
                assert (await stand.post("/generate", BODY))[0] == 200
            assert len(broken.seen) == 1, "a suspect server was given requests although there is another one"
            # One at decode, which said so, and one at prefill, whose fault it may have been.
            assert await stand.figure("sglang_hetero:router_failures_total") == 2
            decode.script = lambda call: call.answer({"object": "error", "message": "no such model"}, 404)
            assert await stand.post("/generate", BODY) == (404, {"object": "error", "message": "no such model"})

    run(test)


class First:
    """A policy that takes the first decode server, with any prefill server, again and again."""

    def choose(self, candidates, tokens):
        return min(candidates, key=lambda pair: (pair.decode.url, pair.prefill.url))


def test_a_full_queue_is_no_fault_and_the_request_goes_elsewhere() -> None:
    async def test() -> None:
        full = {"error": {"message": "The request queue is full.", "code": 503}}
        prefills, decodes = ([answering(role), answering(role)] for role in (Side.PREFILL, Side.DECODE))
        async with standing(*prefills, *decodes, policy=First(), retries=1) as stand:
            await stand.post("/generate", BODY)
            first, other = sorted(decodes, key=lambda server: -len(server.seen))
            first.script = lambda call: call.answer(full, 503)
            for _ in range(3):
                assert (await stand.post("/generate", BODY))[0] == 200
            assert len(other.seen) == 3 and len(first.seen) == 4
            await _state(stand, first.url, "healthy")
            assert first.probes == 1

    run(test)


def test_what_may_be_either_sides_fault_is_tried_with_another_pair_first() -> None:
    async def test() -> None:
        servers = [answering(role) for role in (Side.PREFILL, Side.PREFILL, Side.DECODE, Side.DECODE)]
        prefills, decodes = servers[:2], servers[2:]
        async with standing(*servers, policy=First(), retries=3, limits=Limits(backoff=0.0)) as stand:
            failing = {"detail": "the hand-over failed"}
            for decode in decodes:
                decode.script = lambda call: call.answer(failing, 500)
            status, answer = await stand.post("/generate", BODY)
            tried = [(one["prefill"], one["decode"]) for one in answer["error"]["attempts"]]
            assert status == 500 and len(set(tried)) == 4, "a pair was tried twice while there was another one"
            (p0, d0), (p1, d1), *_ = tried
            assert p0 != p1 and d0 != d1
            assert {p0, p1} == {one.url for one in prefills}

    run(test)


async def _states(stand) -> list[str]:
    return [one["state"] for one in (await stand.get("/hetero/pairs"))[1]["servers"]]


async def all_healthy(stand) -> None:
    async with asyncio.timeout(60):
        while set(await _states(stand)) != {"healthy"}:
            await asyncio.sleep(0.01)


def test_a_request_that_every_server_refuses_alike_makes_none_suspect() -> None:
    async def test() -> None:
        poison = {"detail": "Internal Server Error"}
        servers = [answering(role, poison, 500) for role in (Side.PREFILL, Side.DECODE) for _ in range(3)]
        limits = Limits(interval=600.0, backoff=600.0, max_backoff=600.0)
        async with standing(*servers, retries=5, limits=limits) as stand:
            await all_healthy(stand)
            for _ in range(3):
                assert (await stand.post("/generate", BODY))[0] == 500
            assert set(await _states(stand)) == {"healthy"}

    run(test)


def test_refusals_in_other_words_count_against_each_server() -> None:
    async def test() -> None:
        prefill = answering(Side.PREFILL)
        servers = [answering(Side.DECODE, {"detail": f"rank {number} is lost"}, 500) for number in range(2)]
        limits = Limits(interval=600.0, backoff=600.0, max_backoff=600.0)
        async with standing(prefill, *servers, retries=1, limits=limits) as stand:
            await all_healthy(stand)
            assert (await stand.post("/generate", BODY))[0] == 500
            assert await _states(stand) == ["suspect"] * 3
            # They get requests all the same, since there are no others: so the router is ready.
            assert (await stand.get("/readiness"))[0] == 200

    run(test)


def test_an_abort_in_a_whole_answer_is_a_failure() -> None:
    async def test() -> None:
        prefill = answering(Side.PREFILL)
        servers = [answering(Side.DECODE, [token("a"), aborted("no units")]), answering(Side.DECODE)]
        async with standing(prefill, *servers) as stand:
            for _ in range(2):
                assert await stand.post("/generate", BODY) == (200, token("decode"))

    run(test)


def test_an_answer_that_comes_although_prefill_says_it_failed_is_taken() -> None:
    async def test() -> None:
        prefill, decode = answering(Side.PREFILL, {"detail": "too late"}, 500), FakeServer(Side.DECODE)
        async with standing(prefill, decode, grace=10.0) as stand:
            task = asyncio.create_task(stand.post("/generate", BODY))
            now = await soon(decode.calls.get())
            await soon(prefill.seen[0].over.wait())
            now.answer(token("there"))
            assert await soon(task) == (200, token("there"))

    run(test)


def test_the_server_that_is_gone_is_blamed_not_the_one_that_says_so_first() -> None:
    async def test() -> None:
        prefill, decode = FakeServer(Side.PREFILL), answering(Side.DECODE, {"detail": "the peer is silent"}, 500)
        async with standing(prefill, decode, retries=0, grace=10.0) as stand:
            task = asyncio.create_task(stand.post("/generate", BODY))
            before = await soon(prefill.calls.get())
            await soon(decode.seen[0].over.wait())
            before.die()
            status, answer = await soon(task)
            assert status == 502 and answer["error"]["attempts"][0]["server"] == f"prefill {prefill.url}"

    run(test)


def test_a_request_id_is_another_one_when_it_is_tried_again() -> None:
    async def test() -> None:
        def script(call: Call) -> None:
            call.answer(token("a") if len(decode.seen) > 1 else {"detail": "x"}, 200 if len(decode.seen) > 1 else 500)

        prefill, decode = answering(Side.PREFILL), FakeServer(Side.DECODE, script=script)
        async with standing(prefill, decode) as stand:
            assert (await stand.post("/generate", BODY | {"rid": "mine"}))[0] == 200
            assert [call.body["rid"] for call in decode.seen] == ["mine", "r1-mine"]

    run(test)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'"x"', b'{"text": []}', b'{"input_ids": 5}', b"\xff", b"[" * 100_000], ids=repr
)
def test_what_is_no_request_is_refused_and_reaches_nobody(data: bytes) -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            async with stand.client.post(stand.url + "/generate", data=data) as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == (400, "invalid_request_error")
            assert not prefill.seen and not decode.seen

    run(test)


def test_a_request_that_is_too_long_is_refused_with_the_remedy() -> None:
    async def test() -> None:
        async with standing(*pair(), max_payload=1000) as stand:
            status, answer = await stand.post("/generate", {"text": "x" * 1000})
            assert status == 413 and "--max-payload-size" in answer["error"]["message"]

    run(test)


def test_without_servers_the_client_is_told_what_is_missing() -> None:
    async def test() -> None:
        async with standing(answering(Side.PREFILL), ready=False) as stand:
            async with stand.client.post(stand.url + "/generate", json=BODY) as response:
                answer = await response.json()
                assert response.status == 503 and response.headers["Retry-After"]
            assert "no decode server" in answer["error"]["message"] and "--decode" in answer["error"]["message"]
            assert (await stand.get("/health"))[0] == 200
            status, said = await stand.get("/readiness")
            assert status == 503 and "no decode server" in said["reason"]

    run(test)


def test_a_server_that_dies_is_evicted_and_gets_requests_again_when_it_is_back() -> None:
    async def test() -> None:
        prefill, one, other = answering(Side.PREFILL), answering(Side.DECODE), answering(Side.DECODE)
        async with standing(prefill, one, other) as stand:
            await one.stop()
            for _ in range(8):
                assert (await soon(stand.post("/generate", BODY)))[0] == 200
            await _state(stand, one.url, "evicted")
            served = len(one.seen)
            await one.start()
            await _state(stand, one.url, "healthy")
            for _ in range(2):
                assert (await soon(stand.post("/generate", BODY)))[0] == 200
            assert len(one.seen) == served + 1

    run(test)


def test_a_server_that_says_that_it_is_ill_is_evicted_with_its_words() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            decode.health = 503
            decode.script = lambda call: call.die()
            await soon(stand.post("/generate", BODY))
            await _state(stand, decode.url, "evicted", "a rank is gone")
            status, answer = await stand.post("/generate", BODY)
            assert status == 503 and "a rank is gone" in answer["error"]["message"] and decode.url in str(answer)
            decode.health, decode.script = 200, lambda call: call.answer(token("decode"))
            await _state(stand, decode.url, "healthy")
            assert (await stand.post("/generate", BODY))[0] == 200

    run(test)


async def _state(stand, url: str, state: str, cause: str = "") -> None:
    async with asyncio.timeout(60):
        while True:
            _, said = await stand.get("/hetero/pairs", Authorization="Bearer key")
            if any((one["url"], one["state"]) == (url, state) and cause in one["cause"] for one in said["servers"]):
                return
            await asyncio.sleep(0.01)


def test_servers_come_and_go() -> None:
    async def test() -> None:
        prefill, one, other = answering(Side.PREFILL), answering(Side.DECODE), answering(Side.DECODE)
        async with standing(prefill, one, other) as stand:
            stand.members.change(prefill.instance, one.instance)
            await asyncio.to_thread(stand.members.callback)
            await until(lambda: True)
            for _ in range(4):
                assert (await stand.post("/generate", BODY))[0] == 200
            assert not other.seen and len(one.seen) == 4
            stand.members.change(prefill.instance, other.instance)
            await _state(stand, other.url, "healthy")
            async with asyncio.timeout(60):
                while (await stand.post("/generate", BODY))[0] != 200:
                    await asyncio.sleep(0.01)
            assert len(one.seen) == 4 and other.seen

    run(test)


def test_a_request_under_way_goes_on_when_its_servers_leave_the_list() -> None:
    async def test() -> None:
        prefill, decode = answering(Side.PREFILL), FakeServer(Side.DECODE)
        async with standing(prefill, decode) as stand:
            task = asyncio.create_task(stand.post("/generate", BODY))
            now = await soon(decode.calls.get())
            stand.members.change()
            async with asyncio.timeout(60):
                while (await stand.get("/readiness"))[0] == 200:
                    await asyncio.sleep(0.01)
            now.answer(token("there"))
            assert await soon(task) == (200, token("there"))

    run(test)


def test_questions_about_the_model_go_to_a_prefill_server_that_answers() -> None:
    async def test() -> None:
        dead, prefill, decode = pair()[0], *pair()
        async with standing(dead, prefill, decode) as stand:
            await dead.stop()
            assert (await stand.get("/v1/models"))[1]["data"] == [{"id": "tiny"}]
            for path in ("/model_info", "/get_model_info"):
                prefill.answers.setdefault(path, prefill.answers["/model_info"])
                assert (await stand.get(path, Authorization="Bearer mine"))[1]["role"] == "prefill"
            assert prefill.others[-1][2]["Authorization"] == "Bearer mine"
            await prefill.stop()
            status, answer = await stand.get("/v1/models")
            assert status == 503 and prefill.url in answer["error"]["message"] and dead.url in str(answer)

    run(test)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_is_that_of_all_servers(path: str) -> None:
    async def test() -> None:
        prefill, decode, other = *pair(), answering(Side.DECODE)
        other.answers["/get_server_info"] = {"internal_states": [{"last_gen_throughput": 8.0}]}
        del other.answers["/server_info"]
        async with standing(prefill, decode, other) as stand:
            status, said = await stand.get(path)
            assert status == 200
            assert sorted(one["last_gen_throughput"] for one in said["internal_states"]) == [7.0, 8.0]
            assert [one["role"] for one in said["prefill"]] == ["prefill"] and len(said["decode"]) == 2

    run(test)


def test_flush_cache_reaches_every_server_and_fails_if_one_does() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            async with stand.client.post(
                stand.url + "/flush_cache?timeout=3", headers={"Authorization": "Bearer admin"}
            ) as response:
                assert response.status == 200
            for server in (prefill, decode):
                method, path, headers = server.others[-1]
                assert (method, path, headers["Authorization"]) == ("POST", "/flush_cache?timeout=3", "Bearer admin")
            del decode.answers["/flush_cache"]
            status, said = await stand.get("/flush_cache")
            assert status == 503 and decode.url in said["error"]["message"]
            assert (await stand.get("/health_generate"))[0] == 200

    run(test)


def test_pairs_are_shown_to_who_has_the_key() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode, key="key", unknown=Unknown.NEVER, ready=False) as stand:
            assert (await stand.get("/hetero/pairs"))[0] == 401
            assert (await stand.get("/hetero/pairs", Authorization="Bearer wrong"))[0] == 401
            await _state(stand, decode.url, "healthy")
            async with asyncio.timeout(60):
                while True:
                    _, said = await stand.get("/hetero/pairs", Authorization="Bearer key")
                    if said["pairs"][0]["fit"] == "no":
                        break
            assert "--allow-unknown" in said["pairs"][0]["reason"] and not said["pairs"][0]["usable"]
            assert not said["ready"] and {one["url"] for one in said["servers"]} == {prefill.url, decode.url}

    run(test)


def test_a_server_that_wants_a_key_is_told_apart_from_one_that_is_stock() -> None:
    async def test() -> None:
        prefill, decode = pair()
        decode.key = "secret"
        async with standing(prefill, decode, ready=False) as stand:
            async with asyncio.timeout(60):
                while "--api-key" not in str((await stand.get("/hetero/pairs"))[1]["pairs"]):
                    await asyncio.sleep(0.01)
            status, answer = await stand.post("/generate", BODY)
            assert status == 503 and "--api-key" in answer["error"]["message"]

    run(test)


def test_what_is_counted() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            prefill.script = decode.script = None
            task = asyncio.create_task(stand.post("/generate", {"input_ids": [1] * 100} | BODY | {"text": None}))
            before, now = await soon(prefill.calls.get()), await soon(decode.calls.get())
            tokens = "sglang_hetero:router_outstanding_tokens"
            assert await stand.figure(f'{tokens}{{role="prefill"') == 100
            assert await stand.figure(f'{tokens}{{role="decode"') == 104
            before.answer(token("p"))
            async with asyncio.timeout(60):
                while await stand.figure(f'{tokens}{{role="prefill"'):
                    await asyncio.sleep(0.01)
            now.answer(token("d"))
            assert (await soon(task))[0] == 200
            assert await stand.figure(tokens) == 0
            assert await stand.figure('sglang_hetero:router_requests_total{route="/generate",status="200"}') == 1
            assert await stand.figure('sglang_hetero:router_servers{role="decode",state="healthy"}') == 1
            assert await stand.figure("sglang_hetero:router_request_seconds_count") == 1

    run(test)


def test_prefill_may_answer_after_decode_has() -> None:
    async def test() -> None:
        prefill, decode = FakeServer(Side.PREFILL), answering(Side.DECODE)
        async with standing(prefill, decode) as stand:
            assert (await soon(stand.post("/generate", BODY)))[0] == 200
            before = prefill.seen[0]
            assert not before.over.is_set()
            before.answer(token("p"))
            await soon(before.over.wait())
            assert not before.left

    run(test)


def test_what_the_router_does_not_know_is_an_error_in_json() -> None:
    async def test() -> None:
        async with standing(*pair()) as stand:
            for method, path, status in (
                ("GET", "/nothing", 404),
                ("GET", "/generate", 405),
                ("PUT", "/flush_cache", 405),
            ):
                async with stand.client.request(method, stand.url + path) as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"]) == (status, status) and path in error["message"]

    run(test)


def test_an_error_of_the_router_itself_is_told_and_logged(monkeypatch, caplog) -> None:
    async def test() -> None:
        async with standing(*pair()) as stand:
            monkeypatch.setattr(bodies, "meet", lambda *_: 1 / 0)
            status, answer = await stand.post("/generate", BODY)
            assert status == 500 and "the router itself" in answer["error"]["message"]
            assert await stand.figure("sglang_hetero:router_outstanding") == 0

    run(test)
    assert "ZeroDivisionError" in caplog.text


def test_every_request_has_a_connection_of_its_own() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            for _ in range(3):
                await stand.post("/generate", BODY)
            assert len(set(decode.peers)) == len(set(prefill.peers)) == 3

    run(test)


def test_a_host_that_is_gone_without_a_word_is_noticed() -> None:
    async def test() -> None:
        outgoing = connector()
        with outgoing._socket_factory((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
            assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, every, times = (
                made.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + every * times == 25  # as docs/router.md says
            # Data that nobody confirms end it as soon.
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
        await outgoing.close()

    run(test)


def test_a_policy_that_fails_does_not_fail_requests() -> None:
    class Broken:
        def choose(self, candidates, tokens):
            raise ValueError("no idea")

    async def test() -> None:
        async with standing(*pair(), policy=Broken()) as stand:
            assert (await stand.post("/generate", BODY))[0] == 200

    run(test)
