"""Make or repair `.venv`: everything that `make demo` and `make test` need.

Runs on the system's Python before anything is installed: standard library only, and a syntax that an old
Python can still parse, so that a wrong version gets a sentence instead of a SyntaxError.

A second run costs a second or two: a stamp says which locks the environment was made from, and every file
that a locked package recorded at its installation is looked up (existence and size), so that a broken or
half-made environment is found and mended before anything is started from it.
"""

import argparse
import csv
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time

MIN_PYTHON = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, ".sglang-hetero-stamp")
# Beside .venv, not in it: the environment itself may be removed while the lock is held.
LOCK = os.path.join(ROOT, ".venv.lock")
REQUIREMENTS = ("cpu.lock", "sglang.lock", "dev.lock")
# The finished environment takes 2.8 GB; pip also unpacks the largest wheels beside it while it works.
NEEDED_BYTES = 5 * 1000**3
TORCH_INDEX = "SGLANG_HETERO_TORCH_INDEX"
PROGRESS_SECONDS = 5
APT_PACKAGE = "libibverbs1"
LIBRARY = "libibverbs.so.1"


class SetupError(Exception):
    """A sentence for the user: what is wrong, and what to do."""


def say(text):
    print("setup: " + text, file=sys.stderr, flush=True)


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


def check_disk():
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        raise SetupError(
            "only {:.1f} GB free on the disk of {}, the environment needs {:.0f} GB while it is made; free some space "
            "and run again".format(free / 1e9, ROOT, NEEDED_BYTES / 1e9)
        )


def library_loads():
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def check_library():
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
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", APT_PACKAGE]):
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = done.stdout.decode(errors="replace").strip().splitlines()
    if not library_loads():
        raise SetupError(
            "installing {} failed ({}); run `{}` by hand".format(
                APT_PACKAGE, output[-1] if output else "no output", remedy
            )
        )


def requirement_files():
    return [os.path.join(ROOT, "requirements", name) for name in REQUIREMENTS]


def pins():
    """Name (normalised) -> version of every locked package."""
    result = {}
    for path in requirement_files():
        with open(path) as file:
            for line in file:
                pin = line.split("#")[0].strip()
                if pin:
                    name, version = pin.split("==")
                    result[normalise(name)] = version
    return result


def normalise(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def fingerprint():
    """What the environment is a function of: the locks, our metadata, the interpreter and the place."""
    digest = hashlib.sha256()
    for path in [*requirement_files(), os.path.join(ROOT, "pyproject.toml"), os.path.abspath(__file__)]:
        with open(path, "rb") as file:
            digest.update(file.read())
    digest.update("{} {} {}".format(sys.version, os.path.realpath(sys.executable), VENV).encode())
    return digest.hexdigest()


def venv_python():
    return os.path.join(VENV, "bin", "python")


def site_packages():
    return os.path.join(VENV, "lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages")


def installed():
    """Name (normalised) -> (version, path of its dist-info), read from the folder itself."""
    result = {}
    site = site_packages()
    if not os.path.isdir(site):
        return result
    for entry in os.listdir(site):
        match = re.match(r"(.+)-([^-]+)\.dist-info$", entry)
        if match:
            result[normalise(match.group(1))] = (match.group(2), os.path.join(site, entry))
    return result


def damaged(dist_info):
    """Whether a file that the package's RECORD names is gone or has another size."""
    record = os.path.join(dist_info, "RECORD")
    if not os.path.exists(record):
        return True
    site = os.path.dirname(dist_info)
    with open(record, newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            path, size = row[0], row[2]
            if path.endswith(".pyc"):
                continue
            try:
                found = os.stat(os.path.join(site, path)).st_size
            except OSError:
                return True
            if size and found != int(size):
                return True
    return False


def broken_packages():
    """The locked packages that are missing, of another version or damaged: name==version each."""
    have = installed()
    broken = []
    for name, version in sorted(pins().items()):
        found = have.get(name)
        if found is None or found[0].split("+")[0] != version or damaged(found[1]):
            broken.append("{}=={}".format(name, version))
    return broken


def runs(*command):
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def make_venv():
    """A fresh `.venv` where there is none that runs under this interpreter."""
    home = os.path.join(VENV, "pyvenv.cfg")
    same_place = False
    pip = os.path.join(VENV, "bin", "pip")
    if os.path.exists(pip):
        with open(pip, errors="replace") as file:
            # pip's script names its interpreter: another name means that the folder was moved or copied.
            same_place = VENV in file.readline()
    if os.path.exists(home) and same_place and runs(venv_python(), "-m", "pip", "--version"):
        done = subprocess.run([venv_python(), "-c", "import sys; print(sys.version)"], stdout=subprocess.PIPE)
        if done.stdout.decode().strip() == sys.version.strip():
            return
    if os.path.lexists(VENV):
        say(".venv is broken or was made by another Python: making it anew")
        if os.path.islink(VENV) or not os.path.isdir(VENV):
            os.remove(VENV)
        else:
            shutil.rmtree(VENV)
    say("making .venv with Python {}.{}.{}".format(*sys.version_info[:3]))
    done = subprocess.run([sys.executable, "-m", "venv", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines() or ["no output"]
        raise SetupError("python -m venv failed: " + lines[-1])


def pip_install(arguments, what, total):
    """Run pip with a progress line; on failure raise with pip's own last words."""
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    start = time.time()
    shown = 0.0
    seen = 0
    tail = []
    process = subprocess.Popen(
        [venv_python(), "-m", "pip", "install", *quiet, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    for raw in process.stdout:
        line = raw.decode(errors="replace").strip()
        tail = [*tail[-19:], line]
        if line.startswith(("Collecting", "Processing")):  # from an index, or from a file
            seen += 1
            stage = os.path.basename(line.split()[1])
        elif line.startswith("Installing collected"):
            stage = "unpacking, about a minute" if total > 1 else "unpacking"
            shown = 0.0
        else:
            continue
        if time.time() - shown > PROGRESS_SECONDS:
            shown = time.time()
            say("{}: {}/{}, {:.0f} s, {}".format(what, seen, total, shown - start, stage))
    if process.wait():
        errors = [line for line in tail if "ERROR" in line or "Errno" in line] or tail[-1:] or ["no output"]
        raise SetupError("pip could not install {}: {}".format(what, errors[0]))


def install(broken):
    extra = []
    if os.environ.get(TORCH_INDEX):
        extra = ["--extra-index-url", os.environ[TORCH_INDEX]]
    if broken:
        # Everything is pinned, so no resolver is wanted; SGLang's own requirements are its CUDA tree.
        pip_install(["--no-deps", "--force-reinstall", *extra, *broken], "packages", len(broken))
    pip_install(["--no-deps", "--no-build-isolation", "-e", ROOT], "sglang-hetero itself", 1)


def check_torch():
    """On x86-64 the package index may offer a CUDA build under the same version: it must not be the one."""
    with open(os.path.join(site_packages(), "torch", "version.py")) as file:
        match = re.search(r"^cuda\b[^=]*=\s*(.+)$", file.read(), re.M)
    if match and match.group(1).strip() != "None":
        raise SetupError(
            "the installed torch is a CUDA build ({}), but the CPU environment needs the CPU build of the same "
            "version: set {} to the index of PyTorch's CPU wheels (pytorch.org, Get started, CPU) and run "
            "again".format(match.group(1).strip(), TORCH_INDEX)
        )


def enable_cpu_platform():
    done = subprocess.run(
        [venv_python(), "-m", "sglang_hetero", "cpu", "enable"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise SetupError(done.stdout.decode(errors="replace").strip() or "`sglang-hetero cpu enable` failed")


def is_current():
    try:
        with open(STAMP) as file:
            stamped = file.read().strip()
    except OSError:
        return False
    return stamped == fingerprint() and not broken_packages() and runs(venv_python(), "-c", "import sglang_hetero")


def setup():
    check_python()
    check_library()
    with open(LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another set-up of this folder is running: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current():
            return
        if os.path.exists(STAMP):
            os.remove(STAMP)
        make_venv()
        broken = broken_packages()
        if broken:
            check_disk()
        start = time.time()
        install(broken)
        left = broken_packages()
        if left:
            raise SetupError("still broken after the installation: {}; remove .venv and run again".format(left[0]))
        check_torch()
        enable_cpu_platform()
        with open(STAMP, "w") as file:
            file.write(fingerprint())
        say("ready after {:.0f} s".format(time.time() - start))


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        setup()
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        return 130
    except OSError as error:
        say("{}; the next run goes on from here".format(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
