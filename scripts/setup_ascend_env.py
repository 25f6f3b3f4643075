"""Make or repair `.venv-ascend`: what the tests use of Ascend hosts, Triton's compiler for NPUs and vendors' wheels.

triton-ascend installs a package `triton` of its own, so it cannot share `.venv` with SGLang's. It compiles as far as
Linalg (MLIR) without an NPU, CANN or torch. MemFabric's classes can be called, though not move a byte. torch_npu and
Mooncake for NPUs cannot be imported here; the tests look for names in their files. These, and what imports need, are
all that is installed: about 380 MB.
Runs after setup_env.py and uses the pip of `.venv`. A second run costs about a quarter of a second.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import time

import setup_env
import venv_packages
from child_process import met_no_version, run_child

LOCKS = ("triton_ascend.lock", "ascend.lock", "vendor_ascend.lock")
VENV = os.path.join(setup_env.ROOT, ".venv-ascend")
REQUIREMENTS = [os.path.join(setup_env.ROOT, "requirements", name) for name in LOCKS]
PYTHON = os.path.join(VENV, "bin", "python")
SITE = os.path.join(VENV, "lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages")
# Written last: the fingerprint of a complete environment.
STAMP = os.path.join(VENV, ".sglang-hetero-stamp")
# What is unpacked, and the wheels beside it.
NEEDED_BYTES = 600 * 1000**2


def say(text):
    setup_env.say("packages for Ascend: " + text)


def fingerprint():
    """What the environment is a function of: the locks, this script, the interpreter and the place."""
    digest = hashlib.sha256("{} {} {}".format(sys.version, setup_env.base_python(), VENV).encode(errors="replace"))
    for path in (*REQUIREMENTS, os.path.realpath(__file__)):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def pins():
    return venv_packages.read_pins(REQUIREMENTS)


def broken_packages():
    """The locked packages that are missing, of another version, damaged, or there twice."""
    have = venv_packages.installed(SITE)
    broken = []
    for name, version in sorted(pins().items()):
        found = have.get(name, [])
        if len(found) != 1 or found[0][0] != version or venv_packages.damaged(found[0][1]):
            broken.append(name)
    return broken


def imports():
    """Isolated (-I): the folder that we stand in must not answer for what is installed."""
    return setup_env.runs(PYTHON, "-I", "-c", "import triton.backends.ascend, triton.compiler, memfabric_hybrid")


def is_current():
    return setup_env.read_text(STAMP) == fingerprint() and not broken_packages() and imports()


def remove():
    if os.path.islink(VENV) or os.path.isfile(VENV):
        os.remove(VENV)
    elif os.path.isdir(VENV):
        shutil.rmtree(VENV)


def check_disk():
    free = shutil.disk_usage(setup_env.ROOT).free
    if free < NEEDED_BYTES:
        raise setup_env.SetupError(
            "only {:.1f} GB free on the disk of {}, the packages for Ascend need {:.1f} GB; free some space and run "
            "again".format(free / 1e9, setup_env.ROOT, NEEDED_BYTES / 1e9)
        )


def install(lock):
    """Make the environment anew: it is small, so there is nothing worth mending."""
    say("making .venv-ascend")
    check = setup_env.check_child
    check(*run_child([setup_env.base_python(), "-I", "-m", "venv", "--without-pip", VENV], lock), what="python -m venv")
    # Git, and ruff with it, then leave the folder out without being told.
    setup_env.write_text(os.path.join(VENV, ".gitignore"), "*")
    requirements = ["{}=={}".format(name, version) for name, version in sorted(pins().items())]
    say("downloading and unpacking {} (118 MB)".format(", ".join(requirements)))
    pip = [setup_env.venv_python(), "-I", "-m", "pip", "--python", PYTHON, "install"]
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    status, lines = run_child([*pip, *options, *requirements], lock)
    if status and met_no_version(lines) and sys.version_info[:2] != (3, 11):
        raise setup_env.SetupError(
            "triton-ascend {} or memfabric_hybrid {} may have no wheel for Python {}.{}: run again with "
            "PYTHON=/path/to/python3.11".format(
                pins()["triton-ascend"], pins()["memfabric-hybrid"], *sys.version_info[:2]
            )
        )
    check(status, lines, what="pip install of the packages in requirements/*ascend.lock")


def setup():
    """Make or repair the environment; nothing to do where it is whole. Raises SetupError."""
    setup_env.check_python()
    # The lock of .venv: its pip is used here, so nobody may be replacing it meanwhile.
    with open(setup_env.LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this folder is running: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current():
            return
        if not os.path.exists(setup_env.venv_python()):
            raise setup_env.SetupError("there is no .venv yet, whose pip installs these packages: run `make setup`")
        start = time.time()
        remove()
        check_disk()
        install(lock)
        left = broken_packages()
        if left or not imports():
            raise setup_env.SetupError(
                "{} does not work after its installation: remove .venv-ascend and run again; on an old system see "
                "whether its libraries load, with {} -c 'import triton, memfabric_hybrid'".format(
                    left[0] if left else "it", PYTHON
                )
            )
        setup_env.write_text(STAMP, fingerprint())
        say("ready after {:.0f} s".format(time.time() - start))


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        setup()
    except setup_env.SetupError as error:
        say(str(error))
        return 1
    except (setup_env.Interrupted, KeyboardInterrupt) as error:
        say("interrupted; the next run starts again")
        return 128 + (error.args[0] if isinstance(error, setup_env.Interrupted) else signal.SIGINT)
    except OSError as error:
        say(setup_env.explain(error))
        return 1
    return 0


if __name__ == "__main__":
    setup_env.catch_signals()
    sys.exit(main())
