"""Make or repair `.venv`: everything that `make demo` and `make test` need.

Runs on the system's Python before anything is installed: standard library only, and a syntax that an old
Python can still parse, so that a wrong version gets a sentence instead of a SyntaxError.

A second run costs about a second: a stamp says what the environment was made from, every file that an installed
package recorded is looked up (existence and size; venv_packages.py), and the command `sglang-hetero cpu status` is
run, so that a broken or half-made environment is found and mended before anything is started from it.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import venv_packages
from child_process import met_full_disk, met_no_index, met_no_version, reason, run_child

MIN_PYTHON = (3, 11)
# The real path: a checkout that is reached through a symbolic link is the same one.
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
VENV = os.path.join(ROOT, ".venv")
# Beside .venv, not in it: the environment itself may be removed while the lock is held.
LOCK = os.path.join(ROOT, ".venv.lock")
REQUIREMENTS = ("cpu.lock", "sglang.lock", "picture.lock", "dev.lock")
OWN = "sglang-hetero"
STAMP = ".sglang-hetero-stamp"
TORCH_INDEX = "SGLANG_HETERO_TORCH_INDEX"
APT_PACKAGE = "libibverbs1"
LIBRARY = "libibverbs.so.1"
# The finished environment takes 2.8 GB; what pip downloads and unpacks in the temporary folder at most 2/3 of it.
ENVIRONMENT_BYTES = 3 * 1000**3
DOWNLOAD_SHARE = 2 / 3
# The size of a package that has no RECORD (yet).
LARGE_PACKAGES = ("torch", "triton")
LARGE_BYTES = 1000**3
PACKAGE_BYTES = 200 * 1000**2
PROGRESS_SECONDS = 5


class SetupError(Exception):
    """A sentence for the user: what is wrong, and what to do."""


class Interrupted(BaseException):
    """A signal asked us to end; args[0] is its number."""


def say(text):
    print("setup: " + text, file=sys.stderr, flush=True)


# --- what has to be there before ---------------------------------------------------------------------------------


def check_python():
    if sys.version_info[:2] < MIN_PYTHON:
        raise SetupError(
            "this is Python {}.{}, but SGLang 0.5.23 needs {}.{} or newer; "
            "install it and run again with PYTHON=/path/to/python3.11".format(*sys.version_info[:2], *MIN_PYTHON)
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise SetupError(
            "this Python cannot make virtual environments ({}); on Debian: apt-get install python3-venv".format(error)
        ) from None


def library_loads():
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def check_library(lock):
    """Mooncake's engine is linked against libibverbs, also where only its TCP transport is used."""
    if library_loads():
        return
    remedy = "apt-get install {} (Debian, Ubuntu)".format(APT_PACKAGE)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            "the system library {} is missing (Mooncake needs it) and only root can install it: run `{}` as root, "
            "then run again".format(LIBRARY, remedy)
        )
    say("installing the system package {}".format(APT_PACKAGE))
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    run_child(["apt-get", "update", "-qq"], lock, env=env)  # where this fails, the next one says what is wrong
    _, lines = run_child(
        ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-qq", APT_PACKAGE], lock, env=env
    )
    if not library_loads():
        raise SetupError(
            "installing {} failed ({}); run `{}` by hand".format(APT_PACKAGE, (lines or ["no output"])[-1], remedy)
        )


def needed_bytes(broken):
    """How much the installation of these packages adds to .venv."""
    sizes = {}
    for name, versions in installed().items():
        sizes[name] = max(venv_packages.recorded_bytes(dist_info) for _, dist_info in versions)
    size = sum(sizes.get(name) or (LARGE_BYTES if name in LARGE_PACKAGES else PACKAGE_BYTES) for name in broken)
    whole = sum(sizes.get(name, 0) for name in pins() if name not in broken)
    return min(size, max(ENVIRONMENT_BYTES - whole, 0))


def check_disk(broken):
    needs = {ROOT: needed_bytes(broken)}
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise SetupError("{}; free some space or set TMPDIR, and run again".format(error.strerror)) from None
    download = needs[ROOT] * DOWNLOAD_SHARE
    if os.stat(temporary).st_dev == os.stat(ROOT).st_dev:
        needs[ROOT] += download
    else:
        needs[temporary] = download
    for folder, need in needs.items():
        check_free(folder, need, "the installation")


def check_free(folder, need, what):
    """Raise a SetupError unless the disk of that folder has room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise SetupError(
            "only {:.1f} GB free on the disk of {}, {} needs {:.1f} GB there while it works; free some space and run "
            "again".format(free / 1e9, folder, what, need / 1e9)
        )


# --- what the environment is, and whether it is whole ------------------------------------------------------------


def in_venv(*parts):
    return os.path.join(VENV, *parts)


def venv_python():
    return in_venv("bin", "python")


def stamp_file():
    """Written last: the fingerprint of a complete environment."""
    return in_venv(STAMP)


def place_file():
    """Written when the bare environment is made: its folder. Console scripts name it, so it cannot be moved."""
    return in_venv(".sglang-hetero-place")


def site_packages(venv=None):
    """Of an environment that this Python made; of `.venv` where none is named."""
    return os.path.join(venv or VENV, "lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages")


def base_python():
    """The interpreter to make an environment from; not that of an environment, which may be the one to replace."""
    base = getattr(sys, "_base_executable", None)
    return base if base and os.path.exists(base) else os.path.realpath(sys.executable)


def requirement_files():
    return [os.path.join(ROOT, "requirements", name) for name in REQUIREMENTS]


def pins():
    """Name (normalised) -> version of every locked package."""
    return venv_packages.read_pins(requirement_files())


def installed():
    """Name (normalised) -> [(version, path of its dist-info)]."""
    return venv_packages.installed(site_packages())


def read_text(path):
    """The text of a file of ours; None where there is none."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().strip()
    except OSError:
        return None


def write_text(path, text):
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text + "\n")


def fingerprint():
    """What the environment is a function of: the locks, our metadata, the interpreter and the place."""
    digest = hashlib.sha256()
    ours = [os.path.join(ROOT, "pyproject.toml"), os.path.realpath(__file__), venv_packages.__file__]
    for path in [*requirement_files(), *ours]:
        with open(path, "rb") as file:
            digest.update(file.read())
    digest.update(
        "{} {} {}".format(sys.version, os.path.realpath(base_python()), VENV).encode(errors="surrogateescape")
    )
    return digest.hexdigest()


def broken_packages():
    """The locked packages that are missing, of another version or build, damaged, or there twice."""
    have = installed()
    broken = []
    for name, version in sorted(pins().items()):
        found = have.get(name, [])
        # A wheel of PyTorch's CPU index has the version 2.13.0+cpu, a CUDA wheel may have the bare 2.13.0.
        whole = (
            len(found) == 1
            and found[0][0].split("+")[0] == version
            and not venv_packages.damaged(found[0][1])
            and not (name == "torch" and venv_packages.torch_accelerator(site_packages()))
        )
        if not whole:
            broken.append(name)
    return broken


def own_package_is_whole():
    found = installed().get(OWN, [])
    return len(found) == 1 and not venv_packages.damaged(found[0][1]) and venv_packages.is_editable(found[0][1], ROOT)


def runs(*command):
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def platform_is_on():
    """Isolated (-I): the folder that we stand in must not answer for what is installed."""
    return runs(venv_python(), "-I", "-m", "sglang_hetero", "cpu", "status")


def is_current():
    return (
        read_text(stamp_file()) == fingerprint()
        and read_text(place_file()) == VENV
        and not broken_packages()
        and own_package_is_whole()
        and platform_is_on()
    )


# --- making it ---------------------------------------------------------------------------------------------------


def disk_is_full():
    return "the disk of {} or of the temporary files is full: free some space and run again".format(ROOT)


def check_child(status, lines, what):
    """Raise a SetupError with the reason that a child's output gives, unless it succeeded."""
    if status and met_full_disk(lines):
        raise SetupError(disk_is_full())
    if status:
        raise SetupError("{} failed: {}; put that right and run again".format(what, reason(status, lines)))


def make_venv(lock):
    """A fresh `.venv`, unless there is one that was made here by this Python and runs."""
    if read_text(place_file()) == VENV:
        probe = "import sys, pip._internal.cli.main; print(sys.version)"
        try:
            done = subprocess.run([venv_python(), "-I", "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError:
            done = None
        pip = installed().get("pip", [])
        pip_is_whole = len(pip) == 1 and not venv_packages.damaged(pip[0][1])
        if pip_is_whole and done is not None and done.stdout.decode(errors="replace").strip() == sys.version.strip():
            return
    if os.path.lexists(VENV):
        say(".venv is broken, was moved or was made by another Python: making it anew")
        if os.path.islink(VENV) or not os.path.isdir(VENV):
            os.remove(VENV)
        else:
            if os.path.exists(place_file()):
                os.remove(place_file())  # first: what is left of an interrupted removal is no environment
            shutil.rmtree(VENV)
    say("making .venv with Python {}.{}.{}".format(*sys.version_info[:3]))
    check_child(*run_child([base_python(), "-I", "-m", "venv", VENV], lock), what="python -m venv")
    write_text(place_file(), VENV)


def pip_install(arguments, what, total, lock):
    """Run pip with a progress line; gives (exit status, lines of output)."""
    start = time.time()
    state = {"seen": 0, "shown": 0.0}

    def progress(line):
        if line.startswith(("Collecting", "Processing")):  # from an index, or from a file
            state["seen"] += 1
            stage = os.path.basename(line.split()[1])
        elif line.startswith("Installing collected"):
            stage = "unpacking, about a minute" if total > 1 else "unpacking"
            state["shown"] = 0.0
        else:
            return
        if time.time() - state["shown"] > PROGRESS_SECONDS:
            state["shown"] = time.time()
            say("{}: {}/{}, {:.0f} s, {}".format(what, state["seen"], total, time.time() - start, stage))

    # Everything is pinned, so no resolver is wanted; SGLang's own requirements are its CUDA tree.
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return run_child([venv_python(), "-I", "-m", "pip", "install", *options, *arguments], lock, progress)


def discard(names):
    """Take these packages away ourselves: pip cannot uninstall what has no proper RECORD or METADATA."""
    have = installed()
    for name in names:
        for _, dist_info in have.get(name, []):
            venv_packages.discard(dist_info, VENV)


def install_torch(lock):
    """First and alone: on x86-64 the version without `+cpu` may be a CUDA build, refused before its download."""
    version = pins()["torch"]
    wants_cpu_build = platform.machine() in ("x86_64", "AMD64")
    requirement = "torch=={}{}".format(version, "+cpu" if wants_cpu_build else "")
    index = os.environ.get(TORCH_INDEX)
    discard(["torch"])
    arguments = [*(["--extra-index-url", index] if index else []), requirement]
    status, lines = pip_install(arguments, "torch", 1, lock)
    if status and wants_cpu_build and met_no_version(lines) and not met_no_index(lines):
        raise SetupError(
            "the configured package index{} has no CPU build of torch {} for Python {}.{}: name one that has with "
            "{}=<index of PyTorch's CPU wheels, see pytorch.org, Get Started, CPU> and run again".format(
                " with {}".format(index) if index else "", version, *sys.version_info[:2], TORCH_INDEX
            )
        )
    check_child(status, lines, what="pip install " + requirement)


def install(broken, lock):
    """Install the broken packages and, always, our own."""
    venv_packages.discard_leftovers(site_packages())
    if "torch" in broken:
        install_torch(lock)
    rest = [name for name in broken if name != "torch"]
    if rest:
        discard(rest)
        versions = pins()
        arguments = ["{}=={}".format(name, versions[name]) for name in rest]
        check_child(*pip_install(arguments, "packages", len(rest), lock), what="pip install of the locked packages")
    discard([OWN])
    check_child(
        *pip_install(["--no-build-isolation", "-e", ROOT], "sglang-hetero itself", 1, lock), what="pip install -e ."
    )


def enable_cpu_platform():
    done = subprocess.run(
        [venv_python(), "-I", "-m", "sglang_hetero", "cpu", "enable"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise SetupError(lines[-1] if lines else "`sglang-hetero cpu enable` failed; remove .venv and run again")


def check_result():
    left = broken_packages()
    accelerator = venv_packages.torch_accelerator(site_packages())
    if "torch" in left and accelerator:
        raise SetupError(
            "the package index gave a torch that is built for {}, but the CPU environment needs the CPU build: run "
            "again with {}=<index of PyTorch's CPU wheels>".format(accelerator, TORCH_INDEX)
        )
    if not left and not own_package_is_whole():
        left = [OWN]
    if left:
        raise SetupError("{} is still broken after its installation; remove .venv and run again".format(left[0]))


@contextlib.contextmanager
def locked(tell):
    """Hold the lock of this folder's environments, and wait for whoever has it; gives its open file."""
    with open(LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another set-up of this folder is running: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def setup():
    """Make or repair the environment; nothing to do where it is whole. Raises SetupError."""
    check_python()
    with locked(say) as lock:
        check_library(lock)
        if is_current():
            return
        start = time.time()
        if os.path.exists(stamp_file()):
            os.remove(stamp_file())
        make_venv(lock)
        broken = broken_packages()
        check_disk(broken)
        install(broken, lock)
        check_result()
        enable_cpu_platform()
        write_text(stamp_file(), fingerprint())
        say("ready after {:.0f} s".format(time.time() - start))


def explain(error):
    """The sentence for an OSError: what could not be used, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_is_full()
    path = error.filename or VENV
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "cannot write {} ({}): run as the owner of the checkout, or make it yours (chown) and run again".format(
            path, error.strerror
        )
    return "cannot use {} ({}): put that right, or remove it if it is .venv or .venv.lock, and run again".format(
        path, error.strerror or error
    )


def catch_signals():
    """End in the same way at every signal that asks for it, but for one that we were started to ignore (nohup)."""

    def interrupt(number, _frame):
        raise Interrupted(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def finish(work, tell, next_run):
    """Run `work` and tell in one line why it did not come to its end; gives the exit status.

    next_run: what that does after an interruption, in words.
    """
    try:
        work()
    except SetupError as error:
        tell(str(error))
        return 1
    except (Interrupted, KeyboardInterrupt) as error:
        tell("interrupted; " + next_run)
        return 128 + (error.args[0] if isinstance(error, Interrupted) else signal.SIGINT)
    except OSError as error:
        tell(explain(error))
        return 1
    return 0


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    return finish(setup, say, "the next run goes on from here")


if __name__ == "__main__":
    catch_signals()
    sys.exit(main())
