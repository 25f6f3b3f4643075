"""The seed's five topologies answer as the undivided server does: docs/accuracy_topologies.md has the index."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy.asks import ASKS, Ask, differences, send, stopping_at, through_a_hand_over
from tests.serving import fleets
from tests.serving.conftest import server_logs  # noqa: F401 (a fixture)
from tests.serving.fleets import Served, Setup

pytestmark = pytest.mark.full

PAGES = ("--page-size", "64")
UNDIVIDED = Setup("mixed_tp1", options=PAGES)
SEED = [
    Setup(name, options=PAGES, conv_layout=layout)
    for name, layout in (
        ("mixed_tp2", "channels_first"),
        ("mixed_tp4", "channels_first"),
        ("p2_d1", "window_first"),
        ("p2_d2", "channels_first"),
        ("p2x2_d2", "channels_first"),
    )
]
PLACE_OF_THE_END = 5
"""Of the plain answer's tokens, the one that ends an answer."""


def _run(setup: Setup, logs: Path) -> Iterator[Served]:
    fleet = fleets.start(setup, logs / f"accuracy-{setup.id}")
    try:
        yield fleet
        fleets.stop(fleet)
    finally:
        fleet.end()


@pytest.fixture(scope="session")
def asks_and_answers(server_logs: Path) -> list[tuple[Ask, list[dict[str, Any]]]]:  # noqa: F811
    """Of the undivided server, which is stopped again before any other starts."""
    for fleet in _run(UNDIVIDED, server_logs):
        found = [(ask, send(fleet.client.url, ask)) for ask in ASKS]
        end = stopping_at(found[0][1][0]["output_ids"][PLACE_OF_THE_END])
        found.append((end, send(fleet.client.url, end)))
    return found


@pytest.fixture(scope="session")
def fleet(asks_and_answers: Any, request: pytest.FixtureRequest, server_logs: Path) -> Iterator[Served]:  # noqa: F811
    yield from _run(request.param, server_logs)


def test_the_undivided_server_says_what_is_compared(asks_and_answers):
    """An answer without the figures that it was asked for would be equal to another one without them."""
    said = {ask.name: answers for ask, answers in asks_and_answers}
    prompt = said["log-probabilities of the prompt"][0]["meta_info"]
    assert len(prompt["input_token_logprobs"]) == prompt["prompt_tokens"]
    assert len(said["the three best tokens"][0]["meta_info"]["output_top_logprobs"][0]) == 3
    assert len(said["log-probabilities of chosen tokens"][0]["meta_info"]["output_token_ids_logprobs"][0]) == 3
    assert not set(said["tokens that may not come"][0]["output_ids"]) & set(range(256, 400))
    assert set(said["plain"][0]["output_ids"]) & set(range(256, 400))
    assert said["a token that ends the answer"][0]["meta_info"]["finish_reason"]["type"] == "stop"
    assert said["plain"][0]["meta_info"]["spec_num_correct_drafts"] > 0


@pytest.mark.parametrize("fleet", SEED, ids=lambda setup: setup.id, indirect=True)
def test_answers_are_those_of_the_undivided_server(fleet, asks_and_answers):
    prefills = sum(server["role"] == "prefill" for server in fleet.described["servers"])
    wrong = [
        f"{ask.name}: {difference}"
        for _ in range(prefills or 1)  # the router chooses one by chance
        for ask, answers in asks_and_answers
        for difference in differences(
            send(fleet.client.url, ask), through_a_hand_over(answers) if prefills else answers
        )
    ]
    assert not wrong, "\n".join(wrong)
    for server in fleet.described["servers"]:
        assert re.search(r"(Prefill|Decode) batch", Path(server["log"]).read_text()), f"{server['name']} did nothing"
