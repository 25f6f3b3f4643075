"""The models as plain data: what each one's geometry is and why it exists. No torch here."""

from dataclasses import dataclass
from enum import StrEnum

from sglang_hetero.errors import HeteroError


class Family(StrEnum):
    """Model families, by the `model_type` of their text configuration in transformers."""

    QWEN3_5 = "qwen3_5_text"
    QWEN3_5_MOE = "qwen3_5_moe_text"
    QWEN3_NEXT = "qwen3_next"
    QWEN3 = "qwen3"


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts feed-forward, one in every layer; widths are per expert."""

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True)
class Scales:
    """Sizes of the random weights. They decide how lively decoding is and how often the MTP head is right.

    The residual stream is an embedding of unit variance plus the branches' small contributions. The MTP head
    sees the next token's embedding, so it guesses the target's state up to what the branches add: larger
    `branch` means fewer accepted drafts. tests/unit/models/test_tuning.py holds the result to bounds.
    """

    branch: float  # standard deviation of what one residual branch adds, relative to the embedding (about)
    draft_branch: float  # the same for the MTP head's own layer
    draft_hidden: float  # weight of the target's hidden state beside the embedding in the MTP head's input
    draft_noise: float  # random part of the MTP head's input projection, relative to its identity part
    logits: float  # standard deviation of the logits


@dataclass(frozen=True)
class ModelSpec:
    """One checkpoint: a hybrid of gated-delta-net and full-attention layers with one MTP layer, or, with an interval
    of 1 and without `mtp_layers`, a plain transformer.

    Layer i is full attention if (i + 1) % full_attention_interval == 0, else linear attention. Sizes are
    elements; heads are counts for tensor parallel size 1, 0 of linear ones where there is no such layer.
    """

    name: str
    purpose: str
    family: Family
    seed: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    scales: Scales
    intermediate_size: int | None = None  # dense feed-forward; None with experts
    experts: Experts | None = None
    full_attention_interval: int = 4
    conv_kernel: int = 4
    max_positions: int = 65536
    mtp_layers: int = 1
    trained: bool = False  # its weights are files of this package; `seed` and `scales` are an untrained one's

    @property
    def full_attention_layers(self) -> list[int]:
        """Layer ids with a KV cache."""
        return [i for i in range(self.num_layers) if (i + 1) % self.full_attention_interval == 0]

    @property
    def linear_attention_layers(self) -> list[int]:
        """Layer ids with a convolution and a recurrent state."""
        return [i for i in range(self.num_layers) if (i + 1) % self.full_attention_interval != 0]

    @property
    def linear_key_width(self) -> int:
        """Channels of q, and of k, in a linear layer."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_value_width(self) -> int:
        """Channels of v in a linear layer."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution state: q | k | v."""
        return 2 * self.linear_key_width + self.linear_value_width

    @property
    def pad_token(self) -> int:
        """Id of the padding token, the last but one of the vocabulary."""
        return self.vocab_size - 2

    @property
    def eos_token(self) -> int:
        """Id of the end token, the last of the vocabulary."""
        return self.vocab_size - 1


# Seeds below were chosen among the first few so that decoding neither comes near a tie nor falls into a short cycle
# on the prompts of the tuning test.
_DENSE = Scales(branch=0.1, draft_branch=0.1, draft_hidden=0.15, draft_noise=0.05, logits=4.0)
_SPARSE = Scales(branch=0.15, draft_branch=0.1, draft_hidden=0.15, draft_noise=0.05, logits=4.0)
# Three times the layers, so smaller branches for the same sum.
_DEEP = Scales(branch=0.05, draft_branch=0.1, draft_hidden=0.15, draft_noise=0.05, logits=4.0)

_ALL = [
    ModelSpec(
        name="tiny",
        purpose="default of the tests and the benchmark: TP 1, 2 and 4 split every head",
        family=Family.QWEN3_5,
        seed=1,
        num_layers=8,
        hidden_size=128,
        vocab_size=512,
        attention_heads=8,
        kv_heads=4,
        head_dim=64,
        linear_key_heads=4,
        linear_value_heads=8,
        linear_key_dim=32,
        linear_value_dim=64,
        intermediate_size=256,
        scales=_DENSE,
    ),
    ModelSpec(
        name="tiny-gqa2",
        purpose="2 kv heads: at TP 4 every kv head lives on two ranks",
        family=Family.QWEN3_5,
        seed=6,
        num_layers=8,
        hidden_size=128,
        vocab_size=512,
        attention_heads=8,
        kv_heads=2,
        head_dim=64,
        linear_key_heads=4,
        linear_value_heads=8,
        linear_key_dim=32,
        linear_value_dim=64,
        intermediate_size=256,
        scales=_DENSE,
    ),
    ModelSpec(
        name="tiny-h6",
        purpose="TP 1, 2, 3 and 6: pairs such as 2 and 3, where neither size divides the other",
        family=Family.QWEN3_5,
        seed=1,
        num_layers=8,
        hidden_size=192,
        vocab_size=576,  # 9 * 64: SGLang pads to 64, and to 64 * TP if TP does not divide that
        attention_heads=12,
        kv_heads=6,
        head_dim=32,
        linear_key_heads=6,
        linear_value_heads=12,
        linear_key_dim=32,
        linear_value_dim=16,
        intermediate_size=384,
        scales=_DENSE,
    ),
    ModelSpec(
        name="tiny-moe",
        purpose="Qwen3.5 with experts",
        family=Family.QWEN3_5_MOE,
        seed=7,
        num_layers=4,
        hidden_size=128,
        vocab_size=512,
        attention_heads=8,
        kv_heads=4,
        head_dim=64,
        linear_key_heads=4,
        linear_value_heads=8,
        linear_key_dim=32,
        linear_value_dim=64,
        experts=Experts(count=8, per_token=2, intermediate_size=128, shared_intermediate_size=128),
        scales=_SPARSE,
    ),
    ModelSpec(
        name="tiny-next",
        purpose="Qwen3-Next: fused q|k|v|z projection grouped by key head, experts",
        family=Family.QWEN3_NEXT,
        seed=9,
        num_layers=4,
        hidden_size=128,
        vocab_size=512,
        attention_heads=8,
        kv_heads=4,
        head_dim=64,
        linear_key_heads=4,
        linear_value_heads=8,
        linear_key_dim=32,
        linear_value_dim=64,
        experts=Experts(count=8, per_token=2, intermediate_size=128, shared_intermediate_size=128),
        scales=_SPARSE,
    ),
    ModelSpec(
        name="tiny-gqa",
        purpose="Qwen3: attention in every layer, no linear state and no MTP",
        family=Family.QWEN3,
        seed=4,
        num_layers=4,
        hidden_size=128,
        vocab_size=512,
        attention_heads=8,
        kv_heads=4,
        head_dim=64,
        linear_key_heads=0,
        linear_value_heads=0,
        linear_key_dim=0,
        linear_value_dim=0,
        intermediate_size=256,
        full_attention_interval=1,
        mtp_layers=0,
        scales=_SPARSE,
    ),
    ModelSpec(
        name="qwen35-2b-cache",
        purpose="cache geometry of Qwen3.5-2B at a small hidden size: real transfer sizes, quick start",
        family=Family.QWEN3_5,
        seed=1,
        num_layers=24,
        hidden_size=128,
        vocab_size=512,
        attention_heads=8,
        kv_heads=2,
        head_dim=256,
        linear_key_heads=16,
        linear_value_heads=16,
        linear_key_dim=128,
        linear_value_dim=128,
        intermediate_size=256,
        scales=_DEEP,
    ),
    ModelSpec(
        name="recall",
        purpose="trained to recall values from a long prompt: lost state shows as a score (docs/recall.md)",
        family=Family.QWEN3_5,
        seed=1,
        num_layers=3,
        hidden_size=128,
        vocab_size=512,
        attention_heads=8,
        kv_heads=4,
        head_dim=32,
        linear_key_heads=4,
        linear_value_heads=8,
        linear_key_dim=128,
        linear_value_dim=16,
        intermediate_size=128,
        full_attention_interval=3,
        trained=True,
        scales=_DENSE,
    ),
]

MODELS: dict[str, ModelSpec] = {model.name: model for model in _ALL}


def get(name: str) -> ModelSpec:
    """The model of that name; HeteroError, listing the names, if there is none."""
    try:
        return MODELS[name]
    except KeyError:
        raise HeteroError(f"unknown model {name!r}; choose one of: {', '.join(MODELS)}") from None
