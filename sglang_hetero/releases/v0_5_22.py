"""SGLang 0.5.22."""

from sglang_hetero.backend.selfcheck import COMMON, MOONCAKE, Symbol

from .release import Attribute, Release

V0_5_22 = Release(
    "0.5.22",
    ran="SGLang 0.5.22, on which one pair was run (P2/D1 on the CPU reference platform, MTP depth 0 and 3, "
    "docs/versions.md); all else is run on 0.5.23",
    instead={
        # Each backend's sender has its own; Ascend's is a Mooncake sender.
        f"{COMMON}.CommonKVSender._poll_with_status": Symbol(
            MOONCAKE, "MooncakeKVSender._poll_with_status", "check_status"
        ),
        f"{COMMON}.CommonKVSender.poll_pp_consensus": Symbol(MOONCAKE, "MooncakeKVSender.poll_pp_consensus"),
        # The receiver writes its frames itself, in _register_kv_args, which is checked as it is.
        f"{MOONCAKE}.MooncakeKVManager.build_receiver_registration_message": None,
        # Page ids always come as they are, in an array.
        f"{MOONCAKE}.MooncakeKVSender.supports_host_tensor_indices": None,
        # attn_tp_size where 0.5.23 has state_tp_size, which is the same without groups that CP and TP share.
        f"{MOONCAKE}.MooncakeKVManager._send_mamba_state_slice": Symbol(
            MOONCAKE, "MooncakeKVManager._send_mamba_state_slice", digest="f559f35ba7e6f7cd"
        ),
    },
    attributes=(
        # Its bootstrap server does not tell. A prefill server with this package refuses KV cache sharding by itself.
        Attribute(COMMON, "PrefillServerInfo", "enable_kv_cache_sharding", False),
    ),
)
