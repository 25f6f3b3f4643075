"""Keeps one server's record in etcd: writes it when the server serves, renews its lease, and writes it again whenever
it is gone. A thread of its own, which nothing that etcd does ends."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from sglang_hetero.errors import DiscoveryError, RecordError
from sglang_hetero.state.report import Discovery
from sglang_hetero.transfer.worker import Worker

from .etcd import Etcd, Held, LeaseGone
from .members import entered, key_of
from .record import Instance, encode
from .settings import EtcdOptions

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 1.0
"""Between two looks whether the server serves."""
RENEWALS = 3
"""Per lease: two may fail."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 5.0
"""Between two attempts while etcd is away; doubled each time."""
MAX_CAUSES = 16
"""Why the server does not serve yet, or cannot tell what it is, of which it is remembered that the log has them."""
LEAVE_SECONDS = 4.0
"""How long the end of a process waits for its record to be taken away. If it is not, it goes with its lease."""


class Standing(StrEnum):
    """What the registrar is about."""

    WAITING = "waiting"
    """The server does not serve yet."""
    REGISTERED = "registered"
    AWAY = "away"
    """etcd cannot be reached or refuses; it is tried again."""
    DISPLACED = "displaced"
    """Another server has registered under this one's URL since."""
    LEFT = "left"
    """The server is being stopped."""


@dataclass(frozen=True)
class Server:
    """What is registered. serves: whether the server answers, asked until it does; a DiscoveryError says why not.
    describe: its record, asked for from then on before each renewal, since its ranks may tell late what they are; a
    DiscoveryError has it asked again. Both are called from the registrar's thread."""

    serves: Callable[[], bool]
    describe: Callable[[], Instance]


class Registrar:
    """The thread. Everything may be called from any thread."""

    def __init__(
        self,
        options: EtcdOptions,
        server: Server,
        *,
        connect: Callable[[EtcdOptions], Etcd] = Etcd,
        health: float = HEALTH_SECONDS,
        retry: float = RETRY_SECONDS,
    ) -> None:
        """Starts it and waits for nothing. connect, health, retry: for tests."""
        self._options, self._server, self._health, self._retry = options, server, health, retry
        self._etcd = connect(options)
        self._lock = threading.Lock()
        self._instance: Instance | None = None
        self._lease: int | None = None
        self._written = False
        """Whether the record has been written since this process started."""
        self._causes: set[str] = set()
        self._leaving = threading.Event()
        self._now = Discovery(standing=Standing.WAITING, etcd=self._etcd.endpoint, since=time.time())
        self.worker = Worker("hetero-registrar", self._run)

    @property
    def registration(self) -> Discovery:
        """How it stands."""
        with self._lock:
            found = msgspec.structs.replace(self._now)
        found.trouble = found.trouble or self.worker.fault
        return found

    def leave(self) -> None:
        """Take the record away, now: the server takes no new requests any more. Does not wait."""
        self.worker.stop()
        self._leaving.set()

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """The same, and wait until it is done, so long at most."""
        self.leave()
        if threading.current_thread() is not self.worker.thread:
            self.worker.thread.join(seconds)

    # The thread.

    def _run(self) -> None:
        wait = self._retry
        while not self._leaving.is_set():
            try:
                pause = self._step()
                wait = self._retry
            except DiscoveryError as error:
                self._stand(Standing.AWAY if self._instance else Standing.WAITING, str(error))
                pause, wait = wait * random.uniform(0.5, 1.0), min(2 * wait, MAX_RETRY_SECONDS)
            except Exception as error:
                # An error of ours must not take the server out of the fleet for good.
                self._stand(Standing.AWAY, f"{type(error).__name__}: {error}", traceback=True)
                pause, wait = wait, min(2 * wait, MAX_RETRY_SECONDS)
            self._leaving.wait(pause)
        self._leave()

    def _step(self) -> float:
        """One thing to be done. Returns seconds until the next one."""
        if self._instance is None and not self._serves():
            return self._health
        self._instance = self._describe()
        key = key_of(self._options.prefix, self._instance)
        if self._lease is None:
            self._lease = self._etcd.grant(self._options.lease)
        try:
            self._etcd.keep_alive(self._lease)
            found = self._etcd.get(key)
            if self._written and self._another(key, found, self._instance):
                return self._options.lease / RENEWALS
            record = encode(self._instance)
            if found != Held(record, self._lease) and not self._etcd.replace(key, record, self._lease, found):
                return self._retry  # somebody has written there at this moment: look again
            self._written = True
        except LeaseGone:
            self._lease = None
            logger.warning("etcd has ended the lease of %s; it registers anew", self._instance.label)
            return 0.0
        self._stand(Standing.REGISTERED)
        return self._options.lease / RENEWALS

    def _serves(self) -> bool:
        """Whether the server answers. Why not is part of how it stands, and in the log once for each cause."""
        try:
            if self._server.serves():
                return True
            why = "the server does not answer yet"
        except DiscoveryError as error:
            why = str(error)
        self._log_once(logging.INFO, f"discovery: not registered yet: {why}")
        self._stand(Standing.WAITING, why, log=False)
        return False

    def _log_once(self, level: int, text: str) -> None:
        if text not in self._causes and len(self._causes) < MAX_CAUSES:
            self._causes.add(text)
            logger.log(level, "%s", text)

    def _describe(self) -> Instance:
        """The record as it is now; as it was, where that cannot be told."""
        try:
            return msgspec.structs.replace(self._server.describe(), lease=self._options.lease)
        except Exception as error:
            if self._instance is None:
                raise
            why = f"{type(error).__name__}: {error}"
            self._log_once(logging.WARNING, f"discovery: the record of {self._instance.label} stays as it was: {why}")
            return self._instance

    def _another(self, key: str, found: Held | None, here: Instance) -> bool:
        """Whether the record there is that of another server, which is then left alone: whoever came last is right."""
        if found is None:
            return False
        try:
            other = entered(self._options.prefix, key, found)
        except RecordError as error:  # whoever wrote that, it serves nobody
            logger.warning("discovery: the record %s is replaced: %s", key, error)
            return False
        if other.incarnation == here.incarnation:
            return False
        self._stand(
            Standing.DISPLACED,
            f"another server has registered as {here.label} since ({other.incarnation}): give each one a URL of its "
            "own with SGLANG_HETERO_ADVERTISE_URL; this one registers again when that record is gone",
        )
        return True

    def _leave(self) -> None:
        """With its lease goes the record, if it is still this server's."""
        try:
            if self._lease is not None:
                self._etcd.revoke(self._lease)
            self._stand(Standing.LEFT)
        except LeaseGone:
            self._stand(Standing.LEFT)  # the record went with it
        except Exception as error:  # whatever it is, this is the end
            self._stand(Standing.LEFT, f"the record stays until its lease ends: {error}")
        finally:
            self._etcd.close()

    def _stand(self, standing: Standing, trouble: str = "", *, traceback: bool = False, log: bool = True) -> None:
        """Note it, and log what is new."""
        with self._lock:
            before = self._now
            key = "" if self._instance is None else key_of(self._options.prefix, self._instance)
            same = before.standing == standing
            self._now = Discovery(
                standing=standing,
                key=key,
                etcd=self._etcd.endpoint,
                since=before.since if same else time.time(),
                trouble=trouble,
            )
        if not log:
            return
        if not same and not trouble:
            logger.info("discovery: %s, %s in etcd at %s", standing, key or "no record", self._etcd.endpoint)
        elif trouble and trouble != before.trouble:
            logger.warning("discovery: %s: %s", standing, trouble, exc_info=traceback)
