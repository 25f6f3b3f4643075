"""What a greedy request must return, computed with transformers alone (docs/models.md).

`greedy` gives tokens and log-probabilities; `greedy_with_mtp` adds the speculation counters that SGLang reports
per request. Nothing here imports SGLang.
"""

from tests.reference.speculation import Speculation, greedy_with_mtp
from tests.reference.target import Continuation, greedy

__all__ = ["Continuation", "Speculation", "greedy", "greedy_with_mtp"]
