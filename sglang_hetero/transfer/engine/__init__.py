"""Engines move bytes between processes and know nothing of models: one small protocol, three engines."""

from .base import Engine, EngineError

__all__ = ["Engine", "EngineError"]
