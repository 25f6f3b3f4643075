"""What is noted of a forward pass, with a scheduler, a pool and a side that only look like SGLang's and ours."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from sglang_hetero.backend import layerwise
from sglang_hetero.backend.layerwise import Layerwise, around_checkpoint, around_linear_extend, around_run_batch
from sglang_hetero.layout.component import Item
from sglang_hetero.transfer.counters import Counters
from sglang_hetero.transfer.outbox import Chunk, Move
from sglang_hetero.transfer.pieces import COMPLETE, layer_done

PAGE = 4
FULL = (1, 3)


class Side:
    """Prefill's side: says what was begun."""

    def __init__(self, double: tuple[int, ...] = ()) -> None:
        self.counters = Counters()
        parts = [SimpleNamespace(item=Item.PAGE, layers=FULL), SimpleNamespace(item=Item.SLOT, layers=(0, 2, *double))]
        self.manifest = SimpleNamespace(label="prefill", components=parts)
        self.unknown: set[int] = set()
        self.begun: list[tuple] = []
        self.error: set[int] = set()
        self.nothing: set[int] = set()
        self.over: list[tuple] = []
        self.moved: list[int] = []
        self.located: list[tuple] = []
        self.failed: list[tuple] = []

    def follows(self, room):
        return room not in self.unknown

    def begin(self, room, *, end, last, placed):
        if room in self.error:
            raise RuntimeError("no")
        slot = None if placed.slot is None else placed.slot.array().tolist()
        self.begun.append((room, end, last, placed.ids.array().tolist(), slot))
        return None if room in self.nothing else Chunk(0, 1, end, last, handed_over=False)

    def reached(self, room, chunk, mark):
        raise AssertionError("the follower is not started here")

    def computed(self, room, *, last):
        self.over.append((room, last))

    def move(self, room):
        if room in self.error:
            raise RuntimeError("no")
        self.moved.append(room)
        return Move(1, 2)

    def locate(self, room, move, placed):
        self.located.append((room, move, placed.ids.array().tolist(), placed.slot.array().tolist()))

    def fail(self, room, reason):
        self.failed.append((room, reason))


class Pool:
    def __init__(self) -> None:
        self.written: list[tuple] = []

    def set_kv_buffer(self, layer, places, k, v, k_scale=1.0):
        self.written.append((layer.layer_id, places, len(k), k_scale))
        return "written"


class Linear:
    """HybridLinearAttnBackend, as far as the hook looks."""

    full_attn_layers = FULL


def layer(number):
    return SimpleNamespace(layer_id=number)


class World:
    def __init__(self, **options) -> None:
        self.side, self.pool = Side(**options), Pool()
        mapping = torch.tensor([0, 11, 12, 13])
        rows = torch.zeros(4, 40, dtype=torch.int32)
        for row in range(1, 4):
            pages = torch.arange(10) + 10 * row
            rows[row] = (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
        self.shares = True
        self.scheduler = SimpleNamespace(
            enable_overlap=False,
            tree_cache=SimpleNamespace(supports_prefix_sharing=lambda: self.shares),
            token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE, translate_kv_indices_for_transfer=lambda x: x),
            req_to_token_pool=SimpleNamespace(
                req_to_token=rows,
                req_index_to_mamba_index_mapping=mapping,
                translate_mamba_indices=lambda index: index + 100,
            ),
        )
        self.layerwise = Layerwise(self.scheduler, self.side, self.pool, torch.device("cpu"))
        self.layerwise.follower.stop()
        self.layerwise._two_batches = lambda: False  # asks SGLang
        self.notes: list = []
        self.layerwise.follower.put = self.notes.append
        self.scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(
            kv_manager=SimpleNamespace(hetero_layerwise=self.layerwise)
        )

    def request(self, room, end, tokens, row=1, **changes):
        sender = SimpleNamespace(bootstrap_room=room, hetero_unseen=False)
        fields = {
            "disagg_kv_sender": sender,
            "pending_bootstrap": False,
            "host_hit_length": 0,
            "bootstrap_room": room,
            "extend_end": end,
            "origin_input_ids": range(tokens),
            "kv": SimpleNamespace(req_pool_idx=row),
        }
        return SimpleNamespace(**{**fields, **changes})

    def run(self, *requests, tokens=8, mode="EXTEND", layers=(0, 1, 2, 3), computed=None, load=-1):
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            reqs=list(requests),
            extend_num_tokens=tokens,
            hicache_consumer_index=load,
        )

        def forward(scheduler, given, extra):
            assert (scheduler, given, extra) == (self.scheduler, batch, "extra")
            for number in layers:
                self.layer(number, tokens if computed is None else computed[number])
            return "result"

        assert around_run_batch(forward, self.scheduler, batch, "extra") == "result"
        return batch

    def layer(self, number, tokens):
        if number in FULL:
            assert (
                self.pool.set_kv_buffer(layer(number), "places", torch.zeros(tokens, 1), None, k_scale=2.0) == "written"
            )
            return
        forward_batch = SimpleNamespace(extend_num_tokens=tokens)
        found = around_linear_extend(
            lambda *given, **named: (given, named), Linear(), layer(number), forward_batch, a=1
        )
        assert found[0][2] is forward_batch and found[1] == {"a": 1}

    def told(self):
        found = defaultdict(list)
        for note in self.notes:
            for each in note.begun:
                found[each.room].append(note.mark)
        return dict(found)


@pytest.fixture
def world():
    made = World()
    yield made
    assert not layerwise._running


def test_layers_and_the_end_of_a_pass(world):
    world.run(world.request(5, 8, 8))
    assert world.told() == {5: [layer_done(0), layer_done(1), layer_done(2), layer_done(3), COMPLETE]}
    assert world.side.begun == [(5, 8, True, [10, 11], [111])]
    assert world.side.over == [(5, True)]
    assert world.pool.written == [(1, "places", 8, 2.0), (3, "places", 8, 2.0)]


def test_a_batch_with_a_last_and_a_middle_chunk(world):
    """The middle one: full pages only, no slot."""
    world.run(world.request(5, 8, 8), world.request(6, 10, 30, row=2), tokens=18)
    assert world.side.begun == [(5, 8, True, [10, 11], [111]), (6, 10, False, [20, 21], None)]
    assert world.side.over == [(5, True), (6, False)]
    assert set(world.told()) == {5, 6}


def test_a_prompt_whose_last_page_is_not_full(world):
    world.run(world.request(5, 9, 9, row=3))
    assert world.side.begun == [(5, 9, True, [30, 31, 32], [113])]


def test_nothing_is_begun_before_the_first_layer(world):
    """SGLang sends what the prefix cache holds inside run_batch, before it computes."""
    seen = []
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="EXTEND"), reqs=[world.request(5, 8, 8)], extend_num_tokens=8
    )

    def forward(scheduler, given):
        seen.append(list(world.side.begun))
        world.layer(0, 8)
        seen.append(list(world.side.begun))

    around_run_batch(forward, world.scheduler, batch)
    assert seen == [[], world.side.begun] and len(world.side.begun) == 1


def test_who_is_not_ours(world):
    """No sender, SGLang's own sender, its warm-up's; none of these stands in the way of another request."""
    others = [
        world.request(7, 8, 8, disagg_kv_sender=None),
        world.request(7, 8, 8, disagg_kv_sender=SimpleNamespace(bootstrap_room=7)),
        world.request(7, 8, 8, disagg_kv_sender=SimpleNamespace()),
    ]
    world.run(*others, world.request(5, 8, 8))
    assert [room for room, *_ in world.side.begun] == [5]
    world.side.begun.clear()
    world.notes.clear()
    world.run(*others)
    assert not world.notes and not world.side.begun


@pytest.mark.parametrize(
    "why", ["not bound", "bootstrap pending", "host cache", "another mode", "loads", "two batches", "error", "hidden"]
)
def test_a_request_with_a_chunk_that_was_not_followed_is_never_followed(world, why):
    """Its chunk would be handed over behind ones that were begun, or in one with them."""
    request, other = world.request(5, 8, 20), world.request(6, 8, 20, row=2)
    if why == "not bound":
        world.side.unknown = {5}
    if why == "bootstrap pending":
        request.pending_bootstrap = True
    if why == "host cache":
        request.host_hit_length = 4
    if why == "two batches":
        world.layerwise._two_batches = lambda: True
    if why == "error":
        world.side.error = {5}
    world.run(
        request,
        other,
        mode="MIXED" if why == "another mode" else "EXTEND",
        load=3 if why == "loads" else -1,
        layers=() if why == "hidden" else (0, 1, 2, 3),
    )
    world.side.unknown, world.side.error, request.pending_bootstrap = set(), set(), False
    world.layerwise._two_batches, request.host_hit_length = (lambda: False), 0
    world.side.begun.clear()
    request.extend_end = other.extend_end = 16
    world.run(request, other)
    followed = set() if why in {"another mode", "loads", "two batches", "hidden"} else {6}
    assert {room for room, *_ in world.side.begun} == followed


def test_a_pass_that_hides_its_layers_is_counted_and_said_once(world, caplog):
    for room in (5, 6):
        world.run(world.request(room, 8, 8), layers=())
    assert world.side.counters.snapshot() == {"hidden": 2}
    assert caplog.text.count("without telling its layers") == 1
    assert not world.notes and not world.side.begun


def test_layers_that_are_hidden_count_with_the_next_one(world):
    world.run(world.request(5, 8, 8), layers=(1, 3))
    assert world.told() == {5: [layer_done(1), layer_done(3), COMPLETE]}


def test_a_layer_that_is_told_twice_or_out_of_order_is_noted_once(world):
    world.run(world.request(5, 8, 8), layers=(0, 1, 1, 0, 2))
    assert world.told() == {5: [layer_done(0), layer_done(1), layer_done(2), COMPLETE]}


def test_a_layer_that_is_written_in_parts_counts_with_the_next_one(world):
    world.run(world.request(5, 8, 8), computed={0: 8, 1: 7, 2: 8, 3: 16})
    assert world.told() == {5: [layer_done(0), layer_done(2), layer_done(3), COMPLETE]}
    world.notes.clear()
    world.run(world.request(6, 8, 8), computed={0: 4, 1: 8, 2: 4, 3: 8})
    assert world.told() == {6: [layer_done(1), layer_done(3), COMPLETE]}


def test_a_layer_with_attention_and_state_counts_with_the_next_one():
    world = World(double=(1, 3))
    world.run(world.request(5, 8, 8))
    assert world.told() == {5: [layer_done(0), layer_done(0), layer_done(2), layer_done(2), COMPLETE]}


def test_a_chunk_that_completes_no_page_is_not_noted(world):
    world.side.nothing = {5}
    world.run(world.request(5, 3, 30), world.request(6, 8, 8, row=2))
    assert set(world.told()) == {6}


def test_outside_of_a_pass_and_on_decode(world):
    world.layer(0, 8)
    world.layer(1, 8)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(name="DECODE"), reqs=[], extend_num_tokens=None)
    assert around_run_batch(lambda scheduler, given: "result", SimpleNamespace(), batch) == "result"
    assert not world.notes


def test_an_error_of_the_model_goes_on_to_sglang(world):
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="EXTEND"), reqs=[world.request(5, 8, 8)], extend_num_tokens=8
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        around_run_batch(_fails, world.scheduler, batch)
    world.layer(0, 8)
    assert not world.notes


def _fails(scheduler, batch):
    raise RuntimeError("out of memory")


def test_an_error_of_ours_does_not_reach_the_model(world, caplog):
    world.layerwise.follower.put = lambda note: 1 // 0
    world.run(world.request(5, 8, 8))
    assert "is not followed" in caplog.text
    del world.scheduler.req_to_token_pool
    request = world.request(6, 8, 8)
    world.run(request)
    assert request.disagg_kv_sender.hetero_unseen


def test_a_model_without_linear_state_has_no_slot(world):
    del world.scheduler.req_to_token_pool.req_index_to_mamba_index_mapping
    world.run(world.request(5, 8, 8))
    assert world.side.begun == [(5, 8, True, [10, 11], None)]


def test_a_request_that_a_prefix_cache_takes_over_is_moved_before_it_is(world):
    seen = []

    def checkpoint(scheduler, request):
        seen.append(list(world.side.moved))
        return "result"

    request = world.request(5, 8, 8)
    assert around_checkpoint(checkpoint, world.scheduler, request) == "result"
    assert seen == [[5]]
    assert world.side.located == [(5, Move(1, 2), [10, 11], [111])]
    world.shares = False  # the cache is off: a request stays where it is
    around_checkpoint(checkpoint, world.scheduler, request)
    around_checkpoint(checkpoint, world.scheduler, world.request(7, 8, 8, disagg_kv_sender=None))
    assert world.side.moved == [5]
    world.shares, world.side.error = True, {5}
    assert around_checkpoint(checkpoint, world.scheduler, request) == "result"
    ((room, reason),) = world.side.failed
    assert room == 5 and "prefill: " in reason and "RuntimeError: no" in reason and "--disable-radix-cache" in reason
    assert around_checkpoint(checkpoint, SimpleNamespace(), request) == "result"


def test_without_layers_only_moves_are_seen():
    """SGLANG_HETERO_LAYERWISE=0, or pipeline stages."""
    world = World()
    world.layerwise._early = False
    world.run(world.request(5, 8, 8))
    assert not world.side.begun
    pool = Pool()
    Layerwise(world.scheduler, world.side, pool, torch.device("cpu"), early=False).close()
    assert pool.set_kv_buffer.__func__ is Pool.set_kv_buffer
    around_checkpoint(lambda scheduler, request: None, world.scheduler, world.request(5, 8, 8))
    assert world.side.located == [(5, Move(1, 2), [10, 11], [111])]


def test_a_place_that_cannot_be_read_fails_the_request(world):
    request = world.request(5, 8, 8)
    del world.scheduler.req_to_token_pool
    assert around_checkpoint(lambda scheduler, request: "result", world.scheduler, request) == "result"
    assert [room for room, _ in world.side.failed] == [5]
