"""What the tests of our transfer have in common."""

from collections.abc import Sequence

from . import Forward, Geometry, Handoff, Leftovers, Pair, Result

OFF = {"SGLANG_HETERO": "off"}
"""Our package, switched off: SGLang's own path, with the conv axis repaired."""
STOCK = {"SGLANG_HETERO_TEST_STOCK": "1"}
"""SGLang without our package, but for what its CPU path needs."""
ALWAYS = {"SGLANG_HETERO": "always"}
PREPUSH = {"SGLANG_HETERO_STATE": "prepush"}
PUSH = {"SGLANG_HETERO_STATE": "push"}
PULL = {"SGLANG_HETERO_STATE": "pull"}
PULL_IN_TURN = {**PULL, "SGLANG_HETERO_PARALLEL_SHARD_PULL": "0"}
AT_THE_END = {"SGLANG_HETERO_LAYERWISE": "0"}
"""On prefill: nothing is sent before a chunk's end."""
VERIFY = {"SGLANG_HETERO_VERIFY": "1"}

SCARCE = {"SGLANG_HETERO_WINDOW": "2", "SGLANG_HETERO_STAGING_MB": "8"}
"""Units for two requests at a time."""

SIXES = {"kv_heads": 6, "linear_key_heads": 6, "linear_value_heads": 12}
"""Heads that 2 and 3 ranks can share out."""


def geometry(page_size: int, **fields: object) -> Geometry:
    """Pools for a few hundred tokens, whatever the page."""
    return Geometry(page_size=page_size, pages=max(16, 900 // page_size), **fields)  # type: ignore[arg-type]


def around_pages(page_size: int, seed: int = 0, decode: int = 0) -> list[Handoff]:
    """Prompts that end around the borders of pages, in one chunk or in several, which end anywhere."""
    lengths = [(1, 1), (page_size, 2), (page_size + 1, 3), (2 * page_size - 1, 1), (3 * page_size + 2, 4)]
    return [
        Handoff(tokens, min(chunks, tokens), seed=seed + number, decode=decode)
        for number, (tokens, chunks) in enumerate(lengths)
    ]


def check(pair: Pair, handoffs: Sequence[Handoff], forward: Forward | Sequence[Forward] = ()) -> Result:
    """Hand over; every request arrives and every byte is right, also those that must not be written."""
    result = pair.handoff_many(handoffs, leftovers=Leftovers.UNTOUCHED, forward=forward)
    assert result.succeeded, [outcome.reasons for outcome in result.outcomes]
    assert not result.differences, [str(difference) for difference in result.differences]
    return result


def check_ours(pair: Pair) -> None:
    """The pair has taken our path: our managers say that they have sent or read bytes."""
    assert sum(counters.get("bytes", 0) for counters in pair.hetero("hetero_counters")) > 0


def check_all_is_back(pair: Pair) -> None:
    """Nothing is held any more, on any rank."""
    pair.quiet()
    assert not pair.leaks()
