"""What clients and servers may send, and rarely do: odd flags, headers and answers."""

import asyncio
import gzip
import json

import pytest

from sglang_hetero.layout.manifest import Side
from tests.unit.router.fakes import run, soon, standing, token
from tests.unit.router.test_router_routes import BODY, all_healthy, answering, pair


def test_a_request_is_streamed_if_sglang_streams_it() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            assert await stand.post("/generate", BODY | {"stream": "false"}) == (200, token("decode"))
            assert decode.seen[0].body["stream"] == "false"

    run(test)


def test_a_body_that_was_compressed_is_passed_on_unpacked() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            data = gzip.compress(json.dumps(BODY).encode())
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            async with stand.client.post(stand.url + "/generate", data=data, headers=headers) as response:
                assert response.status == 200
            assert decode.seen[0].body["text"] == BODY["text"] and "Content-Encoding" not in decode.seen[0].headers

    run(test)


async def _raw(stand, *lines: bytes, body: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rsplit(":", 1)[1]))
    length = b"Content-Length: %d" % len(body)
    writer.write(b"\r\n".join([*lines, b"Host: x", b"Connection: close", length, b"", body]))
    said = await soon(reader.read())
    writer.close()
    return said


def test_headers_that_any_of_several_connection_headers_names_are_not_passed_on() -> None:
    async def test() -> None:
        prefill, decode = pair()
        async with standing(prefill, decode) as stand:
            body = json.dumps(BODY).encode()
            lines = (b"POST /generate HTTP/1.1", b"Connection: x-one", b"Connection: x-two", b"X-One: 1", b"X-Two: 2")
            assert b" 200 " in await _raw(stand, *lines, b"X-Three: 3", body=body)
            headers = decode.seen[0].headers
            assert headers["X-Three"] == "3" and "X-One" not in headers and "X-Two" not in headers

    run(test)


def test_a_key_that_is_no_text_is_a_wrong_one() -> None:
    async def test() -> None:
        async with standing(*pair(), key="key") as stand:
            said = await _raw(stand, b"GET /hetero/pairs HTTP/1.1", b"Authorization: Bearer \xff")
            assert said.startswith(b"HTTP/1.1 401 ")

    run(test)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "said", ['{"internal_states": 5}', DEEP, "{", "7"], ids=["number", "deep", "half", "no object"]
)
def test_what_a_server_says_of_itself_may_be_rubbish(said: str) -> None:
    async def test() -> None:
        prefill, decode, *others = *pair(), *pair()
        decode.answers["/server_info"] = said
        async with standing(prefill, decode, *others) as stand:
            await all_healthy(stand)
            status, answer = await stand.get("/server_info")
            assert status == 200 and answer["internal_states"] == [{"last_gen_throughput": 7.0}]
            prefill.answers["/v1/models"] = said
            assert (await stand.get("/v1/models"))[0] in (200, 502)

    run(test)


def test_each_server_of_which_no_model_is_known_is_asked_for_its_models() -> None:
    async def test() -> None:
        one, other, decode = answering(Side.PREFILL), *pair()
        other.answers["/v1/models"] = {"object": "list", "data": [{"id": "another"}]}
        async with standing(one, other, decode) as stand:
            _, said = await stand.get("/v1/models")
            assert sorted(model["id"] for model in said["data"]) == ["another", "tiny"]

    run(test)
