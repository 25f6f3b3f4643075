"""Bounds on what a description from the network may claim, far above any model that exists.

They keep the work that a hostile or broken peer can cause small. Arithmetic on them is Python's, which does not wrap;
what becomes a numpy array has been checked to lie in the address space first.
"""

MAX_MANIFEST_BYTES = 512 << 10
"""A manifest of 1,024 layers with all roles takes about 100 KB. What fits in here is decoded in a fraction of a second,
which matters because decoding holds the interpreter's lock."""
MAX_NAME = 256
"""Characters in a name, a fingerprint or an incarnation."""
MAX_LAYERS = 4096
MAX_COMPONENTS = 256
MAX_AXES = 8
MAX_COLUMNS = 64
"""Columns of the row of metadata that goes with a first token; SGLang has 15."""
MAX_ROW_BYTES = 2 << 20
"""Bytes of such a row: hidden state and top log-probabilities take some ten KB, the mask of a restricted vocabulary of
200,000 tokens 0.8 MB."""
MAX_SEGMENTS = 16
MAX_RANKS = 4096
"""Ranks along one parallel dimension."""
MAX_ELEMENTS = 1 << 32
"""Elements along one axis, heads, and items of a pool."""
MAX_BYTES = 1 << 56
"""Strides and spans."""
MAX_RUNS = 1 << 20
"""Runs of bytes in which a source may hold its part of one item of all layers; a page of 128 tokens, cut by head, has
128 per layer."""
ADDRESS_SPACE = 1 << 64
