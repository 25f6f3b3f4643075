"""A rank's figures where SGLang runs: made for its manager, and told of decode's first step of each request.

SGLang has no event for "decode has processed a request's first own step"; its batch result processor does it, once per
step of the whole batch. So that is where we look, and only while a request waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_hetero.perf.records import Perf
from sglang_hetero.perf.spans import trace_in

from .metrics import figures_observer
from .options import Options

logger = logging.getLogger(__name__)

_watched: list[Perf] = []
"""Of the ranks in this process: one, but in tests."""


def perf_of(side: str, rank: str, options: Options) -> Perf:
    """The Perf of this process's rank. Raises OptionError if its trace cannot be written."""
    perf = Perf(side, rank, observe=figures_observer(side), trace=trace_in(options.trace, side, rank))
    _watched.append(perf)
    return perf


def around_decode_result(original: Callable[..., Any], processor: Any, batch: Any, *others: Any, **named: Any) -> Any:
    """SGLang has the tokens of a decode step and streams them."""
    done = original(processor, batch, *others, **named)
    _tell(batch.reqs)
    return done


def around_prebuilt_result(original: Callable[..., Any], processor: Any, batch: Any, *others: Any, **named: Any) -> Any:
    """SGLang streams prefill's first token; a request that needs no more is finished, and has no step of its own."""
    requests = list(batch.reqs)
    done = original(processor, batch, *others, **named)
    if any(perf.awaits_step for perf in _watched):
        _tell([request for request in requests if request.finished()])
    return done


def _tell(requests: list[Any]) -> None:
    for perf in _watched:
        if perf.awaits_step:
            try:
                perf.stepped(request.bootstrap_room for request in requests)
            except Exception:
                logger.exception("%s: the figures of a step", perf.rank)
