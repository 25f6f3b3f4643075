"""The same questions to one endpoint or two, several times over."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TextIO

from sglang_hetero.errors import AccuracyError

from .compare import Answer, Failure, Pass
from .endpoint import Endpoint, Reply

GIVE_UP = 20
"""Requests of a pass that fail in a row, each of those under way not counted, until the rest is not sent: a server
that is gone would cost a timeout for each question."""
SAY_SECONDS = 10.0
"""Between two lines of progress in a log; a terminal gets them every ON_TERMINAL_SECONDS, one over the other."""
ON_TERMINAL_SECONDS = 0.5
MINUTE = 60.0


@dataclass(frozen=True)
class Case:
    """One question. name: unique in its task; tokens: most that are generated; right: scores a text."""

    name: str
    prompt: str
    tokens: int
    right: Callable[[str], bool]


def order(endpoints: int, repeat: int) -> list[int]:
    """Which endpoint gives the next pass: 0 1 1 0 0 1 ..., so that a machine that gets slower or warmer meets both."""
    return [one for turn in range(repeat) for one in range(endpoints)[:: -1 if turn % 2 else 1]]


def ask(
    endpoints: Sequence[Endpoint],
    cases: Sequence[Case],
    *,
    repeat: int,
    concurrency: int,
    seed: int,
    flush: bool = False,
    say: Callable[[str], None] = lambda _text: None,
) -> list[list[Pass]]:
    """`repeat` passes of every endpoint.

    Each pass has an order of its own, from the seed: who is batched with whom differs as much between two passes of
    one endpoint as between two endpoints. flush: cached prefixes are dropped before each pass; AccuracyError if an
    endpoint does not do so.
    """
    passes: list[list[Pass]] = [[] for _ in endpoints]
    progress = Progress(len(cases) * repeat * len(endpoints), say)
    for turn, which in enumerate(order(len(endpoints), repeat)):
        endpoint = endpoints[which]
        if flush:
            endpoint.flush()
        shuffled = list(cases)
        random.Random(f"{seed}/{turn}").shuffle(shuffled)
        found = _one_pass(endpoint, shuffled, concurrency, progress)
        passes[which].append({case.name: found[case.name] for case in cases})
    return passes


def _one_pass(endpoint: Endpoint, cases: Sequence[Case], concurrency: int, progress: Progress) -> Pass:
    """All answers, by `concurrency` threads. They are daemons: Ctrl-C need not wait for answers that are under way."""
    waiting: SimpleQueue[Case] = SimpleQueue()
    for case in cases:
        waiting.put(case)
    done: SimpleQueue[tuple[Case, Answer | Failure | BaseException]] = SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        with contextlib.suppress(Empty):
            while not stop.is_set():
                case = waiting.get_nowait()
                done.put((case, _answer(endpoint, case)))

    for number in range(min(concurrency, len(cases))):
        threading.Thread(target=work, name=f"accuracy-{number}", daemon=True).start()
    found: dict[str, Answer | Failure] = {}
    row, last = 0, ""
    try:
        while len(found) < len(cases):
            case, answer = done.get()
            if isinstance(answer, BaseException):
                raise answer
            found[case.name] = answer
            failed = isinstance(answer, Failure)
            row, last = (row + 1, answer.reason) if isinstance(answer, Failure) else (0, "")
            progress.step(failed)
            if row >= GIVE_UP + concurrency and len(found) < len(cases):
                break
    finally:
        stop.set()
    for case in cases:
        if case.name not in found:
            found[case.name] = Failure(f"not asked: {row} requests in a row had failed, the last with: {last}")
            progress.step(True)
    return found


def _answer(endpoint: Endpoint, case: Case) -> Answer | Failure | BaseException:
    """Never raises: a thread that ended would leave its question without an answer."""
    try:
        reply: Reply = endpoint.ask(case.prompt, case.tokens)
        return Answer(reply.text, case.right(reply.text), reply.tokens, reply.accept, reply.prompt_tokens)
    except AccuracyError as error:
        return Failure(str(error))
    except BaseException as error:
        return error


class Progress:
    """How many answers there are and how long the rest will take."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self.say = total, say
        self.done = self.failed = 0
        self.began = time.monotonic()

    def step(self, failed: bool) -> None:
        """One more."""
        self.done += 1
        self.failed += failed
        spent = time.monotonic() - self.began
        left = spent / self.done * (self.total - self.done)
        errors = f", {self.failed} failed" if self.failed else ""
        self.say(f"{self.done}/{self.total} answers{errors}, {left / MINUTE:.1f} min left")


class Teller:
    """Lines of progress on a stream, not too many."""

    def __init__(self, name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.stream, self.clock = name, sys.stderr if stream is None else stream, clock
        self.terminal = self.stream.isatty()
        self.last = self.text = ""
        self.told = clock()

    def __call__(self, text: str) -> None:
        """Say it if the last was some time ago."""
        self.text = text
        if self.clock() - self.told >= (ON_TERMINAL_SECONDS if self.terminal else SAY_SECONDS):
            self._tell("\r" if self.terminal else "\n")

    def close(self) -> None:
        """The last one, and a new line."""
        if self.text and (self.terminal or self.text != self.last):
            self._tell("\n")

    def _tell(self, end: str) -> None:
        line = f"{self.name}: {self.text}"
        self.stream.write(line.ljust(len(self.last) + len(self.name) + 2) + end if self.terminal else line + end)
        self.stream.flush()
        self.last, self.told = self.text, self.clock()
