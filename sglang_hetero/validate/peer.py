"""`python -m sglang_hetero.validate.peer KIND DEVICE TRANSPORT STORE BYTES`: the other end of the loop-back.

A process with registered memory full of POISON and unregistered memory behind it. It answers on standard output, a JSON
object a line: first where it is; then to `digest`, `fill` and `end` on standard input.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from sglang_hetero.device import Lane, on_device

from . import engines

POISON = 0xA5
GUARD = 2 << 20
"""Bytes behind the registered ones, which must keep their poison; a unit of MemFabric's registration."""
ALIGN = 2 << 20
SEED = 11


def memory(kind: str, device: int, nbytes: int) -> torch.Tensor:
    """Poisoned bytes on a device, aligned to ALIGN, with GUARD more behind them."""
    place = torch.device("cpu") if kind == "cpu" else torch.device(kind, device)
    on_device(place)
    whole = torch.empty(nbytes + GUARD + ALIGN, dtype=torch.uint8, device=place)
    poison(whole)
    start = -whole.data_ptr() % ALIGN
    return whole[start : start + nbytes + GUARD]


def poison(values: torch.Tensor) -> None:
    """Fill with POISON; done when it returns, because an engine asks no stream of the device."""
    with Lane(values.device).active():
        values.fill_(POISON)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that two processes make alike, on the host."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(values: torch.Tensor) -> str:
    """Of all bytes of a tensor, wherever it is."""
    return hashlib.blake2b(values.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Serve until standard input ends."""
    kind, device, transport, store, size = arguments
    nbytes = int(size)
    whole = memory(kind, int(device), nbytes)
    try:
        upstream = engines.make(transport, role=engines.DECODE, device=int(device), store=store)
        engine = engines.wrap(upstream, transport)
        engine.register([(whole.data_ptr(), nbytes)])
    except Exception as error:
        _answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    _answer({"session": engine.session, "address": whole.data_ptr()})
    for line in sys.stdin:
        word = line.strip()
        if word == "end":
            break
        if word == "fill":
            whole[:nbytes].copy_(pattern(nbytes, SEED))
        _answer({"digest": digest(whole)})
    engine.close()
    return 0


def _answer(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
