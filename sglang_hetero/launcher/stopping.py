"""SIGINT and SIGTERM as one exception, so that `with Fleet(...)` stops its processes on the way out."""

import signal
from types import FrameType


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived. Like KeyboardInterrupt no Exception, which any library below might swallow."""


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: a second signal must not interrupt the stopping.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Stopped


def raise_on_signals() -> None:
    """From now on the first SIGINT or SIGTERM raises `Stopped` in the main thread."""
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
