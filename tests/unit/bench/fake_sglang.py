"""A server that answers /generate like SGLang, with as many tokens as it is asked for; or not, as MODE says.

`fake_sglang.py MODE LOG`: prints `READY <url>`. Each request is a line of JSON in LOG.

MODE: honest; short (one token less than asked for); silent (the stream ends with an error before any text); broken
(HTTP 500); longer (counts a token more in the prompt); dies (ends at the third request).
"""

import asyncio
import json
import os
import socket
import sys
from typing import Any

from aiohttp import web

MODE, LOG = sys.argv[1], sys.argv[2]
TOKENS_PER_STEP = 3
"""As speculation does: several tokens in one piece."""
DIES_AFTER = 3
STEP_SECONDS = 0.002

count = {"seen": 0, "running": 0}


def event(answer: Any) -> bytes:
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


async def generate(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    count["seen"] += 1
    count["running"] += 1
    try:
        asked = body["sampling_params"]["max_new_tokens"]
        prompt = len(body["text"].encode())
        with open(LOG, "a") as log:
            ignores = body["sampling_params"]["ignore_eos"]
            log.write(
                json.dumps({"prompt": prompt, "asked": asked, "ignores": ignores, "running": count["running"]}) + "\n"
            )
        if MODE == "dies" and count["seen"] == DIES_AFTER:
            os._exit(3)
        if MODE == "broken":
            raise web.HTTPInternalServerError(text="no memory")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if MODE == "silent":
            await response.write(event({"error": {"message": "the transfer failed"}}))
        else:
            total = asked - (MODE == "short")
            done = 0
            while done < total:
                await asyncio.sleep(STEP_SECONDS)
                done = min(total, done + TOKENS_PER_STEP)
                meta = {"completion_tokens": done, "prompt_tokens": prompt + (MODE == "longer")}
                await response.write(event({"text": "a" * done, "meta_info": meta}))
        await response.write(b"data: [DONE]\n\n")
        return response
    finally:
        count["running"] -= 1


async def models(_request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake"}]})


async def server_info(_request: web.Request) -> web.Response:
    return web.json_response({"internal_states": [{"avg_spec_accept_length": 2.5}]})


async def main() -> None:
    app = web.Application(client_max_size=2**24)
    app.add_routes(
        [
            web.post("/generate", generate),
            web.get("/v1/models", models),
            web.get("/health", models),
            web.get("/server_info", server_info),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    print(f"READY http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
