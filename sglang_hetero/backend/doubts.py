"""Peers that requests wait for: has the process ended? Asked on threads of ours until it is known, or nobody waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Protocol

from sglang_hetero.transfer.engine.base import Engine
from sglang_hetero.transfer.engine.mooncake import refuses_connections
from sglang_hetero.transfer.link import Awaited, Endpoint
from sglang_hetero.transfer.worker import Worker

from .background import Background

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at whom requests wait for, on prefill."""
DOUBT_SECONDS, MAX_DOUBT_SECONDS = 2.0, 30.0
"""From when a process is waited for until it is first asked about; the pause doubles each time, up to the second. The
question is `has_let_go`. Mooncake writes two lines into its log for a connection that says nothing."""
WARNING_SECONDS = 60.0
"""Units of staging that are kept for a rank for so long are told of in the log, and again after ten times as long each
time."""
APART_SECONDS = 5.0
"""A process is taken for dead when it refuses connections twice, so far apart, and nothing is heard of it meanwhile.
One refusal proves less: a rule of a firewall looks the same. Between the two what waits for the process is said to it
again (transfer/lifetime/repetition.py: 2 and 6 s after the last news), and one that lives can answer."""


def has_let_go(
    engine: Engine, process: Awaited, *, sessions: Container[str] = (), endpoints: Container[Endpoint] = ()
) -> bool:
    """Whether nobody listens any more where a process does as long as it lives, running or stopped: where it takes
    messages, and at its transfer engine if that is known to listen (MemFabric's is not). Takes seconds.

    sessions, endpoints: of other processes that have been seen alive; an address has one owner at a time. A rule of a
    firewall that refuses, or one port that is closed too early, looks the same as an end, the less likely the more
    ports are asked. A host that says nothing has let go of nothing.
    """
    if engine.sees_ends and process.session not in sessions and not engine.peer_gone(process.session):
        return False
    return process.endpoint in endpoints or refuses_connections(str(process.endpoint))


class Side(Protocol):
    """One rank's side of the transfer."""

    def awaited(self) -> dict[str, Awaited]:
        """The processes of peers that requests wait for, by incarnation."""

    def gone(self, incarnations: frozenset[str], why: str) -> None:
        """These processes are no more; `why` continues the name of one."""


class Doubts:
    """Asks whether processes have ended, each again and again, and tells the side of those that have."""

    def __init__(self, label: str, side: Side, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        """label: of this rank, for the log."""
        self._label, self._side, self._engine, self._clock = label, side, engine, clock
        self._jobs = Background("hetero-gone")
        self._doubts: dict[str, _Doubt] = {}  # by incarnation

    def resolve(self, awaited: Mapping[str, Awaited]) -> None:
        """Ask about these, as far as it is time to; of no others any more. Does not wait for the answers."""
        now = self._clock()
        self._doubts = {key: self._doubts.get(key) or _Doubt(now) for key in awaited}
        for incarnation, each in awaited.items():
            doubt = self._doubts[incarnation]
            if now >= doubt.due and self._jobs.submit(incarnation, partial(self._ask, incarnation, doubt)):
                doubt.pause = min(2 * doubt.pause, MAX_DOUBT_SECONDS)
                doubt.ask = now + doubt.pause
            if each.units and now >= doubt.warn:
                doubt.warn = now + 10 * (now - doubt.since)
                logger.warning(
                    "%s: %d units of staging are kept for %.0f s now, because %s of server %s may still write to them "
                    "and has not said that it does not; they are free when it answers, when its process has ended, or "
                    "when another one has taken its place at that address. If its host is lost for good, start this "
                    "decode server again",
                    self._label,
                    each.units,
                    now - doubt.since,
                    each.label,
                    each.address,
                )

    def close(self) -> None:
        """Ask nobody any more."""
        self._jobs.close()

    def _ask(self, incarnation: str, doubt: _Doubt) -> None:
        """One question, on a thread of ours; there is one at a time about a process."""
        awaited = self._side.awaited().get(incarnation)
        if awaited is None:
            return
        asked = self._clock()
        if not has_let_go(self._engine, awaited):
            doubt.refused = None
            return
        awaited = self._side.awaited().get(incarnation)  # what has been heard until now
        if awaited is None:
            return
        if doubt.refused is None or awaited.heard >= doubt.refused:
            doubt.refused = asked
            return
        doubt.refused = None
        logger.warning("%s: %s of server %s has ended", self._label, awaited.label, awaited.address)
        self._side.gone(frozenset((incarnation,)), f"has ended (server {awaited.address})")


class _Doubt:
    """Since when a process is waited for, when it is asked about next, and when the log is to say so."""

    def __init__(self, now: float) -> None:
        self.since, self.pause = now, DOUBT_SECONDS
        self.ask, self.warn = now + DOUBT_SECONDS, now + WARNING_SECONDS
        self.refused: float | None = None
        """When it was asked the last time, if it refused the connection then and was not taken for dead."""

    @property
    def due(self) -> float:
        """When it is asked about."""
        refused = self.refused
        return self.ask if refused is None else refused + APART_SECONDS


class DecodeRanks:
    """On prefill: looks after the decode ranks that requests stand still for, from construction to `close`."""

    def __init__(self, label: str, side: Side, engine: Engine) -> None:
        self._side, self._doubts = side, Doubts(label, side, engine)
        self._closing = threading.Event()
        self.worker = Worker("hetero-liveness", self._run)

    def close(self) -> None:
        """Stop looking; questions that are being asked end by themselves."""
        self.worker.stop()
        self._doubts.close()
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            try:
                self._doubts.resolve(self._side.awaited())
            except Exception:
                logger.exception("a look at the decode ranks that requests wait for")
