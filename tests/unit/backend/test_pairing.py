"""Which path a pair takes, from both sides, with peers that have this package and peers that do not."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from sglang_hetero.backend.options import Mode
from sglang_hetero.backend.pairing import (
    Conv,
    Here,
    Path,
    Registration,
    Route,
    decide,
    kv_buffers_at_decode,
    same_layouts,
)
from sglang_hetero.layout import Role
from sglang_hetero.layout.config import geometry_from_config
from sglang_hetero.layout.manifest import Coordinates, Side
from sglang_hetero.layout.row import Column
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.models import spec
from sglang_hetero.models.config import model_config
from tests.reshard_oracle.handover import prefill_ranks
from tests.reshard_oracle.pair import MODEL, SHAPE, decode, prefill, with_component
from tests.reshard_oracle.rank import CHANNELS_FIRST, WINDOW_FIRST, Shape

KIMI = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
    },
}
GEOMETRIES = {"tiny": geometry_from_config(model_config(spec("tiny"))), "kimi": geometry_from_config(KIMI)}
ONE_PER_LAYER = {Role.TARGET_KEY, Role.TARGET_LATENT, Role.DRAFT_KEY, Role.DRAFT_LATENT}
KV_HEADS, PAGE, KEY_BYTES = 4, 64, 32
CHANNELS, SSM_HEADS, HEAD_BYTES, CONV_BYTES = 64, 8, 256, 2
LAYERS, KV_BUFFERS = 2, 4


def item_lens(tp, page=PAGE, rows=3, kv_buffers=KV_BUFFERS, kv_heads=KV_HEADS):
    """Bytes of a page of each KV buffer, and of a slot of each conv and SSM buffer, on a rank."""
    kv = page * (max(1, kv_heads // tp) if kv_heads else 1) * KEY_BYTES
    state = (rows * CHANNELS // tp * CONV_BYTES,) * LAYERS + (SSM_HEADS // tp * HEAD_BYTES,) * LAYERS
    return (kv,) * kv_buffers, state


def here(tp, *, rows=3, kv_heads=KV_HEADS, **changes):
    kv, state = item_lens(tp, rows=rows, kv_heads=kv_heads)
    whole = Here(
        name="A",
        tp=tp,
        page_size=PAGE,
        kv_dtype="bfloat16",
        kv_heads=kv_heads,
        conv=Conv.ANNOUNCED,
        kv_item_lens=kv,
        state_item_lens=state,
        state_dims=(CHANNELS // tp,) * LAYERS + (SSM_HEADS // tp,) * LAYERS,
    )
    return replace(whole, **changes)


def route(tp, **changes):
    return replace(Route("B", tp, PAGE, "bfloat16"), **changes)


def registration(tp, *, page=PAGE, rows=3, kv_buffers=KV_BUFFERS, window_cut=False, kv_heads=KV_HEADS, **changes):
    """What a stock decode rank sends; window_cut: it takes the window for the channels."""
    kv, state = item_lens(tp, page, rows, kv_buffers, kv_heads)
    dims = (rows if window_cut else CHANNELS // tp,) * LAYERS + (SSM_HEADS // tp,) * LAYERS
    return replace(Registration("B", tp, kv_buffers, kv[0], kv, state, dims), **changes)


def check_refusal(decision, *words):
    """It is one line with both names, the rule and a remedy."""
    assert decision.path is Path.REFUSED
    assert "\n" not in decision.reason
    for word in ("A (TP", "B (TP", "; ", *words):
        assert word in decision.reason, decision.reason


PEERS = pytest.mark.parametrize("peer", [route, registration], ids=["prefill", "decode"])


@PEERS
@pytest.mark.parametrize(
    ("mode", "tps", "same", "path"),
    [
        (Mode.AUTO, (2, 2), True, Path.UPSTREAM),
        (Mode.AUTO, (2, 2), False, Path.OURS),
        (Mode.AUTO, (2, 1), False, Path.OURS),
        (Mode.AUTO, (2, 3), False, Path.OURS),
        (Mode.ALWAYS, (2, 2), True, Path.OURS),
        (Mode.ALWAYS, (1, 2), False, Path.OURS),
        (Mode.OFF, (2, 2), True, Path.UPSTREAM),
        (Mode.OFF, (2, 1), False, Path.UPSTREAM),
    ],
)
def test_a_peer_with_this_package(peer, mode, tps, same, path):
    decision = decide(mode, here(tps[0]), peer(tps[1]), capable=True, same_layout=same)
    assert decision.path is path, decision.reason
    assert "A" in decision.reason and "B" in decision.reason


@PEERS
@pytest.mark.parametrize("tps", [(1, 1), (2, 2), (2, 1), (1, 2), (4, 1), (1, 4), (4, 2), (8, 2), (2, 8)])
@pytest.mark.parametrize("kv_heads", [0, 2, KV_HEADS])
def test_a_stock_peer_takes_upstreams_path_where_it_is_right(peer, tps, kv_heads):
    options = {"kv_heads": kv_heads} if peer is registration else {}
    decision = decide(Mode.AUTO, here(tps[0], kv_heads=kv_heads), peer(tps[1], **options), capable=False)
    assert decision.path is Path.UPSTREAM, decision.reason


@PEERS
def test_always_refuses_a_stock_peer_with_equal_tp(peer):
    decision = decide(Mode.ALWAYS, here(2), peer(2), capable=False)
    check_refusal(decision, "SGLANG_HETERO=always", "install sglang-hetero on B", "SGLANG_HETERO=auto")


@PEERS
@pytest.mark.parametrize("tps", [(2, 3), (3, 2), (4, 6)])
def test_sizes_that_do_not_divide_are_refused_without_our_path(peer, tps):
    decision = decide(Mode.AUTO, replace(here(1), tp=tps[0]), replace(peer(1), tp=tps[1]), capable=False)
    check_refusal(decision, f"neither of TP {tps[0]} and {tps[1]} divides", "install sglang-hetero on B")
    decision = decide(Mode.OFF, replace(here(1), tp=tps[0]), replace(peer(1), tp=tps[1]), capable=True)
    check_refusal(decision, "divides", "remove SGLANG_HETERO=off")


@PEERS
def test_conv_slots_that_no_axis_cuts(peer):
    odd = replace(here(2), conv=Conv.UNCUTTABLE)
    check_refusal(decide(Mode.AUTO, odd, peer(1), capable=False), "no axis", "install sglang-hetero on B")
    assert decide(Mode.AUTO, odd, peer(2), capable=False).path is Path.UPSTREAM
    assert decide(Mode.AUTO, odd, peer(1), capable=True).path is Path.OURS


@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (4, 2)])
def test_window_first_slots_and_a_stock_prefill_server(tps):
    npu = replace(here(tps[0]), conv=Conv.REPAIRED)
    check_refusal(decide(Mode.AUTO, npu, route(tps[1]), capable=False), "takes the window for the channels")
    for mode in (Mode.OFF, Mode.AUTO):
        decision = decide(mode, npu, route(tps[1], repaired=True), capable=False)
        assert decision.path is Path.UPSTREAM, "it has this package, if switched off, and announces the right axis"
    assert decide(Mode.AUTO, replace(npu, tp=1), route(1), capable=False).path is Path.UPSTREAM


@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("rows", [3, 6])
def test_window_first_slots_and_a_stock_decode_rank(tps, rows):
    npu = here(tps[0], rows=rows, conv=Conv.REPAIRED)
    stock = registration(tps[1], rows=rows, window_cut=True)
    check_refusal(decide(Mode.AUTO, npu, stock, capable=False), f"an axis of {rows} elements at B")
    off = registration(tps[1], rows=rows)
    assert decide(Mode.AUTO, npu, off, capable=False).path is Path.UPSTREAM


def test_equal_sizes_need_no_axis():
    npu = here(2, rows=6, conv=Conv.REPAIRED)
    stock = registration(2, rows=6, window_cut=True)
    assert decide(Mode.AUTO, npu, stock, capable=False).path is Path.UPSTREAM


@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({"rows": 6}, "slots of a linear-state buffer"),
        ({"page": 128}, "pages of an attention KV buffer"),
        ({"kv_buffers": KV_BUFFERS + 2}, "speculative decoding"),
        ({"kv_item_lens": ()}, None),
        ({"kv_item_lens": (), "kv_item_len": 7}, "pages of an attention KV buffer have 7 bytes"),
        ({"state_item_lens": (1,)}, "4 linear-state buffers here, 1 at B"),
    ],
    ids=["draft-tokens", "page-size", "draft-buffers", "one-length", "one-length-wrong", "state-buffers"],
)
def test_what_a_decode_rank_registers_with(tps, peer, words):
    """Seen by prefill: upstream's transfer thread would raise, or write to the wrong place."""
    decision = decide(Mode.AUTO, here(tps[0]), registration(tps[1], **peer), capable=False)
    if words is None:
        assert decision.path is Path.UPSTREAM
    else:
        check_refusal(decision, words, "install sglang-hetero on B")


def test_a_draft_buffer_of_another_size_is_seen():
    lens = registration(1).kv_item_lens
    peer = registration(1, kv_item_lens=(*lens[:-1], lens[-1] + 2))
    check_refusal(decide(Mode.AUTO, here(2), peer, capable=False), f"have {lens[-1] + 2} bytes at B")


def test_linear_state_without_dimensions_is_not_cut():
    peer = registration(1, state_dims=())
    check_refusal(decide(Mode.AUTO, here(2), peer, capable=False), "along which axis")
    assert decide(Mode.AUTO, here(1), peer, capable=False).path is Path.UPSTREAM


def test_state_that_every_rank_has_whole_is_not_divided():
    """Dimension 0 is SGLang's mark of it (memory_pool.py, get_state_dim_per_tensor)."""
    mine, theirs = here(2), registration(1)
    whole = {"state_dims": (*mine.state_dims, 0), "state_item_lens": (*mine.state_item_lens, 48)}
    other = {"state_dims": (*theirs.state_dims, 0), "state_item_lens": (*theirs.state_item_lens, 48)}
    assert decide(Mode.AUTO, replace(mine, **whole), replace(theirs, **other), capable=False).path is Path.UPSTREAM


def test_a_pipeline_stage_has_some_of_the_buffers():
    stage = here(2, pp=2)
    stage = replace(
        stage,
        kv_item_lens=stage.kv_item_lens[:1],
        state_item_lens=stage.state_item_lens[::2],
        state_dims=stage.state_dims[::2],
    )
    assert decide(Mode.AUTO, stage, registration(1), capable=False).path is Path.UPSTREAM
    check_refusal(decide(Mode.AUTO, stage, registration(1, rows=6), capable=False), "slots of a linear-state")
    check_refusal(decide(Mode.AUTO, stage, registration(1, rows=6, window_cut=True), capable=False), "axis of 6 or 8")


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("family", "per_layer"), [("tiny", 2), ("kimi", 1)])
@pytest.mark.parametrize("drafts", [(False, True), (True, False), (True, True), (False, False)], ids=str)
def test_speculation_on_one_side_is_seen_by_a_pipeline_stage(stages, family, per_layer, drafts):
    """By every stage that has attention layers, though each has some of the buffers, and the last one the draft's."""
    model = GEOMETRIES[family]
    alike = drafts[0] == drafts[1] or not model.draft_layers
    theirs = per_layer * (len(model.attention_layers) + len(model.draft_layers) * drafts[1])
    ours = per_layer * (len(model.attention_layers) + len(model.draft_layers) * drafts[0])
    stages_with_attention = 0
    for stage in range(stages):
        one = manifest(model, Side.PREFILL, Coordinates(pp_rank=stage, pp_size=stages), PoolOptions(), draft=drafts[0])
        own = per_layer * sum(len(c.layers) for c in one.components if c.role in ONE_PER_LAYER)
        known = kv_buffers_at_decode(one, model, own, drafts=drafts[0])
        if not own:
            assert known == ()
            continue
        stages_with_attention += 1
        rank = here(2, pp=stages, kv_buffers_at_decode=known, kv_item_lens=here(2).kv_item_lens[:1] * own)
        decision = decide(Mode.OFF, rank, registration(2, kv_buffers=theirs), capable=True)
        if alike:
            assert decision.path is Path.UPSTREAM, decision.reason
        else:
            words = f"{ours} attention KV buffers here in all stages, {theirs} at B: is speculative"
            check_refusal(decision, words, "remove SGLANG_HETERO=off")
        if not drafts[0]:  # decode with as many stages, which never speculates
            same = decide(Mode.OFF, rank, registration(2, kv_buffers=own), capable=True)
            assert same.path is Path.UPSTREAM, same.reason
    assert stages_with_attention == 2


def test_buffers_that_no_rule_explains_are_not_counted():
    model = GEOMETRIES["tiny"]
    one = manifest(model, Side.PREFILL, Coordinates(pp_rank=1, pp_size=2), PoolOptions())
    assert kv_buffers_at_decode(one, model, 4, drafts=True) == (6,)
    assert kv_buffers_at_decode(one, model, 3, drafts=True) == ()
    stage = here(2, pp=2)
    assert decide(Mode.OFF, stage, registration(2, kv_buffers=KV_BUFFERS + 2), capable=True).path is Path.UPSTREAM


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("capable", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({"page_size": 128}, ("pages of 64 tokens here, of 128 at B", "--page-size")),
        ({"kv_dtype": "fp8_e4m3"}, ("KV cache of bfloat16 here, of fp8_e4m3 at B", "--kv-cache-dtype")),
    ],
    ids=["page-size", "dtype"],
)
def test_what_raises_in_the_schedulers_loop_is_refused_before(mode, capable, tp, peer, words):
    if mode is Mode.ALWAYS and not capable:
        words = ("SGLANG_HETERO=always",)
    check_refusal(decide(mode, here(2), route(tp, **peer), capable=capable), *words)


def test_a_route_that_does_not_say_is_no_mismatch():
    assert decide(Mode.AUTO, here(2), Route("B", 1), capable=False).path is Path.UPSTREAM


@pytest.mark.parametrize("side", ["here", "peer"])
def test_a_feature_that_our_path_does_not_serve(side):
    reason = ("Role switch is not served by this package's path: X; start without --enable-pd-role-switch",)
    mine = here(2, unsupported=reason if side == "here" else ())
    peers = [route(tp, unsupported=reason if side == "peer" else ()) for tp in (1, 2)]
    check_refusal(decide(Mode.AUTO, mine, peers[0], capable=True), "Role switch", "one TP size")
    check_refusal(decide(Mode.ALWAYS, mine, peers[1], capable=True, same_layout=True), "Role switch")
    assert decide(Mode.AUTO, mine, peers[1], capable=True, same_layout=True).path is Path.UPSTREAM
    # Such a server shows no layout.
    taken = decide(Mode.AUTO, mine, peers[1], capable=True, same_layout=None)
    assert taken.path is Path.UPSTREAM and "Role switch" in taken.reason
    check_refusal(decide(Mode.AUTO, mine, peers[0], capable=True, same_layout=None), "Role switch", "one TP size")
    check_refusal(decide(Mode.ALWAYS, mine, peers[1], capable=True, same_layout=None), "Role switch")
    check_refusal(decide(Mode.AUTO, mine, peers[1], capable=True, same_layout=False), "Role switch")
    other = replace(peers[1], page_size=128)
    check_refusal(decide(Mode.AUTO, mine, other, capable=True, same_layout=None), "--page-size")
    assert decide(Mode.OFF, mine, peers[0], capable=True).path is Path.UPSTREAM
    assert decide(Mode.AUTO, mine, peers[0], capable=False).path is Path.UPSTREAM


class TestSameLayouts:
    """Equal means that upstream may copy whole pages and slots."""

    def test_equal_sizes(self):
        for rank in range(2):
            assert same_layouts(prefill(2), decode(rank, 2))

    def test_other_pools_and_places(self):
        assert same_layouts(prefill(2), decode(1, 2, shape=Shape(pages=9, slots=5, base=1 << 33)))

    def test_pipeline_stages_of_prefill(self):
        sources = [rank.manifest for rank in prefill_ranks(MODEL, 2, SHAPE, stages=2)]
        assert same_layouts(sources, decode(1, 2))
        assert not same_layouts(sources[:2], decode(1, 2)), "the second stage is missing"

    @pytest.mark.parametrize(
        "destination",
        [
            decode(0, 1),
            decode(0, 4),
            decode(0, 2, shape=Shape(page_size=4)),
            decode(0, 2, shape=Shape(formats={Role.CONV: WINDOW_FIRST})),
            with_component(decode(0, 2), Role.CONV, dtype="float16"),
            decode(0, 2, model=MODEL[:4]),
        ],
        ids=["TP1", "TP4", "page", "conv-layout", "dtype", "no-draft"],
    )
    def test_what_differs(self, destination):
        assert not same_layouts(prefill(2, shape=Shape(formats={Role.CONV: CHANNELS_FIRST})), destination)

    def test_releases_of_sglang(self):
        """Nobody has run SGLang's own path between two releases either."""
        older = [replace_struct(one, sglang="0.5.22") for one in prefill(2)]
        assert same_layouts(older, replace_struct(decode(1, 2), sglang="0.5.22"))
        assert not same_layouts(older, decode(1, 2))
        assert not same_layouts([prefill(2)[0], older[1]], decode(0, 2))

    def test_rows_of_metadata(self):
        """SGLang's own path would take prefill's size of a column for decode's."""
        wide, narrow = ((Column("output_hidden_states", "bfloat16", nbytes, draft=True),) for nbytes in (4096, 64))
        sources = [replace_struct(one, row=wide) for one in prefill(2)]
        assert same_layouts(sources, replace_struct(decode(1, 2), row=wide))
        assert not same_layouts(sources, replace_struct(decode(1, 2), row=narrow))
        assert not same_layouts(
            [sources[0], replace_struct(sources[1], row=narrow)], replace_struct(decode(1, 2), row=wide)
        )

    def test_more_drafts_with_the_same_bytes(self):
        """Channels-first slots have no rows for drafts: then depth is in nothing that is handed over. Window-first ones
        have, so that such a pair does not take SGLang's own path, whatever its TP sizes."""
        first, more = replace(WINDOW_FIRST, dead_before=1), replace(WINDOW_FIRST, dead_before=5)
        for format_of_decode, same in ((first, True), (more, False)):
            sources = prefill(2, shape=Shape(formats={Role.CONV: first}))
            assert same_layouts(sources, decode(1, 2, shape=Shape(formats={Role.CONV: format_of_decode}))) is same

    def test_another_side_of_the_model(self):
        assert not same_layouts(prefill(2), decode(0, 2, model=(*MODEL[:3], *MODEL[4:])))
