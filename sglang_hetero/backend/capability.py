"""What a prefill server's bootstrap server says about it: its ranks, and whether this package is there.

HTTP with short timeouts, for threads of ours: an answer may take seconds, so SGLang's scheduler must not wait for it.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_hetero.errors import PeerAway, SealError, TransferRefused
from sglang_hetero.layout import limits
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.fields import MAX_REASON
from sglang_hetero.transfer.link import Addressee, Endpoint
from sglang_hetero.transfer.seal import Purpose, Seal

from .bootstrap import MAX_BODY, NONCE_BYTES, NONCE_HEADER, ROUTE, SEAL_HEADER, Capability
from .options import Mode
from .posts import numeric

TIMEOUT_SECONDS = 5.0
"""Of one request, as SGLang's own to the bootstrap server."""
ENDPOINTS_SECONDS = 10.0
"""For the addresses of all ranks of a server that is refused, so that they can be told."""
MAX_REPLY = 1 << 20
"""Bytes of an answer; a longer one is none."""
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

    @property
    def listens(self) -> bool:
        """Whether its ranks take our messages: one that our path cannot serve knows SGLang's only."""
        return self.capable and not (self.capability and self.capability.unsupported)


@dataclass(frozen=True)
class _Reply:
    status: int
    body: bytes
    seal: str


def _request(address: str, path: str, headers: Mapping[str, str], *, put: bytes | None = None) -> _Reply:
    """An answer of bounded size within bounded time. Nobody is sent on to another address. Raises PeerAway."""
    connection = None
    try:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
        # The time-out is that of a single read; who sends a byte now and then would hold the thread for ever.
        watchdog = threading.Timer(TIMEOUT_SECONDS, _shut, (connection,))
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.request("GET" if put is None else "PUT", path, body=put, headers=dict(headers))
            with connection.getresponse() as reply:  # it has the socket, too
                body = reply.read(MAX_REPLY + 1)
        finally:
            watchdog.cancel()
        if len(body) > MAX_REPLY:
            raise PeerAway(f"the bootstrap server at {address} answers with more than {MAX_REPLY} bytes")
        return _Reply(reply.status, body, reply.headers.get(SEAL_HEADER, ""))
    except ConnectionRefusedError:
        raise PeerAway(f"nobody listens at the bootstrap server's address {address}", refused=True) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerAway(
            f"the bootstrap server at {address} does not answer: {messages.printable(str(error) or repr(error))}",
            unanswered=True,
        ) from None
    finally:
        if connection is not None:
            connection.close()


def _shut(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class _Question:
    """What a bootstrap server is asked, and how its answer is known to be of now and of who has the token."""

    nonce: bytes
    headers: Mapping[str, str]


def _question(seal: Seal) -> _Question:
    nonce = os.urandom(NONCE_BYTES).hex()
    signature = seal.sign(nonce.encode(), Purpose.QUESTION)
    return _Question(nonce.encode(), {NONCE_HEADER: nonce, SEAL_HEADER: signature})


def ask(address: str, seal: Seal) -> PrefillServer:
    """What is known of the prefill server whose bootstrap server has this address.

    seal: of this process. Raises PeerAway if it is not there or not ready yet.
    """
    from sglang.srt.disaggregation.common.conn import PrefillServerInfo

    question = _question(seal)
    reply, offer = _request(address, _route(-1, -1, -1, -1), {}), _request(address, ROUTE, question.headers)
    for found, wanted in ((reply, (HTTP_OK,)), (offer, (HTTP_OK, HTTP_NOT_FOUND))):
        if found.status not in wanted:
            text = messages.printable(found.body[:MAX_REASON].decode("utf-8", "replace"))
            raise PeerAway(f"the prefill server at {address} is not ready: {found.status} {text}")
    try:
        info = PrefillServerInfo(**msgspec.json.decode(reply.body))
        sizes = info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size
        if min(sizes) < 1 or math.prod(sizes) > limits.MAX_RANKS:
            raise ValueError(f"parallel sizes {sizes}")
    except (ValueError, TypeError) as error:
        # SGLang wants sizes also of a server that is refused.
        stub = PrefillServerInfo(1, 1, 1, 1, None, None, follow_bootstrap_room=True)
        text = messages.printable(str(error))
        return PrefillServer(
            address, stub, None, f"the bootstrap server at {address} describes its ranks in an unknown way: {text}"
        )
    try:
        return PrefillServer(address, info, _capability(address, offer, seal, question))
    except TransferRefused as error:
        return PrefillServer(address, info, None, str(error))


def _route(dp_rank: int, cp_rank: int, tp_rank: int, pp_rank: int) -> str:
    return (
        f"/route?prefill_dp_rank={dp_rank}&prefill_cp_rank={cp_rank}&target_tp_rank={tp_rank}&target_pp_rank={pp_rank}"
    )


def ranks(address: str, info: Any) -> dict[int, tuple[Addressee, ...]]:
    """Where the ranks of each attention-DP replica take messages, as far as the bootstrap server says it in time; not
    which processes they are.

    Raises PeerAway, also for a name that cannot be looked up, or msgspec's error for what is no address.
    """
    found: dict[int, tuple[Addressee, ...]] = {}
    until = time.monotonic() + ENDPOINTS_SECONDS
    places = list(itertools.product(range(info.attn_tp_size), range(info.pp_size)))
    for dp_rank in range(info.dp_size):
        replies = []
        for tp_rank, pp_rank in places:
            if time.monotonic() > until:
                return found
            reply = _request(address, _route(dp_rank, 0, tp_rank, pp_rank), {})
            if reply.status == HTTP_OK:
                replies.append(msgspec.json.decode(reply.body, type=_RankInfo))
        found[dp_rank] = tuple(Addressee(Endpoint(numeric(each.rank_ip), each.rank_port)) for each in replies)
    return found


class _RankInfo(msgspec.Struct):
    """SGLang's PrefillRankInfo."""

    rank_ip: str
    rank_port: int


def offer(address: str, seal: Seal) -> Capability:
    """What the bootstrap server says of this package, asked by a rank of the same prefill server.

    Raises PeerAway if it is not there, TransferRefused if it has not this package, another release or another token.
    """
    question = _question(seal)
    found = _request(address, ROUTE, question.headers)
    capability = _capability(address, found, seal, question)
    if capability is None:
        raise TransferRefused(f"the bootstrap server at {address} has no {ROUTE}: install sglang-hetero there, too")
    return capability


class _Version(msgspec.Struct):
    """What every release says first, whatever else it says."""

    version: int = 0


def _capability(address: str, offer: _Reply, seal: Seal, question: _Question) -> Capability | None:
    if offer.status == HTTP_NOT_FOUND:
        return None
    if offer.status != HTTP_OK:
        raise PeerAway(f"the bootstrap server at {address} answers {ROUTE} with {offer.status}")
    try:
        version = msgspec.json.decode(offer.body, type=_Version).version
        if version != messages.VERSION:
            raise TransferRefused(
                f"prefill at {address} speaks version {version} of our messages, this rank version "
                f"{messages.VERSION}; install the same release of sglang-hetero on both sides"
            )
        found = msgspec.json.decode(offer.body, type=Capability)
        Mode(found.mode)
    except (msgspec.MsgspecError, ValueError) as error:
        text = messages.printable(str(error))
        raise TransferRefused(f"the bootstrap server at {address} answers {ROUTE} with {text}") from None
    try:
        seal.verify(offer.seal, offer.body, Purpose.OFFER, question.nonce)
    except SealError as error:
        raise TransferRefused(f"the answer of the bootstrap server at {address} is not taken: {error}") from None
    return found


def refuse(address: str, reason: str, seal: Seal) -> None:
    """Tell the own bootstrap server why a prefill rank cannot take part; decode then says so. To be repeated, every
    bootstrap.REFUSAL_SECONDS.

    Raises TransferRefused if it does not take that, PeerAway if it cannot be reached.
    """
    # First who it is: what is sealed for one start of one server counts at no other.
    audience = offer(address, seal).instance.encode()
    body = msgspec.json.encode(messages.printable(reason, MAX_BODY // 2))
    found = _request(address, ROUTE, {SEAL_HEADER: seal.sign(body, Purpose.REFUSAL, audience)}, put=body)
    if found.status != HTTP_OK:
        text = messages.printable(found.body[:MAX_REASON].decode("utf-8", "replace"))
        raise TransferRefused(f"the bootstrap server at {address} does not take a refusal: {found.status} {text}")
