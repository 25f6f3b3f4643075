"""Byte movers between staging and the live cache pools: the shards of several ranks become what one rank works with.

`Assembler` and `pack_pages` carry out a plan. Beneath them `ops` has the operations; `naive` says in loops what they
do; `cpu` and `triton_ops` do it; `checks` holds every rule about their arguments.
"""

from .assemble import Assembler, Memory, pack_pages

__all__ = ["Assembler", "Memory", "pack_pages"]
