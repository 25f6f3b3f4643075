"""Many requests at a time, servers that fail in every way, clients that leave: nothing hangs and nothing is left."""

import asyncio
import gc
import random
from collections import Counter

import aiohttp

from sglang_hetero.layout.manifest import Side
from sglang_hetero.router.policy import LeastTokens
from tests.unit.router.fakes import DONE, Call, FakeServer, aborted, event, run, standing, token

REQUESTS = 300
AT_A_TIME = 40


def moody(role: Side, rng: random.Random) -> FakeServer:
    """Serves three requests of four, and fails the others in all ways that there are."""

    def script(call: Call) -> None:
        mood = rng.random()
        streamed = bool(call.body.get("stream"))
        if mood < 0.05:
            call.die()
        elif mood < 0.1:
            call.answer({"error": {"message": "broken"}}, 500)
        elif mood < 0.13:
            call.answer({"error": {"message": "full"}}, 503)
        elif streamed and mood < 0.18:
            call.finish(event(aborted("the hand-over failed")))
        elif streamed and mood < 0.22 and role is Side.DECODE:
            call.send(event(token("a")))
            call.die()
        elif streamed:
            call.finish(event(token("a")), event(token("ab")))
        else:
            call.answer(token("ab"))

    return FakeServer(role, script=script)


def test_a_storm() -> None:
    async def test() -> None:
        rng = random.Random(11)
        servers = [moody(role, rng) for role in (Side.PREFILL, Side.DECODE) for _ in range(3)]
        async with standing(*servers, policy=LeastTokens(), retries=8) as stand:
            before = len(asyncio.all_tasks())
            ends: Counter[str] = Counter()
            gate = asyncio.Semaphore(AT_A_TIME)

            async def one(number: int) -> None:
                streamed, leaves = bool(number % 3), rng.random() < 0.1
                body = {"text": "x" * rng.randrange(400), "stream": streamed}
                async with gate:
                    try:
                        async with (
                            asyncio.timeout(rng.random() * 0.02 if leaves else 30),
                            stand.client.post(stand.url + "/generate", json=body) as response,
                        ):
                            data = await response.read()
                    except (TimeoutError, aiohttp.ClientError):
                        assert leaves, "a request has hung or lost its connection"
                        ends["left"] += 1
                        return
                    if response.status != 200:
                        assert b'"attempts"' in data
                        ends["failed"] += 1
                    elif streamed:
                        assert data.endswith(DONE)
                        whole = data == event(token("a")) + event(token("ab")) + DONE
                        assert whole or b"broke off after the first token" in data
                        ends["whole" if whole else "broken"] += 1
                    else:
                        ends["whole"] += 1

            await asyncio.gather(*(one(number) for number in range(REQUESTS)))
            assert sum(ends.values()) == REQUESTS
            assert ends["whole"] > REQUESTS / 2 and ends["broken"] and ends["left"], ends
            async with asyncio.timeout(60):
                while await stand.figure("sglang_hetero:router_outstanding"):
                    await asyncio.sleep(0.01)
            # Some have left before the router knew them.
            assert REQUESTS - ends["left"] <= await stand.figure("sglang_hetero:router_requests_total") <= REQUESTS
            for server in servers:
                for call in server.seen:
                    async with asyncio.timeout(60):
                        await call.over.wait()
            # Rooms are never used again, whatever was tried.
            rooms = [call.room for server in servers for call in server.seen if server.role is Side.DECODE]
            assert len(set(rooms)) == len(rooms)
            gc.collect()
            async with asyncio.timeout(60):
                while len(asyncio.all_tasks()) > before:
                    await asyncio.sleep(0.01)

    run(test)


def test_nothing_is_called_forgotten(caplog) -> None:
    """asyncio complains of exceptions that nobody has looked at when a task is collected."""

    async def test() -> None:
        rng = random.Random(5)
        servers = [moody(role, rng) for role in (Side.PREFILL, Side.DECODE) for _ in range(2)]
        async with standing(*servers, retries=2) as stand:
            for number in range(60):
                async with stand.client.post(
                    stand.url + "/generate", json={"text": "a", "stream": bool(number % 2)}
                ) as response:
                    await response.read()
        gc.collect()

    run(test)
    gc.collect()
    assert "never retrieved" not in caplog.text and "was destroyed" not in caplog.text
