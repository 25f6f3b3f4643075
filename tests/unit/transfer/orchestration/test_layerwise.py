"""Pieces that go while the model computes: the same bytes whatever the timing, and nothing before it is there."""

import random

import pytest
import torch

from sglang_hetero.device import HostCopy
from sglang_hetero.layout import Role
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.engine.loopback import Fault, Gate
from sglang_hetero.transfer.outbox import Placed
from sglang_hetero.transfer.pieces import COMPLETE, StateMode, layer_done

from .models import FOUR, MLA, PLAIN, SIX, TWO
from .network import of_kind
from .passes import Pass, run
from .world import World

KEY, VALUE = Role.TARGET_KEY.value, Role.TARGET_VALUE.value
PAIRS = [(FOUR, (2, 1)), (FOUR, (1, 2)), (SIX, (3, 2)), (SIX, (2, 3)), (TWO, (4, 1)), (PLAIN, (2, 1)), (MLA, (2, 1))]


def pieces_of(world: World, room: int) -> dict[str, list[tuple[object, ...]]]:
    """Per source what it announced, by number."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for one in world.network.sent(messages.Ready, room=room):
        for piece in one.message.pieces:
            shape = (piece.seq, piece.role, piece.layer, piece.first_page, piece.pages, piece.tokens)
            found.setdefault(one.sender, set()).add(shape)
    return {sender: sorted(pieces) for sender, pieces in found.items()}


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{len(pair[0])}-{pair[1][0]}-{pair[1][1]}")
def test_pairs(pair, mode, late):
    """Caches are written layer by layer; whatever is read before it is there shows in decode's bytes."""
    chance = random.Random(hash((len(pair[0]), pair[1], mode, late)))
    for seed in range(3):
        with World(*pair, mode=mode, window=chance.randint(1, 4), seed=seed + 1) as world:
            request = world.start(1, 22, 2, 4, computed=False)
            world.until(lambda w=world, r=request: w.is_bound(r), send=False)
            run(world, [Pass(world, node, request, late=late, tail=seed) for node in world.prefill], chance)
            request.sent = len(request.ends)
            world.serve(request)
            world.check()


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("pair", PAIRS[:3], ids=lambda pair: f"{len(pair[0])}-{pair[1][0]}-{pair[1][1]}")
def test_a_prefix_cache_moves_the_request_while_it_is_sent(pair, mode, late, lag):
    """Behind every pass, to other pages, also of earlier chunks; what it has left belongs to somebody else at once."""
    chance = random.Random(f"{len(pair[0])} {pair[1]} {mode} {late} {lag}")
    for seed in range(2):
        with World(*pair, mode=mode, window=chance.randint(1, 4), seed=seed + 1, verify=seed == 1) as world:
            request = world.start(1, 22, 2, 4, computed=False)
            to = world._place(0, request.ends[-1])
            world.until(lambda w=world, r=request: w.is_bound(r), send=False)
            passes = [Pass(world, node, request, late=late, tail=seed, to=to, lag=lag) for node in world.prefill]
            run(world, passes, chance)
            request.sent = len(request.ends)
            world.serve(request)
            world.check()


@pytest.mark.parametrize("late", [0, 1])
def test_a_batch_that_was_on_its_way_when_the_request_moved_is_written_again(late):
    """Its bytes were read from pages that somebody else has by now; nothing of it is announced before it is right."""
    with World(FOUR, (2, 1), window=8) as world:
        request = world.start(1, 22, 2, computed=False)
        to = world._place(0, request.ends[-1])
        world.until(lambda: world.is_bound(request), send=False)
        gates = []
        for node in world.prefill:
            gates.append(Gate())
            node.engine.script.next(Fault(gate=gates[-1]))
        passes = [Pass(world, node, request, to=to, late=late) for node in world.prefill]
        layers = len(passes[0].layers)
        for one, gate in zip(passes, gates, strict=True):
            for _ in range(layers + 1):  # every layer and the end of the pass
                one.step()
            world.until(lambda gate=gate: gate.wait_reached(0), send=False)
        # The request moves now, and the bytes that the engine is about to read are somebody else's.
        for one in passes:
            one.step()
        world.rounds(3, send=False)
        assert not world.network.sent(messages.Ready)
        for gate in gates:
            gate.open()
        run(world, passes, random.Random(1))
        request.sent = len(request.ends)
        world.serve(request)
        assert all(node.side.counters.snapshot()["again"] >= 1 for node in world.prefill)
        world.check()


def test_nothing_is_read_between_a_move_and_the_word_of_where():
    with World(FOUR, (2, 1), window=8) as world:
        request, chunks = started(world)
        passes = [Pass(world, node, request) for node in world.prefill]
        moves = []
        for one, chunk in zip(passes, chunks, strict=True):
            moves.append([one.node.side.move(1), one.node.side.move(1)])
            one.node.side.reached(1, chunk, COMPLETE)
        world.send_chunk(request)  # with the first token, whose message says where the request is
        world.rounds(5, send=False)
        assert not world.network.sent(messages.Ready, messages.FirstGeneration)
        for one, (old, _) in zip(passes, moves, strict=True):
            one.locate(old)  # it has moved again since
        world.rounds(5, send=False)
        assert not world.network.sent(messages.Ready, messages.FirstGeneration)
        for one, (_, new) in zip(passes, moves, strict=True):
            one.locate(new)
        world.serve(request)
        world.check()


@pytest.mark.parametrize("mode", StateMode)
def test_the_same_pieces_as_at_the_end_of_each_chunk(mode):
    found = []
    for early in (True, False):
        with World(FOUR, (2, 1), mode=mode, window=2) as world:
            request = world.start(1, 21, 2, 3)
            world.until(lambda w=world, r=request: w.is_bound(r), send=False)
            if early:
                run(world, [Pass(world, node, request, tail=1) for node in world.prefill], random.Random(1))
                request.sent = len(request.ends)
            world.until(lambda w=world, r=request: w.complete(r))
            names = {node.name: number for number, node in enumerate(world.prefill)}
            found.append({names[name]: pieces for name, pieces in pieces_of(world, 1).items()})
            world.serve(request)
    assert found[0] == found[1]
    assert found[0][0]


def started(world: World, tokens: int = 8, *cuts: int):
    """A bound request whose first forward pass has begun at both ranks; its chunks there."""
    request = world.start(1, tokens, *cuts)
    world.until(lambda: world.is_bound(request), send=False)
    pages = (*cuts, -(-tokens // world.shapes[0].page_size))[0]
    end = min(tokens, pages * world.shapes[0].page_size)
    chunks = []
    for node in world.prefill:
        placed = Placed(
            HostCopy(torch.tensor(request.source.pages[:pages])), HostCopy(torch.tensor([request.source.slot]))
        )
        chunks.append(node.side.begin(1, end=end, last=not cuts, placed=placed))
    return request, chunks


def entries(world: World, node) -> set[tuple[str, int]]:
    return {
        (piece.role, piece.layer)
        for one in world.network.sent(messages.Ready)
        if one.sender == node.name
        for piece in one.message.pieces
    }


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (StateMode.PREPUSH, {(None, 0), (KEY, 1), (VALUE, 1), (None, 2)}),
        (StateMode.PUSH, {(KEY, 1), (VALUE, 1)}),
        (StateMode.PULL, {(KEY, 1), (VALUE, 1)}),
    ],
)
def test_what_goes_when_layer_two_has_run(mode, expected):
    with World(FOUR, (2, 1), mode=mode, window=8) as world:
        request, chunks = started(world)
        for node, chunk in zip(world.prefill, chunks, strict=True):
            node.side.reached(1, chunk, layer_done(2))
        world.until(lambda: all(entries(world, node) == expected for node in world.prefill), send=False)
        world.rounds(send=False)
        assert all(entries(world, node) == expected for node in world.prefill)
        assert not world.complete(request)
        world.serve(request)
        world.check()


def test_nothing_goes_before_anything_is_told_or_the_place_is_known():
    class Slow(HostCopy):
        known = False

        def ready(self) -> bool:
            return self.known

    with World(FOUR, (2, 1)) as world:
        request, _ = started(world)
        world.rounds(send=False)
        assert not world.network.sent(messages.Ready)
        placed = Placed(Slow(torch.tensor([1])))
        assert not placed.ready()
        Slow.known = True
        assert placed.ready()
        world.serve(request)
        world.check()


def test_marks_that_come_again_or_late_change_nothing():
    with World(FOUR, (2, 1)) as world:
        request, chunks = started(world, 12, 1)
        for node, chunk in zip(world.prefill, chunks, strict=True):
            for mark in (layer_done(1), layer_done(0), layer_done(1), COMPLETE, layer_done(3)):
                node.side.reached(1, chunk, mark)
        world.serve(request)
        world.check()


def test_handed_over_before_it_was_told():
    """SGLang's thread was faster than ours: the chunk is complete, and what is told afterwards changes nothing."""
    with World(FOUR, (2, 1)) as world:
        request, chunks = started(world, 12, 1)
        world.send_chunk(request)
        for node, chunk in zip(world.prefill, chunks, strict=True):
            node.side.reached(1, chunk, layer_done(0))
        world.serve(request)
        world.check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 7}, "but has computed pages 0 to 1 (8 tokens, the last)"),
        ({"last": False}, "hands over pages 0 to 1 (8 tokens)"),
    ],
)
def test_a_chunk_that_is_not_what_was_computed_fails_the_request(changes, words):
    """Bytes of what was computed may lie on decode by then."""
    with World(FOUR, (2, 1)) as world:
        request, chunks = started(world)
        for node, chunk in zip(world.prefill, chunks, strict=True):
            node.side.reached(1, chunk, layer_done(3))
        world.send_chunk(request, **changes)
        world.until(lambda: world.failed(request), send=False)
        assert all(words in node.side.failure(1) for node in world.prefill)
        world.end(request)
        world.check()


def test_what_cannot_be_begun():
    """Not bound, unknown, ended, nothing complete, nothing left: then it goes at the end of the chunk, as ever."""
    with World(FOUR, (2, 1)) as world:
        side = world.prefill[0].side
        request = world.start(1, 12, 1)

        def begin(end: int, pages: int, *, last: bool = False):
            ids = HostCopy(torch.tensor(request.source.pages[:pages]))
            return side.begin(1, end=end, last=last, placed=Placed(ids))

        assert not side.follows(1)
        assert begin(4, 1) is None
        world.until(lambda: world.is_bound(request), send=False)
        assert side.follows(1) and not side.follows(2)
        assert begin(3, 0) is None
        assert begin(4, 1) is not None
        assert begin(5, 1) is None
        assert begin(12, 3, last=True) is not None
        assert begin(12, 3, last=True) is None
        world.serve(request)
        world.check()


def by_decode(world, request) -> None:
    world.decode[0].side.fail(request.room, "the client left")


def by_prefill(world, request) -> None:
    for node in world.prefill:
        node.side.fail(request.room, "the client left")


@pytest.mark.parametrize("who", [by_decode, by_prefill])
@pytest.mark.parametrize("steps", [0, 1, 3, 5, 7, 9])
def test_an_end_in_the_middle_of_a_pass(steps, who):
    """The model runs on; nothing more of it goes, and everything is free again. The room is used again at once."""
    with World(FOUR, (2, 1), window=2) as world:
        request = world.start(1, 12, 1, computed=False)
        world.until(lambda: world.is_bound(request), send=False)
        passes = [Pass(world, node, request) for node in world.prefill]
        for one in passes:
            for _ in range(steps):
                one.step()
        world.rounds(3, send=False)
        who(world, request)
        world.until(lambda: world.failed(request), send=False)
        for one in passes:
            for _ in range(3):
                one.step()
        for node in world.prefill:  # the model has written the rest by the time its memory is somebody else's
            node.rank.write(request.seed, request.source.pages, request.source.slot, request.tokens)
        world.end(request)
        world.serve(world.start(1, 9, 1))
        world.check()


def test_a_failed_place_fails_the_request():
    with World(FOUR, (2, 1)) as world:
        request = world.start(1, 8)
        world.until(lambda: world.is_bound(request), send=False)
        side = world.prefill[0].side
        chunk = side.begin(
            1, end=8, last=True, placed=Placed(HostCopy(torch.tensor([1, 2, 3])), HostCopy(torch.tensor(1)))
        )
        side.reached(1, chunk, layer_done(0))
        assert "3 pages of the request are known" in side.failure(1)
        world.until(lambda: world.failed(request), send=False)
        world.end(request)
        world.check()


def test_a_chunk_of_the_rooms_last_use_is_told_late():
    """Its pages are somebody else's: the request that has the room now keeps its own."""
    with World(FOUR, (2, 1)) as world:
        old, chunks = started(world)
        by_decode(world, old)
        world.until(lambda: world.failed(old), send=False)
        world.end(old)
        request, new = started(world)
        for node, ours, theirs in zip(world.prefill, new, chunks, strict=True):
            node.side.reached(1, ours, layer_done(0))
            node.side.reached(1, theirs, COMPLETE)

        def only_ours() -> bool:
            return all(entries(world, node) == {(None, 0)} for node in world.prefill)

        world.until(only_ours, send=False)
        world.rounds(5, send=False)
        assert only_ours()
        for node, ours in zip(world.prefill, new, strict=True):
            node.side.reached(1, ours, COMPLETE)
        world.serve(request)
        world.check()


def test_all_is_handed_over_before_the_first_chunk_is_told():
    """The first chunk's place is shorter than what is known by then."""
    with World(FOUR, (2, 1), window=1) as world:
        request, chunks = started(world, 16, 1)
        world.send_chunk(request)
        world.send_chunk(request)
        for node, chunk in zip(world.prefill, chunks, strict=True):
            node.side.reached(1, chunk, layer_done(1))
        world.serve(request)
        world.check()


def test_a_request_that_not_all_decode_ranks_have_bound_is_not_begun():
    with World(FOUR, (1, 2)) as world:
        held = world.network.hold(of_kind(messages.Bind, sender=world.decode[1].name))
        request = world.start(1, 8)
        side = world.prefill[0].side
        world.until(lambda: side.owns(1), send=False)
        world.rounds(5, send=False)
        placed = Placed(HostCopy(torch.tensor(request.source.pages)), HostCopy(torch.tensor(request.source.slot)))
        assert not side.follows(1)
        assert side.begin(1, end=8, last=True, placed=placed) is None
        world.network.let_go(held)
        world.serve(request)
        world.check()


def test_the_hand_over_of_an_earlier_chunk_says_nothing_of_a_later_one_that_has_moved():
    with World(FOUR, (2, 1), window=8) as world:
        request = world.start(1, 16, 2, computed=False)
        to = world._place(0, request.ends[-1])
        world.until(lambda: world.is_bound(request), send=False)
        passes = [Pass(world, node, request, to=to, late=1, tail=1) for node in world.prefill]
        layers = len(passes[0].layers)
        for one in passes:
            for _ in range(layers + 1):
                one.step()  # the first chunk; it moves behind that
        world.until(lambda: all(len(entries(world, node)) == 6 for node in world.prefill), send=False)
        moves = []
        for one in passes:
            one.node.side.move(1)
            begin = one._begin(1)
            moves.append(one.node.side.move(1))  # with the second chunk begun, and told below
            world.send_chunk_of(one.node, request, 0)
            one.node.side.reached(1, begin, COMPLETE)
        told = len(world.network.sent(messages.Ready))
        world.rounds(5, send=False)
        assert len(world.network.sent(messages.Ready)) == told
        for one, move in zip(passes, moves, strict=True):
            one._write(1, lambda role, at: True)
            one.locate(move)
            world.send_chunk_of(one.node, request, 1)
        request.sent = len(request.ends)
        world.serve(request)
        world.check()


def test_a_move_that_names_too_few_pages_fails_the_request():
    with World(FOUR, (2, 1)) as world:
        request, _ = started(world)
        side = world.prefill[0].side
        move = side.move(1)
        side.locate(1, move, Placed(HostCopy(torch.tensor([3]))))
        assert "moved 2 pages, and 1 are known" in side.failure(1)
        world.until(lambda: world.failed(request), send=False)
        world.end(request)
        world.check()


def test_what_is_not_known_does_not_move():
    with World(FOUR, (2, 1)) as world:
        side = world.prefill[0].side
        request = world.start(1, 8)
        assert side.move(1) is None and side.move(2) is None
        world.serve(request)
        world.check()
