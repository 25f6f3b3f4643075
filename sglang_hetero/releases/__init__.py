"""The releases of SGLang that this package serves: the one that it is made for, and what is different in older ones.

Every table of this package (backend/selfcheck.py, backend/conv_axis.py, cpu/gaps.py) names the symbols of MADE_FOR. For
an older release a module beside this one says what stands in their place there. It is chosen here, by the release's
number, and nowhere else. A release of any other number is held against the tables as they are.
"""

from .release import Attribute, Instead, Release
from .v0_5_22 import V0_5_22

__all__ = ["MADE_FOR", "OLDER", "Attribute", "Instead", "Release", "by_number", "installed", "number"]

MADE_FOR = Release("0.5.23")
"""Its symbols are those of the tables, and all tests are run on it."""
OLDER: tuple[Release, ...] = (V0_5_22,)


def by_number(number: str) -> Release:
    """What is known of a release; one that is not known ought to be as MADE_FOR."""
    return next((release for release in OLDER if release.number == number), MADE_FOR)


def number() -> str:
    """That of the SGLang of this process, as it tells it. Raises ImportError if there is no SGLang."""
    from sglang.version import __version__

    return str(__version__)


def installed() -> Release:
    """The one that this process has. Raises ImportError if there is no SGLang."""
    return by_number(number())
