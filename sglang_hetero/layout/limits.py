"""Bounds on what a description from the network may claim, far above any model that exists.

They keep the work that a hostile or broken peer can cause small, and every product of two of them below 2**64.
"""

MAX_MANIFEST_BYTES = 4 << 20
"""A manifest of 1,024 layers with all roles takes about 100 KB."""
MAX_NAME = 256
"""Characters in a name, a fingerprint or an incarnation."""
MAX_LAYERS = 4096
MAX_COMPONENTS = 256
MAX_AXES = 8
MAX_SEGMENTS = 16
MAX_RANKS = 4096
"""Ranks along one parallel dimension."""
MAX_ELEMENTS = 1 << 32
"""Elements along one axis, heads, and items of a pool."""
MAX_BYTES = 1 << 56
"""Strides and spans."""
ADDRESS_SPACE = 1 << 64
