"""What one rank's row of metadata is made of: the row in which prefill tells decode a request's first token.

A row is a few columns of numbers: token, log-probabilities, and with speculation what the draft model begins with. Its
owner says what they are, as it does of the caches; whether two sides' rows go together is in reshard/row.py.
"""

from . import limits
from .checks import Struct, check_name, within


class Column(Struct, frozen=True):
    """One column. dtype: torch's name. nbytes: in one request's row.

    draft: it says what the draft model begins with, so that it is of use only together with the prompt's draft caches.
    """

    name: str
    dtype: str
    nbytes: int
    draft: bool = False

    def __post_init__(self) -> None:
        check_name(self.name, "name of a column")
        check_name(self.dtype, f"column {self.name}: dtype")
        within(self.nbytes, 1, limits.MAX_ROW_BYTES, f"column {self.name}: bytes")

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of {self.dtype}"
