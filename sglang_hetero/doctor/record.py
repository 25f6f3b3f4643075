"""`python -m sglang_hetero.doctor.record`: write down what the installed SGLang has of the touched symbols.

For whoever adds one, or moves this package to another release. The file stands beside this one; a test compares it.
"""

from __future__ import annotations

from pathlib import Path

from .host import installed
from .symbols import RECORD, encode, record_of
from .upstream import uses

if __name__ == "__main__":
    target = Path(__file__).with_name(RECORD)
    target.write_bytes(encode(record_of(installed(), uses())))
    print(target)
