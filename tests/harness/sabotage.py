"""Faults inside a rank process: messages that are lost, changed or late, an engine that fails, a merge that hangs.

A `Rule` says what is met (a message of some kind, a write, a read, a merge; of one request), how many of those pass
before, and what is done with it. The `Saboteur` sits between our side and what it calls; it knows those names of ours
(`_post`, `_control`, `Writer.write`, `Puller._read`, `reception.merge`, the engine's `write` and `read`) and nothing
else of it.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

logger = logging.getLogger(__name__)

HOLD_SECONDS = 30.0
"""So long at most is anything held back."""
HEADER_BYTES = 5
"""Of a message: magic word and version."""


class At(StrEnum):
    """What a rule is about."""

    POST = "post"
    """A message to a rank of the other side."""
    CONTROL = "control"
    """A message through the control service: FirstGeneration."""
    WRITE = "write"
    READ = "read"
    MERGE = "merge"


class Do(StrEnum):
    """What is done with it."""

    COUNT = "count"
    """Nothing."""
    HOLD = "hold"
    """Whoever writes, reads or merges waits until `let_go`; a message waits for it, and the sender goes on."""
    # Messages.
    LOSE = "lose"
    DOUBLE = "double"
    LATE = "late"
    """`seconds` later, so that others overtake it."""
    CUT = "cut"
    """Its first half."""
    GARBLE = "garble"
    """Random bytes behind the header."""
    VERSION = "version"
    """Of another version."""
    EPOCH = "epoch"
    """Of another use of the room."""
    INCARNATION = "incarnation"
    """From another process."""
    # Engine calls.
    REFUSE = "refuse"
    """It fails, and nothing has been moved nor will be."""
    DOUBT = "doubt"
    """It fails now, and moves its bytes at `let_go`."""
    RAISE = "raise"
    """Something that is no error of an engine."""
    SLOW = "slow"
    """`seconds` later."""


@dataclass(frozen=True)
class Rule:
    """kind: name of the message's class. room: of the request, 0 for any. skip: as many pass before; count: then so
    many are met. total: only a Ready that tells the number of pieces. also: the message goes out as well, unchanged.
    """

    at: At
    do: Do
    kind: str = ""
    room: int = 0
    skip: int = 0
    count: int = 1
    seconds: float = HOLD_SECONDS
    total: bool = False
    also: bool = False


class Saboteur:
    """All rules of one rank. Thread-safe."""

    def __init__(self, manager: Any) -> None:
        """Get in between; rules come later. manager: of this package."""
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._seen: list[int] = []
        self._met: list[int] = []
        self._released = threading.Event()
        self._later: list[Callable[[], object]] = []
        self._room = threading.local()
        self._random = random.Random(0)
        side = manager.hetero_prefill or manager.hetero_decode
        side._post = self._posting(side._post)
        engine = manager._hetero_engine
        for name, at in (("write", At.WRITE), ("read", At.READ)):
            setattr(engine, name, self._moving(at, getattr(engine, name)))
        if manager.hetero_prefill is not None:
            side._control = self._controlling(side._control)
            side._writer.write = self._of_request(side._writer.write)
        else:
            from sglang_hetero.transfer import reception

            side._puller._read = self._of_request(side._puller._read)
            reception.merge = self._merging(reception.merge)

    def take(self, rules: Sequence[Rule]) -> None:
        """These rules hold from now on."""
        with self._lock:
            self._rules, self._seen, self._met = list(rules), [0] * len(rules), [0] * len(rules)
            self._released = threading.Event()

    def met(self) -> list[int]:
        """How often each rule has met something."""
        with self._lock:
            return list(self._met)

    def let_go(self) -> None:
        """No rule holds any more; what was held back goes on."""
        with self._lock:
            self._rules = []
            later, self._later = self._later, []
            self._released.set()
        for each in later:
            try:
                each()
            except Exception:
                # The peer may be dead by now, or have refused us; whoever sent it had been told that all is well.
                logger.exception("what was held back could not go on")

    def _meets(self, at: At, room: int, kind: str = "", total: bool = False) -> Rule | None:
        """The first rule that is about this; all that are count it."""
        found = None
        with self._lock:
            for index, rule in enumerate(self._rules):
                if rule.at is not at or (rule.room and rule.room != room) or (rule.kind and rule.kind != kind):
                    continue
                if rule.total and not total:
                    continue
                self._seen[index] += 1
                if not 0 < self._seen[index] - rule.skip <= rule.count:
                    continue
                if found is None:
                    self._met[index] += 1
                    found = rule if rule.do is not Do.COUNT else None
        return found

    # Messages.

    def _posting(self, post: Callable[[Any, bytes], None]) -> Callable[[Any, bytes], None]:
        from sglang_hetero.transfer import messages

        def posted(endpoint: Any, payload: bytes) -> None:
            message = messages.decode(payload)
            total = getattr(message, "total", -1) >= 0
            rule = self._meets(At.POST, message.room, type(message).__name__, total)
            if rule is None:
                post(endpoint, payload)
                return
            self._mistreat(rule, lambda: post(endpoint, payload), lambda: post(endpoint, self._changed(rule, payload)))

        return posted

    def _controlling(self, control: Callable[[Any], None]) -> Callable[[Any], None]:
        from msgspec.structs import replace

        def controlled(message: Any) -> None:
            rule = self._meets(At.CONTROL, message.room, type(message).__name__)
            if rule is None:
                control(message)
                return

            def changed() -> None:
                if rule.do is Do.EPOCH:
                    targets = tuple(target._replace(epoch=_other(target.epoch)) for target in message.targets)
                    control(replace(message, targets=targets))
                elif rule.do is Do.INCARNATION:
                    control(replace(message, incarnation=_somebody()))
                else:
                    raise ValueError(f"{rule.do} is nothing that is done with a message to the control service")

            self._mistreat(rule, lambda: control(message), changed)

        return controlled

    def _mistreat(self, rule: Rule, send: Callable[[], None], send_changed: Callable[[], None]) -> None:
        match rule.do:
            case Do.LOSE:
                pass
            case Do.DOUBLE:
                send()
                send()
            case Do.HOLD:
                with self._lock:
                    self._later.append(send)
            case Do.LATE:
                timer = threading.Timer(rule.seconds, send)
                timer.daemon = True
                timer.start()
            case _:
                send_changed()
        if rule.also:
            send()

    def _changed(self, rule: Rule, payload: bytes) -> bytes:
        from msgspec.structs import replace

        from sglang_hetero.transfer import messages

        match rule.do:
            case Do.CUT:
                return payload[: len(payload) // 2]
            case Do.GARBLE:
                return payload[:HEADER_BYTES] + self._random.randbytes(len(payload) - HEADER_BYTES)
            case Do.VERSION:
                at = HEADER_BYTES - 1
                return payload[:at] + bytes([payload[at] ^ 0xFF]) + payload[HEADER_BYTES:]
            case Do.EPOCH:
                message = messages.decode(payload)
                return messages.encode(replace(message, epoch=_other(message.epoch)))
            case Do.INCARNATION:
                return messages.encode(replace(messages.decode(payload), incarnation=_somebody()))
        raise ValueError(f"{rule.do} is nothing that is done with a message")

    # Engine and merge.

    def _of_request(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Remember whose request the engine's calls of this thread are. Its first argument knows the room."""

        def called(request: Any, *arguments: Any) -> Any:
            self._room.number = request.room
            return call(request, *arguments)

        return called

    def _moving(self, at: At, move: Callable[..., None]) -> Callable[..., None]:
        from sglang_hetero.transfer.engine.base import EngineError

        def moved(session: str, *columns: Any) -> None:
            rule = self._meets(at, getattr(self._room, "number", 0))
            if rule is None:
                move(session, *columns)
                return
            copied = [list(column) for column in columns]
            match rule.do:
                case Do.REFUSE:
                    raise EngineError(f"the test lets this {at} fail", settled=True)
                case Do.RAISE:
                    raise RuntimeError(f"the test lets this {at} raise")
                case Do.DOUBT:
                    with self._lock:
                        self._later.append(lambda: move(session, *(_words(column) for column in copied)))
                    raise EngineError(f"the test lets this {at} fail, and land later")
                case Do.SLOW:
                    time.sleep(rule.seconds)
                case Do.HOLD:
                    self._wait(rule)
                case _:
                    raise ValueError(f"{rule.do} is nothing that is done with a {at}")
            move(session, *columns)

        return moved

    def _merging(self, merge: Callable[..., None]) -> Callable[..., None]:
        def merged(arena: Any, assembler: Any, inbox: Any, batch: Any) -> None:
            rule = self._meets(At.MERGE, inbox.room)
            if rule is not None and rule.do is Do.RAISE:
                raise RuntimeError("the test lets this merge raise")
            if rule is not None:
                self._wait(rule)
            merge(arena, assembler, inbox, batch)

        return merged

    def _wait(self, rule: Rule) -> None:
        with self._lock:
            released = self._released
        released.wait(rule.seconds)


def _words(values: Sequence[int]) -> Any:
    import numpy as np

    return np.array(values, dtype=np.uint64)


def _other(epoch: int) -> int:
    """Of a use of the room that has not been."""
    return epoch + 1000


def _somebody() -> str:
    """A process that nobody knows."""
    return "an incarnation of nobody"
