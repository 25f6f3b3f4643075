"""What is done to the caches of a decode server after a merge, as data; injected/merge_faults.py carries it out."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from sglang_hetero.models.specs import ModelSpec

from .injected.merge_faults import HITS, ORDER

FOLDER = Path(__file__).parent / "injected"
"""On the PYTHONPATH of a decode server it is a plugin of SGLang's."""
LOST_HEAD = 0
"""Of the SSM heads, the one that gets lost; chosen before anything was measured."""


@dataclass(frozen=True)
class MergeFault:
    """One fault. layers: ids of the layers that it is about, None for all of the role's.

    conv: order of the segments of a conv window, such as `qvk`, or `sources`, each source's block as it came; empty for
    none. heads: of the SSM state that stay zero, counted over the whole model. zeroed: roles whose pages stay zero.
    """

    name: str
    says: str
    conv: str = ""
    heads: tuple[int, ...] = ()
    zeroed: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None

    @property
    def harmless(self) -> bool:
        """Whether it changes nothing: the control."""
        return not (self.conv or self.heads or self.zeroed)

    @property
    def drafts_only(self) -> bool:
        """Whether only the draft's caches are hit, so that no answer may change."""
        return bool(self.zeroed) and not self.conv and not self.heads and all("draft" in role for role in self.zeroed)


def faults(model: ModelSpec) -> dict[str, MergeFault]:
    """All faults by name, for a model with linear layers."""
    first = (model.linear_attention_layers[0],)
    full = (model.full_attention_layers[0],)
    found = (
        MergeFault("control", "the hook in place, nothing done"),
        MergeFault("conv-kv", "conv: k and v segments swapped, all layers", conv="qvk"),
        MergeFault("conv-kv-one", f"conv: k and v segments swapped, layer {first[0]}", conv="qvk", layers=first),
        MergeFault("conv-sources", "conv: blocks as the sources sent them, not by segment", conv="sources"),
        MergeFault("ssm-head", f"SSM: head {LOST_HEAD} lost, all layers", heads=(LOST_HEAD,)),
        MergeFault("ssm-head-one", f"SSM: head {LOST_HEAD} lost, layer {first[0]}", heads=(LOST_HEAD,), layers=first),
        MergeFault("draft", "draft: keys and values of its layer zeroed", zeroed=("draft_key", "draft_value")),
        MergeFault("kv", f"attention: keys and values of layer {full[0]} zeroed", zeroed=_TARGET, layers=full),
    )
    return {fault.name: fault for fault in found}


_TARGET = ("target_key", "target_value")


class Injection:
    """The plugin in one fleet's decode servers: what they do, and whom they have done it to."""

    def __init__(self, folder: Path) -> None:
        """folder: for the two files; made if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self._order, self._hits = folder.absolute() / "order.json", folder.absolute() / "hits.jsonl"
        self._hits.write_text("")

    @cached_property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """Variables of the decode servers."""
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(FOLDER), *([inherited] if inherited else [])])
        return ("PYTHONPATH", path), (ORDER, str(self._order)), (HITS, str(self._hits))

    def choose(self, fault: MergeFault) -> None:
        """From now on it is this one; no request may be under way. What was hit before is forgotten."""
        new = self._order.with_suffix(".new")
        new.write_text(json.dumps(asdict(fault)))
        new.replace(self._order)
        self._hits.write_text("")

    def hit(self, fault: MergeFault) -> tuple[int, int]:
        """How many requests have been merged with this fault, and in how many of them it has changed something."""
        return counted(self._hits.read_text(), fault.name)


def counted(lines: str, name: str) -> tuple[int, int]:
    """Requests that the lines of the hook tell of, and those with something changed. Warm-up requests (room 0) do not
    count. Raises ValueError where another fault was at work."""
    touched: dict[int, int] = {}
    for line in lines.splitlines():
        hit: Mapping[str, int | str] = json.loads(line)
        if hit["fault"] != name:
            raise ValueError(f"the decode server did {hit['fault']!r} when {name!r} was asked for")
        room = int(hit["room"])
        if room:
            touched[room] = touched.get(room, 0) + int(hit["touched"])
    return len(touched), sum(bool(count) for count in touched.values())
