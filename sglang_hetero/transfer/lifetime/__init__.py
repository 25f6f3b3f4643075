"""The life of one request's transfer, as state machines. Pure: no torch, no SGLang, no socket, no thread, no clock.

`Sending` is one request on its way from one source rank to one decode rank, `Receiving` is one request at one decode
rank, `Epochs` keeps what belongs to an earlier use of a room number out of both, `Repetition` says when to say again
what may have been lost, `Stillness` when nothing has happened for too long. Every event has an answer in every state:
it does something, it is late and does nothing, or it can only come from a broken peer and is a ProtocolError.
tests/model_check drives these classes through every interleaving.

The machines are not thread-safe. Their caller serialises the events of a room, carries out the actions in the order in
which it gets them, and fails a room whose machine raised ProtocolError.
"""

from .epochs import Epochs
from .receiving import Ack, Action, Merge, Pull, Receiving, ReceivingStatus, ReturnUnits, Settle, Stage
from .repetition import Repetition
from .sending import Sending, SendingStatus
from .stillness import Stillness

__all__ = [
    "Ack",
    "Action",
    "Epochs",
    "Merge",
    "Pull",
    "Receiving",
    "ReceivingStatus",
    "Repetition",
    "ReturnUnits",
    "Sending",
    "SendingStatus",
    "Settle",
    "Stage",
    "Stillness",
]
