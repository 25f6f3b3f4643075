"""Starts, watches and stops the servers of one topology on this machine (`sglang-hetero up`)."""
