"""Manifests of ranks that do not exist: for `explain`, for benchmarks and for tests.

They have the geometry that the pools of a rank would have, densely packed, at made-up addresses.
"""

from dataclasses import dataclass

from sglang_hetero.releases import MADE_FOR

from .axes import Axis, AxisName, Segment
from .component import ITEMSIZE, Component, Item, Role
from .geometry import LatentAttention, ModelGeometry
from .manifest import Coordinates, Manifest, Side
from .row import Column
from .window import ConvLayout


@dataclass(frozen=True)
class PoolOptions:
    """What a server's start decides about its pools. Counts of pages and slots are without SGLang's padding item 0."""

    page_size: int = 128
    pages: int = 256
    slots: int = 16
    conv_layout: ConvLayout = ConvLayout.CHANNELS_FIRST
    draft_rows: int = 0
    """Rows of a window-first slot beside the live K-1, which are the last ones."""
    kv_dtype: str = "bfloat16"
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"
    whole_draft: bool = False
    """Every rank keeps all heads of the draft, as if its TP size were 1."""


ROW_HEAD = (
    ("output_ids", "int32", 16),
    ("cached_tokens", "int32", 16),
    ("output_token_logprobs_val", "float32", 16),
    ("output_token_logprobs_idx", "int32", 16),
    ("output_top_logprobs_val", "float32", 128),
    ("output_top_logprobs_idx", "int32", 128),
)
ROW_DRAFT = (("output_topk_p", "float32", 16), ("output_topk_index", "int64", 16))
HIDDEN = "output_hidden_states"
NO_HIDDEN = (16, "float32")
"""Of a server that does not speculate."""
ROOM = ("bootstrap_room", 8)
"""Name and elements of the columns of SGLang 0.5.23 (disaggregation/utils.py, MetadataBuffers)."""


def first_token_row(hidden: tuple[int, str] | None, *, npu: bool = False) -> tuple[Column, ...]:
    """The row with a request's first token that a server has without SGLANG_ variables and options that add columns.

    hidden: elements and dtype of the hidden state that its draft model begins with; None if it does not speculate.
    """
    size, dtype = hidden or NO_HIDDEN
    columns = [(*one, False) for one in ROW_HEAD] + [(*one, True) for one in ROW_DRAFT]
    columns += [(HIDDEN, dtype, size, True), (ROOM[0], "int64" if npu else "uint64", ROOM[1], False)]
    return tuple(Column(name, dtype, count * _BYTES[dtype], draft) for name, dtype, count, draft in columns)


_BYTES = ITEMSIZE | {"int32": 4, "int64": 8, "uint64": 8}


def dense_axes(
    sizes: list[tuple[AxisName, int]], itemsize: int, segments: dict[AxisName, tuple[Segment, ...]]
) -> tuple[Axis, ...]:
    """Axes of a dense array, the outermost first; strides in bytes."""
    axes, stride = [], itemsize
    for name, size in reversed(sizes):
        axes.append(Axis(name, size, stride, segments.get(name, ())))
        stride *= size
    return tuple(reversed(axes))


def manifest(
    model: ModelGeometry,
    side: Side,
    coordinates: Coordinates,
    options: PoolOptions,
    *,
    host: str = "synthetic",
    fingerprint: str = "synthetic",
    sglang: str = MADE_FOR.number,
    draft: bool = True,
    row: tuple[Column, ...] = (),
) -> Manifest:
    """The manifest of one rank of that model. Layers are dealt to pipeline stages in equal runs, the draft to the last.

    Raises TopologyError where the TP size cannot shard the model's heads.
    """
    builder = _Builder(model, coordinates, options)
    if draft and coordinates.pp_rank == coordinates.pp_size - 1:
        builder.attention(model.draft_layers, draft=True)
    return Manifest(
        side=side,
        host=host,
        coordinates=coordinates,
        page_size=options.page_size,
        model=fingerprint,
        incarnation=f"{side}-{coordinates}",
        sglang=sglang,
        components=tuple(builder.components),
        row=row,
    )


class _Builder:
    """Collects the components of one rank, each behind the one before it in a made-up memory."""

    def __init__(self, model: ModelGeometry, coordinates: Coordinates, options: PoolOptions) -> None:
        self.options, self.coordinates, self.model = options, coordinates, model
        self.components: list[Component] = []
        self.address = 1 << 32
        self.attention(self._stage(model.attention_layers), draft=False)
        self._linear(self._stage(model.linear_layers))

    def _stage(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        count = max((*self.model.attention_layers, *self.model.linear_layers)) + 1
        stages, stage = self.coordinates.pp_size, self.coordinates.pp_rank
        return tuple(layer for layer in layers if layer * stages // count == stage)

    def _size(self, segments: tuple[Segment, ...]) -> int:
        return sum(segment.local_size(self.coordinates.tp_size, self.coordinates.tp_rank) for segment in segments)

    def _add(self, role: Role, item: Item, dtype: str, layers: tuple[int, ...], axes: tuple[Axis, ...]) -> None:
        items = 1 + (self.options.pages if item is Item.PAGE else self.options.slots)
        stride = ITEMSIZE[dtype] + sum((axis.size - 1) * axis.stride for axis in axes)
        addresses = tuple(self.address + index * items * stride for index in range(len(layers)))
        self.address += len(layers) * items * stride
        self.components.append(Component(role, item, dtype, layers, axes, items, stride, addresses))

    def attention(self, layers: tuple[int, ...], *, draft: bool) -> None:
        """Add the attention caches of these layers."""
        if not layers:
            return
        attention, dtype = self.model.attention, self.options.kv_dtype
        if isinstance(attention, LatentAttention):
            segments = attention.latent_segments + attention.rope_segments
            sizes = [(AxisName.TOKEN, self.options.page_size), (AxisName.CHANNEL, self._size(segments))]
            axes = dense_axes(sizes, ITEMSIZE[dtype], {AxisName.CHANNEL: segments})
            self._add(Role.DRAFT_LATENT if draft else Role.TARGET_LATENT, Item.PAGE, dtype, layers, axes)
            return
        key, value = (Role.DRAFT_KEY, Role.DRAFT_VALUE) if draft else (Role.TARGET_KEY, Role.TARGET_VALUE)
        whole = draft and self.options.whole_draft
        heads = attention.whole_segments(self.coordinates.tp_size) if whole else attention.segments
        for role, width in ((key, attention.key_width), (value, attention.value_width)):
            self._add(role, Item.PAGE, dtype, layers, self._head_axes(heads, width, ITEMSIZE[dtype]))

    def _head_axes(self, heads: tuple[Segment, ...], width: int, itemsize: int) -> tuple[Axis, ...]:
        sizes = [
            (AxisName.TOKEN, self.options.page_size),
            (AxisName.HEAD, self._size(heads)),
            (AxisName.CHANNEL, width),
        ]
        return dense_axes(sizes, itemsize, {AxisName.HEAD: heads})

    def _linear(self, layers: tuple[int, ...]) -> None:
        linear = self.model.linear
        if not layers or linear is None:
            return
        conv, options = linear.conv_segments, self.options
        channels, itemsize = self._size(conv), ITEMSIZE[options.conv_dtype]
        if options.conv_layout is ConvLayout.CHANNELS_FIRST:
            window = Axis(AxisName.WINDOW, linear.live_window, itemsize)
            channel = Axis(AxisName.CHANNEL, channels, itemsize * linear.live_window, conv)
        else:
            rows = linear.live_window + options.draft_rows
            live = (options.draft_rows, linear.live_window) if options.draft_rows else None
            window = Axis(AxisName.WINDOW, rows, itemsize * channels, live=live)
            channel = Axis(AxisName.CHANNEL, channels, itemsize, conv)
        self._add(Role.CONV, Item.SLOT, options.conv_dtype, layers, (channel, window))
        heads = linear.ssm_segments
        sizes = [
            (AxisName.HEAD, self._size(heads)),
            (AxisName.STATE_ROW, linear.ssm_rows),
            (AxisName.STATE_COLUMN, linear.ssm_columns),
        ]
        axes = dense_axes(sizes, ITEMSIZE[options.ssm_dtype], {AxisName.HEAD: heads})
        self._add(Role.SSM, Item.SLOT, options.ssm_dtype, layers, axes)
