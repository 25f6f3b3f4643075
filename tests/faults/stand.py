"""Runs cases one after the other, on one pair as long as it is left as it was."""

from types import TracebackType

from tests.harness import Handoff, Harness, HarnessError, Leftovers, Pair

from .cases import Case
from .result import FaultResult, Kind, Verdict
from .topologies import Topology
from .trial import Baseline, Trial, brief

WARM = 3
"""Rounds of requests before the start values are taken: threads and connections are made when they are first needed."""


class Stand:
    """Use as a context manager. harness: that pairs are made from; it stays the caller's."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._topology: Topology | None = None
        self._pair: Pair | None = None
        self._baseline: Baseline | None = None

    def run(self, case: Case) -> FaultResult:
        """Try one case. What it has damaged is not used for the next one."""
        try:
            pair, baseline = self._ready(case.topology)
        except HarnessError as error:
            self.clear()
            problem = f"no pair could be started: {brief(error)}"
            return FaultResult(
                case.fault, case.step, case.topology.name, Kind.HARNESS, case.expectation, wrong=(problem,)
            )
        result = Trial(case, pair, baseline).run()
        if result.verdict is not Verdict.RIGHT:
            self.clear()
        return result

    def clear(self) -> None:
        """End the pair."""
        if self._pair is not None:
            self._pair.close()
        self._topology = self._pair = self._baseline = None

    def _ready(self, topology: Topology) -> tuple[Pair, Baseline]:
        if self._pair is None or self._baseline is None or self._topology != topology:
            self.clear()
            self._pair, self._topology = topology.pair(self._harness), topology
            for number in range(WARM):
                _warm_up(self._pair, topology, number)
            self._baseline = Baseline(self._pair)
        return self._pair, self._baseline

    def __enter__(self) -> "Stand":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()


def _warm_up(pair: Pair, topology: Topology, seed: int) -> None:
    """Every server has to do with every other one."""
    servers = range(topology.servers)
    prompts = [Handoff(250, 4, seed, prefill=prefill, decode=decode) for prefill in servers for decode in servers]
    result = pair.handoff_many(prompts, Leftovers.UNTOUCHED)
    if not result.succeeded or result.differences:
        problems = [*(each.reasons for each in result.outcomes), *map(str, result.differences)]
        raise HarnessError(f"a pair does not work although nothing was done to it: {problems}")
