"""What prefill's client is told when the rank that it hears has no cause of its own."""

from types import SimpleNamespace

import pytest

from sglang_hetero.backend.endpoints import SenderMixin

ROOM = 5
UNKNOWN = "an unknown reason from another rank"


class Upstream:
    """SGLang's sender, as far as it matters here."""

    def failure_exception(self) -> None:
        raise RuntimeError(self.kv_mgr.failure_records.pop(self.bootstrap_room, UNKNOWN))


class Sender(SenderMixin, Upstream):
    def __init__(self, cause: str | None = None) -> None:
        self.bootstrap_room = ROOM
        records = {} if cause is None else {ROOM: cause}
        self.kv_mgr = SimpleNamespace(
            failure_records=records,
            hetero_owns=lambda room: room == ROOM,
            hetero_explain=records.setdefault,
            hetero_prefill=SimpleNamespace(explain=lambda room: f"room {room} waited for decode TP0/1"),
        )


def test_a_rank_without_a_cause_says_what_it_waited_for():
    with pytest.raises(RuntimeError, match="room 5 waited for decode TP0/1"):
        Sender().failure_exception()


def test_a_cause_that_is_known_stays():
    with pytest.raises(RuntimeError, match=r"^a write has failed$"):
        Sender(cause="a write has failed").failure_exception()


def test_requests_on_sglangs_own_path_are_not_explained():
    sender = Sender()
    sender.kv_mgr.hetero_owns = lambda room: False
    with pytest.raises(RuntimeError, match=UNKNOWN):
        sender.failure_exception()
