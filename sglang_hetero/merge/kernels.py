"""Whether this process has kernels. If none can be built, strided copies move the same bytes; the log says so once.

A kernel is built when it is first started. On a host without CANN's compiler, or with one that does not take the
kernel, that fails each time, after seconds: so one failure is enough, and nothing is tried again until the next start.
"""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class NoKernel(Exception):
    """A kernel cannot be built or loaded here; `__cause__` says why."""


class Kernels:
    """Of one process. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = False

    @property
    def usable(self) -> bool:
        """Whether none has failed yet."""
        return not self._gone

    def give_up(self, error: BaseException) -> None:
        """Start none any more, and say why."""
        with self._lock:
            first, self._gone = not self._gone, True
        if first:
            cause = error.__cause__ or error
            logger.warning(
                "the merge's kernels cannot be built here (%s: %s): caches are filled by strided copies from now on, "
                "which is right, and slower; see that Triton for this device and its compiler (CANN's on an NPU) are "
                "installed and start again",
                type(cause).__name__,
                cause,
            )

    def attempt(self, kernels: Callable[[], None], copies: Callable[[], None]) -> None:
        """Do the same by kernels or, where they cannot be had, by copies.

        Copies do all of it again where only some of the kernels could be built: what a merge reads it does not write.
        Raises what else a start raises: the request has failed, and the next one has kernels.
        """
        if self.usable:
            try:
                return kernels()
            except (NoKernel, ImportError) as error:  # ImportError: Triton itself is missing
                self.give_up(error)
        copies()


KERNELS = Kernels()
