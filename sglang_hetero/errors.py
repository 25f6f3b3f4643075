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


class OptionError(HeteroError):
    """An option has a value that cannot work, or is none."""


class UpstreamChanged(HeteroError):
    """The installed SGLang is not the one that this release was made for."""


class MessageError(HeteroError):
    """Bytes are no message of ours, or a message says what cannot be."""


class SealError(MessageError):
    """A message is not sealed with this side's token, or has come before (docs/security.md)."""


class ProtocolError(HeteroError):
    """A peer, or the code around a state machine, broke the order of a transfer; the room it happened in must fail."""


class StagingError(HeteroError):
    """Staging memory cannot hold what is asked of it, or the memory that it needs is not there."""


class TransferRefused(HeteroError):
    """A prefill and a decode rank do not take our path together, or not now."""


class ControlError(HeteroError):
    """The control service cannot be started or reached, or does not know what it is asked for."""


class PeerAway(HeteroError):
    """A server cannot be reached or is not ready; to ask again later may help. refused: its host says that nobody
    listens there, so that its process has ended or not begun to listen. unanswered: nothing came back that is an
    answer."""

    def __init__(self, message: str, *, refused: bool = False, unanswered: bool = False) -> None:
        super().__init__(message)
        self.refused, self.unanswered = refused, unanswered


class TraceError(HeteroError):
    """A trace cannot be read or drawn (docs/perf.md)."""


class StateError(HeteroError):
    """What a server says of itself cannot be kept, read or asked for (docs/state.md)."""


class RecordError(HeteroError):
    """What is said of a server is no sound record of it (docs/discovery.md)."""


class DiscoveryError(HeteroError):
    """etcd cannot be reached or refuses; the text names the endpoint and the remedy."""


class RouterError(HeteroError):
    """A router cannot be started, or cannot be told which servers there are (docs/router.md)."""


class AccuracyError(HeteroError):
    """An endpoint cannot be asked what it knows, or did not answer a question (docs/accuracy.md)."""
