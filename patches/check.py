"""Applies the patches of this folder to a copy of SGLang's source and runs their tests there, without our plugin.

On the unpatched copy each test of a fault has to fail, for its reason; with its patch alone and with all patches every
test has to pass. Nothing installed is changed.

A stage is a fork: what SGLang imports of others is imported twice at most, SGLang itself anew from the copy.
"""

import argparse
import contextlib
import faulthandler
import filecmp
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE / "tests"
VERSION = "0.5.23"
"""Of SGLang, which the patches are for."""
NOT_NEEDED = ("multimodal_gen", "test", "benchmark", ".git")
"""Folders that are not copied: no part of the server."""
IMPORTED_FIRST = ("torch", "transformers", "pytest")
"""Before the first fork. Importing anything in this process must start no thread, because of the forks."""
NOT_SHARED = ("sglang", "sgl_kernel")
"""Packages that each stage imports anew: what is tested, and what might import it."""
STAGE_SECONDS = 400
"""After which a stage that has not ended is ended, with the place where it stands."""
FLAGS = re.DOTALL | re.MULTILINE
"""Of the regular expressions of faults: pytest adds lines to the message of an assertion."""
ENVIRONMENT = {
    "SGLANG_PLUGINS": "none",  # a list of the plugins that are loaded: none has this name
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Of the stages; other variables of SGLang are taken away."""


class Unfit(Exception):
    """The check cannot be done here; the message says why and what to do."""


@dataclass(frozen=True)
class Patch:
    file: Path

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def test(self) -> Path:
        """Named after the patch without its number."""
        return TESTS / f"test_patch_{self.name.partition('-')[2].replace('-', '_')}.py"


@dataclass(frozen=True)
class Test:
    """What has come of one test."""

    file: str
    """Its file's name; empty for something that concerns all of them."""
    name: str
    passed: bool
    message: str = ""
    fault: str | None = None
    """What the message of a test of a fault matches on unpatched source."""

    @property
    def shows_fault(self) -> bool:
        return not self.passed and self.fault is not None and re.search(self.fault, self.message, FLAGS) is not None


def patches() -> list[Patch]:
    """In the order in which all of them are applied."""
    return [Patch(file) for file in sorted(HERE.glob("*.patch"))]


def installed() -> Path:
    """The folder that holds the package sglang, which is not imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise Unfit("there is no SGLang in this Python: name one with PYTHON=..., or source with --source")
    version = importlib.metadata.version("sglang")
    if version != VERSION:
        raise Unfit(f"the patches are for SGLang {VERSION}, installed is {version}: give its source with --source")
    return Path(spec.origin).parent.parent


def given_source(folder: Path) -> Path:
    if not (folder / "sglang" / "srt").is_dir():
        raise Unfit(f"{folder} has no sglang/srt: of a clone of SGLang it is the folder python")
    return folder


def copy(source: Path, into: Path) -> None:
    shutil.copytree(source / "sglang", into / "sglang", ignore=shutil.ignore_patterns(*NOT_NEEDED))


def apply(patch: Patch, tree: Path, *options: str) -> str | None:
    """git apply; None, or why it does not apply (then nothing is changed)."""
    # Without the ceiling git takes a repository around the folder for the tree, and skips every file.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, str(patch.file)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip() or f"git apply ended with {done.returncode}"


def files_of(patch: Patch) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.file.read_text(), re.MULTILINE)


class Recorder:
    """A pytest plugin that keeps what has come of each test."""

    def __init__(self) -> None:
        self.tests: list[Test] = []

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.when == "call" or call.excinfo is not None:
            message = "" if call.excinfo is None else str(call.excinfo.value)
            fault = getattr(item.function, "fault", None) if call.when == "call" else None
            self.tests.append(Test(item.path.name, item.name, call.excinfo is None, message, fault))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tests.append(Test("", str(report.nodeid), False, str(report.longrepr)))


@dataclass(frozen=True)
class Stage:
    """What has come of one stage."""

    tests: list[Test]
    modules: list[str]
    """That it has imported, without NOT_SHARED."""


def stage(tree: Path, tests: Sequence[Path], log: Path) -> Stage:
    """The tests in a fork that imports SGLang from `tree`; one failed test more if it does not end as it should."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run_and_exit(tree, tests, log, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    try:
        found = json.loads(answer)
        return Stage([Test(*fields) for fields in found["tests"]], found["modules"])
    except ValueError:
        tail = log.read_text(errors="replace")[-2000:]
        return Stage([Test("", "the stage", False, f"has ended without a result: {tail}")], [])


def _run_and_exit(tree: Path, tests: Sequence[Path], log: Path, write: int) -> None:
    # No return to what the parent was doing, whatever happens.
    try:
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            faulthandler.dump_traceback_later(STAGE_SECONDS, exit=True, file=output)
            # Byte code of a patched file must not be found by a stage without the patch, nor left in this folder.
            sys.dont_write_bytecode = True
            sys.path[:0] = [str(tree), str(TESTS)]
            before = set(sys.modules)
            found = [list(vars(test).values()) for test in _tests(tree, tests)]
            modules = [name for name in sys.modules if name not in before and _can_be_shared(name)]
            _write_all(write, json.dumps({"tests": found, "modules": modules}).encode())
            output.flush()
    except BaseException as error:  # told by the missing answer
        print(repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def _can_be_shared(name: str) -> bool:
    """A stand-in that a test has put there has no spec, and must not make this process import the real one."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and name.partition(".")[0] not in NOT_SHARED


def _write_all(write: int, answer: bytes) -> None:
    with io.FileIO(write, "w") as pipe:
        while answer:
            answer = answer[pipe.write(answer) :]


def _tests(tree: Path, tests: Sequence[Path]) -> list[Test]:
    import pytest

    recorder = Recorder()
    options = ["-q", "-c", os.devnull, "--rootdir", str(TESTS), "--tb=native"]
    # pytest's own faulthandler takes back, at the first failed test, what ends a stage that hangs.
    without = [option for name in ("cacheprovider", "warnings", "faulthandler") for option in ("-p", f"no:{name}")]
    pytest.main([*options, *without, *map(str, tests)], plugins=[recorder])
    return [*recorder.tests, *_what_ran(tree)]


def _what_ran(tree: Path) -> list[Test]:
    """Failed tests if it was not SGLang's source in `tree`, or not that alone."""
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if name.partition(".")[0] == "sglang" and file and not Path(file).is_relative_to(tree):
            found.append(Test("", name, False, f"was imported from {file}"))
        if name.startswith(("sglang_hetero.plugin", "sglang_hetero.backend", "sglang_hetero.transfer")):
            found.append(Test("", name, False, "has been imported: the plugin must not be there"))
    return found


def judge_unpatched(tests: Sequence[Test]) -> list[str]:
    """What is wrong with a run on unpatched source: a fault that does not show, or anything else that fails."""
    wrong = []
    for test in tests:
        if test.fault is None and not test.passed:
            wrong.append(f"{test.name} fails without any patch: {test.message[:400]}")
        elif test.fault is not None and test.passed:
            wrong.append(f"{test.name} passes without the patch: the fault is not there, or the test does not see it")
        elif test.fault is not None and not test.shows_fault:
            wrong.append(f"{test.name} fails for another reason than {test.fault!r}: {test.message[:400]}")
    if not any(test.fault for test in tests):
        wrong.append("no test shows a fault")
    return wrong


def judge_patched(tests: Sequence[Test]) -> list[str]:
    wrong = [f"{test.name}: {test.message[:400]}" for test in tests if not test.passed]
    return wrong or ([] if tests else ["no test has run"])


def share(modules: Sequence[str]) -> None:
    """Import here what a stage has imported of others, so that the next ones need not."""
    for name in modules:
        # One that only its package can import, or of the tests' folder.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if shared := [name for name in NOT_SHARED if name in sys.modules]:
        raise Unfit(f"another package imports {', '.join(shared)}: the stages would not import the copy")


class Check:
    """The stages on one copy."""

    def __init__(self, tree: Path, source: Path, logs: Path) -> None:
        self.tree, self.source, self.logs = tree, source, logs

    def run(self, chosen: Sequence[Patch], say: Callable[[str], None]) -> int:
        """How many of the patches are right; a line for each."""
        unpatched = self._stage(chosen, "unpatched")
        wrong = {patch: [f"unpatched: {text}" for text in judge_unpatched(unpatched[patch])] for patch in chosen}
        for patch in chosen:
            wrong[patch] += [f"alone: {text}" for text in self._alone(patch)]
        for patch, texts in self._together(chosen).items():
            wrong[patch] += [f"with the others: {text}" for text in texts]
        for patch in chosen:
            faults = [test for test in unpatched[patch] if test.fault]
            shown = sum(test.shows_fault for test in faults)
            others = len(unpatched[patch]) - len(faults)
            state = "right alone and with the others" if not wrong[patch] else "WRONG"
            say(f"{patch.name}: {shown}/{len(faults)} faults shown without it, {others} tests of what works; {state}")
            for text in wrong[patch]:
                say(f"  {text}")
        return sum(not texts for texts in wrong.values())

    def _alone(self, patch: Patch) -> list[str]:
        if (why := apply(patch, self.tree)) is not None:
            return [f"does not apply: {why}"]
        try:
            return judge_patched(self._stage([patch], patch.name)[patch])
        finally:
            apply(patch, self.tree, "--reverse")
            for file in files_of(patch):
                if not filecmp.cmp(self.tree / file, self.source / file, shallow=False):
                    raise Unfit(f"{patch.name} leaves {file} changed when it is taken back")

    def _together(self, chosen: Sequence[Patch]) -> dict[Patch, list[str]]:
        for patch in chosen:
            if (why := apply(patch, self.tree)) is not None:
                return {any_patch: [f"{patch.name} does not apply: {why}"] for any_patch in chosen}
        return {patch: judge_patched(tests) for patch, tests in self._stage(chosen, "together").items()}

    def _stage(self, chosen: Sequence[Patch], name: str) -> dict[Patch, list[Test]]:
        found = stage(self.tree, [patch.test for patch in chosen], self.logs / f"{name}.log")
        share(found.modules)
        return {patch: [test for test in found.tests if test.file in ("", patch.test.name)] for patch in chosen}


def prepare() -> None:
    """The environment of the stages, and what they share."""
    for name in list(os.environ):
        if name.startswith(("SGLANG_", "SGL_")) or name in ("PYTHONPATH", "HOST_IP"):
            del os.environ[name]
    os.environ.update(ENVIRONMENT)
    if shutil.which("git") is None:
        raise Unfit("git is needed to apply the patches: install it")
    share(IMPORTED_FIRST)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="patches/check", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--source", type=Path, help="the folder that holds sglang/ (of a clone: python/), any version")
    parser.add_argument("--logs", type=Path, help="where pytest's output of each stage is kept")
    parser.add_argument("only", nargs="*", help="numbers of patches; all without")
    given = parser.parse_args(arguments)
    chosen = [patch for patch in patches() if not given.only or patch.name.partition("-")[0] in given.only]
    try:
        if not chosen:
            raise Unfit(f"there is no patch {' '.join(given.only)}: {', '.join(patch.name for patch in patches())}")
        source = installed() if given.source is None else given_source(given.source)
        prepare()
        with tempfile.TemporaryDirectory(prefix="sglang-patches-") as folder:
            tree, logs = Path(folder).resolve() / "tree", given.logs or Path(folder)
            tree.mkdir()
            logs.mkdir(parents=True, exist_ok=True)
            copy(source, tree)
            right = Check(tree, source, logs).run(chosen, lambda line: print(line, flush=True))
    except Unfit as error:
        print(f"patches: {error}", file=sys.stderr)
        return 2
    print(f"patches {right}/{len(chosen)}")
    return 0 if right == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
