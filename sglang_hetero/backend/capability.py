"""What a prefill server's bootstrap server says about it: its ranks, and whether this package is there.

HTTP with short timeouts, in the scheduler's thread, once per prefill server, as SGLang itself does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import requests

from sglang_hetero.errors import TransferRefused
from sglang_hetero.transfer import messages

from .bootstrap import ROUTE, Capability
from .options import Mode

TIMEOUT_SECONDS = 5.0
"""As SGLang's own requests to the bootstrap server."""
MAX_REPLY = 1 << 20
HTTP_OK, HTTP_NOT_FOUND = 200, 404


@dataclass(frozen=True)
class PrefillServer:
    """info: SGLang's PrefillServerInfo. capability: None for a server without this package.

    problem: why this package over there and here cannot work together, or an empty text.
    """

    address: str
    info: Any
    capability: Capability | None
    problem: str = ""

    @property
    def capable(self) -> bool:
        """Whether it offers our path."""
        return self.capability is not None and self.capability.mode != Mode.OFF


def ask(address: str) -> PrefillServer | None:
    """What is known of the prefill server whose bootstrap server has this address; None if it is not ready yet.

    Raises TransferRefused if it describes its ranks in a way that this SGLang does not know.
    """
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    route = f"http://{address}/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    try:
        reply = requests.get(route, timeout=TIMEOUT_SECONDS)
        offer = requests.get(f"http://{address}{ROUTE}", timeout=TIMEOUT_SECONDS)
    except requests.RequestException:
        return None
    if reply.status_code != HTTP_OK or offer.status_code not in (HTTP_OK, HTTP_NOT_FOUND):
        return None
    try:
        info = PrefillServerInfo(**reply.json())
        if min(info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size) < 1:
            raise ValueError("a parallel size is below 1")
    except (ValueError, TypeError) as error:
        raise TransferRefused(
            f"the bootstrap server at {address} describes its ranks in an unknown way: {error}"
        ) from None
    try:
        return PrefillServer(address, info, _capability(address, offer))
    except TransferRefused as error:
        return PrefillServer(address, info, None, str(error))


def offer(address: str) -> Capability | None:
    """What the bootstrap server says of this package, asked by a rank of the same prefill server; None if not there.

    Raises TransferRefused if it has another release of it.
    """
    try:
        found = requests.get(f"http://{address}{ROUTE}", timeout=TIMEOUT_SECONDS)
    except requests.RequestException:
        return None
    return _capability(address, found) if found.status_code == HTTP_OK else None


def _capability(address: str, offer: requests.Response) -> Capability | None:
    if offer.status_code == HTTP_NOT_FOUND:
        return None
    try:
        found = msgspec.json.decode(offer.content[:MAX_REPLY], type=Capability)
        Mode(found.mode)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TransferRefused(f"the bootstrap server at {address} answers {ROUTE} with {error}") from None
    if found.version != messages.VERSION:
        raise TransferRefused(
            f"prefill at {address} speaks version {found.version} of our messages, this decode rank version "
            f"{messages.VERSION}; install the same release of sglang-hetero on both sides"
        )
    return found


def refuse(address: str, reason: str) -> None:
    """Tell the own bootstrap server why a prefill rank cannot take part; best effort, decode then says so."""
    requests.put(f"http://{address}{ROUTE}", data=msgspec.json.encode(reason), timeout=TIMEOUT_SECONDS)
