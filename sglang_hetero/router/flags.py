"""What the two commands have in common."""

from __future__ import annotations

import argparse
import logging

KEY = "SGLANG_API_KEY"
LEVELS = ("debug", "info", "warn", "error")


def log_to_stderr(level: str) -> None:
    """What happens, a line each."""
    logging.basicConfig(
        level="WARNING" if level == "warn" else level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def seconds(text: str) -> float:
    """A number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return value


def count(text: str) -> int:
    """0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return value


def positive(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value
