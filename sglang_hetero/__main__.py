"""`python -m sglang_hetero` is the same as the console script `sglang-hetero`."""

import sys

from sglang_hetero.cli import main

if __name__ == "__main__":
    sys.exit(main())
