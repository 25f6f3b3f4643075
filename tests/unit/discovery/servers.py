"""Servers that do not exist: their records, and the manifests of their ranks."""

from msgspec.structs import replace

from sglang_hetero.discovery.record import Instance
from sglang_hetero.layout.manifest import Manifest, Side
from tests.reshard_oracle.pair import manifest

_COMMON = {
    "model": "Qwen3.5",
    "tp_size": 2,
    "dp_size": 1,
    "pp_size": 1,
    "fingerprint": "f" * 32,
    "requests": 16,
    "tokens": 4096,
    "incarnation": "first",
    "release": "0.1.0",
    "messages": 2,
    "lease": 3,
}


def prefill_server(**fields) -> Instance:
    given = {"role": Side.PREFILL, "url": "http://10.0.0.7:30000", "bootstrap_port": 8998, **_COMMON, **fields}
    return Instance(**given)


def decode_server(**fields) -> Instance:
    return Instance(**{"role": Side.DECODE, "url": "http://10.0.0.8:30000", **_COMMON, **fields})


def manifests(
    side, tp, *, host="10.0.0.8:30000", incarnation="first", model="m", shift=0, pages=None
) -> tuple[Manifest, ...]:
    """Of all ranks of a server. shift: bytes by which its caches lie elsewhere. pages: items of its pools."""
    found = []
    for rank in range(tp):
        one = manifest(side, rank, tp)
        parts = tuple(
            replace(
                part,
                addresses=tuple(
                    at + shift + (place * (1 << 32) if pages else 0) for place, at in enumerate(part.addresses)
                ),
                items=pages or part.items,
            )
            for part in one.components
        )
        if pages:  # pools of another size lie apart from each other, too
            parts = tuple(
                replace(part, addresses=tuple(at + (1 << 40) * (number + 1) for at in part.addresses))
                for number, part in enumerate(parts)
            )
        found.append(replace(one, host=host, incarnation=incarnation, model=model, components=parts))
    return tuple(found)
