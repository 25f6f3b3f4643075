"""Prefill/decode pairs made of SGLang's real cache pools, managers, senders and receivers, without a model.

docs/harness.md shows how it works and how to write a case.
"""

from sglang_hetero.layout.window import ConvLayout

from .compare import Difference
from .errors import HarnessError, HarnessTimeout, RankDied
from .expectation import Leftovers
from .flow import Abort, Handoff, On, Outcome
from .geometry import Geometry
from .harness import Harness
from .oracle import Component
from .pair import Pair, Result
from .sides import Forward

__all__ = [
    "Abort",
    "Component",
    "ConvLayout",
    "Difference",
    "Forward",
    "Geometry",
    "Handoff",
    "Harness",
    "HarnessError",
    "HarnessTimeout",
    "Leftovers",
    "On",
    "Outcome",
    "Pair",
    "RankDied",
    "Result",
]
