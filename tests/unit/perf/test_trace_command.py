"""`sglang-hetero trace` on a trace that is made up."""

import json

import pytest

from sglang_hetero import cli
from sglang_hetero.perf.spans import Trace, Track

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path):
    directory = tmp_path / "trace"
    prefill = Trace(directory, "prefill", "prefill TP0/1", monotonic=lambda: 0.0, wall=lambda: 10**18)
    decode = Trace(directory, "decode", "decode TP0/1", monotonic=lambda: 0.0, wall=lambda: 10**18)
    for room, at in ((41, 0.0), (42, 1.0)):
        prefill.span(Track.FORWARD, "chunk 1", at, at + 0.25, room, tokens=300, chunk=1)
        prefill.instant(Track.FORWARD, "prefill ended", at + 0.25, room)
        for name, start in (("kv", 0.125), ("state", 0.25), ("draft", 0.375)):
            prefill.span(
                Track.LINK, name, at + start, at + start + 0.0625, room, peer="decode TP0/1", bytes={name: 1 << 20}
            )
        decode.span(Track.WAIT, "window wait", at, at + 0.0625, room)
        decode.span(Track.MERGE, "read", at + 0.3, at + 0.4, room)
        decode.span(Track.MERGE, "merge kv", at + 0.4, at + 0.45, room, bytes=5)
        decode.instant(Track.SCHEDULER, "first response", at + 0.5, room)
    prefill.close()
    decode.close()
    return directory


def test_the_list(folder, capsys):
    assert cli.main(["trace", str(folder), "--list"]) == 0
    heads, first, second, *_ = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert heads[:4] == ["room", "at", "tokens", "prefill"]
    assert first == ["41", "0.0", "300", "250.0", "1.00", "1.00", "1.00", "312.5", "33%", "500.0"]
    assert second == ["42", "1000.0", *first[2:]]


def test_without_options_it_lists(folder, capsys):
    assert cli.main(["trace", str(folder)]) == 0
    assert "42" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "rooms"), [([], {"41", "42"}), (["--room", "42"], {"42"})], ids=["all", "one"])
def test_files(folder, tmp_path, capsys, options, rooms):
    output, picture = tmp_path / "t.json", tmp_path / "t.png"
    assert cli.main(["trace", str(folder), *options, "-o", str(output), "--png", str(picture)]) == 0
    entries = json.loads(output.read_text())["traceEvents"]
    assert {entry["args"]["rooms"] for entry in entries if entry["ph"] != "M"} == rooms
    assert min(entry["ts"] for entry in entries if entry["ph"] != "M") == 0
    assert picture.read_bytes().startswith(PNG)
    assert "ui.perfetto.dev" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--room", "1"], "nothing of room 1"),
        (["-o", "/nonexistent/t.json"], "No such file"),
        (["--png", "/nonexistent/t.png"], "No such file"),
    ],
)
def test_errors_are_one_line(folder, capsys, arguments, text):
    assert cli.main(["trace", str(folder), *arguments]) == 1
    said = capsys.readouterr().err
    assert text in said
    assert len(said.splitlines()) == 1


def test_bad_lines_are_told_of(folder, capsys):
    next(iter(folder.iterdir())).open("a").write("rubbish\n")
    assert cli.main(["trace", str(folder)]) == 0
    assert "1 bad lines left out" in capsys.readouterr().err


def test_a_picture_says_what_is_missing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert cli.main(["trace", str(folder), "--png", str(tmp_path / "t.png")]) == 1
    assert "needs matplotlib (the extra `picture`" in capsys.readouterr().err
