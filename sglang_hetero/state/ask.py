"""What a route of ours on an SGLang server answers, or why it does not: one place for the words and remedies."""

from __future__ import annotations

import requests

from sglang_hetero import answers
from sglang_hetero.errors import PeerAway

KEY = "SGLANG_API_KEY"
"""The variable from which commands take a server's API key."""
SECONDS = 10.0
SHOWN = 300
"""Bytes of a wrong answer that an error quotes."""


def ask(url: str, path: str, key: str | None, most: int = answers.MAX_ANSWER_BYTES) -> bytes:
    """The answer of `path` of the server at `url`, of at most so many bytes. Raises PeerAway, with the remedy."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with answers.asked("GET", f"{url}{path}", headers=headers, timeout=(SECONDS, SECONDS)) as reply:
            data = answers.whole(reply, SECONDS, most)
            status = reply.status_code
    except (*answers.BROKEN, ValueError) as error:
        raise PeerAway(f"no proper answer: {error}; is it started, and this its own URL?") from None
    if status == requests.codes.unauthorized:
        raise PeerAway(f"it wants its API key: give --api-key, or set {KEY}")
    if status in (requests.codes.not_found, requests.codes.method_not_allowed):
        raise PeerAway(
            f"there is no {path}: give the URL of an SGLang server, not of a router, with this release of "
            "sglang-hetero installed and without --tokenizer-worker-num"
        )
    if status != requests.codes.ok:
        raise PeerAway(f"HTTP {status}: {data[:SHOWN].decode(errors='replace')}")
    return data
