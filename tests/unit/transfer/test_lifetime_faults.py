"""The explorer notices faults in the machines: each class below is wrong in one way."""

from dataclasses import replace
from typing import Any

import pytest

from sglang_hetero.transfer.lifetime import Ack, Epochs, Merge, Receiving, ReceivingStatus, ReturnUnits, Sending
from sglang_hetero.transfer.lifetime.sending import SendingStatus
from tests.model_check.explore import explore
from tests.model_check.machines import Violation
from tests.model_check.setup import Budget, Setup

MOST_STATES = 100_000
TWO_PIECES = Setup("two pieces", chunks=(1, 1))
ABORTS = Setup("aborts", chunks=(1, 1), budget=Budget(receiver_aborts=1, source_aborts=1))
QUEUE = Setup(
    "two requests, units for one",
    requests=2,
    joined_totals=True,
    aborts_reach_requests=False,
    budget=Budget(receiver_aborts=1),
)
AGAIN = Setup(
    "same room again", requests=2, same_room=True, joined_totals=True, budget=Budget(receiver_aborts=1, duplicates=1)
)


class AcksBeforeTheMerge(Receiving[Any]):
    def ready(self, *arguments: Any) -> tuple[Any, ...]:
        actions = super().ready(*arguments)
        return (*actions, *(Ack(action.stage, action.seq + 1) for action in actions if isinstance(action, Merge)))


class MergesWithTheFirstAnnouncement(Receiving[Any]):
    def ready(self, source: int, seq: int, piece: Any, sharers: frozenset[int]) -> tuple[Any, ...]:
        return super().ready(source, seq, piece, frozenset({source}))


class ForgetsWhoMayWrite(Receiving[Any]):
    @property
    def may_write(self) -> frozenset[int]:
        return frozenset()


class ReturnsUnitsThatAMergeReads(Receiving[Any]):
    def _return_units(self) -> tuple[Any, ...]:
        running, self._merging = self._merging, set()
        try:
            return super()._return_units()
        finally:
            self._merging = running


class ReturnsUnitsTwice(Receiving[Any]):
    def _return_units(self) -> tuple[Any, ...]:
        self._units_home = False
        return super()._return_units()


class KeepsUnitsAfterAFencedMerge(Receiving[Any]):
    def merged(self, *arguments: Any) -> tuple[Any, ...]:
        return tuple(action for action in super().merged(*arguments) if self.reason is None or action != ReturnUnits())


class KeepsUnitsThatWereNeverBound(Receiving[Any]):
    def _return_units(self) -> tuple[Any, ...]:
        return super()._return_units() if self._bound else ()


class MergesAfterFailing(Receiving[Any]):
    def fail(self, reason: str) -> tuple[Any, ...]:
        progress = list(self._progress)
        actions = super().fail(reason)
        self._progress = progress
        return actions

    def ready(self, *arguments: Any) -> tuple[Any, ...]:
        status = self._status
        if status is ReceivingStatus.FAILED:
            self._status = ReceivingStatus.OPEN
        try:
            return super().ready(*arguments)
        finally:
            self._status = status


class NeedsNoFirstGeneration(Receiving[Any]):
    def _advance(self) -> tuple[Any, ...]:
        self._generated = True
        return super()._advance()


class BelievesTheFirstTotal(Receiving[Any]):
    def total(self, source: int, total: int) -> tuple[Any, ...]:
        if not self._ended:
            index = self._stage_of[source]
            self._progress[index].closed.update(self._stages[index].sources)
        return super().total(source, total)


class AcceptsAnotherIdentity(Receiving[Any]):
    def ready(self, source: int, seq: int, piece: Any, sharers: frozenset[int]) -> tuple[Any, ...]:
        return super().ready(source, seq, "any", sharers)


class IgnoresAFailedPeer(Receiving[Any]):
    def peer_failed(self, source: int, reason: str) -> tuple[Any, ...]:
        return ()


class IgnoresTheWindow(Sending):
    @property
    def _limit(self) -> int:
        return self._produced


class CountsAcksOneByOne(Sending):
    def acked(self, upto: int) -> None:
        super().acked(self.acknowledged + 1)


class DrainsWithAWriteInFlight(Sending):
    @property
    def drained(self) -> bool:
        return self.status is not SendingStatus.SENDING


class TrustsAWriteInDoubt(Sending):
    def write_failed(self, reason: str, in_doubt: bool = False) -> None:
        super().write_failed(reason)


class SendsAfterAbort(Sending):
    def abort(self, reason: str) -> None:
        pass


class OpensAnyBind(Epochs):
    def open(self, incarnation: str, room: int, epoch: int) -> bool:
        super().open(incarnation, room, epoch)
        return True


class ForgetsAnAbortBeforeItsBind(Epochs):
    def end(self, incarnation: str, room: int, epoch: int) -> None:
        if (incarnation, room) in self._newest:
            super().end(incarnation, room, epoch)

    def open(self, incarnation: str, room: int, epoch: int) -> bool:
        opens = epoch > self._newest.get((incarnation, room), -1)
        super().end(incarnation, room, epoch)
        return opens


class RemembersRoomsWithoutEpochs(Epochs):
    def open(self, incarnation: str, room: int, epoch: int) -> bool:
        return super().open(incarnation, room, 0)


ONE_LAGS = Setup("the last piece comes from source 0 alone", chunks=(1, 1), eager=False, sharers=((0, 1), (0,)))
DOUBT = Setup("doubt", chunks=(1, 1), budget=Budget(receiver_aborts=1, write_failures=1, in_doubt=True))
LIES = Setup("lies", chunks=(1, 1), budget=Budget(contradictions=1))

RECEIVING = [
    (AcksBeforeTheMerge, TWO_PIECES, "acknowledged 1 pieces"),
    (MergesWithTheFirstAnnouncement, TWO_PIECES, "source . wrote"),
    (ForgetsWhoMayWrite, ABORTS, "come home while source|units that it does not hold"),
    (ReturnsUnitsThatAMergeReads, ABORTS, "come home while .* are read"),
    (ReturnsUnitsTwice, replace(ABORTS, budget=Budget(receiver_aborts=1, duplicates=1)), "ReturnUnits after"),
    (KeepsUnitsAfterAFencedMerge, ABORTS, "no way out"),
    (KeepsUnitsThatWereNeverBound, QUEUE, "must not be told"),
    (MergesAfterFailing, ABORTS, "after the end"),
    (NeedsNoFirstGeneration, TWO_PIECES, "complete without FirstGeneration"),
    (BelievesTheFirstTotal, ONE_LAGS, "Sending.finished"),
    (AcceptsAnotherIdentity, LIES, "not the same for all"),
    (IgnoresAFailedPeer, ABORTS, "no way out"),
]
SENDING = [
    (IgnoresTheWindow, TWO_PIECES, "being read|wrote|outside|window"),
    (CountsAcksOneByOne, replace(TWO_PIECES, budget=Budget(duplicates=1)), "CountsAcksOneByOne.acked"),
    (DrainsWithAWriteInFlight, ABORTS, "come home while source"),
    (TrustsAWriteInDoubt, DOUBT, "come home while source"),
    (SendsAfterAbort, ABORTS, "no way out"),
]
EPOCHS = [
    (OpensAnyBind, AGAIN, "source . wrote"),
    (ForgetsAnAbortBeforeItsBind, QUEUE, "units that it does not hold|come home while source"),
]


@pytest.mark.parametrize(("wrong", "setup", "message"), RECEIVING, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_receiving_is_found(wrong: type[Receiving[Any]], setup: Setup, message: str) -> None:
    with pytest.raises(Violation, match=message):
        explore(replace(setup, make_receiving=wrong), MOST_STATES)


@pytest.mark.parametrize(("wrong", "setup", "message"), SENDING, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_sending_is_found(wrong: type[Sending], setup: Setup, message: str) -> None:
    with pytest.raises(Violation, match=message):
        explore(replace(setup, make_sending=wrong), MOST_STATES)


@pytest.mark.parametrize(("wrong", "setup", "message"), EPOCHS, ids=lambda value: getattr(value, "__name__", ""))
def test_wrong_epochs_are_found(wrong: type[Epochs], setup: Setup, message: str) -> None:
    with pytest.raises(Violation, match=message):
        explore(replace(setup, make_epochs=wrong), MOST_STATES)


def test_epochs_that_take_a_new_use_for_an_old_one_are_found() -> None:
    """Nothing is wrong then but that no room can be used again: the source says that it is over."""
    calm = replace(AGAIN, budget=Budget())
    right, wrong = (explore(replace(calm, make_epochs=of), MOST_STATES) for of in (Epochs, RemembersRoomsWithoutEpochs))
    assert right.finals == right.succeeded > 0
    assert wrong.finals > wrong.succeeded == 0


@pytest.mark.parametrize(
    "setup",
    # AGAIN is explored in test_lifetime_explorer.py.
    list({setup: None for _, setup, _ in [*RECEIVING, *SENDING, *EPOCHS] if setup is not AGAIN}),
    ids=lambda setup: setup.name,
)
def test_the_right_machines_pass_in_the_same_setups(setup: Setup) -> None:
    assert explore(setup, MOST_STATES).succeeded
