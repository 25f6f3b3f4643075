"""From spans to a file, and from files to one axis of time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hetero.errors import OptionError, TraceError
from sglang_hetero.perf import parts, perfetto, spans
from sglang_hetero.perf.spans import NO_TRACE, Trace, Track, trace_in

SECOND = 1_000_000_000
ROOM = (1 << 63) - 2


def trace(folder, side, rank, monotonic=0.0, wall=0):
    return Trace(folder, side, rank, monotonic=lambda: monotonic, wall=lambda: wall)


@pytest.fixture
def run(tmp_path):
    """Two prefill ranks whose monotonic clocks differ by 1000 s, and a decode rank, on one wall clock."""
    first = trace(tmp_path, "prefill", "prefill TP0/2 (a:1)", monotonic=10.0, wall=100 * SECOND)
    second = trace(tmp_path, "prefill", "prefill TP1/2 (a:1)", monotonic=1010.0, wall=100 * SECOND)
    decode = trace(tmp_path, "decode", "decode TP0/1 (b:2)", monotonic=5.0, wall=101 * SECOND)
    for rank, zero in ((first, 10.0), (second, 1010.0)):
        rank.span(Track.FORWARD, "chunk 1", zero + 1, zero + 2, ROOM, tokens=100, chunk=1)
        rank.span(Track.FORWARD, "chunk 2", zero + 2, zero + 3, ROOM, tokens=50, chunk=2)
        rank.instant(Track.FORWARD, "prefill ended", zero + 3, ROOM)
        rank.span(Track.LINK, "kv", zero + 2, zero + 2.5, ROOM, peer="decode TP0/1 (b:2)", bytes={"kv": 1000})
        rank.span(Track.LINK, "state", zero + 3, zero + 3.5, ROOM, peer="decode TP0/1 (b:2)", bytes={"state": 500})
    second.span(Track.FORWARD, "chunk 1", 1011.001, 1011.999, 5, tokens=8, chunk=1)
    decode.span(Track.WAIT, "window wait", 5.25, 5.5, ROOM)
    decode.span(Track.MERGE, "merge kv", 6.5, 7.0, ROOM, bytes=2000)
    decode.span(Track.SCHEDULER, "merge state", 7.5, 7.75, ROOM, bytes=1000)
    decode.instant(Track.SCHEDULER, "first response", 8.0, ROOM)
    for each in (first, second, decode):
        each.close()
    return tmp_path


def test_times_of_all_ranks_are_on_one_axis(run):
    found = parts.read(run)
    assert [process.rank for process in found.processes] == [
        "decode TP0/1 (b:2)",
        "prefill TP0/2 (a:1)",
        "prefill TP1/2 (a:1)",
    ]
    assert not found.problems
    passes = [(event.process.rank[8:11], event.at, event.took) for event in found.events if event.name == "chunk 2"]
    assert passes == [("TP0", 102 * SECOND, SECOND), ("TP1", 102 * SECOND, SECOND)]
    (merge,) = [event for event in found.events if event.name == "merge kv"]
    assert (merge.at, merge.took, merge.room, merge.details) == (int(102.5e9), SECOND // 2, ROOM, {"bytes": 2000})


def test_the_file_of_chromes_format(run):
    said = perfetto.chrome(parts.read(run))
    entries = said["traceEvents"]
    assert {entry["ph"] for entry in entries} == {"M", "X", "i"}
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in entries if e["name"] == "process_sort_index"}
    assert [processes[pid] for pid in sorted(processes, key=order.get)] == [
        "prefill ranks",
        "link",
        "decode merges",
        "decode scheduler",
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert list(names.values()) == [
        "prefill TP0/2 (a:1)",
        "prefill TP1/2 (a:1)",
        "prefill TP0/2 (a:1) -> decode TP0/1 (b:2)",
        "prefill TP1/2 (a:1) -> decode TP0/1 (b:2)",
        "decode TP0/1 (b:2)",
        "decode TP0/1 (b:2)",
        "decode TP0/1 (b:2), waits",
    ]
    drawn = [(names[e["pid"], e["tid"]], e["name"], e["ts"], e.get("dur")) for e in entries if e["ph"] != "M"]
    # The axis begins with the first pass, at 101 s; decode's anchor is 101 s, too.
    assert ("prefill TP0/2 (a:1)", "chunk 2", 1e6, 1e6) in drawn
    assert ("decode TP0/1 (b:2), waits", "window wait", 0.25e6, 0.25e6) in drawn
    assert ("decode TP0/1 (b:2)", "first response", 3e6, None) in drawn
    assert ("prefill TP1/2 (a:1) -> decode TP0/1 (b:2)", "state", 2e6, 0.5e6) in drawn
    assert json.loads(json.dumps(said, allow_nan=False)) == said


def test_requests_of_one_pass_are_one_span_with_both_rooms(run):
    entries = perfetto.chrome(parts.read(run))["traceEvents"]
    (both,) = [e for e in entries if e["name"] == "2 requests"]
    assert both["args"] == {"tokens": 108, "rank": "prefill TP1/2 (a:1)", "rooms": f"{ROOM} 5"}
    assert (both["ts"], both["dur"]) == (0.0, 1e6)


def test_one_request_only(run):
    found = parts.read(run).of(5)
    assert [event.name for event in found.events] == ["chunk 1"]
    with pytest.raises(TraceError, match="nothing of room 6"):
        parts.read(run).of(6)


def test_spans_that_overlap_get_threads_of_their_own(tmp_path):
    rank = trace(tmp_path, "prefill", "r")
    for start, end in [(0, 2), (1, 3), (2, 4), (3, 5), (7, 8), (8, 9)]:
        rank.span(Track.LINK, f"{start}", start, end, 1, peer="p")
    rank.close()
    lanes = perfetto.lanes(parts.read(tmp_path))
    assert [[event.name for event in lane.events] for lane in lanes] == [["0", "2", "7", "8"], ["1", "3"]]


def test_figures_of_the_requests(run):
    first, second = perfetto.rooms(parts.read(run))
    assert (first.room, first.tokens, first.nbytes) == (ROOM, 150, {"kv": 2000, "state": 1000})
    assert first.early == pytest.approx(2 / 3)
    assert (first.last_byte - first.first_byte, first.prefill_ended - first.first_pass) == (int(1.5e9), 2 * SECOND)
    assert first.first_response == 104 * SECOND
    assert (second.room, second.tokens, second.early) == (5, 8, None)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"SGLANG_HETERO_TRACE=.*no trace can be written there"):
        Trace(tmp_path / "file" / "below", "prefill", "r")
    with pytest.raises(OptionError):
        spans.prepare(tmp_path / "file")
    assert trace_in(None, "prefill", "r") is NO_TRACE
    made = trace_in(str(tmp_path / "a" / "b"), "prefill", "r")
    made.close()
    assert [path.parent for path in tmp_path.rglob(f"*{spans.SUFFIX}")] == [tmp_path / "a" / "b"]


def test_what_waits_to_be_written_is_bounded_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "MAX_WAITING", 10)
    monkeypatch.setattr(spans, "FLUSH_SECONDS", 3600)
    rank = trace(tmp_path, "prefill", "r")
    for _ in range(25):
        rank.instant(Track.FORWARD, "x", 0.0, 1)
    rank.close()
    found = parts.read(tmp_path)
    assert (len(found.events), found.dropped) == (10, 15)
    assert "15 spans were dropped" in parts.where(found)


def test_a_file_grows_to_its_limit(tmp_path, monkeypatch, caplog):
    """It says once that it is full, at once in the file, too; all that came later is counted when it is closed."""
    monkeypatch.setattr(spans, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(spans, "FLUSH_SECONDS", 3600)
    rank = trace(tmp_path, "prefill", "r")
    sizes = []
    for _ in range(6):
        for number in range(5):
            rank.instant(Track.FORWARD, f"{number}", 0.0, 1)
        rank.flush()
        sizes.append(rank.path.stat().st_size)
    kept = len(parts.read(tmp_path).events)
    assert 5 < kept < 20
    assert parts.read(tmp_path).dropped == -kept % 5 > 0, "a server that is killed has said that something is missing"
    assert sizes[-1] == sizes[-2] <= 1000 + len('{"dropped": 1}\n')
    rank.instant(Track.FORWARD, "late", 0.0, 1)
    assert not rank._waiting, "what is dropped takes memory"
    rank.close()
    found = parts.read(tmp_path)
    assert (len(found.events), found.dropped, found.bad) == (kept, 31 - kept, 0)
    assert f"{31 - kept} spans were dropped" in parts.where(found)
    assert [record.message for record in caplog.records if "dropped and counted" in record.message] == [
        f"{rank.path} has 0 MiB, as much as a trace may: what comes from now on is dropped and counted"
    ]


def test_what_was_in_a_file_before_counts(tmp_path, monkeypatch):
    """A process may get the number of an earlier one, and with it its file."""
    monkeypatch.setattr(spans, "MAX_FILE_BYTES", 1000)
    for turn in range(3):
        rank = trace(tmp_path, "prefill", "r")
        for number in range(9):
            rank.instant(Track.FORWARD, f"{turn} {number}", 0.0, 1)
        rank.close()
    found = parts.read(tmp_path)
    assert len(found.events) + found.dropped == 27
    assert found.events[-1].name < "2", "the last process found its file full"


def test_a_file_that_cannot_be_written_does_not_end_the_caller(tmp_path, caplog):
    rank = trace(tmp_path, "prefill", "r")
    rank.instant(Track.FORWARD, "x", 0.0, 1, what=object())  # no JSON
    rank.flush()
    assert "is not written any more" in caplog.text
    rank.instant(Track.FORWARD, "y", 0.0, 1)
    rank.close()


def test_a_process_that_ends_writes_what_it_has(tmp_path):
    program = (
        "import sys; from pathlib import Path; from sglang_hetero.perf.spans import Trace, Track\n"
        "Trace(Path(sys.argv[1]), 'decode', 'r').instant(Track.WAIT, 'last', 1.0, 3)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
    assert [event.name for event in parts.read(tmp_path).events] == ["last"]


def test_nothing_of_ours_needs_torch_or_sglang():
    program = (
        "import sys, sglang_hetero.perf.records, sglang_hetero.perf.perfetto, sglang_hetero.perf.command\n"
        "sys.exit(bool({'torch', 'sglang', 'matplotlib'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0


HEAD = {"version": 1, "side": "prefill", "rank": "r", "pid": 1, "start": 0}
GOOD = {"track": "link", "name": "n", "at": 5, "took": 1, "room": 2, "details": {"peer": "p", "bytes": {"kv": 1}}}


def hostile(**fields):
    return json.dumps({**GOOD, **fields})


BAD = {
    "no JSON": "{",
    "no object": "[1]",
    "not a number": hostile(details={"x": float("nan")}),
    "infinite": hostile(details={}).replace("{}", '{"x": 1e999}'),
    "deep": "[" * 20000,
    "unknown track": hostile(track="elsewhere"),
    "track of another type": hostile(track=["link"]),
    "no name": hostile(name=""),
    "long name": hostile(name="x" * 201),
    "name of another type": hostile(name=3),
    "negative time": hostile(at=-1),
    "time with a fraction": hostile(at=1.5),
    "time that is a bool": hostile(at=True),
    "huge time": hostile(at=1 << 63),
    "end beyond": hostile(at=(1 << 63) - 1, took=1),
    "digits without end": hostile(at=5).replace(": 5", ": " + "9" * 5000),
    "negative duration": hostile(took=-1),
    "room of another type": hostile(room="2"),
    "details of another type": hostile(details=[1]),
    "a detail that is a list": hostile(details={"x": [1]}),
    "a detail that is deep": hostile(details={"x": {"y": {"z": 1}}}),
    "many details": hostile(details={str(number): 1 for number in range(33)}),
    "unknown version": json.dumps({**HEAD, "version": 2}),
    "unknown side": json.dumps({**HEAD, "side": "router"}),
    "long line": hostile(details={"x": "y" * 70000}),
    "dropped of another type": json.dumps({"dropped": "1"}),
    "no text": "\xff\xfe",
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line):
    path = tmp_path / f"x{spans.SUFFIX}"
    path.write_bytes("\n".join([json.dumps(HEAD), hostile(), line, hostile(at=9)]).encode("latin-1"))
    found = parts.read(tmp_path)
    assert [event.at for event in found.events] == [5, 9]
    assert found.bad == 1
    assert found.problems[0].startswith(f"x{spans.SUFFIX}:3: ")
    assert len(found.problems[0]) < 500
    perfetto.chrome(found)


ODD = {
    "details of other types": hostile(track="forward", details={"tokens": "many", "rooms": 5, "chunk": None}),
    "bytes of other types": hostile(details={"bytes": {"kv": "x", "state": -1, "draft": True}, "peer": 7}),
    "a name with control characters": hostile(name="\x1b[31mred\nline\ud800"),
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD.keys())
def test_an_odd_line_is_harmless(tmp_path, line):
    (tmp_path / f"x{spans.SUFFIX}").write_text("\n".join([json.dumps(HEAD), line, line]))
    found = parts.read(tmp_path)
    assert not found.bad
    assert all(event.name.isprintable() for event in found.events)
    (room,) = perfetto.rooms(found)
    assert sum(room.nbytes.values()) == 2 * ("kv" in line and "draft" not in line)
    json.dumps(perfetto.chrome(found), allow_nan=False).encode("utf-8")


def test_a_file_without_its_first_line_is_left_out(tmp_path):
    (tmp_path / f"a{spans.SUFFIX}").write_text(hostile() + "\n" + hostile())
    (tmp_path / f"b{spans.SUFFIX}").write_text(json.dumps(HEAD) + "\n" + hostile())
    found = parts.read(tmp_path)
    assert (len(found.events), found.bad) == (1, 1)
    assert "does not say who wrote" in found.problems[0]


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / f"a{spans.SUFFIX}")
    (tmp_path / f"b{spans.SUFFIX}").mkdir()
    assert parts.read(tmp_path).bad == 2


def test_only_some_problems_are_named(tmp_path):
    (tmp_path / f"x{spans.SUFFIX}").write_text(json.dumps(HEAD) + "\n" + "{\n" * 100)
    found = parts.read(tmp_path)
    assert (found.bad, len(found.problems)) == (100, parts.SHOWN)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_trace(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError):
        parts.read(tmp_path / name)
