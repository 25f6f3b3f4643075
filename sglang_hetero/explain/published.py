"""Cache geometries of published checkpoints, by name, for `explain` where there is no config.json at hand.

Only the fields that decide what is kept of a request are here, so that these serve no server and no fingerprint is
compared with them. From the checkpoints' config.json as NVIDIA's Megatron Bridge has it in its tests (397B-A17B) and
as the model cards say (35B-A3B: 40 layers, 16 and 32 linear heads of 128, 2 KV heads of 256; 2B: 24 layers, 16 and 16).
"""

from typing import Any

_QWEN35 = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "mtp_num_hidden_layers": 1,
}
"""What the checkpoints have in common."""

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3.5-2B": {
        **_QWEN35,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "linear_num_value_heads": 16,
    },
    "Qwen3.5-35B-A3B": {
        **_QWEN35,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
    "Qwen3.5-397B-A17B": {
        **_QWEN35,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
    },
}
"""By the name behind the publisher's."""
