"""One rank with SGLang's own pools for an NPU, on CPU tensors, and what a request must be in them.

The oracle knows a model by its global tensors and shards them as SGLang does: heads in contiguous runs, a head of K and
V on several ranks where there are more ranks than heads. It writes through the pools' own views and shares no code with
the description, the plan or the merge.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sglang_hetero.layout import Manifest, Role, Side
from sglang_hetero.layout.geometry import LatentAttention, ModelGeometry
from tests.reshard_oracle.handover import Place
from tests.unit.layout.described import describe_pools
from tests.unit.layout.live_pools import Pools, cache_params, coordinates, kv_pool, mamba_pool, platform

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Kind:
    """How an NPU server keeps its caches. draft_tokens: of a verify step, None without speculation. ssm: its states."""

    name: str = "npu"
    page_size: int = 128
    draft_tokens: int | None = 3
    nz: bool = False
    ssm: torch.dtype = torch.float32


class Npu:
    """A rank's pools, full of `poison`."""

    def __init__(self, model: ModelGeometry, tp: int, rank: int, kind: Kind, *, side: Side, poison: int) -> None:
        self.model, self.tp, self.rank, self.kind = model, tp, rank, kind
        self.kda = isinstance(model.attention, LatentAttention)
        self.pools = self._build()
        for storage in self.storages():
            storage.fill_(poison)
        self.manifest: Manifest = describe_pools(self.pools, model, side=side, coordinates=coordinates(tp, rank))
        self.shape = SimpleNamespace(page_size=kind.page_size)
        spans = {
            (part.role, layer): (part.address(layer), part.buffer_span)
            for part in self.manifest.components
            for layer in part.layers
        }
        self._spans = dict(spans.values())
        self.buffers = {key: SimpleNamespace(address=address) for key, (address, _) in spans.items()}

    def _build(self) -> Pools:
        model, kind = self.model, self.kind
        with platform(kind.name), patch.dict("os.environ", SGLANG_USE_FIA_NZ=str(int(kind.nz))):
            params = cache_params(model.linear, model.linear_layers, self.tp, kda=self.kda)
            params = replace(params, dtype=replace(params.dtype, temporal=kind.ssm))
            mamba = mamba_pool(params, model.linear_layers, draft_tokens=kind.draft_tokens)
            target, draft = (
                kv_pool(model, layers, self.tp, mamba, kind.name, page_size=kind.page_size)
                for layers in (model.attention_layers, model.draft_layers)
            )
        return Pools(target, draft, mamba, kind.name, self.kda)

    def storages(self) -> list[torch.Tensor]:
        """All bytes of all caches, a row of uint8 for each allocation."""
        found: dict[int, torch.Tensor] = {}
        for view in self._tensors():
            storage = view.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
        return list(found.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for pool, layers in (
            (self.pools.target, self.model.attention_layers),
            (self.pools.draft, self.model.draft_layers),
        ):
            for layer in layers:
                yield pool.get_key_buffer(layer)
                yield pool.get_value_buffer(layer)
        cache = self.pools.mamba.mamba_cache
        yield from (cache.conv[0], cache.temporal)

    # For tests/unit/transfer/pieces_handover.py, in the place of the oracle's own ranks.

    def read(self, start: int, size: int) -> np.ndarray:
        """Bytes of the process's memory."""
        return np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)

    def bytes_from(self, address: int) -> np.ndarray:
        """The live bytes of one layer's buffer from its address on."""
        return np.frombuffer((ctypes.c_uint8 * self._spans[address]).from_address(address), np.uint8)

    # The oracle.

    def write(self, seed: int, place: Place, tokens: int) -> None:
        """Put a request of so many tokens there, by SGLang's views."""
        model = self.model
        for pool, layers, roles in (
            (self.pools.target, model.attention_layers, (Role.TARGET_KEY, Role.TARGET_VALUE)),
            (self.pools.draft, model.draft_layers, (Role.DRAFT_KEY, Role.DRAFT_VALUE)),
        ):
            for layer in layers:
                views = (pool.get_key_buffer(layer), pool.get_value_buffer(layer))
                for number, (role, view) in enumerate(zip(roles, views, strict=True)):
                    self._write_tokens(view, self._tokens(seed, role, layer, number, tokens), place.pages)
        for layer in model.linear_layers:
            state = self.pools.mamba.mamba2_layer_cache(model.linear_layers.index(layer))
            live = model.linear.live_window
            _put(state.conv[0][place.slot, -live:], self._conv(seed, layer).T)
            _put(state.temporal[place.slot], self._ssm(seed, layer))

    def _write_tokens(self, view: torch.Tensor, values: np.ndarray, pages: tuple[int, ...]) -> None:
        rows = view.view(-1, *view.shape[-2:])  # [page, token, head, channel], or FIA's rows: the same bytes
        for position, value in enumerate(values):
            page, token = divmod(position, self.kind.page_size)
            _put(rows[pages[page] * self.kind.page_size + token], value)

    def _tokens(self, seed: int, role: Role, layer: int, number: int, tokens: int) -> np.ndarray:
        """[token, head, channel] of this rank."""
        attention = self.model.attention
        if isinstance(attention, LatentAttention):
            width = (attention.latent_width, attention.rope_width)[number]
            return _hash(seed, f"{role} {layer}", (tokens, 1, width))
        heads, width = attention.kv_heads, attention.key_width
        own = _run(heads, self.tp, self.rank) if self.tp <= heads else [self.rank * heads // self.tp]
        return _hash(seed, f"{role} {layer}", (tokens, heads, width))[:, list(own)]

    def _conv(self, seed: int, layer: int) -> np.ndarray:
        """[channel, live row] of this rank: a run of the heads of q, of k and of v."""
        linear, parts = self.model.linear, []
        for segment in linear.conv_segments:
            whole = _hash(seed, f"{segment.name} {layer}", (segment.heads, segment.width, linear.live_window))
            parts.append(whole[list(_run(segment.heads, self.tp, self.rank))].reshape(-1, linear.live_window))
        return np.concatenate(parts)

    def _ssm(self, seed: int, layer: int) -> np.ndarray:
        linear = self.model.linear
        whole = _hash(seed, f"ssm {layer}", (linear.ssm_heads, linear.ssm_rows, linear.ssm_columns))
        return whole[list(_run(linear.ssm_heads, self.tp, self.rank))]


def _run(heads: int, tp: int, rank: int) -> range:
    each = heads // tp
    return range(rank * each, (rank + 1) * each)


def _hash(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Global values, int64: any two differ almost surely."""
    random = np.random.default_rng([seed, *name.encode()])
    return random.integers(0, 2**31, shape)


def _put(view: torch.Tensor, values: np.ndarray) -> None:
    """Write the low bytes of values as the elements' bits."""
    bits = INTEGERS[view.element_size()]
    numbers: Any = torch.from_numpy(np.ascontiguousarray(values)).to(bits)
    view.view(bits).copy_(numbers)
