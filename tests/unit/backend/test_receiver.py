"""Decode's receiver of one request: however it ends without success, prefill is told, once."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sglang_hetero.backend.endpoints import ReceiverMixin
from sglang_hetero.errors import TransferRefused
from sglang_hetero.transfer.link import Addressee, Endpoint
from sglang_hetero.transfer.reception import Progress

ADDRESS, ROOM = "10.0.0.1:8998", 7
FIRST, SECOND, AGAIN, THIRD, FOURTH = (
    Addressee(Endpoint("10.0.0.1", port), incarnation)
    for port, incarnation in [(1, "a"), (2, "b"), (2, "b again"), (3, "c"), (4, "d")]
)
OLD, NEW = (FIRST, SECOND), (THIRD, FOURTH)
POLL = SimpleNamespace(Failed=0, Bootstrapping=1, WaitingForInput=2, Transferring=3, Success=4)


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("conn")
    module.KVPoll = POLL
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.base.conn", module)


class Upstream:
    """What of SGLang's receiver matters here: how it fails, and that clear() comes with a failure's exception."""

    def __init__(self, manager):
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = manager, ADDRESS, ROOM
        self.conclude_state = None

    def init(self, prefill_dp_rank):
        if not self.kv_mgr.in_table:
            self._fail("it is down now")
            return
        self._setup_bootstrap_infos()

    def poll(self):
        if self.kv_mgr.status == POLL.Failed:
            self.conclude_state = POLL.Failed
        return POLL.WaitingForInput if self.conclude_state is None else self.conclude_state

    def clear(self):
        pass

    def abort(self):
        if self.conclude_state is None:
            self.kv_mgr.record_failure(ROOM, "Aborted by AbortReq.")
            self.conclude_state = POLL.Failed

    def failure_exception(self):
        self.conclude_state = POLL.Failed
        self.clear()
        raise RuntimeError(self.kv_mgr.failure_records.pop(ROOM, "an unknown reason from another rank"))


class Receiver(ReceiverMixin, Upstream):
    pass


class Decode:
    """Decode's side, which tells its sources itself of what it has opened."""

    def __init__(self):
        self.open_rooms, self.failed, self.cause, self.lacks = [], [], "", "the first token from prefill TP0/2"

    def open(self, room, *_):
        self.open_rooms.append(room)

    def poll(self, room):
        return Progress.FAILED if self.cause else Progress.ARRIVING

    def reason(self, room):
        return self.cause

    def waits_for(self, room):
        assert room in self.open_rooms
        return self.lacks

    def fail(self, room, reason):
        self.failed.append(reason)

    def settle(self, room):
        self.open_rooms.remove(room)


class Manager:
    def __init__(self):
        self.hetero_decode, self.hetero_rank = Decode(), SimpleNamespace(name="decode TP0/2")
        self.hetero_perf = SimpleNamespace(created=lambda room: True, received_end=lambda room, reason: None)
        self.in_table, self.status, self.ranks, self.refused = True, POLL.WaitingForInput, OLD, None
        self.takes = True
        self.failure_records, self.told, self.owed = {}, [], []

    def hetero_refusal(self, address):
        return self.refused

    def hetero_takes(self, address, room):
        self.owed = [each for each in self.owed if each[:2] != (address, room)]
        if self.takes is None:
            raise TransferRefused("it has to be asked first")
        return self.takes

    def hetero_sources(self, address, dp_rank):
        return SimpleNamespace(ranks=OLD)

    def hetero_problem(self, address):
        return f"prefill at {address} does not answer"

    def hetero_ranks(self, address, dp_rank):
        assert dp_rank == 0
        return self.ranks

    def hetero_listens(self, address):
        return bool(self.ranks)

    def hetero_slot(self, state_indices):
        return -1

    def hetero_give_up(self, room, ranks, reason, *, ours):
        self.told.append((ranks, reason, ours))

    def hetero_owe(self, address, room, reason):
        self.owed.append((address, room, reason))

    def hetero_reason(self, room):
        return self.failure_records.get(room) or "SGLang has failed the request"

    def hetero_explain(self, room, reason):
        self.failure_records.setdefault(room, reason)

    def record_failure(self, room, reason):
        self.failure_records[room] = reason

    def update_status(self, room, status):
        self.status = status


@pytest.fixture
def manager():
    return Manager()


def ends(receiver, match):
    """SGLang lets go of a request that has failed; it clears a receiver twice."""
    with pytest.raises(RuntimeError, match=match):
        receiver.failure_exception()
    receiver.clear()


def test_one_that_is_given_up_before_its_server_is_known(manager):
    receiver = Receiver(manager)
    receiver.abort()
    assert receiver.poll() == POLL.Failed
    receiver.init(0)  # SGLang may, since it waits in two queues
    ends(receiver, "given up before it began: prefill at .* does not answer")
    assert [(address, room) for address, room, _ in manager.owed] == [(ADDRESS, ROOM)]
    assert manager.told == []


def test_one_that_sglang_fails_by_itself_when_it_begins(manager):
    """Its table was cleared between two lines."""
    manager.in_table = False
    receiver = Receiver(manager)
    receiver.init(0)
    receiver.abort()
    ends(receiver, "it is down now")
    assert manager.told == [(OLD, "it is down now", True)]
    assert manager.owed == []


def test_one_whose_server_has_to_be_asked_anew(manager):
    """It was started again, say: nobody is at the former addresses."""
    manager.takes, manager.ranks = None, ()
    receiver = Receiver(manager)
    receiver.init(0)
    ends(receiver, "has to be asked first")
    assert manager.owed == [(ADDRESS, ROOM, "it has to be asked first")]
    assert manager.told == []


def test_one_that_is_refused(manager):
    manager.refused = "other page sizes"
    receiver = Receiver(manager)
    receiver.init(0)
    ends(receiver, "other page sizes")
    assert manager.told == [(OLD, "other page sizes", True)]


def test_one_that_waits_for_its_pages_when_its_server_is_given_up(manager):
    """SGLang's heartbeat was too slow for it; it lives, and waits."""
    receiver = Receiver(manager)
    receiver.init(0)
    manager.ranks = ()  # forgotten
    manager.record_failure(ROOM, "no heartbeat")
    manager.update_status(ROOM, POLL.Failed)
    assert receiver.poll() == POLL.Failed
    ends(receiver, "no heartbeat")
    assert manager.told == [(OLD, "no heartbeat", True)]
    assert manager.owed == []


def test_one_that_the_client_gives_up_while_it_waits(manager):
    receiver = Receiver(manager)
    receiver.init(0)
    receiver.abort()
    ends(receiver, "Aborted")
    assert manager.told == [(OLD, "the client gave the request up (decode)", True)]


def test_one_that_is_cleared_without_a_failure(manager):
    receiver = Receiver(manager)
    receiver.init(0)
    manager.ranks = NEW
    receiver.clear()
    assert [ranks for ranks, _, _ in manager.told] == [(*OLD, *NEW)], "both may wait"


def test_one_that_takes_sglangs_path_is_sglangs(manager):
    manager.takes = False
    receiver = Receiver(manager)
    receiver._setup_bootstrap_infos = lambda: None
    receiver.init(0)
    receiver.abort()
    ends(receiver, "Aborted")
    assert manager.told == manager.owed == []


@pytest.mark.parametrize(
    ("now", "told"),
    [(OLD, ()), (NEW, NEW), ((FIRST, AGAIN), (AGAIN,)), ((), ())],
    ids=["the same", "a successor", "one at a former one's address", "not known"],
)
def test_of_one_that_was_bound_its_sources_are_told_by_decodes_side(manager, now, told):
    receiver = Receiver(manager)
    receiver.init(0)
    receiver.send_metadata([1, 2], 0)
    manager.hetero_decode.cause = "it stands still"
    assert receiver.poll() == POLL.Failed
    manager.ranks = now
    ends(receiver, "it stands still")
    assert manager.told == ([(told, "it stands still", True)] if told else [])
    assert manager.owed == []


@pytest.mark.parametrize("bound", [False, True])
def test_what_another_rank_has_failed_has_a_reason_here_too(manager, bound):
    receiver = Receiver(manager)
    receiver.init(0)
    if bound:
        receiver.send_metadata([1, 2], 0)
    assert receiver.poll() == POLL.WaitingForInput
    waits = "the first token from prefill TP0/2" if bound else f"its turn to ask prefill at {ADDRESS}"
    why = f"another rank of this decode server has failed it, whose log says why; decode TP0/2 waited for {waits}"
    ends(receiver, why)
    assert manager.hetero_decode.failed == ([why] if bound else []), "and prefill hears it"
    assert manager.told == ([] if bound else [(OLD, why, True)])


def test_a_cause_that_this_rank_knows_is_told(manager):
    receiver = Receiver(manager)
    receiver.init(0)
    receiver.send_metadata([1, 2], 0)
    manager.hetero_decode.cause = "prefill TP0/2 has stopped"  # since it was polled
    ends(receiver, "^prefill TP0/2 has stopped$")
    other = Receiver(manager)
    other.init(0)
    other.send_metadata([1, 2], 0)
    manager.hetero_decode.cause, manager.hetero_decode.lacks = "", ""
    ends(other, "decode TP0/2 has all of it$")


@pytest.mark.parametrize(
    ("now", "fails"),
    [(OLD, False), ((), False), (NEW, True), ((FIRST, AGAIN), True)],
    ids=["the same", "not known", "a successor", "one at a former one's address"],
)
def test_what_has_waited_for_memory_is_not_bound_to_a_server_that_is_no_more(manager, now, fails):
    receiver = Receiver(manager)
    receiver.init(0)
    manager.ranks = now
    receiver.send_metadata([1, 2], 0)
    assert manager.hetero_decode.open_rooms == ([] if fails else [ROOM])
    assert receiver.poll() == (POLL.Failed if fails else POLL.WaitingForInput)
    if fails:
        ends(receiver, f"prefill at {ADDRESS} was started again")
        ((told, _, _),) = manager.told
        assert set(told) == {*OLD, *now}
