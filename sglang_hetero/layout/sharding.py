"""Which heads a tensor-parallel rank holds: the one place for this rule.

SGLang gives each rank a contiguous run of heads, and where there are more ranks than heads, `tp // heads` neighbouring
ranks hold the same one (sglang/srt/layers/linear.py, QKVParallelLinear; models/qwen3_5.py and the Mamba mixers shard
their q, k, v and SSM heads in the same way). Sizes where neither divides the other are refused there, so they are here.
"""

from sglang_hetero.errors import TopologyError


def check_shardable(heads: int, tp: int, what: str) -> None:
    """Raise TopologyError unless one of the two counts divides the other; `what` names the heads in the message."""
    if heads % tp and tp % heads:
        raise TopologyError(
            f"{what}: {heads} heads cannot be sharded over TP {tp}: one of the two must divide the other; "
            f"choose a TP size that divides {heads}, or a multiple of it"
        )


def check_divided(heads: int, tp: int, what: str) -> None:
    """Raise TopologyError unless every rank gets its own heads.

    SGLang divides the heads of a linear-attention layer among ranks and never replicates them (`divide` in
    sglang/srt/configs/mamba_utils.py); on a CPU it pads them, which has the shapes of replication without being it.
    """
    if heads % tp:
        raise TopologyError(
            f"{what}: {heads} heads cannot be divided among TP {tp}; choose a TP size that divides {heads}"
        )


def shard_count(heads: int, tp: int) -> int:
    """Distinct runs of heads among `tp` ranks: fewer than ranks where heads are replicated."""
    return min(heads, tp)


def replica_count(heads: int, tp: int) -> int:
    """Ranks that hold the same run of heads; they are neighbours."""
    return max(1, tp // heads)


def shard_interval(heads: int, tp: int, shard: int) -> range:
    """The global heads of distinct run number `shard`."""
    size = max(1, heads // tp)
    return range(shard * size, (shard + 1) * size)


def head_interval(heads: int, tp: int, rank: int) -> range:
    """The global heads that one rank holds."""
    return shard_interval(heads, tp, rank // replica_count(heads, tp))
