"""What is known of older releases of SGLang. None of them is installed here: what is recorded of each stands for it."""

import ast
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sglang_hetero import releases
from sglang_hetero.backend import conv_axis, hooks, selfcheck
from sglang_hetero.backend.options import Options
from sglang_hetero.backend.selfcheck import misfit
from sglang_hetero.cpu import gaps
from sglang_hetero.cpu.gaps import Gap
from sglang_hetero.doctor import symbols
from sglang_hetero.doctor.upstream import uses
from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.releases import MADE_FOR, OLDER, Attribute, Instead, Release
from sglang_hetero.releases.symbol import Symbol

TABLES = (*selfcheck.BOOTSTRAP, *selfcheck.SERVING, *selfcheck.RANK, *conv_axis.SYMBOLS)
each_older = pytest.mark.parametrize("release", OLDER, ids=lambda release: release.number)


def parameters(signature: str) -> list[str]:
    """Names in a recorded signature `(a: int, b=1)`."""
    (function,) = ast.parse(f"def f{signature}: ...").body
    found = function.args
    return [one.arg for one in (*found.posonlyargs, *found.args, *found.kwonlyargs)]


def problems(rows, record) -> dict[str, str]:
    """What the self-check would say of the recorded release, by the row's name."""
    found = {}
    for row in rows:
        entry = record.symbols.get(str(row))
        if entry is None:
            found[str(row)] = "missing"
        elif row.parameters is not None and (problem := misfit(row, parameters(entry.signature))):
            found[str(row)] = problem
        elif row.digest not in (None, entry.digest):
            found[str(row)] = "does something else"
    return found


# --- what is recorded -------------------------------------------------------------------------------------------------


@each_older
def test_the_self_check_takes_an_older_release_with_its_own_rows(release):
    assert problems(release.rows(TABLES), symbols.recorded(release)) == {}


@each_older
def test_it_refuses_that_release_by_the_rows_of_the_newest_one(release):
    """So each row that is told to be another one has to be."""
    record = symbols.recorded(release)
    in_tables = {str(symbol) for symbol in TABLES}
    assert problems(TABLES, record).keys() == release.instead.keys() & in_tables
    assert release.instead.keys() <= in_tables | {gap.symbol for gap in gaps.gaps()}


@each_older
def test_the_record_has_every_symbol_of_that_release_and_no_other(release):
    """If this fails because a symbol was added: python -m sglang_hetero.doctor.record FOLDER (docs/versions.md)."""
    record = symbols.recorded(release)
    assert record.release == release.number
    assert record.symbols.keys() == {use.name for use in uses(release) if not use.absent}


@each_older
def test_attributes_that_are_added_are_told_as_absent(release):
    absent = {use.name for use in uses(release) if use.absent}
    assert {str(attribute) for attribute in release.attributes} <= absent


@each_older
def test_what_was_run_on_it_is_said(release):
    assert release.number in release.ran
    assert MADE_FOR.number in release.ran


# --- which one is installed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "chosen"),
    [*((release.number, release) for release in (MADE_FOR, *OLDER)), ("0.5.21", MADE_FOR), ("0.6.0.dev1", MADE_FOR)],
    ids=lambda value: value if isinstance(value, str) else value.number,
)
def test_the_release_is_chosen_by_its_number(number, chosen, monkeypatch):
    version = ModuleType("sglang.version")
    version.__version__ = number
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.version", version)
    assert releases.installed() is chosen


def test_the_newest_one_is_as_the_tables_say():
    assert MADE_FOR.rows(TABLES) == TABLES
    assert all(MADE_FOR.has(gap.symbol) for gap in gaps.gaps())
    assert not MADE_FOR.attributes


# --- on a made-up SGLang ----------------------------------------------------------------------------------------------


class Owner:
    def moved(self, room):
        return room


@pytest.fixture
def upstream(monkeypatch):
    """A module of an older release, and that release, which has one symbol elsewhere and lacks two."""
    module = ModuleType("fake_upstream")
    module.Owner = type("Owner", (Owner,), {})
    module.Info = type("Info", (), {})
    monkeypatch.setitem(sys.modules, "fake_upstream", module)
    older = Release(
        "0.0.1",
        ran="SGLang 0.0.1: a pair was run",
        instead={
            "fake_upstream.Base.moved": Instead(Symbol("fake_upstream", "Owner.moved", "room"), "elsewhere"),
            "fake_upstream.Owner.gone": Instead(None, "not needed"),
        },
        attributes=(Attribute("fake_upstream", "Info", "shared", False, "not told"),),
    )
    monkeypatch.setattr(releases, "installed", lambda: older)
    return SimpleNamespace(module=module, older=older)


NEWEST = (Symbol("fake_upstream", "Base.moved", "room"), Symbol("fake_upstream", "Owner.gone", None))


def test_rows_are_taken_from_where_they_are(upstream):
    assert len(selfcheck.check(NEWEST)) == 2
    assert selfcheck.check(upstream.older.rows(NEWEST)) == []


def test_a_symbol_that_an_older_release_lacks_too_is_told(upstream):
    row = Symbol("fake_upstream", "Owner.other", "room")
    (problem,) = selfcheck.check(upstream.older.rows((*NEWEST, row)))
    assert "fake_upstream.Owner.other is missing" in problem


def test_attributes_are_added_once_and_for_all(upstream):
    upstream.older.complete()
    upstream.older.complete()
    assert upstream.module.Info().shared is False


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        (
            Attribute("fake_upstream", "Info", "there", 1, ""),
            "Info.there is 2 in this SGLang 0.0.1; as released it has none, .* adds 1; install SGLang 0.0.1 as",
        ),
        (
            Attribute("fake_upstream", "Gone", "there", 1, ""),
            "Gone.there has no place in this SGLang 0.0.1 .*; install SGLang 0.0.1 as",
        ),
        (Attribute("no_such_module", "Info", "there", 1, ""), "no_such_module.Info.there has no place"),
    ],
    ids=["other value", "no class", "no module"],
)
def test_nothing_is_added_where_one_attribute_has_no_place(upstream, attribute, words):
    upstream.module.Info.there = 2
    release = Release("0.0.1", attributes=(Attribute("fake_upstream", "Info", "shared", False, "not told"), attribute))
    with pytest.raises(UpstreamChanged, match=words):
        release.complete()
    assert not hasattr(upstream.module.Info, "shared")


def test_a_gap_that_an_older_release_does_not_have_is_left_alone(upstream, monkeypatch):
    upstream.module.Owner.kept = 1
    table = (
        Gap("fake_upstream", "gone", "test", lambda old: 2, owner="Owner"),
        Gap("fake_upstream", "kept", "test", lambda old: 2, owner="Owner"),
    )
    monkeypatch.setattr(gaps, "gaps", lambda: table)
    gaps.close_gaps()
    assert upstream.module.Owner.kept == 2
    assert not hasattr(upstream.module.Owner, "gone")


def test_the_conv_axis_is_repaired_by_the_rows_of_the_installed_release(upstream, monkeypatch):
    upstream.module.Pool = type("Pool", (), {"__init__": lambda self, *, cache_params: None})
    monkeypatch.setattr(conv_axis, "SYMBOLS", NEWEST)
    monkeypatch.setattr(conv_axis, "INIT", Symbol("fake_upstream", "Pool.__init__"))
    before = upstream.module.Pool.__init__
    conv_axis.repair()
    assert upstream.module.Pool.__init__ is not before


@pytest.mark.parametrize("in_scheduler", [True, False])
def test_a_server_on_an_older_release_starts_and_says_so(upstream, monkeypatch, caplog, in_scheduler):
    """Up to where SGLang's own registry is asked for. Rows of the newest release would have stopped it."""

    class Enough(Exception):
        pass

    def registry(_name, *_others):
        raise Enough

    if in_scheduler:
        monkeypatch.setitem(sys.modules, hooks.SCHEDULER, ModuleType(hooks.SCHEDULER))
    else:
        monkeypatch.delitem(sys.modules, hooks.SCHEDULER, raising=False)
    monkeypatch.setattr(selfcheck, "BOOTSTRAP", NEWEST[:1])
    monkeypatch.setattr(selfcheck, "RANK", NEWEST[1:])
    monkeypatch.setattr(conv_axis, "repair", lambda: None)
    monkeypatch.setattr(hooks, "hooks", registry)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", fake_registry())
    with caplog.at_level(logging.WARNING), pytest.raises(Enough):
        hooks.install(Options())
    assert hasattr(upstream.module.Info, "shared") is in_scheduler
    assert [record.message for record in caplog.records] == (["SGLang 0.0.1: a pair was run"] if in_scheduler else [])


def fake_registry():
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = module.HookType = None
    return module
