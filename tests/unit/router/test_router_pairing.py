"""Who fits whom, and what is said of those that do not."""

import itertools
import re
from dataclasses import replace as replace_known
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from sglang_hetero.discovery.record import Description
from sglang_hetero.errors import RecordError
from sglang_hetero.layout import wire
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.config import geometry_from_config
from sglang_hetero.layout.manifest import Coordinates, Manifest, Side
from sglang_hetero.layout.row import Column
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.models import spec
from sglang_hetero.models.config import model_config
from sglang_hetero.router import pairing
from sglang_hetero.router.pairing import Fit, Known, Pairing, Unknown, described, stock
from tests.reshard_oracle.pair import with_component
from tests.unit.discovery.servers import decode_server, manifests, prefill_server

GEOMETRY = geometry_from_config(model_config(spec("tiny")))


def prefill(tp: int = 2, **fields: object) -> Known:
    return _known(prefill_server(tp_size=tp), manifests(Side.PREFILL, tp), fields)


def decode(tp: int = 1, **fields: object) -> Known:
    return _known(decode_server(tp_size=tp), manifests(Side.DECODE, tp), fields)


def _known(instance, ranks, fields) -> Known:
    instance_fields = {name: fields.pop(name) for name in ("url", "model", "messages") if name in fields}
    given = {"told": True, "ranks": ranks, "mode": "auto", "backend": "mooncake", "why": "", **fields}
    return Known(replace(instance, **instance_fields), **given)


@pytest.mark.parametrize(("left", "right"), list(itertools.product((1, 2, 4), repeat=2)))
def test_sizes_that_can_be_planned_fit(left: int, right: int) -> None:
    verdict = Pairing().judge(prefill(left), decode(right))
    assert verdict.fit is Fit.YES
    assert ("same layout" in verdict.reason) == (left == right)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "Qwen3.6"}, "Qwen3.5.*Qwen3.6.*--served-model-name"),
        ({"messages": 3}, "version 2.*3.*same release"),
        ({"backend": "ascend"}, "mooncake.*ascend.*--disaggregation-transfer-backend"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2], ids=["other layouts", "the same layout"])
def test_what_both_say_must_be_alike(changes: dict[str, object], told: str, tp: int) -> None:
    left, right = prefill(2), decode(tp, **changes)
    verdict = Pairing().judge(left, right)
    assert verdict.fit is Fit.NO
    assert left.instance.label in verdict.reason and right.instance.label in verdict.reason
    assert re.search(told, verdict.reason)


def test_a_refusal_is_that_of_plan() -> None:
    other = tuple(replace(one, model="another checkpoint") for one in manifests(Side.DECODE, 1))
    verdict = Pairing().judge(prefill(), decode(ranks=other))
    assert verdict.fit is Fit.NO
    assert "start both with the same checkpoint" in verdict.reason


@pytest.mark.parametrize("tp", [1, 2])
def test_two_releases_of_sglang_are_no_pair(tp: int) -> None:
    """Unless it is left to SGLang, on both sides."""

    def older(side: Side, size: int) -> tuple[Manifest, ...]:
        return tuple(replace(one, sglang="0.5.22") for one in manifests(side, size))

    left, right = prefill(ranks=older(Side.PREFILL, 2)), decode(tp)
    assert left.layout != prefill(2).layout
    for unknown in Unknown:
        verdict = Pairing(unknown).judge(left, right)
        assert verdict.fit is Fit.NO
        for words in (left.instance.label, right.instance.label, "0.5.22", "0.5.23", "install the same SGLang"):
            assert words in verdict.reason
    assert Pairing().judge(left, decode(ranks=older(Side.DECODE, tp))).fit is Fit.YES
    off = [replace_known(one, mode="off") for one in (left, right)]
    assert Pairing().judge(*off).fit is Fit.YES and Pairing(Unknown.NEVER).judge(*off).fit is Fit.NO


def test_every_rank_of_decode_is_looked_at() -> None:
    ranks = manifests(Side.DECODE, 4)
    wrong = (*ranks[:3], with_component(ranks[3], Role.SSM, dtype="bfloat16"))
    verdict = Pairing().judge(prefill(2), decode(ranks=wrong))
    assert verdict.fit is Fit.NO and "--mamba-ssm-dtype" in verdict.reason


def test_servers_of_which_one_rank_differs_have_not_the_same_layout() -> None:
    first, second = manifests(Side.DECODE, 2)
    wrong = (first, with_component(second, Role.SSM, dtype="bfloat16"))
    assert Pairing().judge(prefill(2), decode(ranks=wrong)).fit is Fit.NO


def test_a_rank_of_prefill_that_is_missing_is_noticed() -> None:
    verdict = Pairing().judge(prefill(ranks=manifests(Side.PREFILL, 2)[:1]), decode())
    assert verdict.fit is Fit.NO and "missing" in verdict.reason


def test_every_replica_of_prefill_is_looked_at() -> None:
    def replica(number: int, model: str = "m"):
        ranks = manifests(Side.PREFILL, 2, model=model)
        return tuple(replace(one, coordinates=replace(one.coordinates, dp_rank=number, dp_size=2)) for one in ranks)

    assert Pairing().judge(prefill(ranks=replica(0) + replica(1)), decode()).fit is Fit.YES
    verdict = Pairing().judge(prefill(ranks=replica(0) + replica(1, "other")), decode())
    assert verdict.fit is Fit.NO


def test_a_pair_is_planned_once_for_all_servers_of_the_same_layouts() -> None:
    with patch.object(pairing, "plan", wraps=pairing.plan) as plan:
        judge = Pairing()
        for number in range(3):
            verdict = judge.judge(prefill(url=f"http://p{number}:1"), decode(url=f"http://d{number}:1"))
            assert f"http://p{number}:1" in verdict.reason and f"http://d{number}:1" in verdict.reason
        assert plan.call_count == 1
        judge.judge(prefill(4), decode())
        assert plan.call_count == 2


def test_replicas_and_ranks_that_are_alike_are_planned_once() -> None:
    ranks = tuple(
        replace(one, coordinates=replace(one.coordinates, dp_rank=number, dp_size=3))
        for number in range(3)
        for one in manifests(Side.PREFILL, 2)
    )
    with patch.object(pairing, "plan", wraps=pairing.plan) as plan:
        Pairing().judge(prefill(ranks=ranks), decode())
        assert plan.call_count == 1


def test_a_restarted_server_needs_no_other_plan_but_other_settings_do() -> None:
    again = prefill(ranks=manifests(Side.PREFILL, 2, host="other:1", incarnation="second", shift=4096))
    assert again.layout == prefill().layout
    changed = (
        prefill(mode="always"),
        prefill(4),
        prefill(unsupported=("x",)),
        prefill(model="x"),
        stock(prefill_server()),
    )
    assert len({one.layout for one in (again, *changed)}) == 6


def test_manifests_that_break_the_planner_cost_their_own_pair_only() -> None:
    with patch.object(pairing, "plan", side_effect=ZeroDivisionError("0")):
        verdict = Pairing().judge(prefill(), decode())
    assert verdict.fit is Fit.NO and "ZeroDivisionError" in verdict.reason


def test_a_server_that_has_told_nothing_is_waited_for() -> None:
    silent = Known(decode_server(), why="no answer to /hetero/instance: refused")
    for judge in (Pairing(unknown) for unknown in Unknown):
        verdict = judge.judge(prefill(), silent)
        assert verdict.fit is Fit.PENDING and "refused" in verdict.reason and silent.instance.label in verdict.reason


UNKNOWN = {
    "stock": lambda side: stock(prefill_server() if side is prefill else decode_server()),
    "off": lambda side: side(mode="off"),
    "unsupported": lambda side: side(unsupported=("Prefill context parallelism; start without it",)),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_server_of_which_nothing_is_known_is_paired_as_the_option_says(kind: str) -> None:
    left, right = UNKNOWN[kind](prefill), UNKNOWN[kind](decode)
    for unknown, like, unlike in (
        (Unknown.LIKE, Fit.YES, Fit.NO),
        (Unknown.ANY, Fit.YES, Fit.YES),
        (Unknown.NEVER, Fit.NO, Fit.NO),
    ):
        judge = Pairing(unknown)
        assert judge.judge(left, right).fit is like
        for one, other in ((left, decode()), (prefill(), right)):
            verdict = judge.judge(one, other)
            assert verdict.fit is unlike
            assert unlike is Fit.YES or "--allow-unknown" in verdict.reason


def test_servers_that_take_sglangs_path_fit_whenever_their_layouts_are_the_same() -> None:
    assert Pairing(Unknown.NEVER).judge(prefill(2, mode="off"), decode(2)).fit is Fit.YES


HIDDEN = {True: Column("output_hidden_states", "bfloat16", 256, draft=True)}
HIDDEN[False] = replace(HIDDEN[True], dtype="float32", nbytes=64)
TOKEN = Column("output_ids", "int32", 64)


def speculating(side: Side, tp: int, drafts: bool, rows: int = 3, hidden: Column | None = None) -> tuple[Manifest, ...]:
    """Ranks of a server that speculates or does not; rows: of a window-first conv slot."""
    options = PoolOptions(conv_layout=ConvLayout.WINDOW_FIRST, draft_rows=rows - 3)
    row = (TOKEN, hidden or HIDDEN[drafts])
    places = [Coordinates(tp_rank=rank, tp_size=tp) for rank in range(tp)]
    return tuple(manifest(GEOMETRY, side, place, options, draft=drafts, row=row) for place in places)


@pytest.mark.parametrize("unknown", Unknown)
@pytest.mark.parametrize("limited", ["off", "unsupported", "prefill", "decode"])
@pytest.mark.parametrize(("theirs", "ours"), [(False, True), (True, False)], ids=["decode drafts", "prefill drafts"])
@pytest.mark.parametrize("tp", [1, 2])
def test_sglangs_own_path_is_not_taken_where_only_one_side_drafts(theirs, ours, limited, unknown, tp) -> None:
    """It would say success, and a hidden state would land in another request's row (docs/speculation.md)."""
    changes = {"mode": "off", "why": "SGLANG_HETERO=off"}
    if limited == "unsupported":
        changes = {"unsupported": ("Role switch; start without it",), "why": "Role switch; start without it"}
    left = prefill(ranks=speculating(Side.PREFILL, 2, theirs), **({} if limited == "decode" else changes))
    right = decode(ranks=speculating(Side.DECODE, tp, ours), **({} if limited == "prefill" else changes))
    verdict = Pairing(unknown).judge(left, right)
    assert verdict.fit is Fit.NO
    says = {True: "speculates", False: "does not speculate"}
    for words in (
        left.instance.label,
        right.instance.label,
        f"prefill {says[theirs]}, decode {says[ours]}",
        "lands in another request's row",
        changes["why"],
        "start both with the same speculative decoding",
    ):
        assert words in verdict.reason, (words, verdict.reason)
    # This package's path serves them.
    free = [replace_known(one, mode="auto", unsupported=()) for one in (left, right)]
    assert Pairing(unknown).judge(*free).fit is Fit.YES


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ({"rows": 4}, {"rows": 8}, "conv slots have 4 rows on prefill and 8 on decode"),
        ({}, {"hidden": replace(HIDDEN[True], nbytes=512)}, "columns of the row with the first token have other sizes"),
    ],
    ids=["depth", "hidden state"],
)
def test_nor_where_two_speculate_differently(theirs, ours, words) -> None:
    left = prefill(ranks=speculating(Side.PREFILL, 2, True, **theirs), mode="off")
    right = decode(ranks=speculating(Side.DECODE, 2, True, **ours), mode="off")
    verdict = Pairing().judge(left, right)
    assert verdict.fit is Fit.NO and words in verdict.reason, verdict.reason
    alike = [speculating(side, tp, True, **theirs) for side, tp in ((Side.PREFILL, 2), (Side.DECODE, 1))]
    both = Pairing().judge(prefill(ranks=alike[0], mode="off"), decode(ranks=alike[1], mode="off"))
    assert both.fit is Fit.YES and "which decides itself" in both.reason


def description(**changes: object) -> Description:
    given = {
        "instance": replace(prefill_server(), url="http://0.0.0.0:30000", bootstrap_port=9000, model="said"),
        "mode": "auto",
        "backend": "mooncake",
        "manifests": tuple(wire.encode(one) for one in manifests(Side.PREFILL, 2)),
        **changes,
    }
    return Description(**given)


def test_what_a_server_says_completes_what_is_known_of_it() -> None:
    found = replace(prefill_server(), bootstrap_port=0, model="", tp_size=0, fingerprint="", incarnation="")
    known = described(found, description())
    assert known.told and known.ours and len(known.ranks) == 2
    one = known.instance
    # It is reached where it was found, whatever it says of its own address.
    assert (one.url, one.bootstrap_port, one.model, one.tp_size) == (found.url, 9000, "said", 2)
    assert described(prefill_server(bootstrap_port=7), description()).instance.bootstrap_port == 7


def test_a_server_whose_ranks_have_not_all_told_is_waited_for() -> None:
    known = described(prefill_server(), description(manifests=(), notes=("rank 1 has not told yet",)))
    assert not known.told and "rank 1" in known.why
    final = described(prefill_server(), description(manifests=(), notes=("8 of 16 ranks have not told",), final=True))
    assert final.told and not final.ours and "8 of 16" in final.why  # a server of several nodes: of unknown layout
    assert described(prefill_server(), description(manifests=(), final=True)).why == "no manifests"
    assert described(prefill_server(), description(manifests=(), unsupported=("a feature",))).told
    # Ranks with SGLANG_HETERO=off tell, too; of a former release they do not, and their server says that it is final.
    off = description(manifests=(), mode="off")
    assert not described(prefill_server(), off).told
    known = described(prefill_server(), replace(off, final=True))
    assert known.told and known.why == "SGLANG_HETERO=off"


def test_a_server_of_the_other_role_and_manifests_that_are_none_are_refused() -> None:
    with pytest.raises(RecordError, match=r"says that it is a prefill server"):
        described(decode_server(), description())
    with pytest.raises(RecordError):
        described(prefill_server(), description(manifests=(b"SGHM nonsense",)))


def test_a_server_that_would_take_too_many_plans_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "MAX_PLANS", 1)
    assert Pairing().judge(prefill(2), decode(1)).fit is Fit.YES
    monkeypatch.setattr(pairing, "MAX_PLANS", 0)
    with patch.object(pairing, "plan") as plan:
        verdict = Pairing().judge(prefill(2), decode(1))
    assert verdict.fit is Fit.NO and "1 kinds of ranks" in verdict.reason and not plan.called


def test_a_fingerprint_is_that_of_what_is_shown_and_a_reason_is_bounded() -> None:
    honest, liar = (described(prefill_server(fingerprint=text), description()) for text in ("", "f" * 32))
    assert honest.instance.fingerprint == liar.instance.fingerprint != "f" * 32
    silent = described(prefill_server(), description(manifests=(), notes=("n" * 1000,) * 64, final=True))
    assert silent.instance.fingerprint == "" and len(silent.why) == pairing.MAX_WHY
