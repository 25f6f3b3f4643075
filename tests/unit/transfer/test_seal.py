"""Seals: what is taken, and every way in which a message may be another one than was sealed."""

import random
import threading

import pytest

from sglang_hetero.errors import SealError
from sglang_hetero.transfer import messages, seal
from sglang_hetero.transfer.seal import MARK, MAX_SENDERS, OVERHEAD, REORDER, Purpose, Seal

TOKEN = b"t" * 32
PAYLOAD = messages.encode(messages.Ping(incarnation="i"))
WAY = (Purpose.TO_DECODE, b"10.0.0.1:4000")


@pytest.fixture
def pair():
    """Two processes with the same token."""
    return Seal(TOKEN), Seal(TOKEN)


def test_what_is_sealed_is_opened_once(pair):
    here, there = pair
    sealed = here.seal(PAYLOAD, *WAY)
    assert len(sealed) == len(PAYLOAD) + OVERHEAD
    assert there.open(sealed, *WAY) == PAYLOAD
    with pytest.raises(SealError, match="come before"):
        there.open(sealed, *WAY)
    assert there.open(here.seal(PAYLOAD, *WAY), *WAY) == PAYLOAD


def test_without_a_token_nothing_is_changed():
    here, there = Seal(), Seal()
    assert here.seal(PAYLOAD, *WAY) == PAYLOAD
    assert [there.open(PAYLOAD, *WAY) for _ in range(2)] == [PAYLOAD] * 2
    assert here.sign(PAYLOAD, *WAY) == ""
    there.verify("", PAYLOAD, *WAY)
    assert not here.keyed


def test_a_sealed_message_is_found_as_ours(pair):
    sealed = pair[0].seal(PAYLOAD, *WAY)
    assert messages.find([b"None", b"127.0.0.1", sealed]) == sealed
    assert MARK[-1] != messages.VERSION


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (None, TOKEN, "this side has none.*SGLANG_HETERO_TOKEN_FILE"),
        (TOKEN, None, "has no seal.*SGLANG_HETERO_TOKEN_FILE"),
        (TOKEN, b"u" * 32, "not of this side's token.*SGLANG_HETERO_TOKEN_FILE"),
    ],
)
def test_another_token_or_none_is_named_with_the_remedy(mine, theirs, reason):
    with pytest.raises(SealError, match=reason):
        Seal(mine).open(Seal(theirs).seal(PAYLOAD, *WAY), *WAY)
    with pytest.raises(SealError, match=reason):
        Seal(mine).verify(Seal(theirs).sign(PAYLOAD, *WAY), PAYLOAD, *WAY)


@pytest.mark.parametrize("purpose", [each for each in Purpose if each is not Purpose.TO_DECODE])
def test_a_message_that_is_turned_round(pair, purpose):
    with pytest.raises(SealError, match="something else"):
        pair[1].open(pair[0].seal(PAYLOAD, *WAY), purpose, WAY[1])


@pytest.mark.parametrize("audience", [b"", b"10.0.0.1:4001", b"10.0.0.1:400", b"10.0.0.1:40000"])
def test_a_message_that_is_given_to_somebody_else(pair, audience):
    with pytest.raises(SealError, match="something else"):
        pair[1].open(pair[0].seal(PAYLOAD, *WAY), WAY[0], audience)


def test_the_audience_cannot_take_of_the_message(pair):
    """The same bytes behind one another, cut elsewhere, are another message."""
    sealed = pair[0].seal(b"0" + PAYLOAD, WAY[0], b"10.0.0.1:400")
    with pytest.raises(SealError, match="something else"):
        pair[1].open(sealed[:OVERHEAD] + PAYLOAD, WAY[0], b"10.0.0.1:4000")


def test_every_bit_counts(pair):
    here, there = pair
    sealed = here.seal(PAYLOAD, *WAY)
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SealError):
            there.open(bytes(damaged), *WAY)
    assert there.open(sealed, *WAY) == PAYLOAD, "damaged ones must not make the right one come twice"


@pytest.mark.parametrize("size", range(OVERHEAD))
def test_cut_off(pair, size):
    with pytest.raises(SealError):
        pair[1].open(pair[0].seal(b"", *WAY)[:size], *WAY)


def test_an_empty_message(pair):
    assert pair[1].open(pair[0].seal(b"", *WAY), *WAY) == b""


@pytest.mark.parametrize("signature", ["zz", "0", "00", "\u0660\u0660", MARK.hex(), "00" * (OVERHEAD + 1), " "])
def test_a_signature_that_is_none(pair, signature):
    with pytest.raises(SealError):
        pair[1].verify(signature, PAYLOAD, *WAY)


def test_a_signature_is_the_seal_alone(pair):
    here, there = pair
    there.verify(here.sign(PAYLOAD, *WAY), PAYLOAD, *WAY)
    with pytest.raises(SealError):
        there.verify(here.sign(PAYLOAD, *WAY), PAYLOAD + b"x", *WAY)


def test_any_order_within_the_bound_and_each_once(pair):
    here, there = pair
    sealed = [here.seal(bytes([number % 256]), *WAY) for number in range(1000)]
    random.Random(1).shuffle(sealed)
    taken = refused = 0
    for one in sealed + sealed:
        try:
            there.open(one, *WAY)
            taken += 1
        except SealError:
            refused += 1
    assert (taken, refused) == (1000, 1000)


def test_the_bound_of_lateness(pair):
    here, there = pair
    late = [here.seal(b"x", *WAY) for _ in range(2)]
    rest = [here.seal(b"x", *WAY) for _ in range(REORDER - 1)]
    there.open(rest[-1], *WAY)  # number REORDER: the first one is too late by one, the second one is not
    with pytest.raises(SealError, match="come before"):
        there.open(late[0], *WAY)
    assert there.open(late[1], *WAY) == b"x"


def test_a_gap_of_any_size(pair):
    here, there = pair
    old = here.seal(b"old", *WAY)
    there.open(old, *WAY)
    for _ in range(3 * REORDER):
        next(here._counter)
    assert there.open(here.seal(b"new", *WAY), *WAY) == b"new"
    with pytest.raises(SealError, match="come before"):
        there.open(old, *WAY)


def test_a_restarted_sender_is_another_one(pair):
    for _ in range(3):
        assert pair[1].open(Seal(TOKEN).seal(PAYLOAD, *WAY), *WAY) == PAYLOAD


def test_what_is_remembered_is_bounded_and_only_of_those_with_the_token(pair, monkeypatch):
    assert MAX_SENDERS > 1000
    monkeypatch.setattr(seal, "MAX_SENDERS", 8)
    _, there = pair
    for _ in range(100):
        with pytest.raises(SealError):
            there.open(Seal(b"other" * 8).seal(PAYLOAD, *WAY), *WAY)
    assert not there._heard
    for _ in range(20):
        there.open(Seal(TOKEN).seal(PAYLOAD, *WAY), *WAY)
    assert len(there._heard) == 8


def test_many_threads_seal_and_open(pair):
    """No number is given twice, and no message of theirs is refused."""
    here, there = pair
    opened, refused = [], []

    def work():
        for _ in range(500):
            try:
                opened.append(there.open(here.seal(PAYLOAD, *WAY), *WAY))
            except SealError as error:
                refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), refused) == (4000, [])


def test_the_token_is_in_no_representation():
    assert "tttt" not in repr(Seal(TOKEN)) + str(vars(Seal(TOKEN)))
