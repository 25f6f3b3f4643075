"""What a router reads in a request and adds to it: how long it is, and where the two servers meet. Pure.

A hand-over is arranged by three fields that both servers get alike: host and port of prefill's bootstrap server, and a
room, a number that no other request has. A batch gets a list of each, one entry per prompt.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sglang_hetero.discovery.record import Instance
from sglang_hetero.errors import RouterError

Body = dict[str, Any]

BYTES_PER_TOKEN = 4
"""Of a prompt as text. Close for English; a Chinese character takes three bytes and is about one token. It is only for
comparing loads."""
DEFAULT_NEW_TOKENS = 128
"""SGLang's max_new_tokens where a request does not say it."""
MAX_NEW_TOKENS = 4096
"""Of one answer, for comparing loads: SGLang counts no more, either, when it reckons what a request will need
(SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION). Clients ask for any number, of thousands of digits, too."""
ROOMS = 2**63 - 1
"""Rooms are signed 64-bit numbers."""
MAX_PROMPTS = 1 << 16
"""Of a batch. As many rooms are kept free above a drawn one: several prompts have those that follow."""


TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
"""Texts that SGLang takes for true: pydantic does, which reads its requests."""


def truth(value: Any) -> bool:
    """What a flag of a request says, as SGLang reads it. What is no flag there is refused there; here it is false."""
    if isinstance(value, str):
        return value.lower() in TRUE
    return isinstance(value, int | float) and value == 1


def is_stream(body: Body) -> bool:
    """Whether the answer is to be sent as it comes."""
    return truth(body.get("stream", False))


def wants_logprobs(body: Body) -> bool:
    """Whether prefill's log-probabilities of the prompt belong into decode's answer."""
    wanted = body.get("return_logprob", False)
    return any(map(truth, wanted)) if isinstance(wanted, list) else truth(wanted)


def batch_size(body: Body) -> int | None:
    """How many prompts a body of /generate has; None for one that is no batch. Raises RouterError for an empty one."""
    text = body.get("text")
    if text is not None:
        return None if isinstance(text, str) else _counted(text, "text")
    for name in ("input_ids", "input_embeds"):
        given = body.get(name)
        if given is None:
            continue
        size = _counted(given, name)
        first = given[0]
        if name == "input_embeds":  # one prompt is a list of rows, a batch a list of those
            first = first[0] if isinstance(first, list) and first else first
        return size if isinstance(first, list) else None
    return None


def _counted(given: Any, name: str) -> int:
    if not isinstance(given, list) or not given:
        raise RouterError(f"{name} must be a text or a list that is not empty, of texts or of token ids")
    return len(given)


def answers(body: Body) -> int:
    """How many answers a body of /generate has, each of which a stream numbers."""
    return batch_size(body) or 1


def check(body: Body, path: str) -> None:
    """Raises RouterError for what cannot be handed over: an empty or endless batch, or several samples of a prompt."""
    batch_size(body)
    if (count := _answers(body)) > MAX_PROMPTS:
        raise RouterError(f"a batch of {count} prompts, must have {MAX_PROMPTS} at most; send it in parts")
    if (n := _samples(body, path)) > 1:
        raise RouterError(
            f"n is {n}, but SGLang gives all samples of a prompt the same room, so that prefill and decode cannot hand "
            f"them over one by one and would wait for each other; send {n} requests, or the prompt {n} times"
        )


def _samples(body: Body, path: str) -> int:
    """`n`: how many answers to each prompt. What is no number SGLang refuses."""
    params = body.get("sampling_params") if path == "/generate" else body
    most = 1
    for one in params if isinstance(params, list) else [params]:
        given = one.get("n", 1) if isinstance(one, dict) else 1
        if isinstance(given, str | int | float):  # on the OpenAI routes pydantic takes "2" and 2.0 for 2
            with suppress(ValueError, OverflowError):
                most = max(most, int(float(given)))
    return most


def meet(body: Body, path: str, prefill: Instance, draw: Callable[[int], int]) -> Body:
    """`body` with the fields of a hand-over at this prefill server and rooms of its own.

    path: of the route. draw: a random number from 0 to below its argument. Raises RouterError for an empty batch.
    """
    host, port = bootstrap_host(prefill), prefill.bootstrap_port or None
    size = batch_size(body) if path == "/generate" else None
    first = draw(ROOMS - MAX_PROMPTS)
    if size is None:
        # One room is enough: SGLang numbers on from it for further prompts.
        return body | {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": first,
        }
    return body | {
        "bootstrap_host": [host] * size,
        "bootstrap_port": [port] * size,
        "bootstrap_room": list(range(first, first + size)),
    }


def bootstrap_host(prefill: Instance) -> str:
    """Where prefill's bootstrap server is: the host of its URL, an IPv6 address in brackets."""
    try:
        return f"[{ipaddress.IPv6Address(prefill.host)}]"
    except ValueError:
        return prefill.host


def again(body: Body, attempt: int) -> Body:
    """`body` for a further attempt. A request id of the client's is changed: a server that is still ending the former
    attempt would refuse the same one, and SGLang aborts every request whose id begins with the one that it ends."""
    rid = body.get("rid")
    if isinstance(rid, str):
        return body | {"rid": f"{_mark([rid])}{attempt}-{rid}"}
    if isinstance(rid, list):
        mark = _mark(rid)
        return body | {"rid": [f"{mark}{attempt}-{one}" for one in rid]}
    return body


def _mark(rids: list[Any]) -> str:
    """A character that none of them begins with: what begins with it begins with none of them."""
    taken = {str(one)[:1] for one in rids}
    return next(mark for mark in map(chr, range(ord("r"), sys.maxunicode)) if mark not in taken)


def prompt_tokens(body: Body) -> int:
    """Length of the prompts, all together: exact for token ids, estimated for text."""
    for name in ("input_ids", "input_embeds", "text", "prompt", "messages"):
        if (given := body.get(name)) is not None:
            return _tokens(given)
    return 0


def _tokens(given: Any) -> int:
    total = 0
    waiting = [given]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            # isascii is answered without looking; the length in bytes would be a copy of a long prompt.
            size = len(one) if one.isascii() else len(one.encode(errors="replace"))
            total += -(-size // BYTES_PER_TOKEN)
        elif isinstance(one, list):
            if one and isinstance(one[0], int | float):
                total += len(one) if isinstance(one[0], int) else 1
            else:
                waiting += one
        elif isinstance(one, dict):
            waiting += [value for key, value in one.items() if key in ("content", "text", "tool_calls", "arguments")]
    return total


def new_tokens(body: Body) -> int:
    """How many tokens are asked for, all answers together."""
    params = body.get("sampling_params")
    total = 0
    for one in params if isinstance(params, list) else [params]:
        total += _asked(one if isinstance(one, dict) else body)
    if not isinstance(params, list):
        total *= _answers(body)
    return total


def _answers(body: Body) -> int:
    given = body.get("prompt")
    many = len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1
    try:
        return many * (batch_size(body) or 1)
    except RouterError:
        return many


def _asked(source: Body) -> int:
    for name in ("max_new_tokens", "max_completion_tokens", "max_tokens"):
        value = source.get(name)
        if isinstance(value, int) and value >= 0:
            return min(value, MAX_NEW_TOKENS)
    return DEFAULT_NEW_TOKENS


def merge_logprobs(prefill: Any, decode: Any) -> Any:
    """Decode's answer to /generate with prefill's log-probabilities of the prompt before its own.

    Both are one object, or a list of them for a batch. Where one of them says nothing of log-probabilities, decode's is
    left as it is.
    """
    if isinstance(prefill, list) and isinstance(decode, list):
        merged = [merge_logprobs(left, right) for left, right in zip(prefill, decode, strict=False)]
        return merged + decode[len(merged) :]
    ours, theirs = _meta(decode), _meta(prefill)
    if ours is None or theirs is None:
        return decode
    first = theirs.get("input_token_logprobs")
    if not isinstance(first, list):
        return decode
    rest = ours.get("input_token_logprobs")
    return decode | {"meta_info": ours | {"input_token_logprobs": first + (rest if isinstance(rest, list) else [])}}


def has_meta(answer: Any) -> bool:
    """Whether an answer is one to a prompt, and no failure of the whole."""
    return _meta(answer) is not None


def _meta(answer: Any) -> dict[str, Any] | None:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    return meta if isinstance(meta, dict) else None
