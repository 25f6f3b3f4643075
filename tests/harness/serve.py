"""The main loop of a rank process."""

import traceback
from multiprocessing.connection import Connection
from typing import Any

from . import scheduler
from .core import CoreHandover
from .sides import Shard, Side
from .timing import TimedDecode, TimedPrefill


def start_bootstrap(shard: Shard, side: Side) -> None:
    """Start the bootstrap server in this process, as SGLang's tokenizer manager does."""
    from sglang.srt.managers.disagg_service import start_disagg_service

    scheduler.publish(shard, side)
    start_disagg_service()


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
