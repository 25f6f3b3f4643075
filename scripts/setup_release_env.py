"""Make or repair `.venv-<release>`: an older release of SGLang on what `.venv` has of everything else.

It holds SGLang alone (200 MB), from requirements/sglang-<release>.lock; a line in its site-packages adds those of
`.venv`, this package among them. What an environment has itself is found first. So two environments differ in SGLang
only, and what is different there is SGLang's. The older release's own pins are not looked at: it runs on the torch and
transformers of `.venv`. Runs after setup_env.py and uses the pip of `.venv`. A second run takes about a second.
"""

import argparse
import os
import sys

import setup_env
import venv_packages
from child_process import run_child
from side_env import SideEnvironment

PACKAGE = "sglang"
# Its lines are read when Python starts: it puts the packages of `.venv`, and what they put there, behind ours. Python
# reads such files by name: this one before that of the CPU reference platform, whose stand-ins have to come last.
LINK = "sglang_hetero_base.pth"


class Environment(SideEnvironment):
    """Of one release."""

    TITLE = "older release of SGLang"
    NEEDS_DISK = "another release of SGLang"
    NEEDS_VENV = "which has all that SGLang needs"
    NEEDED_BYTES = 300 * 1000**2
    DOWNLOAD = "35 MB"

    def __init__(self, release):
        super().__init__(".venv-" + release, ["sglang-{}.lock".format(release)], __file__)
        self.release = release
        self.link = os.path.join(self.site, LINK)

    def pins(self):
        """Name -> version. Raises SetupError for a release that there is no lock of."""
        (lock,) = self.locks
        if not os.path.exists(lock):
            raise setup_env.SetupError(
                "there is no {}, so SGLang {} is none that this package serves; docs/versions.md names them".format(
                    os.path.relpath(lock, setup_env.ROOT), self.release
                )
            )
        return super().pins()

    def fault(self):
        """It has to have that release, undamaged, and nothing else, and to find the rest in `.venv`."""
        pins = self.pins()
        whole = (
            not self.broken_packages()
            and set(venv_packages.installed(self.site)) == set(pins)
            and setup_env.read_text(self.link) == link_text()
            and setup_env.runs(self.python, "-I", "-c", probe(pins[PACKAGE]))
            and setup_env.runs(self.python, "-I", "-m", "sglang_hetero", "cpu", "status")
        )
        return None if whole else self.name

    def remedy(self):
        return "remove {} and .venv and run again".format(self.name)

    def configure(self, lock):
        setup_env.write_text(self.link, link_text())
        enable = [self.python, "-I", "-m", "sglang_hetero", "cpu", "enable"]
        setup_env.check_child(*run_child(enable, lock), what="sglang-hetero cpu enable")


def link_text():
    return "import site; site.addsitedir({!r})".format(setup_env.site_packages())


def probe(version):
    """A program that fails unless that release is found first and our package at all."""
    return "import importlib.metadata as m, sglang_hetero; assert m.version({!r}) == {!r}".format(PACKAGE, version)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="of SGLang, e.g. 0.5.22")
    return Environment(parser.parse_args().release).run()


if __name__ == "__main__":
    setup_env.catch_signals()
    sys.exit(main())
