"""What can go wrong with the harness itself (a transfer that fails is a result, not an error)."""


class HarnessError(Exception):
    """A process of the harness did not do what it was told; the message ends with the tail of its log."""


class HarnessTimeout(HarnessError):
    """A process of the harness did not answer, or a request did not end, within its time limit."""


class RankDied(HarnessError):
    """A rank process ended while the harness still needed it."""


class CommandFailed(HarnessError):
    """A rank raised an exception while it ran a command; the message holds its traceback."""
