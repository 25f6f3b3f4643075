"""The check of upstream's symbols, on a module that is made up."""

import sys
from types import ModuleType

import pytest

from sglang_hetero.backend import conv_axis, selfcheck
from sglang_hetero.backend.selfcheck import check, digest_of, require
from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.releases.symbol import Symbol


class Owner:
    flag = True

    def method(self, first, second, third=None):
        return first

    def plain(self):
        return 1


@pytest.fixture(autouse=True)
def upstream(monkeypatch):
    module = ModuleType("fake_upstream")
    module.Owner, module.function = Owner, Owner.method
    monkeypatch.setitem(sys.modules, "fake_upstream", module)
    return module


def row(name, *rest, **named):
    return Symbol("fake_upstream", name, *rest, **named)


@pytest.mark.parametrize(
    "symbol",
    [
        row("Owner"),
        row("Owner.method"),
        row("Owner.method", "first second"),
        row("Owner.method", "first third"),
        row("Owner.plain"),
        row("Owner.flag", None),
        row("function", "second"),
        row("Owner.plain", digest=digest_of(Owner.plain)),
    ],
    ids=str,
)
def test_what_is_as_expected(symbol):
    assert check([symbol]) == []
    require([symbol])


@pytest.mark.parametrize(
    ("symbol", "problem"),
    [
        (Symbol("no_such_module", "x"), "no_such_module.x is missing (ModuleNotFoundError: "),
        (row("Gone.method"), "fake_upstream.Gone.method is missing"),
        (row("Owner.gone"), "fake_upstream.Owner.gone is missing"),
        (row("Owner.gone", None), "fake_upstream.Owner.gone is missing"),
        (row("Owner.flag"), "fake_upstream.Owner.flag is no function any more"),
        (
            row("Owner.method", "first fourth"),
            "fake_upstream.Owner.method takes (first, second, third), expected (first, fourth)",
        ),
        (row("Owner.method", "second first"), "expected (second, first)"),
        (row("Owner.method", digest="0" * 16), "fake_upstream.Owner.method does something else now"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not(symbol, problem):
    (found,) = check([symbol])
    assert problem in found


def test_everything_that_changed_is_said_at_once(upstream, monkeypatch):
    monkeypatch.delattr(Owner, "plain")
    monkeypatch.setattr(Owner, "method", lambda self, other: other)
    with pytest.raises(UpstreamChanged) as error:
        require([row("Owner.plain"), row("Owner"), row("Owner.method", "first")])
    text = str(error.value)
    assert "Owner.plain is missing" in text
    assert "Owner.method takes (other), expected (first)" in text
    assert "SGLang 0.5.23; install that version" in text
    assert "\n" not in text


def test_a_body_that_changed_is_seen_whatever_its_indentation():
    def same(self):
        return 1

    def other(self):
        return 2

    assert digest_of(same) != digest_of(other)
    assert digest_of(Owner.plain) == digest_of(Owner.plain)
    assert digest_of(len) == "none"


def test_a_module_that_fails_while_it_is_imported(monkeypatch, tmp_path):
    (tmp_path / "broken_upstream.py").write_text("raise RuntimeError('no device')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = check([Symbol("broken_upstream", "x")])
    assert "is missing (RuntimeError: no device)" in found


def test_no_symbol_stands_in_the_table_twice():
    symbols = [str(symbol) for symbol in selfcheck.BOOTSTRAP + selfcheck.RANK]
    assert len(set(symbols)) == len(symbols)
    assert all(symbol.module.startswith("sglang.srt.") for symbol in selfcheck.RANK + conv_axis.SYMBOLS)


def test_a_changed_sender_leaves_the_conv_axis_alone(monkeypatch):
    monkeypatch.setattr(conv_axis, "SYMBOLS", (row("Owner.method", digest="0" * 16),))
    monkeypatch.setattr(conv_axis, "INIT", row("Owner.method"))
    before = Owner.method
    with pytest.raises(UpstreamChanged, match="something else"):
        conv_axis.repair()
    assert Owner.method is before
