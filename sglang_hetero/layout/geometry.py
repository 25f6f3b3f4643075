"""The caches of a model before any sharding: what a manifest is checked against, and what one can be made from.

Plain data. layout/config.py reads it from a checkpoint's configuration.
"""

from dataclasses import dataclass

from .axes import Segment, Sharding


@dataclass(frozen=True)
class HeadAttention:
    """Attention with keys and values per head. Widths in elements; heads are those of the whole model."""

    kv_heads: int
    key_width: int
    value_width: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The head axis."""
        return (Segment("kv", self.kv_heads, 1),)

    def whole_segments(self, tp: int) -> tuple[Segment, ...]:
        """The head axis where each of `tp` ranks keeps all heads, as those of a draft that is not sharded do.

        The usual one where a rank's share is all of them (one rank, one head): equal bytes have one description.
        """
        if all(segment.local_size(tp, 0) == segment.heads for segment in self.segments):
            return self.segments
        return (Segment("kv", self.kv_heads, 1, Sharding.REPLICATED),)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: one compressed row per token, the same on every rank. Widths in elements."""

    latent_width: int
    rope_width: int

    @property
    def latent_segments(self) -> tuple[Segment, ...]:
        """The channels of the compressed part."""
        return (Segment("latent", 1, self.latent_width, Sharding.REPLICATED),)

    @property
    def rope_segments(self) -> tuple[Segment, ...]:
        """The channels of the rotary part; where one buffer holds both they come last."""
        return (Segment("rope", 1, self.rope_width, Sharding.REPLICATED),)


@dataclass(frozen=True)
class LinearAttention:
    """A linear-attention or state-space layer.

    conv_segments: channels of the convolution in order; conv_kernel: K, of which K-1 inputs are kept.
    ssm_heads x ssm_rows x ssm_columns is the recurrent state.
    """

    conv_segments: tuple[Segment, ...]
    conv_kernel: int
    ssm_heads: int
    ssm_rows: int
    ssm_columns: int

    @property
    def ssm_segments(self) -> tuple[Segment, ...]:
        """The head axis of the recurrent state."""
        return (Segment("ssm", self.ssm_heads, 1, Sharding.DIVIDED),)

    @property
    def live_window(self) -> int:
        """Inputs of the convolution that the next forward reads."""
        return self.conv_kernel - 1


@dataclass(frozen=True)
class ModelGeometry:
    """Caches of a model, all ranks together. Layer ids are the model's; the draft counts its own from 0.

    linear: None of a plain transformer, which has attention in every layer.
    """

    attention: HeadAttention | LatentAttention
    attention_layers: tuple[int, ...]
    linear: LinearAttention | None
    linear_layers: tuple[int, ...]
    draft_layers: tuple[int, ...] = ()
