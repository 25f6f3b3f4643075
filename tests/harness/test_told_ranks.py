"""What SGLang's real managers leave for `GET /hetero/instance` is enough to see that two servers fit."""

import os

import pytest

from sglang_hetero.discovery.ranks import decode_told, describe
from sglang_hetero.discovery.record import Instance, decode_description, encode_description
from sglang_hetero.layout.manifest import Side
from sglang_hetero.reshard.plan import plan
from sglang_hetero.state import folder

from . import Harness
from .product import OFF, geometry


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a prefill server with TP 2 and a decode server with TP 1 say, each as a client reads it."""
    found = {}
    where = {side: tmp_path_factory.mktemp(side) for side in Side}
    given = {side: {folder.VARIABLE: str(where[side])} for side in Side}
    with Harness() as harness:
        options = {"prefill_env": given[Side.PREFILL], "decode_env": given[Side.DECODE]}
        harness.pair(geometry(64), prefill_tp=2, decode_tp=1, **options)
        for side in Side:
            data, problems = folder.read_ranks(where[side])
            server = Instance(role=side, url="http://127.0.0.1:1")
            ranks = [decode_told(one) for one in data]
            assert all(os.getpid() in one.parents for one in ranks)
            description, whole = describe(server, "auto", "mooncake", ranks, problems)
            assert whole and description.notes == () == description.unsupported
            found[side] = decode_description(encode_description(description))
    return found


def test_all_ranks_say_what_they_are(told):
    assert [(one.instance.tp_size, len(one.manifests)) for one in told.values()] == [(2, 2), (1, 1)]
    assert all(one.instance.fingerprint for one in told.values())


def test_a_plan_between_them_can_be_made(told):
    (decode,) = told[Side.DECODE].ranks()
    found = plan(told[Side.PREFILL].ranks(), decode)
    assert len(found.sources) == 2


def test_ranks_with_the_path_switched_off_tell_the_same(told, tmp_path):
    with Harness() as harness:
        given = {folder.VARIABLE: str(tmp_path)}
        harness.pair(geometry(64), prefill_tp=2, decode_tp=1, prefill_env=given | OFF, decode_env=OFF)
        data, problems = folder.read_ranks(tmp_path)
    ranks = [decode_told(one) for one in data]
    description, whole = describe(Instance(role=Side.PREFILL, url="http://127.0.0.1:1"), "off", "mooncake", ranks)
    assert whole and not problems
    assert [one.fingerprint for one in description.ranks()] == [one.fingerprint for one in told[Side.PREFILL].ranks()]
