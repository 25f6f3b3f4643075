"""Errors that a person is meant to read: one line that says what is wrong and what to do about it."""


class HeteroError(Exception):
    """Base of every error that ends a command with one clear line instead of a traceback."""
