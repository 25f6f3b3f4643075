"""`python -m sglang_hetero.doctor.record [FOLDER]`: write down what SGLang has of the touched symbols.

Of the installed release, or of an older one whose wheel is unpacked in FOLDER. For whoever adds a symbol, or moves this
package to another release. The files stand beside this one; a test compares that of the installed release.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_hetero.releases import by_number

from .host import installed
from .source import Release
from .symbols import encode, record_name, record_of
from .upstream import uses

if __name__ == "__main__":
    release = Release(Path(sys.argv[1])) if sys.argv[1:] else installed()
    served = by_number(release.version)
    target = Path(__file__).with_name(record_name(served))
    target.write_bytes(encode(record_of(release, uses(served))))
    print(target)
