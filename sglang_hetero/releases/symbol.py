"""A symbol of SGLang, as tables name it. No SGLang is needed to read one."""

from dataclasses import dataclass

COMMON = "sglang.srt.disaggregation.common.conn"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
"""Modules whose symbols are others in another release."""


@dataclass(frozen=True)
class Symbol:
    """module, name: where it is; a dot in the name stands for a class and its attribute.

    parameters: names, in this order and without self, that we call it with or that an override has; None for what is no
    callable. digest: of the source, where what its body does is relied on (`digest_of`).
    """

    module: str
    name: str
    parameters: str | None = ""
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"
