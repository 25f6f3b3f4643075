"""What prefill or a control service says that is late, foreign or wrong: one request fails, or nothing happens."""

import pytest
from msgspec.structs import replace

from sglang_hetero.layout import Role
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.messages import AnnouncedPiece, Drained, Failed, FirstGeneration, Ready
from sglang_hetero.transfer.pieces import StateMode

from .models import FOUR, TWO
from .network import of_kind
from .world import World

TOKENS = 22
KEY = AnnouncedPiece(0, Role.TARGET_KEY, 1, 0, 1, 4)
STATE = AnnouncedPiece(0, None, 0)


def held_up(world: World):
    """Two requests, both bound; nothing of the first is announced to decode."""
    world.network.hold(of_kind(Ready))
    victim = world.start(1, TOKENS, 2)
    world.until(lambda: victim.sent == 2)
    world.rounds(5)
    return victim


def fails(world: World, victim, *words: str) -> None:
    """The victim fails on both sides, with a reason that has these words, and others go on as if nothing had been."""
    world.until(lambda: world.failed(victim), what="failure on both sides")
    assert all(victim.reasons.values())
    for word in words:
        assert word in victim.reasons[world.decode[0].name], victim.reasons
    world.end(victim)
    world.network.flow()
    world.serve(world.start(2, 9, 1))
    world.check()


BAD_READY = {
    "no_such_layer": (KEY._replace(layer=9),),
    "no_such_role": (KEY._replace(role=Role.TARGET_LATENT),),
    "state_of_an_attention_layer": (STATE._replace(layer=1),),
    "behind_the_window": (KEY._replace(seq=4000),),
    "behind_the_request": (KEY._replace(first_page=6),),
    "too_many_pages": (KEY._replace(pages=6, tokens=22),),
    "a_page_that_is_not_full": (KEY._replace(tokens=3),),
}


@pytest.mark.parametrize("which", BAD_READY)
def test_a_piece_that_cannot_be(which):
    with World(FOUR, (2, 1), times_least=1.0) as world:
        victim, node = held_up(world), world.prefill[0]
        world.network.deliver_to(world.decode[0].name, Ready(**world.ids(node, 1), source=0, pieces=BAD_READY[which]))
        fails(world, victim, node.rank.manifest.label)


def test_two_sources_that_disagree_about_a_piece():
    with World(FOUR, (2, 1), times_least=1.0) as world:
        victim = held_up(world)
        for number, piece in enumerate((KEY, KEY._replace(role=Role.TARGET_VALUE))):
            message = Ready(**world.ids(world.prefill[number], 1), source=number, pieces=(piece,))
            world.network.deliver_to(world.decode[0].name, message)
        fails(world, victim, world.prefill[1].rank.manifest.label)


def test_a_source_without_a_share():
    with World(TWO, (4, 1)) as world:
        victim = held_up(world)
        shares = {
            share.source for share in world.sets[0].plan.shares if share.role is Role.TARGET_KEY and 1 in share.layers
        }
        (idle, *_) = set(range(4)) - shares
        message = Ready(**world.ids(world.prefill[idle], 1), source=idle, pieces=(KEY,))
        world.network.deliver_to(world.decode[0].name, message)
        fails(world, victim, world.prefill[idle].rank.manifest.label)


@pytest.mark.parametrize("totals", [(3, 4), (1, 1)], ids=["contradiction", "fewer_than_prefill_says"])
def test_wrong_totals(totals):
    with World(FOUR, (2, 1), times_least=1.0) as world:
        victim = held_up(world)
        for number, total in enumerate(totals):
            message = Ready(**world.ids(world.prefill[number], 1), source=number, total=total)
            world.network.deliver_to(world.decode[0].name, message)
        fails(world, victim)


def _foreign(world: World, make):
    """Messages that are not those of the request's present use, made from one that would be right."""
    node = world.prefill[0]
    right = world.ids(node, 1)
    yield make(**{**right, "epoch": right["epoch"] + 7}, source=0)
    yield make(**{**right, "epoch": 0}, source=0)
    yield make(**{**right, "room": 77}, source=0)
    yield make(**{**right, "incarnation": "somebody else"}, source=0)
    yield make(**{**right, "incarnation": world.prefill[1].rank.manifest.incarnation}, source=0)
    yield make(**right, source=1)
    yield make(**right, source=300)


@pytest.mark.parametrize("kind", [Ready, Failed, Drained], ids=lambda kind: kind.__name__)
def test_messages_that_are_somebody_elses(kind):
    def make(**fields):
        return kind(**fields, **({"pieces": (KEY._replace(layer=9),)} if kind is Ready else {}))

    with World(FOUR, (2, 1)) as world:
        request = world.start(1, 22, 2)
        world.until(lambda: world.is_bound(request), send=False)
        for message in _foreign(world, make):
            world.network.deliver_to(world.decode[0].name, message)
        world.serve(request)
        world.network.deliver_to(world.decode[0].name, messages.Ack(incarnation="x"))
        world.check()
        for message in (Ready(incarnation="x", room=1, epoch=1), Drained(incarnation="x", room=1, epoch=1)):
            world.network.deliver_to(world.decode[0].name, message)
        world.check()


@pytest.mark.parametrize("mode", StateMode)
def test_old_messages_of_a_room_that_is_used_again(mode):
    with World(FOUR, (2, 1), mode=mode) as world:
        world.serve(world.start(1, 22, 2))
        old = [one for one in world.network.log if one.receiver == world.decode[0].name]
        request = world.start(1, 15, 1, seed=9)
        world.until(lambda: request.sent == 1)
        for one in old:
            world.network.deliver(one)
        world.serve(request)
        world.check()


FIRST = {
    "topology": {"topology": "another"},
    "one_page_more": {"tokens": 25, "pages": messages.pack_ids(range(1, 8)), "chunks": (2, 7)},
    "one_page_less": {"tokens": 20, "pages": messages.pack_ids(range(1, 6)), "chunks": (2, 5)},
    "pages_do_not_fit_tokens": {"tokens": 25},
    "chunks": {"chunks": (1, 2, 3, 4, 5, 6)},
    "tokens_of_the_last_page": {"tokens": 23},
}


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("which", FIRST)
def test_a_first_generation_that_does_not_agree(which, mode):
    with World(FOUR, (2, 1), mode=mode, times_least=3.0) as world:
        held = world.network.hold(of_kind(FirstGeneration))
        victim = world.start(1, TOKENS, 2)
        world.until(lambda: bool(held))
        world.rounds()
        world.network.deliver_to(world.decode[0].name, replace(held[0].message, **FIRST[which]))
        fails(world, victim)


def test_a_second_first_generation_with_another_token():
    """It may fail the request or be ignored, but the token of the first one must not be replaced."""
    with World(FOUR, (2, 1)) as world:
        ready = world.network.hold(of_kind(Ready))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: bool(world.network.sent(FirstGeneration)))
        world.rounds()
        (first,) = world.network.sent(FirstGeneration)
        world.network.deliver_to(world.decode[0].name, replace(first.message, token=1))
        world.network.let_go(ready)
        world.until(lambda: world.complete(request) or world.failed(request))
        if world.complete(request):
            assert world.decode[0].side.first(1).token == 7001
        world.end(request)
        world.check()


@pytest.mark.parametrize("changes", [{"epoch": 99}, {"room": 77}, {"incarnation": "another"}], ids=str)
def test_a_first_generation_of_somebody_else(changes):
    with World(FOUR, (2, 1)) as world:
        held = world.network.hold(of_kind(FirstGeneration))
        request = world.start(1, TOKENS, 2)
        world.until(lambda: bool(held))
        forged = replace(held[0].message, token=1, **changes)
        if "epoch" in changes:
            forged = replace(forged, targets=(messages.Target(forged.targets[0].identity, 99),))
        world.network.deliver_to(world.decode[0].name, forged)
        world.rounds()
        assert not world.complete(request)
        world.network.let_go(held)
        world.serve(request)
        world.check()


def test_failed_before_its_reason_names_the_rank():
    with World(FOUR, (2, 1)) as world:
        victim = held_up(world)
        world.network.deliver_to(
            world.decode[0].name, Failed(**world.ids(world.prefill[1], 1), source=1, reason="no more memory")
        )
        fails(world, victim, world.prefill[1].rank.manifest.label, "no more memory")


def test_drained_without_a_reason_names_the_rank():
    with World(FOUR, (2, 1)) as world:
        victim = held_up(world)
        world.network.deliver_to(world.decode[0].name, Drained(**world.ids(world.prefill[1], 1), source=1))
        fails(world, victim, world.prefill[1].rank.manifest.label)
