"""SGLang 0.5.22."""

from .release import Attribute, Instead, Release
from .symbol import COMMON, MOONCAKE, Symbol

V0_5_22 = Release(
    "0.5.22",
    ran="SGLang 0.5.22, on which one pair was run (P2/D1 on the CPU reference platform, MTP depth 0 and 3, "
    "docs/versions.md); all else is run on 0.5.23",
    instead={
        f"{COMMON}.CommonKVSender._poll_with_status": Instead(
            Symbol(MOONCAKE, "MooncakeKVSender._poll_with_status", "check_status"),
            "each backend's sender has its own; Ascend's is a Mooncake sender",
        ),
        f"{COMMON}.CommonKVSender.poll_pp_consensus": Instead(
            Symbol(MOONCAKE, "MooncakeKVSender.poll_pp_consensus"), "the same"
        ),
        f"{MOONCAKE}.MooncakeKVManager.build_receiver_registration_message": Instead(
            None, "the receiver writes its frames itself, and this package adds none"
        ),
        f"{MOONCAKE}.MooncakeKVSender.supports_host_tensor_indices": Instead(
            None, "page ids always come in an array, never in pinned memory to be waited for"
        ),
        f"{MOONCAKE}.MooncakeKVManager._send_mamba_state_slice": Instead(
            Symbol(MOONCAKE, "MooncakeKVManager._send_mamba_state_slice", digest="f559f35ba7e6f7cd"),
            "it has `attn_tp_size` where 0.5.23 has `state_tp_size`, which differ only in groups that CP and TP share",
        ),
    },
    attributes=(
        Attribute(
            COMMON,
            "PrefillServerInfo",
            "enable_kv_cache_sharding",
            False,
            "its bootstrap server does not tell; a prefill server with this package refuses KV cache sharding itself",
        ),
    ),
)
