"""One test per rule that refuses a pair of sides: the message names both, the rule and the remedy."""

import pytest
from msgspec.structs import replace

from sglang_hetero.errors import CoverageError, LayoutMismatch, TopologyError
from sglang_hetero.layout import AxisName, Role, Side
from sglang_hetero.layout.row import Column
from sglang_hetero.reshard import STRICT, Policy, plan
from tests.reshard_oracle import model as m
from tests.reshard_oracle.handover import prefill_ranks
from tests.reshard_oracle.pair import (
    MODEL,
    SHAPE,
    decode,
    manifest,
    prefill,
    with_axis,
    with_component,
    with_segment,
)
from tests.reshard_oracle.rank import Format, Shape

P0, P1 = r"prefill TP0/2 \(prefill-host\)", r"prefill TP1/2 \(prefill-host\)"
ANY_P = r"prefill TP[01]/2 \(prefill-host\)"
D0 = r"decode TP0/1 \(decode-host\)"


def test_the_pair_is_good_before_it_is_broken():
    assert plan(prefill(), decode()).missing == frozenset()


# --- which ranks


def test_rejects_no_sources():
    with pytest.raises(TopologyError, match=f"{D0} has no prefill rank.*give one manifest per rank"):
        plan([], decode())


def test_rejects_decode_rank_as_source():
    with pytest.raises(TopologyError, match=r"decode TP1/2 .*stands where a prefill rank is needed.*prefill to decode"):
        plan([prefill()[0], manifest(Side.DECODE, 1, 2)], decode())


def test_rejects_prefill_rank_as_destination():
    with pytest.raises(TopologyError, match=r"prefill TP0/1 .*stands where a decode rank is needed"):
        plan(prefill(), manifest())


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("tp_size", {"tp": 4}),
        ("pp_size", {"pp_size": 2}),
        ("dp_size", {"dp_size": 2}),
        ("dp_rank", {"dp_rank": 1, "dp_size": 2}),
    ],
)
def test_rejects_ranks_of_two_replicas(field, other):
    first = manifest(Side.PREFILL, 0, 2, dp_size=2) if field == "dp_rank" else prefill()[0]
    second = manifest(Side.PREFILL, 1, **({"tp": 2} | other))
    words = rf"prefill TP0/2.* has {field} \d+, prefill TP1/.*: \d+: ranks of two replicas.*give the ranks of one"
    with pytest.raises(TopologyError, match=words.replace(".*: ", ".* ")):
        plan([first, second], decode())


@pytest.mark.parametrize(("field", "value"), [("page_size", 3), ("model", "another"), ("sglang", "0.5.22")])
def test_rejects_sources_that_disagree(field, value):
    changes = {"page_size": {"shape": Shape(page_size=3)}}.get(field, {})
    second = manifest(Side.PREFILL, 1, 2, **changes)
    second = replace(second, **{field: value})
    with pytest.raises(LayoutMismatch, match=f"{P0} has {field} .*, {P1} {value}: restart the prefill server"):
        plan([prefill()[0], second], decode())


def test_rejects_two_manifests_of_one_rank():
    first, second = prefill()
    words = r"2 manifests of prefill stage 0, TP rank 1 \(prefill-host\).*drop the old manifest"
    with pytest.raises(TopologyError, match=words):
        plan([first, second, replace(second, incarnation="2")], decode())


def test_rejects_missing_ranks():
    words = (
        r"prefill server at prefill-host has 8 ranks, 7 manifests are missing: stage 0 TP rank 0, .*, stage 1 TP rank 0"
    )
    with pytest.raises(TopologyError, match=words + r", \.\.\.; wait until all"):
        plan([manifest(Side.PREFILL, 3, 4, pp_size=2)], decode())
    with pytest.raises(TopologyError, match="has 2 ranks, 1 manifests are missing: stage 0 TP rank 1; wait"):
        plan(prefill()[:1], decode())


# --- what a page, a model, a component is


def test_rejects_page_sizes_that_differ():
    """Case 18: before a byte moves, with both sizes."""
    sources, to = prefill(shape=Shape(page_size=64)), decode(shape=Shape(page_size=128))
    with pytest.raises(LayoutMismatch, match=f"{P0} has pages of 64 tokens, {D0} of 128: .*--page-size"):
        plan(sources, to)


def test_rejects_models_that_differ():
    words = f"{P0} serves model oracle, {D0} another: .*start both with the same checkpoint"
    with pytest.raises(LayoutMismatch, match=words):
        plan(prefill(), replace(decode(), model="another"))


def test_rejects_releases_of_sglang_that_differ():
    words = rf"{P0} runs SGLang 0\.5\.22, {D0} 0\.5\.23: no pair of two releases has been run.*the same SGLang on both"
    with pytest.raises(LayoutMismatch, match=words):
        plan([replace(one, sglang="0.5.22") for one in prefill()], decode())
    older = [replace(one, sglang="0.5.22") for one in (*prefill(), decode())]
    assert plan(older[:2], older[2]).missing == frozenset()


LATENT = m.latent_kv(Role.TARGET_LATENT, {"latent": 4}, (1, 3))


@pytest.mark.parametrize("on_prefill", [True, False], ids=["prefill_only", "decode_only"])
@pytest.mark.parametrize(
    ("role", "remedy"), [(Role.TARGET_LATENT, "same checkpoint"), (Role.DRAFT_LATENT, "or allow it by policy")]
)
def test_rejects_role_on_one_side(on_prefill, role, remedy):
    without = m.without_draft(MODEL)
    extra = (*without, m.latent_kv(role, {"latent": 4}, (1,)))
    sources, to = prefill(model=extra if on_prefill else without), decode(model=without if on_prefill else extra)
    has, lacks = (P0, D0) if on_prefill else (D0, P0)
    wrong_way = {"start_empty" if on_prefill else "drop": frozenset({Role.DRAFT_LATENT})}
    for policy in (STRICT, Policy(**wrong_way)):
        with pytest.raises(LayoutMismatch, match=f"{has} has {role}, {lacks} has none: .*{remedy}"):
            plan(sources, to, policy)


@pytest.mark.parametrize("on_prefill", [True, False], ids=["on_prefill", "on_decode"])
def test_rejects_two_drafts_of_different_kinds(on_prefill):
    """Policy or not: what nobody sends of a draft would be empty beside what arrives."""
    more = (*MODEL, m.latent_kv(Role.DRAFT_LATENT, {"latent": 4}, (1,)))
    sources, to = prefill(model=more if on_prefill else MODEL), decode(model=MODEL if on_prefill else more)
    both = ("draft_key, draft_latent, draft_value", "draft_key, draft_value")
    theirs, ours = both if on_prefill else both[::-1]
    with pytest.raises(LayoutMismatch, match=f"{P0} keeps its draft in {theirs}, {D0} in {ours}: .*two different"):
        plan(sources, to)


@pytest.mark.parametrize("stage", [0, 1])
def test_rejects_rows_that_differ_within_a_server(stage):
    sources = [rank.manifest for rank in prefill_ranks(MODEL, 2, SHAPE, stages=2)]
    sources[2 * stage + 1] = replace(sources[2 * stage + 1], row=(Column("output_ids", "int32", 64),))
    words = r"prefill TP0/2 .* and prefill TP1/2 .* have different rows of metadata: restart"
    with pytest.raises(LayoutMismatch, match=words):
        plan(sources, decode())


@pytest.mark.parametrize("role", [role for role in Role if not role.draft])
@pytest.mark.parametrize("field", ["drop", "start_empty"])
def test_rejects_policy_that_leaves_out_what_is_vital(role, field):
    with pytest.raises(ValueError, match=f"{role}: only draft roles can be left out"):
        Policy(**{field: frozenset({role, Role.DRAFT_KEY})})


def swapped(whole, role, order):
    """The axes of a component listed in another order."""
    axes = whole.of(role)[0].axes
    return with_component(whole, role, axes=tuple(axes[index] for index in order))


@pytest.mark.parametrize(
    ("change", "role", "what", "remedy"),
    [
        (
            lambda w: with_component(w, Role.SSM, dtype="bfloat16"),
            Role.SSM,
            "dtype float32, .*bfloat16",
            "--mamba-ssm-dtype",
        ),
        (
            lambda w: with_component(w, Role.TARGET_KEY, dtype="float16"),
            Role.TARGET_KEY,
            "dtype bfloat16, .* float16",
            "--kv-cache-dtype",
        ),
        (lambda w: with_component(w, Role.SSM, encoding="nz"), Role.SSM, "encoding plain, .*nz", "same kind of device"),
        (lambda w: swapped(w, Role.CONV, (1, 0)), Role.CONV, "axes channel, window, .*window, channel", "same SGLang"),
        (lambda w: swapped(w, Role.SSM, (0, 2, 1)), Role.SSM, "axes head, state_row, state_column", "same SGLang"),
        (
            lambda w: with_segment(w, Role.CONV, 0, name="k"),
            Role.CONV,
            "axis channel with segments q 4 x 2 by head, .*k 4 x 2 by head",
            "same checkpoint",
        ),
        (
            lambda w: with_segment(with_segment(w, Role.CONV, 0, heads=2, width=4), Role.CONV, 1, heads=4),
            Role.CONV,
            "axis channel with segments q 4 x 2 by head, .*q 2 x 4 by head",
            "same checkpoint",
        ),
        (
            lambda w: with_axis(w, Role.CONV, AxisName.WINDOW, live=(1, 2)),
            Role.CONV,
            "live size of axis window 3, .* 2",
            "same checkpoint",
        ),
    ],
)
def test_rejects_component_that_means_something_else(change, role, what, remedy):
    words = f"{role}: {ANY_P} has {what}.*{remedy}"
    with pytest.raises(LayoutMismatch, match=words) as error:
        plan(prefill(), change(decode()))
    assert "decode TP0/1 (decode-host)" in str(error.value)


def test_rejects_state_of_another_width():
    sources = prefill(model=(*MODEL[:3], m.ssm(8, 2, 4, (0, 2)), *MODEL[4:]))
    with pytest.raises(LayoutMismatch, match=f"ssm: {ANY_P} has live size of axis state_column 4, {D0} 3; start both"):
        plan(sources, decode())


OPAQUE = {Role.TARGET_LATENT: Format(encoding="packed")}


def test_rejects_opaque_pages_that_lie_differently():
    form = Format(encoding="packed", order=(1, 0))
    sources = prefill(model=(LATENT,), shape=Shape(formats=OPAQUE))
    to = decode(model=(LATENT,), shape=Shape(formats={Role.TARGET_LATENT: form}))
    words = f"target_latent: {ANY_P} and {D0} keep it in encoding packed.*same TP size on both sides, or the plain"
    with pytest.raises(LayoutMismatch, match=words):
        plan(sources, to)


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2)])
def test_rejects_opaque_pages_that_are_cut(p, d):
    shape = Shape(formats={Role.TARGET_KEY: Format(encoding="packed")})
    sources, to = prefill(p, model=MODEL[:1], shape=shape), decode(0, d, model=MODEL[:1], shape=shape)
    with pytest.raises(LayoutMismatch, match=r"target_key: .*encoding packed.*same TP size on both sides"):
        plan(sources, to)


def test_rejects_decode_with_stages():
    with pytest.raises(TopologyError, match=r"decode TP0/1 PP0/2 .*start decode without --pp-size"):
        plan(prefill(), decode(pp_size=2))


# --- which layers


def test_rejects_layer_that_no_source_holds():
    sources = prefill(model=(m.heads_kv(Role.TARGET_KEY, 4, 3, (1,)), *MODEL[1:]))
    words = f"layer 3 of target_key is held by no rank of prefill at prefill-host, but {D0} needs it .*start both"
    with pytest.raises(CoverageError, match=words):
        plan(sources, decode())


def test_rejects_layer_that_one_rank_of_a_stage_lacks():
    """TP rank 1 has lost a layer that rank 0 still has."""
    first, second = prefill()
    short = with_component(second, Role.CONV, layers=(0,), addresses=second.of(Role.CONV)[0].addresses[:1])
    words = rf"layer 2 of conv is held by TP ranks \[0\] of stages \[0\] of prefill at prefill-host, but {D0} needs it"
    with pytest.raises(CoverageError, match=words):
        plan([first, short], decode())


def test_rejects_role_that_one_rank_of_a_stage_lacks():
    first, second = prefill()
    short = replace(second, components=tuple(part for part in second.components if part.role is not Role.SSM))
    with pytest.raises(CoverageError, match=r"layer 0 of ssm is held by TP ranks \[0\] of stages \[0\]"):
        plan([first, short], decode())


def test_rejects_layer_that_two_stages_hold():
    """Whose bytes are right nobody can know."""
    both = [manifest(Side.PREFILL, 0, 1, pp_rank=stage, pp_size=2) for stage in (0, 1)]
    with pytest.raises(CoverageError, match=r"layer 1 of target_key is held by TP ranks \[0, 0\] of stages \[0, 1\]"):
        plan(both, decode())


def test_rejects_layer_that_only_prefill_holds():
    """A decode rank that runs all layers but describes fewer would run the others on old state."""
    to = with_component(decode(), Role.SSM, layers=(0,), addresses=decode().of(Role.SSM)[0].addresses[:1])
    with pytest.raises(LayoutMismatch, match=f"ssm: {P0} and its peers have layers 2, {D0} does not; start both"):
        plan(prefill(), to)
