"""An endpoint that knows the answers of the recall task, and gives them, or others, as a test says."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LENGTH = {"type": "length", "length": 8}


def truth(prompt: str) -> str:
    """The value of the key that a prompt ends with."""
    asked = prompt.rsplit("\n", 1)[1]
    (line,) = [line for line in prompt.split("\n")[:-1] if line.startswith(asked)]
    return line.removeprefix(asked)


def generated(text: str, accept: float | None = None, **meta) -> dict:
    """What SGLang's /generate says, a token for each character."""
    told = {} if accept is None else {"spec_accept_length": accept}
    info = {"id": "r", "finish_reason": LENGTH, "prompt_tokens": 9, "completion_tokens": len(text)} | told | meta
    return {"text": text, "output_ids": [ord(character) for character in text], "meta_info": info}


def completed(text: str) -> dict:
    """What /v1/completions says."""
    return {
        "id": "c",
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": len(text)},
    }


class Fake:
    """answer(prompt, turn) is asked for each prompt, the turn-th time that it comes from 0; it gives a text, an object
    or bytes, and may give a pair of a status and one of these. routes: what there is beside /v1/models; headers: of
    every answer."""

    def __init__(self, answer=None, routes=("/generate", "/flush_cache"), model="fake", key=None, headers=()):
        self.answer = answer or (lambda prompt, _turn: truth(prompt))
        self.routes, self.model, self.key, self.headers = routes, model, key, headers
        self.turns, self.calls, self.lock = Counter(), [], threading.Lock()
        self.url = ""

    def prompts(self):
        """In the order in which they came, without the first short one."""
        return [body["text" if path == "/generate" else "prompt"] for path, body in self.calls if len(str(body)) > 200]

    def reply(self, path, body, headers):
        """Status and body of one request."""
        if self.key and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {"error": "no key"}
        if path == "/v1/models":
            return 200, {"data": [{"id": self.model}]}
        if path not in self.routes:
            return 404, {"detail": "Not Found"}
        with self.lock:
            self.calls.append((path, body))
            if path == "/flush_cache":
                return 200, b"Cache flushed.\n"
            prompt = body["text" if path == "/generate" else "prompt"]
            turn = self.turns[prompt]
            self.turns[prompt] += 1
        said = "1" if prompt == "1 2 3" else self.answer(prompt, turn)
        status, said = said if isinstance(said, tuple) else (200, said)
        if isinstance(said, str):
            said = generated(said) if path == "/generate" else completed(said)
        return status, said


@contextmanager
def serving(fake: Fake):
    """It listens on a port of its own; gives it with its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, said = fake.reply(self.path, body, self.headers)
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in fake.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *_arguments):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
