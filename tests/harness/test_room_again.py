"""A room number that comes again, through SGLang's real senders and receivers.

So does decode when it has retracted requests for new weights (`pause_generation(mode="retract")`): it makes a new
receiver for the room, sends its metadata, and asks prefill for the prompt with what has been generated: a longer one.
"""

import pytest

from . import Handoff, Harness
from .product import PULL, check, check_all_is_back, geometry


@pytest.mark.full
@pytest.mark.parametrize("mode", [{}, PULL], ids=["prepush", "pull"])
def test_a_room_is_bound_again_with_more_tokens(harness: Harness, mode: dict[str, str]) -> None:
    with harness.pair(geometry(64), prefill_tp=2, decode_tp=1, decode_env=mode) as pair:
        room = pair.next_room
        for use, tokens in enumerate((100, 100, 165, 300)):
            pair.next_room = room
            check(pair, [Handoff(tokens, chunks=1 + use % 2, seed=use), Handoff(70, seed=50 + use)])
        check_all_is_back(pair)
