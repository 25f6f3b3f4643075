"""A small environment beside `.venv`: made by the pip of `.venv`, and made anew where it is not whole.

What setup_ascend_env.py and setup_release_env.py have in common: standard library only, and a syntax that an old Python
can still parse.
"""

import hashlib
import os
import shutil
import sys
import time

import setup_env
import venv_packages
from child_process import run_child

PIP_OPTIONS = ("--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")


class SideEnvironment:
    """Where one is, what it is made from, and how. A class of its own for each kind says what these leave open."""

    # What its lines begin with, what it is in the sentence about the disk, and why it cannot be without `.venv`.
    TITLE = NEEDS_DISK = NEEDS_VENV = ""
    # What is unpacked, and the wheels beside it.
    NEEDED_BYTES = 0
    # What pip downloads of it, in words.
    DOWNLOAD = ""

    def __init__(self, name, locks, script):
        """name: of its folder; locks: names in requirements/; script: the file that makes it."""
        self.name = name
        self.folder = os.path.join(setup_env.ROOT, name)
        self.locks = [os.path.join(setup_env.ROOT, "requirements", lock) for lock in locks]
        self.script = os.path.realpath(script)
        self.python = os.path.join(self.folder, "bin", "python")
        self.site = setup_env.site_packages(self.folder)
        # Written last: the fingerprint of a complete environment.
        self.stamp = os.path.join(self.folder, setup_env.STAMP)

    def fault(self):
        """What of it does not work, in words; None where it is whole."""
        raise NotImplementedError

    def remedy(self):
        """What to do where it does not work after its installation."""
        raise NotImplementedError

    def configure(self, lock):
        """What is to be done after its packages have come."""

    def explain(self, status, lines):
        """A sentence on why pip failed, where this kind knows more than pip says."""

    def say(self, text):
        setup_env.say("{}: {}".format(self.TITLE, text))

    def pins(self):
        """Name (normalised) -> version of every locked package."""
        return venv_packages.read_pins(self.locks)

    def broken_packages(self):
        """The locked packages that are missing, of another version, damaged, or there twice."""
        have = venv_packages.installed(self.site)
        broken = []
        for name, version in sorted(self.pins().items()):
            found = have.get(name, [])
            if len(found) != 1 or found[0][0] != version or venv_packages.damaged(found[0][1]):
                broken.append(name)
        return broken

    def fingerprint(self):
        """What the environment is a function of: the locks, these scripts, the interpreter and the place."""
        about = "{} {} {}".format(sys.version, os.path.realpath(setup_env.base_python()), self.folder)
        digest = hashlib.sha256(about.encode(errors="replace"))
        for path in (*self.locks, self.script, os.path.realpath(__file__)):
            with open(path, "rb") as file:
                digest.update(file.read())
        return digest.hexdigest()

    def is_current(self):
        """Whether it is whole and made from what stands here now. Raises SetupError where it cannot be made at all."""
        self.pins()
        return setup_env.read_text(self.stamp) == self.fingerprint() and self.fault() is None

    def remove(self):
        if os.path.islink(self.folder) or os.path.isfile(self.folder):
            os.remove(self.folder)
        elif os.path.isdir(self.folder):
            if os.path.exists(self.stamp):
                os.remove(self.stamp)  # first: what is left of an interrupted removal is no environment
            shutil.rmtree(self.folder)

    def install(self, lock):
        """Make it anew: it is small, so there is nothing worth mending."""
        self.say("making " + self.name)
        check = setup_env.check_child
        command = [setup_env.base_python(), "-I", "-m", "venv", "--without-pip", self.folder]
        check(*run_child(command, lock), what="python -m venv")
        # Git, and ruff with it, then leave the folder out without being told.
        setup_env.write_text(os.path.join(self.folder, ".gitignore"), "*")
        requirements = ["{}=={}".format(*pin) for pin in sorted(self.pins().items())]
        self.say("downloading and unpacking {} ({})".format(", ".join(requirements), self.DOWNLOAD))
        pip = [setup_env.venv_python(), "-I", "-m", "pip", "--python", self.python, "install"]
        status, lines = run_child([*pip, *PIP_OPTIONS, *requirements], lock)
        known = self.explain(status, lines) if status else None
        if known:
            raise setup_env.SetupError(known)
        check(status, lines, what="pip install of " + ", ".join(requirements))
        self.configure(lock)

    def setup(self):
        """Make or repair it; nothing to do where it is whole. Raises SetupError."""
        setup_env.check_python()
        # The lock of .venv: its pip is used here, so nobody may be replacing it meanwhile.
        with setup_env.locked(self.say) as lock:
            if self.is_current():
                return
            if not os.path.exists(setup_env.venv_python()):
                raise setup_env.SetupError("there is no .venv yet, {}: run `make setup`".format(self.NEEDS_VENV))
            start = time.time()
            self.remove()
            setup_env.check_free(setup_env.ROOT, self.NEEDED_BYTES, self.NEEDS_DISK)
            self.install(lock)
            fault = self.fault()
            if fault:
                raise setup_env.SetupError("{} does not work after its installation: {}".format(fault, self.remedy()))
            setup_env.write_text(self.stamp, self.fingerprint())
            self.say("ready after {:.0f} s".format(time.time() - start))

    def run(self):
        """Its set-up as a program; gives the exit status."""
        return setup_env.finish(self.setup, self.say, "the next run starts again")
