"""Which attention pools of SGLang are described, which are not and why.

A pool that is not known exactly is refused: a subclass may arrange its bytes differently, or keep more of them.
"""

from collections.abc import Mapping
from typing import Protocol, cast

from sglang_hetero.errors import ManifestError

from .strided import Registered

MHA = "MHATokenToKVPool"
NPU_MHA = "NPUMHATokenToKVPool"
MLA = "MLATokenToKVPool"
NPU_MLA = "NPUMLATokenToKVPool"
SUPPORTED = (MHA, NPU_MHA, MLA, NPU_MLA)
"""Names of the classes whose layout is known; any of them may be inside a HybridLinearKVPool."""

_TOKEN_MAJOR = "nhd"
"""SGLang's name of the order token, head, channel (MHATokenToKVPool.kv_cache_layout)."""

_REMEDY = "give prefill and decode one TP size, so that SGLang's own transfer serves"

_REFUSED = {
    "MHATokenToKVPoolFP4": "keeps block scales beside quantised K and V",
    "MHATokenToKVPoolMXFP8": "keeps block scales beside quantised K and V",
    "MLATokenToKVPoolFP4": "keeps block scales beside a quantised latent",
    "DSATokenToKVPool": "keeps an index cache for sparse attention",
    "QSATokenToKVPool": "keeps an index cache for sparse attention",
    "MiniMaxSparseKVPool": "keeps an index cache for sparse attention",
    "NPUMiniMaxSparseKVPool": "keeps an index cache for sparse attention",
    "PageMajorMHATokenToKVPool": "interleaves the layers of a page, and this SGLang cannot build it",
    "UnifiedHybridLinearKVPool": "shares one buffer with the linear state (--enable-unified-memory)",
    "UnifiedMHATokenToKVPool": "shares one buffer with the linear state (--enable-unified-memory)",
    "UnifiedMLATokenToKVPool": "shares one buffer with the linear state (--enable-unified-memory)",
    "NoOpMHATokenToKVPool": "keeps nothing",
}
"""Pools that SGLang may build for a hybrid model and that are not described, with the reason."""

_ABSENT = {
    "k_scale_buffer": "scales of quantised K and V",
    "v_scale_buffer": "scales of quantised K and V",
    "kv_scale_buffer": "scales of a quantised latent",
    "native_k_scale_buffer": "scales of quantised K and V",
    "native_v_scale_buffer": "scales of quantised K and V",
    "index_k_buffer": "an index cache for sparse attention",
    "index_k_scale_buffer": "an index cache for sparse attention",
    "index_k_with_scale_buffer": "an index cache for sparse attention",
}
"""Attributes of a pool that stand for bytes which a request needs and no role describes."""


class KVPool(Registered, Protocol):
    """What is read of any attention pool. size: tokens without the padding page."""

    size: int
    page_size: int
    layer_num: int
    start_layer: int
    dtype: object


class _HybridPool(Protocol):
    full_kv_pool: KVPool
    full_attention_layer_id_mapping: Mapping[int, int]


def unwrap(pool: object) -> tuple[KVPool, tuple[int, ...]]:
    """The pool that owns the tensors, and the model's layer id of each of its layers.

    Raises ManifestError for a pool that is not described, and says why.
    """
    if type(pool).__name__ != "HybridLinearKVPool":
        _check_class(pool)
        plain = cast(KVPool, pool)
        return plain, tuple(range(plain.start_layer, plain.start_layer + plain.layer_num))
    hybrid = cast(_HybridPool, pool)
    inner = hybrid.full_kv_pool
    _check_class(inner)
    places = hybrid.full_attention_layer_id_mapping
    layers = tuple(sorted(places, key=places.__getitem__))
    if [places[layer] for layer in layers] != list(range(inner.layer_num)):
        raise ManifestError(f"{type(inner).__name__}: {inner.layer_num} layers, but layer ids for {dict(places)}")
    return inner, layers


def _check_class(pool: object) -> None:
    name = type(pool).__name__
    if name not in SUPPORTED:
        reason = _REFUSED.get(name, "is a pool that is not known")
        raise ManifestError(f"{name}: {reason}; supported are {', '.join(SUPPORTED)}; {_REMEDY}")


def check_plain(pool: KVPool) -> None:
    """Raise ManifestError where a pool of a supported class holds more than plain keys and values, or arranges them
    in another order."""
    name = type(pool).__name__
    for attribute, meaning in _ABSENT.items():
        if getattr(pool, attribute, None) is not None:
            raise ManifestError(f"{name}: {attribute} holds {meaning}, which is not described; {_REMEDY}")
    layout = getattr(pool, "kv_cache_layout", _TOKEN_MAJOR)
    if layout != _TOKEN_MAJOR:
        raise ManifestError(f"{name}: the layout {layout!r} is not described, only {_TOKEN_MAJOR!r} is; {_REMEDY}")
    for attribute, fault in (
        ("is_quantized_kv_cache", "its K and V are quantised with scales"),
        ("use_dsa", "it serves sparse attention, which has an index cache"),
        ("layer_shard_enabled", "its layers are dealt out over ranks"),
    ):
        if getattr(pool, attribute, False):
            raise ManifestError(f"{name}: {fault}, which is not described; {_REMEDY}")
    if getattr(pool, "dcp_size", 1) != 1:
        raise ManifestError(
            f"{name}: its tokens are dealt out over ranks (decode context parallelism); use --dcp-size 1"
        )
