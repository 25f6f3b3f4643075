"""Pictures of traces that are not friendly."""

import json

import pytest
from matplotlib.figure import Figure

from sglang_hetero.errors import TraceError
from sglang_hetero.perf import parts, picture, spans

PNG = b"\x89PNG\r\n\x1a\n"
BAD_MATHS = r"$\bad{$"
"""matplotlib takes texts between dollars for formulas, and raises for this one."""


def trace_of(folder, rank="prefill TP0/1", name="chunk 1", track="forward", peer="decode TP0/1"):
    head = {"version": 1, "side": "prefill", "rank": rank, "pid": 1, "start": 0}
    span = {"track": track, "name": name, "at": 0, "took": 10**9, "room": 1, "details": {"peer": peer, "tokens": 5}}
    (folder / f"x{spans.SUFFIX}").write_text(json.dumps(head) + "\n" + json.dumps(span) + "\n")
    return parts.read(folder)


@pytest.mark.parametrize(
    "said",
    [
        {"rank": BAD_MATHS},
        {"name": BAD_MATHS},
        {"name": BAD_MATHS, "track": "wait"},
        {"peer": BAD_MATHS, "track": "link"},
    ],
    ids=["rank", "pass", "wait", "peer"],
)
def test_texts_of_a_trace_are_no_formulas(tmp_path, said):
    path = tmp_path / "t.png"
    picture.draw(trace_of(tmp_path, **said), path)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("error", [ValueError("no\n such glyph"), RuntimeError("many ticks"), OverflowError("inf")])
def test_what_matplotlib_raises_is_an_error_for_people(tmp_path, monkeypatch, error):
    def savefig(*_arguments, **_options):
        raise error

    monkeypatch.setattr(Figure, "savefig", savefig)
    with pytest.raises(TraceError, match=f"cannot draw this trace: {type(error).__name__}: ") as found:
        picture.draw(trace_of(tmp_path), tmp_path / "t.png")
    assert "\n" not in str(found.value)
