"""Entry point of the group `sglang.srt.plugins`: SGLang calls activate() in each of its processes."""


def activate() -> None:
    """Apply what this process needs (docs/cpu.md)."""
