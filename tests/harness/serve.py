"""The main loop of a rank process."""

import socket
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from . import scheduler
from .core import CoreHandover
from .sides import Shard, Side
from .timing import TimedDecode, TimedPrefill

LISTEN_SECONDS = 30.0
POLL_SECONDS = 0.01


def start_bootstrap(shard: Shard, side: Side) -> None:
    """Start the bootstrap server in this process, as SGLang's tokenizer manager does; returns when it listens."""
    from sglang.srt.managers.disagg_service import start_disagg_service

    scheduler.publish(shard, side)
    start_disagg_service()
    deadline = time.monotonic() + LISTEN_SECONDS
    while not _listens(side):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the bootstrap server does not listen on {side.host}:{side.bootstrap_port}")
        time.sleep(POLL_SECONDS)


def _listens(side: Side) -> bool:
    try:
        socket.create_connection((side.host, side.bootstrap_port), timeout=1).close()
    except OSError:
        return False
    return True


def serve(connection: Connection) -> None:
    """Run commands `(number, name, arguments)` until the other end closes.

    Replies are `(number, value, traceback of an error or "")`.
    """
    rank: Any = None
    roles = {"prefill": TimedPrefill, "decode": TimedDecode, "core": CoreHandover}
    while True:
        try:
            number, name, arguments = connection.recv()
        except EOFError:
            return
        try:
            if name == "build":
                rank = roles[arguments[1].mode](*arguments)
                value = None
            elif name == "start_bootstrap":
                start_bootstrap(*arguments)
                value = None
            else:
                value = getattr(rank, name)(*arguments)
            reply = (number, value, "")
        except Exception:
            reply = (number, None, traceback.format_exc())
        connection.send(reply)
