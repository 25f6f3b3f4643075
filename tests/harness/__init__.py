"""Prefill/decode pairs made of SGLang's real cache pools, managers, senders and receivers, without a model.

docs/harness.md shows how it works and how to write a case.
"""

from sglang_hetero.layout.window import ConvLayout

from .compare import Difference
from .errors import HarnessError, HarnessTimeout, RankDied
from .expectation import Leftovers
from .geometry import Geometry
from .oracle import Component
from .pair import Handoff, Harness, Outcome, Pair, Result

__all__ = [
    "Component",
    "ConvLayout",
    "Difference",
    "Geometry",
    "Handoff",
    "Harness",
    "HarnessError",
    "HarnessTimeout",
    "Leftovers",
    "Outcome",
    "Pair",
    "RankDied",
    "Result",
]
