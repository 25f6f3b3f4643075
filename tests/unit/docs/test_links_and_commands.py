"""Documents: every link leads somewhere, and every command of ours that is shown is one that our parser takes."""

import re
import shlex
from pathlib import Path

import pytest

from sglang_hetero.cli import _parser

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "launch/README.md")
)
COMMAND = re.compile(r" *(?:[A-Z_]+=\S+ )*(?:sglang-hetero [a-z]|launch/\w+/validate\.sh)")
"""At the start of a line, behind variables. The scripts validate.sh give their options to the command of that name."""


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_sections_that_are_named_are_there(document):
    """As in: docs/x.md, "Title"; (Title, below)."""
    text = (ROOT / document).read_text()
    for path, title in re.findall(r'((?:docs|launch)/\w+\.md),\s+"([^"]+)"', " ".join(text.split())):
        assert re.search(rf"^#+ {re.escape(title)}$", (ROOT / path).read_text(), flags=re.MULTILINE), (path, title)
    for title in re.findall(r"\(([A-Z][\w ,-]+), (?:above|below)\)", text):
        assert re.search(rf"^#+ {re.escape(title)}$", text, flags=re.MULTILINE), title


def shown(document: str) -> list[list[str]]:
    """Commands of ours in its blocks of code, as words, without what a shell drops, and what stands before them."""
    found = []
    fenced = False
    for line in (ROOT / document).read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            if not COMMAND.match(line):
                continue
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
            found.append(words[1:] if words[0] == "sglang-hetero" else ["validate", *words[1:]])
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_can_be_given_as_they_stand(document, capsys):
    for words in shown(document):
        own = words[: words.index("--")] if "--" in words else words  # what follows is SGLang's
        try:
            _parser().parse_args(own)
        except SystemExit:
            pytest.fail(f"sglang-hetero {' '.join(words)}: {capsys.readouterr().err.splitlines()[-1]}")


def test_commands_are_found():
    assert sum(len(shown(document)) for document in DOCUMENTS) > 30
