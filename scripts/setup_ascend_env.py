"""Make or repair `.venv-ascend`: what the tests use of Ascend hosts, Triton's compiler for NPUs and vendors' wheels.

triton-ascend installs a package `triton` of its own, so it cannot share `.venv` with SGLang's. It compiles as far as
Linalg (MLIR) without an NPU, CANN or torch. MemFabric's classes can be called, though not move a byte. torch_npu and
Mooncake for NPUs cannot be imported here; the tests look for names in their files. These, and what imports need, are
all that is installed: about 380 MB.
Runs after setup_env.py and uses the pip of `.venv`. A second run costs about a quarter of a second.
"""

import argparse
import sys

import setup_env
from child_process import met_no_version
from side_env import SideEnvironment

LOCKS = ("triton_ascend.lock", "ascend.lock", "vendor_ascend.lock")
PYTHON_OF_WHEELS = (3, 11)


class Environment(SideEnvironment):
    TITLE = NEEDS_DISK = "packages for Ascend"
    NEEDS_VENV = "whose pip installs these packages"
    NEEDED_BYTES = 600 * 1000**2
    DOWNLOAD = "118 MB"

    def __init__(self):
        super().__init__(".venv-ascend", LOCKS, __file__)

    def fault(self):
        """Isolated (-I): the folder that we stand in must not answer for what is installed."""
        broken = self.broken_packages()
        if broken:
            return broken[0]
        imports = "import triton.backends.ascend, triton.compiler, memfabric_hybrid"
        return None if setup_env.runs(self.python, "-I", "-c", imports) else self.name

    def remedy(self):
        return (
            "remove .venv-ascend and run again; on an old system see whether its libraries load, with "
            "{} -c 'import triton, memfabric_hybrid'".format(self.python)
        )

    def explain(self, status, lines):
        if not met_no_version(lines) or sys.version_info[:2] == PYTHON_OF_WHEELS:
            return None
        pins = self.pins()
        return (
            "triton-ascend {} or memfabric_hybrid {} may have no wheel for Python {}.{}: run again with "
            "PYTHON=/path/to/python{}.{}".format(
                pins["triton-ascend"], pins["memfabric-hybrid"], *sys.version_info[:2], *PYTHON_OF_WHEELS
            )
        )


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    return Environment().run()


if __name__ == "__main__":
    setup_env.catch_signals()
    sys.exit(main())
