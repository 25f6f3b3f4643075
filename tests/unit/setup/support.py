"""What the tests of the set-up scripts share."""

import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup_env.py"
MAKEFILE = SCRIPT.parents[1] / "Makefile"
# The metadata folder of the made-up package of the fixture `venv`.
INFO = "some_package-1.2.dist-info"


def add_package(site: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A made-up installed package; gives its dist-info."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    rows = []
    for path, text in {**files, f"{info.name}/METADATA": f"Name: {name}\n"}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        rows.append(f'"{path}",sha256=abc,{len(text)}\r\n')
    rows += [f"{name}/__pycache__/x.cpython-311.pyc,,\r\n", f"{info.name}/RECORD,,\r\n"]
    (info / "RECORD").write_text("".join(rows))
    return info


def fails(setup_env, capsys) -> str:
    """The one line that the script ends with."""
    sys_argv, sys.argv = sys.argv, [str(SCRIPT)]
    try:
        assert setup_env.main() == 1
    finally:
        sys.argv = sys_argv
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("setup: ")
    return lines[0]
