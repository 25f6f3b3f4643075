"""A copy of the checkout in which one fault at a time is put in and the tests are run."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("sglang_hetero", "bench_serving", "tests", "pyproject.toml")
CORE = ("tests/unit/reshard", "tests/unit/merge")
POOLS = ("tests/unit/layout",)
"""In runs of their own, because they import SGLang."""
TRANSFER = (
    "tests/unit/transfer/test_pieces_program.py",
    "tests/unit/transfer/test_pieces_coverage.py",
    "tests/unit/backend/test_first_token.py",
    "tests/unit/transfer/orchestration/test_layerwise.py",
    "tests/unit/transfer/orchestration/test_arrival.py",
    "tests/unit/transfer/test_follower.py",
    "tests/unit/backend/test_layerwise.py",
    "tests/unit/transfer/orchestration/test_lossy.py",
    "tests/unit/transfer/orchestration/test_unequal_drafts.py",
)
"""Of what is sent while prefill computes, and of what gets lost or is replaced."""
# The compiler for Ascend takes longer, and the interpreter runs the same kernels. Fuzzing takes long, too, and shows no
# wrong plan, only wrong exceptions.
LEFT_OUT = ("--ignore-glob=*test_ascend_*", "--ignore-glob=*test_manifest_fuzz*")
PASSED, FAILED = 0, 1
"""pytest's exit statuses; any other one says that tests did not run."""
LIMIT_SECONDS = 900
"""A fault may make a loop endless; that is noticed, too."""


@dataclass(frozen=True)
class Fault:
    """One fault: in `file`, `right` (which must occur once) becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str

    def check(self, text: str) -> None:
        """Raise ValueError if the fault no longer fits the source, and so would test nothing."""
        if text.count(self.right) != 1:
            raise ValueError(
                f"fault {self.name!r}: {self.file} has {text.count(self.right)} places like {self.right!r}, not one; "
                "adapt tests/mutants/faults.py to the code"
            )


@dataclass(frozen=True)
class Outcome:
    """What the tests said: passed, and the first test that did not, or how they ended."""

    passed: bool
    first: str


class Workshop:
    """Context manager: the copy, and the child that runs its tests."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-hetero-mutants-")
        self.root = Path(self._folder.name)

    def __enter__(self) -> "Workshop":
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.root / name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def with_fault(self, fault: Fault) -> Outcome:
        """Run the tests with this fault, then mend it."""
        path = self.root / fault.file
        right = path.read_text()
        fault.check(right)
        path.write_text(right.replace(fault.right, fault.wrong))
        try:
            if fault.file.startswith(("sglang_hetero/transfer", "sglang_hetero/backend")):
                return self.run(TRANSFER)
            # First the tests that are more likely to see it.
            return self.run(POOLS, CORE) if fault.file.endswith("_pools.py") else self.run(CORE, POOLS)
        finally:
            path.write_text(right)

    def run(self, *groups: tuple[str, ...]) -> Outcome:
        """Run groups of tests up to the first failure; all of them by default."""
        outcome = Outcome(True, "")
        for group in groups or (CORE, POOLS, TRANSFER):
            outcome = self._run(group)
            if not outcome.passed:
                break
        return outcome

    def _run(self, tests: tuple[str, ...]) -> Outcome:
        environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", PYTHONPATH=str(self.root))
        check = f"import sglang_hetero as s, sys; sys.exit(not s.__file__.startswith({str(self.root)!r}))"
        subprocess.run([sys.executable, "-c", check], cwd=self.root, env=environment, check=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *LEFT_OUT,
            *tests,
        ]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child:
            try:
                output, _ = child.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                return Outcome(False, f"no end after {LIMIT_SECONDS} s")
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
        if child.returncode not in (PASSED, FAILED):
            raise RuntimeError(
                f"pytest ended with status {child.returncode}, so it has tested nothing:\n{output[-2000:]}"
            )
        return Outcome(child.returncode == PASSED, _first(output))


def _first(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.MULTILINE)
    return found.group(1) if found else "no test"
