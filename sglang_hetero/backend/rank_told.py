"""What a rank is, told once to the HTTP process of its server, which tells routers (backend/instance.py)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hetero.discovery.ranks import Told, encode_told
from sglang_hetero.layout.wire import encode as encode_manifest
from sglang_hetero.state import folder, process
from sglang_hetero.state.report import Report

from .rank import Rank

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""Between two tries of a rank that is not watched; one that is watched tries as often (watch.py)."""
MAX_TRIES = 3600
"""An hour: by then somebody has made room in TMPDIR, or does not look. Each try reads the whole manifest."""


class RankTold:
    """Writes it to the server's folder, again and again until there is room, at most MAX_TRIES times. What would be the
    same at the next try, such as a manifest that is too large, is not tried again."""

    def __init__(self, rank: Rank, where: Path) -> None:
        """Tries it at once. Raises nothing: a server whose ranks cannot be told of serves all the same."""
        self._rank, self._where = rank, where
        self._over, self._tries = False, 0
        # As they are at the start: one that ends is one no more.
        self._parents = tuple(process.parents(os.getpid()))
        self._try()

    def along(self, tell: Callable[[Report], None]) -> Callable[[Report], None]:
        """A function that does what `tell` does, once a second, and tries again where that is still needed."""

        def both(report: Report) -> None:
            self._try()
            tell(report)

        return both

    def insist(self) -> None:
        """Try it again in a thread of its own, where nobody calls what `along` gives, until there was room."""
        if not self._over:
            threading.Thread(target=self._until_written, name="hetero-told", daemon=True).start()

    def _until_written(self) -> None:
        while not self._over:
            time.sleep(AGAIN_SECONDS)
            self._try()

    def _try(self) -> None:
        if self._over:
            return
        self._tries += 1
        try:
            folder.write_rank(self._where, os.getpid(), encode_told(told_of(self._rank, self._parents)))
            self._over = True
        except Exception as error:
            lasting = not isinstance(error, OSError)
            self._over = lasting or self._tries >= MAX_TRIES
            if self._tries == 1:
                logger.error("%s cannot say on /hetero/instance what it is: %s", self._rank.name, error)
            if self._over:
                why = "which will not change" if lasting else f"after {self._tries} tries"
                logger.error(
                    "%s does not try again to say what it is (%s): routers do not know its layout (docs/discovery.md); "
                    "restart the server when that is mended",
                    self._rank.name,
                    why,
                )


def told_of(rank: Rank, parents: tuple[int, ...]) -> Told:
    """What this rank is. Raises ManifestError for a manifest that is too large to be sent."""
    return Told(
        pid=os.getpid(),
        parents=parents,
        place=rank.place,
        manifest=b"" if rank.manifest is None else encode_manifest(rank.manifest),
        unsupported=rank.here.unsupported,
        requests=_count(rank.scheduler, "max_running_requests"),
        tokens=_count(rank.scheduler, "max_total_num_tokens"),
    )


def _count(scheduler: Any, name: str) -> int:
    value = getattr(scheduler, name, 0)
    return value if isinstance(value, int) and value > 0 else 0
