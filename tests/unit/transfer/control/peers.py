"""What the tests of the control service share: reports of prefill ranks, and clients that keep what they hear."""

import time
from contextlib import contextmanager

from msgspec.structs import replace

from sglang_hetero.layout import wire
from sglang_hetero.transfer import messages as m
from sglang_hetero.transfer.control import ControlClient
from tests.reshard_oracle.pair import manifest

HOST = "127.0.0.1"
SOON = 1.5
"""Seconds in which anything must have happened, on a busy machine; nothing waits for it to pass."""


def hello(rank=0, tp=2, start="a", **coordinates):
    """The report of one prefill rank. start: which start of the process this is."""
    incarnation = f"{start}-{coordinates.get('dp_rank', 0)}.{coordinates.get('pp_rank', 0)}.{rank}"
    whole = replace(manifest(rank=rank, tp=tp, **coordinates), incarnation=incarnation)
    return m.Hello(
        incarnation=incarnation, manifest=wire.encode(whole), host=HOST, port=7000 + rank, session=f"s{rank}"
    )


def first(*targets, incarnation="a-0.0.0", room=5):
    return m.FirstGeneration(
        room=room,
        incarnation=incarnation,
        targets=tuple(m.Target(identity, epoch) for identity, epoch in targets),
        token=7,
        topology="t",
        tokens=20,
        pages=m.pack_ids([3]),
        chunks=(1,),
    )


def until(condition, seconds=SOON):
    """Wait until it holds, and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)
    return found


@contextmanager
def client(port, identity, incarnation="i", **options):
    """A client, with what it heard in `heard`."""
    heard = []
    with ControlClient(
        HOST, port, identity=identity, incarnation=incarnation, on_message=heard.append, **options
    ) as made:
        made.heard = heard
        yield made


def report(client, tp=1):
    """Report as the only rank of replica 0, and wait until the service has it."""
    client.send(hello(0, tp=tp))
    until(lambda: client.heard)
    client.heard.clear()


def fields(message):
    return {name: getattr(message, name) for name in message.__struct_fields__}
