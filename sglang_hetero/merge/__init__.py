"""Byte movers between staging and the live cache pools: the shards of several ranks become what one rank works with.

`ops` is the way in; `naive` says in loops what the others must do; `cpu` and `triton_ops` do it; `checks` holds every
rule about the arguments.
"""
