"""Requests and answers that are made to harm others: what they cost, and whom."""

import asyncio

from sglang_hetero.discovery.record import Description, Instance
from sglang_hetero.layout.manifest import Side
from sglang_hetero.router.policy import LeastTokens
from tests.unit.router.fakes import Call, FakeServer, run, standing, token, until

BODY = {"text": "What is a shard?", "sampling_params": {"max_new_tokens": 4}}


def at_once(call: Call) -> None:
    """Answer, unless the client wants it held."""
    if "hold" not in call.body:
        call.answer(token("ok"))


def sized(role: Side, tokens: int) -> FakeServer:
    """A server that tells how many tokens it can hold."""
    instance = Instance(role=role, url="http://0.0.0.0:1", tokens=tokens, requests=8)
    return FakeServer(role, Description(instance=instance, mode="off", unsupported=("off",)), at_once)


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
