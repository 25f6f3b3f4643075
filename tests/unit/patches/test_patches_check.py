"""patches/check: its own judgement, and that it shows what patches/README.md says of the installed SGLang."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[3] / "patches"
SLIPS = {
    "0001": ("self.conv_slice_axis = 1", "self.conv_slice_axis = 0"),
    "0002": ("info.attn_tp_size % self.kv_mgr.attn_tp_size", "info.attn_tp_size < self.kv_mgr.attn_tp_size"),
    "0003": ("        if ret != 0:", "        if ret > 0:"),
    "0004": ("min(src_len, dst_len)", "src_len"),
}
"""A slip in each patch, on one of the lines that it adds."""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(folder / "check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("patches_check", PATCHES / "check.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["patches_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path) -> Path:
    copied = tmp_path / "patches"
    shutil.copytree(PATCHES, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


@pytest.mark.timeout(1200)  # on a machine that is busy with other things
def test_every_fault_is_shown_and_repaired():
    done = run(PATCHES)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == f"patches {len(SLIPS)}/{len(SLIPS)}"
    assert [line[:4] for line in lines] == sorted(SLIPS)
    assert all("right alone and with the others" in line for line in lines)
    readme = (PATCHES / "README.md").read_text()
    assert [line for line in done.stdout.splitlines() if f"    {line}\n" not in readme] == []


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", SLIPS)
def test_a_slip_in_a_patch_is_noticed(folder, number):
    right, wrong = SLIPS[number]
    (patch,) = folder.glob(f"{number}-*.patch")
    added = [line for line in patch.read_text().splitlines() if line.startswith("+") and right in line]
    assert len(added) == 1, added
    patch.write_text(patch.read_text().replace(added[0], added[0].replace(right, wrong)))
    done = run(folder, number)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG" in done.stdout and "  alone: " in done.stdout
    assert done.stdout.endswith("patches 0/1\n")


def test_a_fault_that_does_not_show_or_for_another_reason_is_wrong(check):
    def judged(*tests):
        return check.judge_unpatched([check.Test("file", "name", *fields) for fields in tests])

    assert judged((False, "row 4 is wrong", "row 4"), (True,)) == []
    assert "passes without the patch" in judged((True, "", "row 4"))[0]
    assert "for another reason" in judged((False, "no module", "row 4"))[0]
    assert "fails without any patch" in judged((False, "row 4 is wrong", "row 4"), (False, "no module"))[0]
    assert judged((True,)) == ["no test shows a fault"]


def test_with_the_patch_everything_must_pass(check):
    right, wrong = check.Test("file", "right", True, "", "row 4"), check.Test("file", "wrong", False, "row 4", "row 4")
    assert check.judge_patched([right]) == []
    assert check.judge_patched([right, wrong]) == ["wrong: row 4"]
    assert check.judge_patched([]) == ["no test has run"]


def staged(folder: Path, test: str) -> list[dict]:
    """What a stage says of a test file with this text. In a process that has no threads and no SGLang."""
    (folder / "test_staged.py").write_text(test)
    code = (
        "import check, json, pathlib, sys; folder = pathlib.Path(sys.argv[1]);"
        "found = check.stage(folder, [folder / 'test_staged.py'], folder / 'log').tests;"
        "print(json.dumps([vars(test) for test in found]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, check=False, cwd=PATCHES)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_stage_that_dies_is_a_failed_test(tmp_path):
    (found,) = staged(tmp_path, "import os\n\ndef test_dies():\n    os._exit(0)\n")
    assert not found["passed"] and not found["file"] and "without a result" in found["message"]


def test_a_stage_says_which_source_it_has_run(tmp_path):
    tree = tmp_path / "tree"
    for name in ("tree/sglang", "elsewhere/sglang"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    first = f"import sys\nsys.path.insert(0, {str(tmp_path / 'elsewhere')!r})\n"
    test = "def test_imports():\n    import sglang\n"
    assert [found["passed"] for found in staged(tree, test)] == [True]
    assert [(found["name"], found["passed"]) for found in staged(tree, first + test)] == [
        ("test_imports", True),
        ("sglang", False),
    ]


def test_a_patch_that_does_not_apply_changes_nothing(check, tmp_path):
    (patch,) = (patch for patch in check.patches() if patch.name.startswith("0002"))
    (file,) = check.files_of(patch)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("something else\n")
    assert "patch does not apply" in check.apply(patch, tmp_path)
    assert (tmp_path / file).read_text() == "something else\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["0009"], "there is no patch 0009: 0001-conv-axis"), (["--source", "/"], "/ has no sglang/srt")],
)
def test_what_cannot_be_done_is_said(arguments, said):
    done = run(PATCHES, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_each_patch_has_a_test_and_says_what_is_wrong(check):
    assert len(check.patches()) == len(SLIPS)
    for patch in check.patches():
        assert patch.test.is_file(), patch.test
        head = patch.file.read_text().partition("\ndiff --git ")[0]
        for part in ("Fault. ", "How to see it. ", "What it does. ", "What it does not. "):
            assert f"\n{part}" in head, (patch.name, part)
