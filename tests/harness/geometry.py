"""Shape of the caches of one model, before any sharding. Plain data: no torch, no numpy, no SGLang."""

from dataclasses import dataclass

from sglang_hetero.layout.window import ConvLayout

MINIMAL_HIDDEN = 16
"""Columns of the hidden-state row where there is no MTP, in float32 (scheduler.py, init_disaggregation)."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes per element of each dtype that a pool may be given."""


@dataclass(frozen=True)
class Segment:
    """A run of conv channels that is sharded by head on its own: q, k or v."""

    heads: int
    head_width: int


@dataclass(frozen=True)
class Geometry:
    """One model's caches, all ranks together: a hybrid's, or with attention in every layer a plain transformer's.

    Heads are totals over TP. Sizes are counts (tokens, pages, slots, elements), dtypes are torch's names.
    Raises ValueError when the parts contradict each other.
    """

    layers: int = 4
    full_attention_layers: tuple[int, ...] = (1, 3)
    kv_heads: int = 4
    head_dim: int = 8
    linear_key_heads: int = 4
    linear_value_heads: int = 8
    linear_key_dim: int = 4
    linear_value_dim: int = 4
    conv_kernel: int = 4
    draft_tokens: int = 3
    """Tokens per verify step with MTP; 0 is no MTP and no draft pool."""
    hidden_size: int = 16
    """Width of the hidden-state row that travels with the first token when MTP is on."""
    page_size: int = 64
    pages: int = 12
    """Pages of one rank's pool, without SGLang's padding page 0."""
    slots: int = 6
    """Requests, and so linear-state slots and aux rows, that one rank holds at the same time."""
    kv_dtype: str = "bfloat16"
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"
    hidden_dtype: str = "bfloat16"
    conv_layout: ConvLayout = ConvLayout.CHANNELS_FIRST

    def __post_init__(self) -> None:
        layers = self.full_attention_layers
        if list(layers) != sorted(set(layers)) or not set(layers) <= set(range(self.layers)):
            raise ValueError(f"full_attention_layers={layers} must be an increasing subset of 0..{self.layers - 1}")
        if not self.linear_layers and self.draft_tokens:
            raise ValueError(f"full_attention_layers={layers} are all layers: there is no MTP, draft_tokens must be 0")
        unknown = {self.kv_dtype, self.conv_dtype, self.ssm_dtype, self.hidden_dtype} - set(ITEMSIZE)
        if unknown:
            raise ValueError(f"unknown dtype {sorted(unknown)}, the harness knows {sorted(ITEMSIZE)}")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.layers) if layer not in self.full_attention_layers)

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """Layer ids of the draft pool; an MTP module numbers its single layer from 0."""
        return (0,) if self.draft_tokens else ()

    @property
    def hidden_row(self) -> tuple[int, str]:
        """Columns and dtype of the aux row's hidden state."""
        return (self.hidden_size, self.hidden_dtype) if self.draft_tokens else (MINIMAL_HIDDEN, "float32")

    @property
    def conv_segments(self) -> tuple[Segment, Segment, Segment]:
        """Channels of the conv state in order: q, k, v."""
        key = Segment(self.linear_key_heads, self.linear_key_dim)
        return key, key, Segment(self.linear_value_heads, self.linear_value_dim)

    @property
    def live_window(self) -> int:
        """Rows of the conv window that the next forward reads: K-1."""
        return self.conv_kernel - 1

    @property
    def window(self) -> int:
        """Rows of the conv window that are stored: window-first slots keep room for the draft tokens."""
        if self.conv_layout is ConvLayout.CHANNELS_FIRST:
            return self.live_window
        return self.live_window + max(self.draft_tokens - 1, 0)

    def local_kv_heads(self, tp: int) -> int:
        """KV heads on one of `tp` ranks; with more ranks than heads each rank keeps one, replicated."""
        return max(1, self.kv_heads // tp)

    def check_tp(self, tp: int) -> None:
        """Raise ValueError when SGLang could not shard these heads over `tp` ranks."""
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} and tp={tp}: neither divides the other")
        for name in ("linear_key_heads", "linear_value_heads") if self.linear_layers else ():
            if getattr(self, name) % tp:
                raise ValueError(f"{name}={getattr(self, name)} is not divisible by tp={tp}")
