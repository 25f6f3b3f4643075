"""Messages sealed with a token that both sides have: who lacks it can neither make nor change one, nor send it again.

A seal is a message authentication code (keyed BLAKE2b) in front of the message, behind its magic word; the message
itself stays readable. It says for which way the message is (`Purpose`) and for whom (`audience`), so that it cannot be
turned round or given to somebody else, and which one of its sender's messages it is, so that it is taken once.
"""

import hashlib
import hmac
import itertools
import os
import threading
from collections import OrderedDict
from enum import Enum

from sglang_hetero.errors import SealError

from .messages import MAGIC

TOKEN_OPTION = "SGLANG_HETERO_TOKEN_FILE"
"""Names the file with the token; read by backend/secret.py."""
MARK = MAGIC + b"\xff"
"""What a sealed message begins with; no version of the messages will have this number."""
_SENDER_BYTES = _COUNT_BYTES = 8
_CODE_BYTES = 16
"""128 bits: nobody finds a code by trying."""
OVERHEAD = len(MARK) + _SENDER_BYTES + _COUNT_BYTES + _CODE_BYTES
"""Bytes that a seal adds to a message."""
REORDER = 1 << 14
"""How many messages of its sender a message may be late, because threads overtake each other. One that is later is
dropped; a thread of ours does not wait while the others send that many."""
MAX_SENDERS = 4096
"""Senders whose messages are remembered, 2 KiB each. Only who has the token gets among them."""
_REMEDY = f"set {TOKEN_OPTION} to a file with the same token on both sides, or on neither, and start them again"


class Purpose(Enum):
    """Which way a message goes; a seal for one is none for another. At most 16 bytes, BLAKE2b's bound."""

    TO_PREFILL = b"to prefill"
    TO_DECODE = b"to decode"
    TO_SERVICE = b"to service"
    FROM_SERVICE = b"from service"
    QUESTION = b"question"
    """A rank's to a bootstrap server, what that says of this package."""
    OFFER = b"offer"
    """The answer."""
    REFUSAL = b"refusal"
    """Why a prefill rank cannot take part."""


class _Heard:
    """Which messages of one sender have come, of the newest REORDER ones."""

    def __init__(self) -> None:
        self._newest = -1
        self._bits = 0  # bit n: the message n before the newest one has come

    def first_time(self, number: int) -> bool:
        """Enter a message; False if it has come before, or is too late to know."""
        ahead = number - self._newest
        if ahead > 0:
            self._bits = ((self._bits << ahead) & ((1 << REORDER) - 1) if ahead < REORDER else 0) | 1
            self._newest = number
            return True
        bit = 1 << -ahead if -ahead < REORDER else 0
        if not bit or self._bits & bit:
            return False
        self._bits |= bit
        return True


class Seal:
    """Seals what this process sends and opens what it receives; without a token both leave a message as it is.

    Thread-safe. One for a process and not to be shared over a fork: each is a sender of its own.
    """

    def __init__(self, token: bytes | None = None) -> None:
        """token: any secret bytes; what is short or a word can be guessed from one sealed message."""
        # A digest, because BLAKE2b takes no key of more than 64 bytes.
        self._key = None if token is None else hashlib.blake2b(token, digest_size=64, person=b"hetero token").digest()
        self._sender = os.urandom(_SENDER_BYTES)
        self._counter = itertools.count()
        self._heard: OrderedDict[bytes, _Heard] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keyed(self) -> bool:
        """Whether there is a token."""
        return self._key is not None

    def seal(self, payload: bytes, purpose: Purpose, audience: bytes = b"") -> bytes:
        """The message with its seal, to be sent once, now: what waits must be sealed when it goes.

        audience: whom it is for; who opens it has to say the same.
        """
        if self._key is None:
            return payload
        return self._stamp(payload, purpose, audience) + payload

    def open(self, data: bytes, purpose: Purpose, audience: bytes = b"") -> bytes:
        """The message without its seal. Raises SealError for what a peer with the same token has not sealed for this
        purpose and audience, and for a message that has come before."""
        sealed = data.startswith(MARK)
        if self._key is None:
            if sealed:
                raise SealError(f"the peer seals its messages with a token, and this side has none; {_REMEDY}")
            return data
        if not sealed:
            raise SealError(f"it has no seal, and this side has a token; {_REMEDY}")
        sender, number, code, payload = _parts(data)
        if not hmac.compare_digest(code, self._code(sender, number, payload, purpose, audience)):
            raise SealError(f"its seal is not of this side's token, or it was made for something else; {_REMEDY}")
        # Only now, so that who has no token cannot fill the books.
        with self._lock:
            heard = self._heard.setdefault(sender, _Heard())
            self._heard.move_to_end(sender)
            while len(self._heard) > MAX_SENDERS:
                self._heard.popitem(last=False)
            first = heard.first_time(int.from_bytes(number))
        if not first:
            raise SealError("it has come before")
        return payload

    def sign(self, payload: bytes, purpose: Purpose, audience: bytes = b"") -> str:
        """The seal alone, as text, to go beside the message (a header of HTTP); empty without a token."""
        return "" if self._key is None else self._stamp(payload, purpose, audience).hex()

    def verify(self, signature: str, payload: bytes, purpose: Purpose, audience: bytes = b"") -> None:
        """Raise SealError unless `open` would take the message with this seal."""
        try:
            stamp = bytes.fromhex(signature)
        except ValueError:
            raise SealError("its seal is no row of hexadecimal digits") from None
        if stamp and len(stamp) != OVERHEAD:
            raise SealError(f"its seal has {len(stamp)} bytes, must be {OVERHEAD}")
        self.open(stamp + payload, purpose, audience)

    def _stamp(self, payload: bytes, purpose: Purpose, audience: bytes) -> bytes:
        number = next(self._counter).to_bytes(_COUNT_BYTES)
        return MARK + self._sender + number + self._code(self._sender, number, payload, purpose, audience)

    def _code(self, sender: bytes, number: bytes, payload: bytes, purpose: Purpose, audience: bytes) -> bytes:
        assert self._key is not None
        made = hashlib.blake2b(key=self._key, digest_size=_CODE_BYTES, person=purpose.value)
        # The length says where the audience ends and the message begins.
        for part in (sender, number, len(audience).to_bytes(_COUNT_BYTES), audience, payload):
            made.update(part)
        return made.digest()


def _parts(data: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Sender, number, code and message of sealed bytes."""
    if len(data) < OVERHEAD:
        raise SealError(f"a sealed message of {len(data)} bytes is cut off")
    found, at = [], len(MARK)
    for size in (_SENDER_BYTES, _COUNT_BYTES, _CODE_BYTES):
        found.append(data[at : at + size])
        at += size
    sender, number, code = found
    return sender, number, code, data[at:]
