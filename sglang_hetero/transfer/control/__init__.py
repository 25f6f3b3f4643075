"""The control service: prefill's ranks report to it, decode's ranks ask it, and it relays the first token.

It runs once per prefill server, beside the tokenizer manager. Every rank of both sides has one client.

    prefill rank  --- Hello, FirstGeneration, Ping --->  service  --- Topology, FirstGeneration, Pong --->  decode rank
                  <------- Topology, Pong ------------            <----- TopologyRequest, Ping ----------

The service is a ROUTER and a client a DEALER with an identity of its own. Messages are lost where a connection breaks
with messages in flight; who waits for one has a deadline.
"""

from .client import ControlClient
from .service import ControlService

__all__ = ["ControlClient", "ControlService"]
