"""Make or repair `.venv-<release>`: an older release of SGLang on what `.venv` has of everything else.

It holds SGLang alone (200 MB), from requirements/sglang-<release>.lock; a line in its site-packages adds those of
`.venv`, this package among them. What an environment has itself is found first. So two environments differ in SGLang
only, and what is different there is SGLang's. The older release's own pins are not looked at: it runs on the torch and
transformers of `.venv`. Runs after setup_env.py and uses the pip of `.venv`. A second run takes about a second.
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
from child_process import run_child

PACKAGE = "sglang"
# Its lines are read when Python starts: it puts the packages of `.venv`, and what they put there, behind ours. Python
# reads such files by name: this one before that of the CPU reference platform, whose stand-ins have to come last.
LINK = "sglang_hetero_base.pth"
# What is unpacked, and the wheel beside it.
NEEDED_BYTES = 300 * 1000**2


def say(text):
    setup_env.say("older release of SGLang: " + text)


class Environment:
    """Where one release is, and what it is made from."""

    def __init__(self, release):
        self.release = release
        self.lock = os.path.join(setup_env.ROOT, "requirements", "sglang-{}.lock".format(release))
        self.folder = os.path.join(setup_env.ROOT, ".venv-" + release)
        self.python = os.path.join(self.folder, "bin", "python")
        self.site = os.path.join(self.folder, "lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages")
        self.link = os.path.join(self.site, LINK)
        # Written last: the fingerprint of a complete environment.
        self.stamp = os.path.join(self.folder, ".sglang-hetero-stamp")

    def pins(self):
        """Name -> version. Raises SetupError for a release that there is no lock of."""
        if not os.path.exists(self.lock):
            raise setup_env.SetupError(
                "there is no {}, so SGLang {} is none that this package serves; docs/versions.md names them".format(
                    os.path.relpath(self.lock, setup_env.ROOT), self.release
                )
            )
        return venv_packages.read_pins([self.lock])

    def fingerprint(self):
        """What the environment is a function of: the lock, this script, the interpreter and the place."""
        about = "{} {} {}".format(sys.version, setup_env.base_python(), self.folder)
        digest = hashlib.sha256(about.encode(errors="replace"))
        for path in (self.lock, os.path.realpath(__file__)):
            with open(path, "rb") as file:
                digest.update(file.read())
        return digest.hexdigest()

    def is_whole(self):
        """Whether it has that release, undamaged, and nothing else; and finds the rest in `.venv`."""
        found = venv_packages.installed(self.site)
        pins = self.pins()
        versions = {name: [version for version, _ in entries] for name, entries in found.items()}
        return (
            versions == {name: [version] for name, version in pins.items()}
            and not any(venv_packages.damaged(dist_info) for entries in found.values() for _, dist_info in entries)
            and setup_env.read_text(self.link) == link_text()
            and setup_env.runs(self.python, "-I", "-c", probe(pins[PACKAGE]))
            and setup_env.runs(self.python, "-I", "-m", "sglang_hetero", "cpu", "status")
        )


def link_text():
    return "import site; site.addsitedir({!r})".format(setup_env.site_packages())


def probe(version):
    """A program that fails unless that release is found first and our package at all."""
    return "import importlib.metadata as m, sglang_hetero; assert m.version({!r}) == {!r}".format(PACKAGE, version)


def remove(folder):
    if os.path.islink(folder) or os.path.isfile(folder):
        os.remove(folder)
    elif os.path.isdir(folder):
        shutil.rmtree(folder)


def check_disk():
    free = shutil.disk_usage(setup_env.ROOT).free
    if free < NEEDED_BYTES:
        raise setup_env.SetupError(
            "only {:.1f} GB free on the disk of {}, another release of SGLang needs {:.1f} GB; free some space and run "
            "again".format(free / 1e9, setup_env.ROOT, NEEDED_BYTES / 1e9)
        )


def install(environment, lock):
    """Make the environment anew: it is small, so there is nothing worth mending."""
    name = os.path.basename(environment.folder)
    say("making " + name)
    check = setup_env.check_child
    command = [setup_env.base_python(), "-I", "-m", "venv", "--without-pip", environment.folder]
    check(*run_child(command, lock), what="python -m venv")
    # Git, and ruff with it, then leave the folder out without being told.
    setup_env.write_text(os.path.join(environment.folder, ".gitignore"), "*")
    requirements = ["{}=={}".format(*pin) for pin in sorted(environment.pins().items())]
    say("downloading and unpacking {} (35 MB)".format(", ".join(requirements)))
    pip = [setup_env.venv_python(), "-I", "-m", "pip", "--python", environment.python, "install"]
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    check(*run_child([*pip, *options, *requirements], lock), what="pip install of " + ", ".join(requirements))
    setup_env.write_text(environment.link, link_text())
    enable = [environment.python, "-I", "-m", "sglang_hetero", "cpu", "enable"]
    check(*run_child(enable, lock), what="sglang-hetero cpu enable")


def setup(release):
    """Make or repair the environment; nothing to do where it is whole. Raises SetupError."""
    setup_env.check_python()
    environment = Environment(release)
    environment.pins()
    # The lock of .venv: its pip is used here, so nobody may be replacing it meanwhile.
    with open(setup_env.LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this folder is running: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if setup_env.read_text(environment.stamp) == environment.fingerprint() and environment.is_whole():
            return
        if not os.path.exists(setup_env.venv_python()):
            raise setup_env.SetupError("there is no .venv yet, which has all that SGLang needs: run `make setup`")
        start = time.time()
        remove(environment.folder)
        check_disk()
        install(environment, lock)
        if not environment.is_whole():
            raise setup_env.SetupError(
                "{} does not work after its installation: remove it and .venv and run again".format(environment.folder)
            )
        setup_env.write_text(environment.stamp, environment.fingerprint())
        say("ready after {:.0f} s".format(time.time() - start))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="of SGLang, e.g. 0.5.22")
    release = parser.parse_args().release
    try:
        setup(release)
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
