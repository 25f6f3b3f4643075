"""Requests whose answers depend on more than the plain greedy tokens, and comparing two servers' answers to them.

tests/serving compares tokens, log-probabilities and accepted drafts with transformers. These are about what SGLang does
with a request on both sides of a hand-over: what prefill has to tell about the prompt, what decode has to know about
the first token, which prefill has made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_hetero.client import CONNECT_SECONDS, READ_SECONDS
from tests.serving.fleets import LOGPROB_TOLERANCE

OUTPUT_TOKENS = 24
COUNTERS = ("spec_verify_ct", "spec_correct_drafts_histogram", "spec_num_correct_drafts", "spec_num_proposed_drafts")
PROMPT = "The recipe says to stir until the sauce is thick; the cook says to stir until the recipe is right. "
"""Text: each character is a token."""


@dataclass(frozen=True)
class Ask:
    """One body of /generate. sampling: of its sampling_params, beside temperature 0. fields: others of the body."""

    name: str
    prompt: str | list[str] = PROMPT
    tokens: int = OUTPUT_TOKENS
    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        return {
            "text": self.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": True, **self.sampling},
            "return_logprob": True,
            **self.fields,
        }


LONG = PROMPT * 6
ASKS = (
    Ask("plain"),
    Ask("several chunks", LONG),
    Ask("one token", tokens=1),
    Ask("log-probabilities of the prompt", fields={"logprob_start_len": 0}),
    Ask("log-probabilities of the end of a prompt of several chunks", LONG, fields={"logprob_start_len": 500}),
    Ask("the three best tokens", fields={"top_logprobs_num": 3}),
    Ask("log-probabilities of chosen tokens", fields={"token_ids_logprob": [65, 97, 300]}),
    Ask("tokens that may not come", sampling={"logit_bias": {str(token): -100.0 for token in range(256, 400)}}),
    Ask("several prompts in a request", [PROMPT[:40], PROMPT[:63], PROMPT[:64], PROMPT]),
)
"""Greedy: sampling with a seed needs SGLang's deterministic inference, which has no attention backend for CPUs."""


def stopping_at(token: int) -> Ask:
    """One that ends at a token that the plain answer has."""
    return Ask("a token that ends the answer", sampling={"stop_token_ids": [token], "ignore_eos": False})


def send(url: str, ask: Ask) -> list[dict[str, Any]]:
    """The answers, one for each prompt."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy of the environment must not see loopback
        answer = session.post(f"{url}/generate", json=ask.body(), timeout=(CONNECT_SECONDS, READ_SECONDS))
    assert answer.status_code == requests.codes.ok, f"{ask.name}: HTTP {answer.status_code}: {answer.text[:500]}"
    said = answer.json()
    return said if isinstance(said, list) else [said]


def through_a_hand_over(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is left of an undivided server's answers where prefill and decode are two.

    SGLang's prefill does not hand the log-probabilities of chosen tokens over, so the first place has none
    (disaggregation/decode.py, `Prefill omits these scores`).
    """
    name = "output_token_ids_logprobs"
    found = []
    for answer in answers:
        meta = dict(answer["meta_info"])
        if meta.get(name):
            meta[name] = [None, *meta[name][1:]]
        found.append({**answer, "meta_info": meta})
    return found


def differences(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What of the answers is not the same, a line each; log-probabilities may differ by what fp32 rounds."""
    if len(ours) != len(theirs):
        yield f"{len(ours)} answers, not {len(theirs)}"
        return
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("text", "output_ids"):
            if one[name] != other[name]:
                yield f"{number}: {name} {one[name]!r}, not {other[name]!r}"
        mine, reference = one["meta_info"], other["meta_info"]
        for name in ("prompt_tokens", "completion_tokens", "finish_reason", *COUNTERS):
            if mine.get(name) != reference.get(name):
                yield f"{number}: {name} {mine.get(name)!r}, not {reference.get(name)!r}"
        for name in sorted(name for name in {*mine, *reference} if name.endswith(("_logprobs", "_logprob"))):
            yield from (f"{number}: {name}{text}" for text in _unlike(mine.get(name), reference.get(name)))


def _unlike(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Of two values of JSON: numbers with a fraction may differ a little, all else must be the same."""
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} entries, not {len(other)}"
            return
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _unlike(first, second, f"{where}[{index}]")
    elif isinstance(one, float) and isinstance(other, float):
        if not abs(one - other) <= LOGPROB_TOLERANCE:
            yield f"{where}: {one}, not {other}"
    elif one != other or type(one) is not type(other):
        yield f"{where}: {one!r}, not {other!r}"
