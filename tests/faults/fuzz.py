"""Damaged, cut, shuffled, mixed and made-up bytes through everything that reads what a peer sends.

Nothing may come of them but our own error; what is taken keeps its ranges.
`python -m tests.faults.fuzz` sends a million.
"""

import argparse
import copy
import functools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_hetero.backend import capability
from sglang_hetero.errors import HeteroError, MessageError
from sglang_hetero.layout import wire
from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.seal import Purpose, Seal
from tests.reshard_oracle import mutate
from tests.reshard_oracle.pair import manifest
from tests.unit.transfer.test_messages import ALL, body, framed

SLOWEST = 2.0
"""Seconds of a core that one message may take."""
MAX_ERROR = 1000
"""Characters of an error: what a peer sends must not fill a log."""
MAX_WRONG = 20
"""After so many it is known that something is wrong."""
STEP = 1000
"""Messages between two reports of progress."""
MILLION = 1_000_000

Random = random.Random
_MSGPACK_INTS = range(-(1 << 63), 1 << 64)
_TOKEN = b"t" * 32
_WAY = (Purpose.TO_DECODE, b"10.0.0.1:4000")


@dataclass
class Summary:
    """What became of the messages."""

    count: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind of damage, and `refused` or `accepted`."""
    kinds: set[type] = field(default_factory=set)
    """Of the messages that were accepted."""
    wrong: list[str] = field(default_factory=list)
    """What was no error of ours, took too long, or was accepted with a field out of its range; with the bytes."""
    slowest: tuple[float, str] = (0.0, "")
    """Seconds of the process, and the kind of damage."""

    @property
    def refused(self) -> int:
        return sum(number for (_, what), number in self.outcomes.items() if what == "refused")

    def __str__(self) -> str:
        return (
            f"{self.count:,} messages through the parsers: {self.refused:,} refused, "
            f"{self.count - self.refused - len(self.wrong):,} taken, {len(self.wrong)} wrong; "
            f"the slowest ({self.slowest[1]}) took {self.slowest[0] * 1000:.1f} ms"
        )


def run(count: int, seed: int, progress: Callable[[int, int], None] = lambda done, of: None) -> Summary:
    """Send `count` messages, the same ones for the same seed, each kind of damage in its turn.

    progress: told now and then how many of how many are done. Ends early if much is wrong.
    """
    rng, summary = Random(seed), Summary()
    names = [name for name, (weight, _) in DAMAGES.items() for _ in range(weight)]
    for number in range(count):
        name = names[number % len(names)]
        _try(name, DAMAGES[name][1], rng, summary)
        if len(summary.wrong) >= MAX_WRONG:
            break
        if summary.count % STEP == 0:
            progress(summary.count, count)
    progress(summary.count, count)
    return summary


def _try(name: str, damage: "Damage", rng: Random, summary: Summary) -> None:
    data, parse = damage(rng)
    summary.count += 1
    began = time.thread_time()  # what others take of a busy machine does not count
    try:
        found = parse()
    except HeteroError as error:
        summary.outcomes[name, "refused"] += 1
        problem = "" if 0 < len(str(error)) <= MAX_ERROR else f"an error of {len(str(error))} characters"
    except BaseException as error:  # whatever it is, it is what is looked for
        problem = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            raise
    else:
        summary.outcomes[name, "accepted"] += 1
        problem = _ranges(found) if isinstance(found, m.Message) else ""
        summary.kinds.add(type(found))
    seconds = time.thread_time() - began
    summary.slowest = max(summary.slowest, (seconds, name))
    if seconds > SLOWEST:
        problem = problem or f"it took {seconds:.1f} s"
    if problem:
        summary.wrong.append(f"{name}: {problem}; {data[:500].hex()}")


# What a reader relies on, written apart from the types.


def _ranges(message: Any) -> str:
    """Which range a message that was accepted does not keep, or an empty text."""
    try:
        _check_ranges(message)
        again = m.decode(m.encode(message))
        assert again == message, "another message when it is sent on"
    except AssertionError as error:
        return f"{type(message).__name__} out of range: {error}"
    return ""


def _check_ranges(message: Any) -> None:
    assert 0 <= message.room < 2**63
    assert 0 <= message.epoch < 2**63
    assert message.incarnation.isprintable()
    assert message.incarnation
    match message:
        case m.Bind():
            assert message.rank < message.ranks
            assert all(unit >= 0 for unit in message.units)
            assert min([message.pages, message.area_offset, message.area_bytes, *message.pages_per_piece.values()]) >= 0
        case m.Ready():
            for piece in message.pieces:
                assert 0 <= piece.seq < (2**63 if message.total < 0 else message.total)
                assert min(piece.layer, piece.first_page, piece.pages) >= 0
                assert piece.tokens >= piece.pages
        case m.Ack():
            assert min(message.stage, message.upto) >= 0
        case m.FirstGeneration():
            assert all(page >= 0 for page in message.page_ids)
            assert message.chunks[-1] == len(message.page_ids) <= message.tokens
            assert all(identity for identity, _ in message.targets)
        case m.Register() | m.Hello():
            assert message.manifest
            assert 1 <= message.port < 1 << 16
        case m.Abort() | m.Failed():
            assert len(message.reason) <= m.MAX_REASON


# Kinds of damage: each gives the bytes, and how they are read.

Damage = Callable[[Random], tuple[bytes, Callable[[], Any]]]


def _message(make: Callable[[Random, Any], bytes]) -> Damage:
    def damage(rng: Random) -> tuple[bytes, Callable[[], Any]]:
        data = make(rng, rng.choice(ALL))
        return data, lambda: m.decode(data, limit=m.MAX_TOPOLOGY_BYTES)

    return damage


@functools.cache
def _whole() -> tuple[bytes, ...]:
    return tuple(m.encode(message) for message in ALL)


def _bytes(rng: Random, message: Any) -> bytes:
    return rng.choice(mutate.BYTE_LEVEL)(rng, m.encode(message))


def _anything(rng: Random, _: object) -> Any:
    return rng.choice(rng.choice([mutate.TEXTS, mutate.NUMBERS, mutate.ODD]))


def _of_the_same_kind(rng: Random, value: Any) -> Any:
    """A value that the field's type may well allow."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = value + rng.choice([-2, -1, 1, 2])
        return near if rng.random() < 0.5 and near in _MSGPACK_INTS else rng.choice(mutate.NUMBERS)
    if isinstance(value, str):
        return rng.choice(mutate.TEXTS)
    if isinstance(value, bytes):
        return rng.randbytes(rng.choice([0, 1, 4, 12, 255, 256]))
    return value


def _tree(choose: Callable[[Random, Any], Any]) -> Callable[[Random, Any], bytes]:
    def make(rng: Random, message: Any) -> bytes:
        tree = body(message)
        if choose is _anything and rng.random() < 0.2:
            # That one is framed as a manifest.
            return framed(None)[:-1] + mutate.duplicate_keys(rng, tree)[mutate.HEADER :]
        for _ in range(rng.randint(1, 2)):
            mutate.edit_tree(rng, tree, choose)
            tree = copy.deepcopy(tree)  # or the next edit would change the lists that values are taken from
        return framed(tree)

    return make


def _random(rng: Random, _: object) -> bytes:
    """Nothing of ours but the header, or not even that."""
    header = rng.choice([m.MAGIC, m.MAGIC + bytes([m.VERSION]), m.MAGIC + bytes([rng.randrange(256)]), b""])
    return header + rng.randbytes(rng.choice([0, 1, 3, 10, 100, 1000]))


def _mixed(rng: Random, message: Any) -> bytes:
    """The beginning of one message and the end of another."""
    data, other = m.encode(message), rng.choice(_whole())
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _shuffled(rng: Random, message: Any) -> bytes:
    """The parts of a message in another order."""
    data = m.encode(message)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 4)))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    rng.shuffle(parts)
    return b"".join(parts)


def _frames(rng: Random) -> tuple[bytes, Callable[[], Any]]:
    """Frames of a rank's socket: SGLang's, ours, and what is neither, in any order."""
    choices: Sequence[Callable[[], bytes]] = (
        lambda: b"None",
        lambda: str(rng.choice(mutate.NUMBERS)).encode(),
        lambda: rng.randbytes(rng.randrange(40)),
        lambda: _bytes(rng, rng.choice(ALL)),
        lambda: rng.choice(_whole()),
        lambda: m.MAGIC,
    )
    frames = [rng.choice(choices)() for _ in range(rng.randrange(6))]

    def parse() -> Any:
        payload = m.find(frames)
        if payload is None:
            raise MessageError("none of ours")
        return m.decode(payload)

    return b"|".join(frames), parse


def _sealed(rng: Random) -> tuple[bytes, Callable[[], Any]]:
    """A sealed message that was damaged, mixed, turned round or is of another token: none may be taken."""
    here, token, way = Seal(_TOKEN), _TOKEN, _WAY
    right, other = (here.seal(rng.choice(_whole()), *_WAY) for _ in range(2))
    data: bytes = right
    match rng.randrange(5):
        case 0:
            data = rng.choice(mutate.BYTE_LEVEL)(rng, right)
        case 1:
            cut = rng.randrange(len(right) + 1)
            data = right[:cut] + other[cut:]
        case 2:
            way = (rng.choice([each for each in Purpose if each is not _WAY[0]]), _WAY[1])
        case 3:
            token = rng.choice([b"", b"u" * 32])
        case 4:
            data = rng.choice([rng.choice(_whole()), right[: rng.randrange(len(right))], rng.randbytes(60)])
    # Damage may leave a message as it was. Without a token there is no seal to judge.
    may_be_taken = not token or ((token, way) == (_TOKEN, _WAY) and data in (right, other))
    there = Seal(token or None)

    def parse() -> Any:
        found = there.open(data, *way)
        if not may_be_taken:
            raise AssertionError("a wrong seal is taken")
        return m.decode(found)

    return data, parse


@functools.cache
def _manifest() -> bytes:
    return wire.encode(manifest())


def _manifest_tree() -> Any:
    return msgspec.msgpack.decode(_manifest()[mutate.HEADER :])


def _manifests(rng: Random) -> tuple[bytes, Callable[[], Any]]:
    choice, data = rng.random(), None
    if choice < 0.5:
        data = rng.choice(mutate.BYTE_LEVEL)(rng, _manifest())
    elif choice > 0.8:
        data = mutate.plausible(rng, _manifest_tree())
    data = data or rng.choice(mutate.TREE_LEVEL)(rng, _manifest_tree())
    return data, lambda: wire.decode(data)


_OFFER = {"version": m.VERSION, "control_port": 1234, "mode": "auto", "unsupported": ["because"], "instance": "5e"}


def _offers(rng: Random) -> tuple[bytes, Callable[[], Any]]:
    """What a bootstrap server answers, as JSON."""
    tree = copy.deepcopy(_OFFER)
    if rng.random() < 0.5:
        data = rng.choice([mutate.flip_bits, mutate.truncate, mutate.splice])(rng, json.dumps(tree).encode())
    else:
        mutate.edit_tree(rng, tree, _anything if rng.random() < 0.5 else _of_the_same_kind)
        data = json.dumps(tree, default=str).encode()
    if rng.random() < 0.02:
        data = rng.choice([b"[", b'{"version":']) * mutate.NESTING
    signature = rng.choice(["", "", "zz", rng.randbytes(rng.choice([1, 36, 37, 38])).hex(), "\u0660"])
    status = rng.choice([200, 200, 200, 302, 500])
    reply = capability._Reply(status, data, signature)
    seal = Seal(rng.choice([None, None, None, _TOKEN]))
    return data, lambda: capability._capability("10.0.0.1:8998", reply, seal, capability._question(seal))


DAMAGES: dict[str, tuple[int, Damage]] = {
    "bytes": (8, _message(_bytes)),
    "trees": (2, _message(_tree(_anything))),
    "plausible": (3, _message(_tree(_of_the_same_kind))),
    "random": (2, _message(_random)),
    "mixed": (1, _message(_mixed)),
    "shuffled": (1, _message(_shuffled)),
    "frames": (1, _frames),
    "sealed": (2, _sealed),
    "manifests": (1, _manifests),
    "offers": (1, _offers),
}
"""How many of each kind come in a round, and how one is made."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing was wrong."""
    parser = argparse.ArgumentParser(
        description="Send damaged messages through the parsers; nothing may come of them but our own error.",
        epilog="example: python -m tests.faults.fuzz --count 5000000 --seed 7",
    )
    parser.add_argument("--count", type=int, default=MILLION, help="messages (default: a million)")
    parser.add_argument("--seed", type=int, default=1, help="another one gives other messages (default: 1)")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()

    def progress(done: int, of: int) -> None:
        left = (time.monotonic() - began) / done * (of - done)
        sys.stdout.write(f"\r{done:,} of {of:,}, {left:.0f} s left ")
        sys.stdout.flush()

    summary = run(chosen.count, chosen.seed, progress if sys.stdout.isatty() else lambda done, of: None)
    for line in summary.wrong:
        print(line)
    for (kind, what), number in sorted(summary.outcomes.items()):
        print(f"{kind:>10} {what:>8} {number:>9,}")
    print(summary)
    return 1 if summary.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
