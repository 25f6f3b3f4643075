"""The bytes of a rank's caches by role and layer, as tensors on whatever device they lie.

A manifest says where each buffer begins; the pools' tensors say which storage that address belongs to.
"""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from sglang_hetero.errors import ManifestError
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.manifest import Manifest

DEPTH = 4
"""How deep tensors lie in a pool: pool -> its inner pool -> list of layers or state cache -> tensor."""


def memory_of(manifest: Manifest, pools: Iterable[object]) -> dict[tuple[Role, int], torch.Tensor]:
    """uint8, one-dimensional, `buffer_span` bytes from the address of every layer of every component.

    Raises ManifestError where an address lies in no tensor of the pools.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for pool in pools:
        for tensor in _tensors(pool, DEPTH, set()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
    found = {}
    for component in manifest.components:
        for layer in component.layers:
            span, address = component.buffer_span, component.address(layer)
            found[component.role, layer] = _bytes(manifest, storages.values(), address, span)
    return found


def _bytes(manifest: Manifest, storages: Iterable[torch.UntypedStorage], address: int, span: int) -> torch.Tensor:
    for storage in storages:
        offset = address - storage.data_ptr()
        if offset >= 0 and offset + span <= storage.nbytes():
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return empty.set_(storage, offset, (span,), (1,))
    raise ManifestError(f"{manifest.label}: no tensor of the pools holds the {span} bytes at {address:#x}")


def _tensors(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached through attributes and containers."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield value
        return
    # A pool refers to torch.cpu or torch.npu, and a walk through a module would go on through all of torch.
    if depth == 0 or id(value) in seen or isinstance(value, ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    for part in inner:
        yield from _tensors(part, depth - 1, seen)
