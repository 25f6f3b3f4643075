"""What a row's servers have answered, one line of JSON each, kept from run to run."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_hetero.errors import HeteroError


class RecordError(HeteroError):
    """A file of results cannot be read or written."""


@dataclass(frozen=True)
class Answer:
    """Of one question. rounds: of draft and verify; accepted: drafts in all of them; both 0 without speculation."""

    tokens: tuple[int, ...]
    right: bool
    rounds: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class RowRecord:
    """All answers of a row, in the order of the questions.

    key: of all that the answers depend on. depths: of the questions. merged: requests of which the hook told that they
    were merged; hit: those of them in which it changed something. Both are 0 without the hook. seconds: of asking.
    """

    row: str
    key: str
    depths: tuple[float, ...]
    answers: tuple[Answer, ...]
    merged: int = 0
    hit: int = 0
    seconds: float = 0.0


class Records:
    """A file with a line per row; the last of a key counts. A line that was cut off is left out."""

    def __init__(self, path: Path) -> None:
        """Raises RecordError if the file cannot be read."""
        self.path = path
        self._found: dict[str, RowRecord] = {}
        try:
            text = path.read_text() if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{path} cannot be read: {error}; move it away to start anew") from error
        self._cut = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            record = _record(line)
            if record is not None:
                self._found[record.key] = record

    def get(self, key: str) -> RowRecord | None:
        return self._found.get(key)

    def seconds(self) -> list[float]:
        """Of the rows that there are."""
        return [record.seconds for record in self._found.values()]

    def add(self, record: RowRecord) -> None:
        """Append, and return once it is on the disk. Raises RecordError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                # What an interruption has cut off must not take the next line with it.
                file.write(("\n" if self._cut else "") + json.dumps(asdict(record)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self._cut = False
        self._found[record.key] = record


def _record(line: str) -> RowRecord | None:
    """None for a line that is no record, or not a whole one."""
    try:
        said = json.loads(line)
        answers = tuple(_answer(each) for each in said.pop("answers"))
        return RowRecord(**{**said, "depths": tuple(said["depths"]), "answers": answers})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _answer(said: dict[str, Any]) -> Answer:
    tokens: Sequence[int] = said["tokens"]
    return Answer(**{**said, "tokens": tuple(tokens)})
