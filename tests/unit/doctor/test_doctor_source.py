"""SGLang's symbols read from source alone: found where Python would find them, and told apart when they change."""

from pathlib import Path

import pytest

from sglang_hetero.backend import conv_axis, selfcheck
from sglang_hetero.doctor import host, symbols
from sglang_hetero.doctor.lines import Status
from sglang_hetero.doctor.source import NotFound, Release
from sglang_hetero.doctor.upstream import LAYOUTS, Purpose, Use, imports, uses
from sglang_hetero.errors import UpstreamChanged
from sglang_hetero.releases import MADE_FOR, OLDER, Attribute, Instead
from sglang_hetero.releases import Release as Served
from sglang_hetero.releases.symbol import Symbol

BASE = """
class Base:
    def poll(self, room: int, *, wait=False):
        return room

    @staticmethod
    def made(kind):
        return kind

    enabled = True
"""
CONN = """
from ..base import Base as Parent
from sglang.srt.base import Base as Direct

LIMIT: int = 8

class Sender(Parent):
    def __init__(self, mgr, addr, room=None):
        self.mgr = mgr

    async def send(self, data):
        return data

class Record(Parent):
    size: int
    name: str = "x"

if LIMIT:
    def chosen(a, b=1, *rest, c, **more): ...
else:
    def chosen(z): ...
"""
CHANGED = {"conn": [("def send(self, data)", "def post(self, data)"), ("mgr, addr, room=None", "mgr, room, addr=None")]}


def tree(folder, version="1.2.3", **changes):
    """A small release; changes: per file (old text, new text) pairs."""
    files = {"base": BASE, "conn": CONN}
    for name, pairs in changes.items():
        for old, new in pairs:
            assert old in files[name]
            files[name] = files[name].replace(old, new)
    package = folder / "sglang"
    (package / "srt" / "deep").mkdir(parents=True)
    for name in ("srt/__init__.py", "srt/deep/__init__.py"):
        (package / name).write_text("")
    (package / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    (package / "srt" / "base.py").write_text(files["base"])
    (package / "srt" / "deep" / "conn.py").write_text(files["conn"])
    (package / "srt" / "deep" / "door.py").write_text("from .conn import Sender, chosen as picked\n")
    return Release(folder)


CONN_MODULE = "sglang.srt.deep.conn"


@pytest.mark.parametrize(
    ("module", "name", "signature", "parameters"),
    [
        (CONN_MODULE, "Sender", "(mgr, addr, room=None)", ("mgr", "addr", "room")),
        (CONN_MODULE, "Sender.send", "(data)", ("data",)),
        (CONN_MODULE, "Sender.poll", "(room: int, *, wait=False)", ("room", "wait")),
        (CONN_MODULE, "Sender.made", "(kind)", ("kind",)),
        (CONN_MODULE, "Sender.enabled", "= True", None),
        (CONN_MODULE, "Record", "(size: int, name: str = 'x')", ("size", "name")),
        (CONN_MODULE, "LIMIT", "= 8", None),
        (CONN_MODULE, "Direct.poll", "(room: int, *, wait=False)", ("room", "wait")),
        (CONN_MODULE, "chosen", "(a, b=1, *rest, c, **more)", ("a", "b", "rest", "c", "more")),
        ("sglang.srt.deep.door", "picked", "(a, b=1, *rest, c, **more)", ("a", "b", "rest", "c", "more")),
        ("sglang.srt.deep.door", "Sender.poll", "(room: int, *, wait=False)", ("room", "wait")),
    ],
)
def test_a_symbol_is_found_where_python_finds_it(module, name, signature, parameters, tmp_path):
    found = tree(tmp_path).find(module, name)
    assert (found.signature, found.parameters) == (signature, parameters)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (CONN_MODULE, "nobody"),
        (CONN_MODULE, "Sender.nobody"),
        (CONN_MODULE, "LIMIT.real"),
        ("sglang.srt.none", "x"),
        ("os", "path"),
    ],
)
def test_what_is_not_there_is_said_so(module, name, tmp_path):
    with pytest.raises(NotFound):
        tree(tmp_path).find(module, name)


def test_a_module_that_cannot_be_read_is_a_missing_one(tmp_path):
    release = tree(tmp_path)
    (tmp_path / "sglang" / "srt" / "base.py").write_text("def broken(:")
    with pytest.raises(NotFound, match="cannot be read"):
        release.find("sglang.srt.base", "Base")


def test_imports_in_a_circle_end(tmp_path):
    release = tree(tmp_path)
    (tmp_path / "sglang" / "srt" / "base.py").write_text("from sglang.srt.base import ring\n")
    with pytest.raises(NotFound, match="circle"):
        release.find("sglang.srt.base", "ring")


def test_a_folder_without_sglang_is_refused(tmp_path):
    with pytest.raises(UpstreamChanged, match="unpacked wheel"):
        Release(tmp_path)


USES = (
    Use(Symbol(CONN_MODULE, "Sender.__init__", "mgr addr room"), Purpose.SERVER, where=("backend/a.py",)),
    Use(Symbol(CONN_MODULE, "Sender.send", "data"), Purpose.SERVER, where=("backend/b.py",)),
    Use(Symbol(CONN_MODULE, "Sender.poll"), Purpose.CPU, where=("cpu/gaps.py",)),
    Use(Symbol(CONN_MODULE, "chosen", "a b"), Purpose.SERVER, where=("backend/c.py",)),
    Use(Symbol(CONN_MODULE, "Sender.coming"), Purpose.CPU, absent=True, where=("cpu/gaps.py",)),
)


def compared(folder, **changes):
    known = symbols.record_of(tree(folder / "old"), USES)
    return symbols.changes(tree(folder / "new", **changes), USES, known.symbols)


def test_an_equal_release_needs_nothing(tmp_path):
    assert compared(tmp_path) == []


def test_a_renamed_symbol_and_a_changed_signature_are_listed_with_their_users(tmp_path):
    found = compared(tmp_path, **CHANGED)
    assert [(str(change.use.symbol.name), change.status) for change in found] == [
        ("Sender.__init__", Status.FAIL),
        ("Sender.send", Status.FAIL),
    ]
    needs = symbols.needs(found)
    assert needs[0].startswith(
        f"to change: {CONN_MODULE}.Sender.__init__: takes (mgr, room, addr), expected (mgr, addr"
    )
    assert needs[0].endswith("(used in backend/a.py)")
    assert "has no send (used in backend/b.py)" in needs[1]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (("a, b=1,", "a, b=2,"), Status.WARN, "was (a, b=1, *rest, c, **more), is (a, b=2, *rest, c, **more)"),
        (("**more): ...\nelse", "**more): return 1\nelse"), Status.WARN, "the body is not"),
        (("def chosen(a, b=1, *rest, c, **more): ...", "chosen = 3"), Status.FAIL, "no function any more"),
        (("async def send(self, data)", "def coming(self):\n        ...\n    async def send(self, data)"), None, None),
    ],
)
def test_how_a_change_counts(change, status, words, tmp_path):
    found = compared(tmp_path, conn=[change])
    if status is None:
        assert [(one.use.absent, one.status) for one in found] == [(True, Status.FAIL)]
        return
    assert [(one.use.symbol.name, one.status) for one in found] == [("chosen", status)]
    assert words in found[0].what


def test_what_a_body_does_counts_where_it_is_relied_on(tmp_path):
    digest = tree(tmp_path / "a").find(CONN_MODULE, "Sender.poll").digest
    use = Use(Symbol(CONN_MODULE, "Sender.poll", "room", digest=digest), Purpose.SERVER, where=("x",))
    known = symbols.record_of(tree(tmp_path / "b"), [use])
    assert symbols.changes(tree(tmp_path / "c"), [use], known.symbols) == []
    other = tree(tmp_path / "d", base=[("return room", "return -room")])
    assert [one.status for one in symbols.changes(other, [use], known.symbols)] == [Status.FAIL]


def test_only_the_cpu_platform_misses_what_only_it_needs(tmp_path):
    found = compared(tmp_path, base=[("def poll", "def look")])
    assert [one.use.purpose for one in found] == [Purpose.CPU]
    release = tree(tmp_path / "again")
    for cpu, status in ((True, Status.FAIL), (False, Status.WARN)):
        lines = symbols.lines(release, MADE_FOR, found, len(USES), cpu=cpu)
        assert lines[-1].status is status


# --- the installed one ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed():
    return host.installed()


def test_the_record_is_that_of_the_installed_release(installed):
    """If this fails because a symbol was added: python -m sglang_hetero.doctor.record."""
    assert installed.version == MADE_FOR.number
    all_uses = uses()
    assert symbols.record_of(installed, all_uses) == symbols.recorded()
    assert symbols.changes(installed, all_uses, symbols.recorded().symbols) == []


def test_the_table_has_all_that_the_package_names():
    names = {use.name for use in uses()}
    rows = (*selfcheck.BOOTSTRAP, *selfcheck.SERVING, *selfcheck.RANK, *conv_axis.SYMBOLS, *LAYOUTS)
    assert {str(symbol) for symbol in rows} <= names
    assert {f"{module}.{name}" for _, module, name in imports()} <= names
    assert all(use.where for use in uses())


def test_every_hook_is_in_the_table():
    from sglang_hetero.backend.hooks import hooks
    from sglang_hetero.backend.options import Options

    names = {use.name for use in uses()}
    assert {hook.target for hook in hooks(Options())} <= names


def test_the_digests_that_are_relied_on_are_those_of_the_source(installed):
    """They were made from the imported functions (selfcheck.digest_of): both ways must come to the same."""
    for symbol in conv_axis.SYMBOLS:
        if symbol.digest is not None:
            assert installed.find(symbol.module, symbol.name).digest == symbol.digest, symbol


@pytest.mark.parametrize("served", [MADE_FOR, *OLDER], ids=lambda release: release.number)
def test_the_package_has_its_records(served):
    assert Path(symbols.__file__).with_name(symbols.record_name(served)).is_file()


# --- an older one that is served --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (MADE_FOR.number, f"SGLang {MADE_FOR.number}"),
        ("0.0.1", "SGLang 0.0.1, a pair was run"),
        ("9.9.9", "SGLang 9.9.9, not"),
    ],
)
def test_it_is_said_what_an_older_release_is_good_for(number, said, tmp_path):
    older = Served("0.0.1", ran="SGLang 0.0.1, a pair was run")
    line, touched = symbols.lines(tree(tmp_path, number), older if number == "0.0.1" else MADE_FOR, [], 5, cpu=True)
    assert line.seen.startswith(said)
    assert (line.status is Status.OK) is (number == MADE_FOR.number)
    assert touched.status is Status.OK


def test_an_older_release_has_its_own_symbols():
    """What is in their place is looked for, what it lacks is not, and what this package adds must not be there."""
    moved, gone = selfcheck.RANK[0], selfcheck.RANK[1]
    older = Served(
        "0.0.1",
        instead={str(moved): Instead(Symbol(CONN_MODULE, "Sender.poll"), ""), str(gone): Instead(None, "")},
        attributes=(Attribute(CONN_MODULE, "Record", "shared", False, ""),),
    )
    newest, found = {use.name: use for use in uses()}, {use.name: use for use in uses(older)}
    assert newest.keys() - found.keys() == {str(moved), str(gone)}
    assert found.keys() - newest.keys() == {f"{CONN_MODULE}.Sender.poll", f"{CONN_MODULE}.Record.shared"}
    assert [name for name in found.keys() - newest.keys() if found[name].absent] == [f"{CONN_MODULE}.Record.shared"]
