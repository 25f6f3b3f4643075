"""Errors that a person is meant to read: one line that says what is wrong and what to do about it."""


class HeteroError(Exception):
    """Base of every error that ends a command with one clear line instead of a traceback."""


class ManifestError(HeteroError):
    """A description of a rank's caches contradicts itself, or bytes are no such description."""


class TopologyError(HeteroError):
    """These ranks, or this number of them, cannot hand over a request to that rank."""


class LayoutMismatch(HeteroError):
    """Prefill and decode do not mean the same by a cache component."""


class CoverageError(HeteroError):
    """A destination element would be written by nobody, or by more than one source."""


class MergeError(HeteroError):
    """The arguments of a merge contradict each other, or what it needs has not arrived; nothing was written."""


class BindError(HeteroError):
    """Pages, slots or tokens of a request do not fit the plan."""
