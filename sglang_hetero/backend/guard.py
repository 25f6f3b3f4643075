"""SGLang's threads that receive, kept alive whatever a frame does to them.

SGLang reads the frames of its own messages by position in a loop without a net: one that is damaged, from whoever can
reach the port, ends the thread, while the server looks alive. What such a loop accepts is its own matter; so the frame
is not judged here, but the loop is run again after the exception.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zmq

Receive = Callable[[], Any]


class _SocketEnded(Exception):
    """The socket has been closed: the loop has to end."""


def survives(receive: Receive, *, stopped: Callable[[], bool], dropped: Callable[[Exception], None]) -> Receive:
    """`receive` for a thread whose target is a loop that calls it, in which an exception costs one message.

    When the loop calls it for the first time, the loop is run again from there, with a net, until it is stopped; so the
    loop must have no state of its own between two calls. stopped: whether the loop returns by itself. dropped: told of
    each exception that handling a message has raised.
    """
    owner: list[threading.Thread] = []

    def guarded() -> Any:
        if owner:
            try:
                return receive()
            except zmq.ZMQError as error:
                raise _SocketEnded from error
        thread = threading.current_thread()
        loop = getattr(thread, "_target", None)
        if loop is None:  # no thread with a target: nothing that could be run again
            return receive()
        owner.append(thread)
        while not stopped():
            try:
                loop()
            except _SocketEnded as ended:
                assert ended.__cause__ is not None
                raise ended.__cause__ from None
            except Exception as error:
                dropped(error)
        return None

    return guarded
