"""Requests and answers that are made to harm others: what they cost, and whom."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Self

import aiohttp
import pytest
from multidict import CIMultiDict

from sglang_hetero.discovery.record import Description, Instance
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router import app, ask, events, exchange, fleet
from sglang_hetero.router.health import Limits
from sglang_hetero.router.policy import LeastTokens
from tests.unit.router.fakes import DONE, LIMIT, Call, FakeServer, Stand, aborted, event, run, standing, token, until

BODY = {"text": "What is a shard?", "sampling_params": {"max_new_tokens": 4}}


def at_once(call: Call) -> None:
    """Answer, unless the client wants it held."""
    if "hold" not in call.body:
        call.answer(token("ok"))


def sized(role: Side, tokens: int) -> FakeServer:
    """A server that tells how many tokens it can hold."""
    instance = Instance(role=role, url="http://0.0.0.0:1", tokens=tokens, requests=8)
    return FakeServer(role, Description(instance=instance, mode="off", unsupported=("off",)), at_once)


class First:
    """A policy that takes the first decode server whenever it may."""

    def choose(self, candidates, tokens):
        return min(candidates, key=lambda pair: pair.decode.url)


async def states(stand: Stand) -> dict[str, str]:
    """How each server is."""
    return {one["url"]: one["state"] for one in (await stand.get("/hetero/pairs"))[1]["servers"]}


def plain(role: Side) -> FakeServer:
    return FakeServer(role, script=at_once)


SLOW = Limits(interval=600.0, backoff=600.0, max_backoff=600.0)
"""A suspect server stays so while a test lasts."""


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_refusal_that_may_be_the_servers_own_is_believed_when_another_one_says_so(status: int) -> None:
    async def test() -> None:
        two = plain(Side.DECODE), plain(Side.DECODE)
        async with standing(plain(Side.PREFILL), *two, policy=First(), limits=SLOW) as stand:
            first, other = sorted(two, key=lambda server: server.url)
            await until_healthy(stand)
            refusal = {"error": {"message": "Unauthorized", "code": status}}
            for server in two:
                server.script = lambda call: call.answer(refusal, status)
            assert await stand.post("/generate", BODY) == (status, refusal)
            assert set((await states(stand)).values()) == {"healthy"}
            assert (len(first.seen), len(other.seen)) == (1, 1)
            # Now only one of them says so: a server that has another key than the rest.
            other.script = at_once
            for _ in range(3):
                assert (await stand.post("/generate", BODY))[0] == 200
            assert (len(first.seen), len(other.seen)) == (2, 4), "it was given further requests to refuse"
            assert (await states(stand))[first.url] == "suspect"

    run(test)


def test_a_refusal_of_the_only_server_is_passed_on_at_once() -> None:
    async def test() -> None:
        prefill, decode = plain(Side.PREFILL), plain(Side.DECODE)
        async with standing(prefill, decode) as stand:
            decode.script = lambda call: call.answer({"detail": "Not Found"}, 404)
            assert await stand.post("/generate", BODY) == (404, {"detail": "Not Found"})
            assert len(decode.seen) == 1 and await stand.figure("sglang_hetero:router_retries_total") == 0

    run(test)


def test_a_stream_that_is_refused_by_one_server_goes_to_another() -> None:
    async def test() -> None:
        two = plain(Side.DECODE), plain(Side.DECODE)
        async with standing(streaming(Side.PREFILL), *two, policy=First(), limits=SLOW) as stand:
            await until_healthy(stand)
            first, other = sorted(two, key=lambda server: server.url)
            first.script = lambda call: call.answer({"detail": "Not Found"}, 404)
            other.script = lambda call: call.send(event(token("a")))  # and does not end
            async with stand.client.post(stand.url + "/generate", json=STREAM) as response:
                assert response.status == 200
                assert await response.content.readuntil(b"\n\n") == event(token("a"))
                assert (await states(stand))[first.url] == "suspect", "it is a black hole while streams last"

    run(test)


async def until_healthy(stand: Stand) -> None:
    while set((await states(stand)).values()) != {"healthy"}:
        await asyncio.sleep(0.005)


STREAM = BODY | {"stream": True}


def streaming(role: Side, *pieces: bytes) -> FakeServer:
    return FakeServer(role, script=lambda call: call.finish(*(pieces or (event(token("x")),))))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_too_long_is_no_fault_of_the_server(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_ANSWER", 1000)
    monkeypatch.setattr(events, "MAX_EVENT", 1000)

    async def test() -> None:
        servers = [plain(Side.PREFILL), plain(Side.DECODE), plain(Side.DECODE)]
        async with standing(*servers, limits=Limits(interval=600.0, failures=1)) as stand:
            await until_healthy(stand)
            long = token("x" * 5000)
            for one in servers[1:]:
                one.script = lambda call: call.send(b"data: " + b"x" * 5000) if stream else call.answer(long)
            if stream:
                servers[0].script = lambda call: call.finish(event(token("x")))
            status, said = await stand.post("/generate", BODY | {"stream": stream})
            assert status == 502 and "more than 1000 bytes" in said["error"]["message"]
            assert len(servers[1].seen) + len(servers[2].seen) == 1, "it was sent to others, whose answer is as long"
            assert set((await states(stand)).values()) == {"healthy"}

    run(test)


def test_servers_that_refuse_one_request_as_sglang_words_it_are_as_well_as_before() -> None:
    """The id and the room are other ones in each attempt."""

    async def test() -> None:
        servers = [plain(Side.PREFILL), *(plain(Side.DECODE) for _ in range(3))]

        def fail(call: Call) -> None:
            text = f"Decode transfer failed for request rank=0 rid='{call.room:032x}' bootstrap_room={call.room}"
            call.answer({"error": {"message": text, "code": 500}}, 500)

        async with standing(*servers, policy=First(), limits=SLOW, retries=2) as stand:
            await until_healthy(stand)
            for one in servers[1:]:
                one.script = fail
            assert (await stand.post("/generate", BODY))[0] == 500
            assert [len(one.seen) for one in servers[1:]] == [1, 1, 1]
            suspects = [url for url, state in (await states(stand)).items() if state == "suspect"]
            assert len([url for url in suspects if url != servers[0].url]) <= 1, suspects

    run(test)


def test_a_failure_that_comes_together_with_the_first_token_is_seen() -> None:
    async def test() -> None:
        two = plain(Side.DECODE), plain(Side.DECODE)
        async with standing(streaming(Side.PREFILL), *two, policy=First(), limits=SLOW) as stand:
            await until_healthy(stand)
            first, other = sorted(two, key=lambda server: server.url)
            first.script = lambda call: call.finish(event(token("a")) + event(aborted("out of memory")))
            other.script = lambda call: call.finish(event(token("b")))
            async with stand.client.post(stand.url + "/generate", json=STREAM) as response:
                assert await response.read() == event(token("b")) + DONE  # nothing had gone to the client
            assert (await states(stand))[first.url] == "suspect"

    run(test)


class Pieces:
    """A session, its answer and the content of that, which comes as it is given; an error is raised."""

    status = 200

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces, self.content = pieces, self

    async def post(self, *_: object, **__: object) -> Self:
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for one in self.pieces:
            if isinstance(one, Exception):
                raise one
            yield one

    def exchange(self) -> exchange.Exchange:
        """Of which this is the server's side."""
        server = SimpleNamespace(instance=Instance(role=Side.DECODE, url="http://10.0.0.1:1"))
        return exchange.Exchange(self, server, "/generate", CIMultiDict(), b"")

    async def all(self) -> list[bytes]:
        """What it makes of it."""
        return [event async for events in self.exchange().pieces() for event in events]


def test_what_comes_before_the_first_event_is_looked_at_once_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(exchange, "payload", lambda event: looked.append(event) or events.payload(event))
    pings = [b": ping %d\n\n" % number for number in range(20)]
    found = asyncio.run(Pieces(b"\n\n", *pings, b"\n\n", event(token("b")), DONE).all())
    assert found == [*pings, event(token("b")), DONE] and looked == found[:-1]
    with pytest.raises(exchange.Broken, match="before the first event") as broken:
        asyncio.run(Pieces(*[b": ping\n\n"] * (exchange.MAX_BEFORE // 8 + 1), event(token("b"))).all())
    assert not broken.value.failure.blame


@pytest.mark.parametrize("end", [b"", event(token("c"))[:-9], b"data: [DO"])
def test_a_stream_without_its_end_is_one_that_broke(end: bytes) -> None:
    async def test() -> None:
        got = []
        with pytest.raises(exchange.Broken, match=r"without \[DONE\]") as broken:
            async for some in Pieces(event(token("b")), end).exchange().pieces():
                got += some
        assert got == [event(token("b"))] and broken.value.kind == fleet.LOST
        whole = [event(token("b")), DONE.strip()]  # a proxy has cut the empty line off
        assert await Pieces(*whole).all() == [whole[0], DONE]

    run(test)


def test_a_connection_that_breaks_after_the_end_of_the_stream_has_cut_nothing() -> None:
    """As that of a server that is killed just then: its client has the whole answer and [DONE], and gets no error."""
    whole, gone = [event(token("b")), DONE], aiohttp.ClientPayloadError()
    assert asyncio.run(Pieces(*whole, gone).all()) == whole
    with pytest.raises(exchange.Broken):
        asyncio.run(Pieces(whole[0], gone).all())


def test_a_request_for_endless_tokens_weighs_no_more_than_a_server_holds() -> None:
    async def test() -> None:
        prefill, decodes = sized(Side.PREFILL, 20_000), [sized(Side.DECODE, 20_000) for _ in range(2)]
        async with standing(prefill, *decodes, policy=LeastTokens()) as stand:
            endless = BODY | {"hold": 1, "sampling_params": {"max_new_tokens": 10**400}}
            # aiohttp's client encodes it as it is: 401 digits.
            held = asyncio.create_task(stand.post("/generate", endless))
            await until(lambda: any(one.seen for one in decodes))
            assert (await stand.post("/generate", BODY))[0] == 200
            assert 4096 <= await stand.figure("sglang_hetero:router_outstanding_tokens") < 5000
            many = asyncio.create_task(stand.post("/generate", endless | {"text": ["a"] * 100}))
            await until(lambda: all(one.seen for one in decodes) and len(prefill.seen) == 3)
            _, said = await stand.get("/hetero/pairs")
            assert max(one["outstanding_tokens"] for one in said["servers"]) <= 20_000 + 5_000
            for one in (held, many):
                one.cancel()

    run(test)


def test_a_router_on_its_own_list_does_not_pass_a_request_on_to_itself() -> None:
    async def test() -> None:
        prefill, decode = plain(Side.PREFILL), plain(Side.DECODE)
        async with standing(prefill, decode) as stand:
            assert (await stand.post("/generate", BODY, Via="1.0 other"))[0] == 200
            via = decode.seen[0].headers.getall("Via")
            assert via[0] == "1.0 other" and len(via) == 2
            for path in ("/generate", "/v1/models"):
                status, said = await stand.post(path, BODY, Via=", ".join(via))
                assert status == 508 and "its own list" in said["error"]["message"]
            assert len(decode.seen) == 1

    run(test)


def test_a_body_that_is_not_what_its_encoding_says_is_the_clients_fault() -> None:
    async def test() -> None:
        async with standing(plain(Side.PREFILL), plain(Side.DECODE)) as stand:
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            async with stand.client.post(stand.url + "/generate", data=b"{}", headers=headers) as response:
                assert response.status == 400

    run(test)


SIZE = 32 << 20
"""Bytes of an answer: more than the kernel takes of it while nobody reads."""


def test_a_client_that_does_not_read_its_answer_is_cut_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "limit", lambda seconds: asyncio.timeout(seconds / 1000))

    async def test() -> None:
        prefill, decode = plain(Side.PREFILL), plain(Side.DECODE)
        async with standing(prefill, decode) as stand:
            decode.script = lambda call: call.answer(token("x" * SIZE))
            with socket.create_connection(stand.url[len("http://") :].split(":")) as client:
                body = json.dumps(BODY).encode()
                head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
                await asyncio.to_thread(client.sendall, head + body)
                await until(lambda: decode.seen)
                await until(lambda: "does not read the answer" in caplog.text)
                client.settimeout(LIMIT)
                got = 0
                with suppress(ConnectionError):
                    while data := await asyncio.to_thread(client.recv, 1 << 20):
                        got += len(data)
                assert got < SIZE  # and the connection has ended

    run(test)


def test_servers_are_described_and_judged_while_names_are_looked_up() -> None:
    """Looking up names takes the threads of the loop, for as long as a resolver likes."""

    async def test() -> None:
        loop, gate = asyncio.get_running_loop(), threading.Event()
        with ThreadPoolExecutor(1) as only:
            loop.set_default_executor(only)
            loop.run_in_executor(None, gate.wait)
            try:
                async with standing(sized(Side.PREFILL, 10), sized(Side.DECODE, 10)) as stand:
                    assert (await stand.post("/generate", BODY))[0] == 200
            finally:
                gate.set()

    run(test)


def test_the_time_for_a_connection_includes_that_for_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
        assert exchange.TIMEOUT.connect == exchange.CONNECT_SECONDS
        monkeypatch.setattr(exchange, "TIMEOUT", aiohttp.ClientTimeout(total=None, connect=0.01))
        server = SimpleNamespace(instance=Instance(role=Side.DECODE, url="http://slow.example:1"))
        async with aiohttp.ClientSession(connector=exchange.connector()) as session:
            one = exchange.Exchange(session, server, "/generate", CIMultiDict(), b"")
            with pytest.raises(exchange.Broken) as broken:
                await one.open()
            assert broken.value.kind == fleet.LOST

    run(test)


def test_a_long_answer_to_health_is_a_good_one_and_few_descriptions_are_read_at_once() -> None:
    async def test() -> None:
        servers = [plain(Side.PREFILL) for _ in range(3 * ask.DESCRIBED_AT_ONCE)]
        server = servers[0]
        await server.start()
        server.answers["/well"] = "x" * (ask.MAX_WORDS + 1)
        try:
            async with aiohttp.ClientSession() as session:
                asker = ask.Asker(session, None, LIMIT, "/well")
                await asker.healthy(server.instance)
                under_way, most = [], []

                async def describing(instance: Instance) -> None:
                    under_way.append(instance)
                    most.append(len(under_way))
                    await asyncio.sleep(0)
                    under_way.remove(instance)

                asker._describe = describing
                await asyncio.gather(*(asker.describe(server.instance) for _ in servers))
                assert len(most) == len(servers) and max(most) == ask.DESCRIBED_AT_ONCE
                asker.close()
        finally:
            await server.stop()

    run(test)
