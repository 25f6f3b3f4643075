"""A prefill and a decode side of SGLang in one process: its own managers, pools, senders and receivers.

Only the native transfer engine is replaced, by one that copies memory at once (`NativeEngine`). All the rest is
SGLang's: the handshake over its bootstrap server, its messages over ZeroMQ, its transfer threads. Needs torch, SGLang
and nothing of this repository.

Every buffer is filled with a byte that no request has before a request is handed over, and compared as a whole
afterwards; what it must be is computed here from the request's contents, not by anything of SGLang.
"""

import contextlib
import ctypes
import itertools
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

HOST = "127.0.0.1"
PAGE, PAGES, SLOTS = 4, 6, 6
"""Tokens of a page; pages and slots of a pool, without SGLang's padding page and slot 0."""
ROWS = 4 * SLOTS
"""Metadata rows of a rank: so many that a row counted in four times its length is still one of them."""
KERNEL = 4
"""Positions of the convolution; a slot's live window is one less."""
HEAD_DIM, KEY_DIM, VALUE_DIM = 8, 4, 4
LINEAR_LAYERS, ATTENTION_LAYER = (0, 2), 1
FROM = SimpleNamespace(pages=[5, 2], slot=2, row=1)
TO = SimpleNamespace(pages=[1, 4], slot=3, row=3)
"""Where the request is on prefill and on decode."""
POISON = {"prefill": 0xA5, "decode": 0xFF}
PATIENCE_SECONDS = 60.0
"""After which a handover that has not ended is a failure of the test."""
POLL_SECONDS = 0.005
REFUSED = -1
"""What a native engine returns for a call that it refuses."""
_KEPT: list[Any] = []
"""Managers whose constructor raises have a socket open; collecting their ZeroMQ context would wait for it for ever."""


def fault(reason: str) -> Callable[[Any], Any]:
    """Marks a test that fails on unpatched source; `reason` is a regular expression that its message matches there."""

    def mark(function: Any) -> Any:
        function.fault = reason
        return function

    return mark


class NativeEngine:
    """Stands for the native TransferEngine of mooncake and of memfabric_hybrid; all are in one process.

    Like them it touches registered memory only, and refuses a batch as a whole.
    """

    class TransDataOpType:
        SDMA = "sdma"

    engines: ClassVar[dict[int, "NativeEngine"]] = {}
    refuses_to_register: Callable[[], int] | None = None
    _ports = itertools.count(1)

    def __init__(self) -> None:
        self.port = next(self._ports)
        self.regions: list[tuple[int, int]] = []
        self.engines[self.port] = self

    def initialize(self, *_arguments: Any) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return self.port

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        if NativeEngine.refuses_to_register is not None:
            return NativeEngine.refuses_to_register()
        self.regions += [(address, address + length) for address, length in zip(addresses, lengths, strict=True)]
        return 0

    def batch_transfer_sync_write(self, session: str, sources: list, destinations: list, lengths: list) -> int:
        peer = self.engines[int(session.rpartition(":")[2])]
        blocks = list(zip(sources, destinations, lengths, strict=True))
        if not all(self._has(source, n) and peer._has(destination, n) for source, destination, n in blocks):
            return REFUSED
        for source, destination, length in blocks:
            ctypes.memmove(destination, source, length)
        return 0

    def _has(self, address: int, length: int) -> bool:
        return any(low <= address and address + length <= high for low, high in self.regions)


@dataclass(frozen=True)
class Shape:
    """A model with one attention layer and two linear ones; heads of all ranks together."""

    kv_heads: int = 4
    key_heads: int = 4
    value_heads: int = 8
    npu: bool = False
    """Conv slots as SGLang makes them on an NPU."""
    draft_tokens: int = 0
    """Of a verify step; 0: no speculation."""
    hidden_bytes: dict[str, int] = field(default_factory=lambda: {"prefill": 64, "decode": 64})
    """Of a hidden-state row of each side."""

    @property
    def groups(self) -> list[int]:
        """Channels of the conv segments q, k and v."""
        return [self.key_heads * KEY_DIM, self.key_heads * KEY_DIM, self.value_heads * VALUE_DIM]

    @property
    def window(self) -> int:
        extra = max(self.draft_tokens - 1, 0) if self.npu else 0
        return KERNEL - 1 + extra


class Contents:
    """What one request has left in the caches, as the undivided model would have it."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        tokens = PAGE * len(FROM.pages)
        self.shape = shape
        self.kv = random.integers(1, 1 << 14, (2, tokens, shape.kv_heads, HEAD_DIM), np.int16)
        self.conv = random.integers(1, 1 << 14, (len(LINEAR_LAYERS), sum(shape.groups), shape.window), np.int16)
        self.ssm = random.integers(
            1, 1 << 30, (len(LINEAR_LAYERS), shape.value_heads, VALUE_DIM, KEY_DIM), dtype=np.int32
        )

    def kv_of(self, tp: int, rank: int) -> np.ndarray:
        return self.kv[:, :, _share(self.shape.kv_heads, tp, rank)]

    def ssm_of(self, tp: int, rank: int) -> np.ndarray:
        return self.ssm[:, _share(self.shape.value_heads, tp, rank)]

    def conv_of(self, tp: int, rank: int) -> np.ndarray:
        """Each segment is divided on its own; an NPU keeps the window before the channels."""
        starts = np.cumsum([0, *self.shape.groups[:-1]])
        channels = [
            np.arange(start + _share(size, tp, rank).start, start + _share(size, tp, rank).stop)
            for start, size in zip(starts, self.shape.groups, strict=True)
        ]
        shard = self.conv[:, np.concatenate(channels)]
        return shard.swapaxes(1, 2) if self.shape.npu else shard

    def row(self, length: int, number: int) -> np.ndarray:
        """Bytes of the request's row of metadata buffer `number` on prefill."""
        return np.random.default_rng([number, length]).integers(1, 100, length, np.uint8)


def _share(size: int, tp: int, rank: int) -> slice:
    if size % tp:
        raise ValueError(f"{size} cannot be divided by {tp}")
    return slice(size // tp * rank, size // tp * (rank + 1))


class Rank:
    """One rank's pools and manager."""

    def __init__(self, shape: Shape, *, mode: str, backend: str, tp: int, rank: int, bootstrap_port: int) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers

        self.shape, self.mode, self.tp, self.rank = shape, mode, tp, rank
        server_args = _publish(mode, backend, tp, rank, bootstrap_port)
        self.state = _state_pool(shape, tp)
        self.kv = _kv_pool(shape, tp, self.state)
        self.metadata = MetadataBuffers(
            ROWS,
            hidden_size=shape.hidden_bytes[mode] // 2,
            hidden_states_dtype=torch.bfloat16,
            max_sampling_mask_tokens=1,
        )
        for view in self.views().values():
            view.fill(POISON[mode])
        manager, self.endpoint = _classes(backend, mode)
        self.manager = manager.__new__(manager)
        _KEPT.append(self.manager)
        with _engine():
            self.manager.__init__(self._kv_args(), DisaggregationMode(mode), server_args, False)

    def views(self) -> dict[str, np.ndarray]:
        """The bytes of every buffer, `[items, ...]`."""
        attention = (self.kv.get_key_buffer(ATTENTION_LAYER), self.kv.get_value_buffer(ATTENTION_LAYER))
        found = {name: tensor.view(torch.uint8).numpy() for name, tensor in zip("KV", attention, strict=True)}
        for index, layer in enumerate(LINEAR_LAYERS):
            found[f"conv of layer {layer}"] = self.state.mamba_cache.conv[0][index].view(torch.uint8).numpy()
            found[f"SSM of layer {layer}"] = self.state.mamba_cache.temporal[index].view(torch.uint8).numpy()
        for name, tensor in vars(self.metadata).items():
            if isinstance(tensor, torch.Tensor):
                found[f"metadata {name}"] = tensor.view(torch.uint8).numpy()
        return found

    def fill(self, contents: Contents) -> None:
        """The request as prefill leaves it."""
        views = self.views()
        self._put(views, contents, FROM)
        for number, name in enumerate(name for name in views if name.startswith("metadata")):
            views[name][FROM.row] = contents.row(views[name].shape[1], number)

    def expected(self, contents: Contents, row_lengths: list[int]) -> dict[str, np.ndarray]:
        """What every buffer must be when the request has arrived, if prefill's metadata rows have these bytes each."""
        views = {name: np.full_like(view, POISON[self.mode]) for name, view in self.views().items()}
        self._put(views, contents, TO)
        for number, name in enumerate(name for name in views if name.startswith("metadata")):
            common = min(row_lengths[number], views[name].shape[1])
            views[name][TO.row, :common] = contents.row(row_lengths[number], number)[:common]
        return views

    def _put(self, views: dict[str, np.ndarray], contents: Contents, where: SimpleNamespace) -> None:
        tokens = [page * PAGE + token for page in where.pages for token in range(PAGE)]
        for name, shard in zip("KV", contents.kv_of(self.tp, self.rank), strict=True):
            views[name][tokens] = np.ascontiguousarray(shard).view(np.uint8)
        for index, layer in enumerate(LINEAR_LAYERS):
            conv = np.ascontiguousarray(contents.conv_of(self.tp, self.rank)[index])
            views[f"conv of layer {layer}"][where.slot] = conv.view(np.uint8)
            views[f"SSM of layer {layer}"][where.slot] = contents.ssm_of(self.tp, self.rank)[index].view(np.uint8)

    def _kv_args(self) -> Any:
        """As prefill.py and decode.py fill it in (`_init_kv_manager`)."""
        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.utils import setup_state_kv_args

        args = KVArgs()
        args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = self.rank, 0, 0, 0
        args.rust_http_port, args.ib_device, args.kv_cache_dtype_str = None, None, "bfloat16"
        args.prefill_start_layer, args.prefill_end_layer = 0, None
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.kv.get_contiguous_buf_infos()
        args.kv_layer_ids = [ATTENTION_LAYER] * len(args.kv_data_ptrs)
        args.kv_head_num, args.total_kv_head_num = self.shape.kv_heads // self.tp, self.shape.kv_heads
        args.page_size = PAGE
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        setup_state_kv_args(args, self.kv, None, len(LINEAR_LAYERS) + 1)
        return args


class Pair:
    """Both sides, connected."""

    def __init__(self, shape: Shape, prefill_tp: int, decode_tp: int, backend: str = "mooncake") -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

        NativeEngine.engines.clear()
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        self.address = f"{HOST}:{port}"
        CommonKVBootstrapServer(HOST, port)
        _wait(lambda: _listens(port), "the bootstrap server does not listen")
        same = {"backend": backend, "bootstrap_port": port}
        self.prefill = [Rank(shape, mode="prefill", tp=prefill_tp, rank=rank, **same) for rank in range(prefill_tp)]
        self.decode = [Rank(shape, mode="decode", tp=decode_tp, rank=rank, **same) for rank in range(decode_tp)]
        self.contents = Contents(shape)

    def hand_over(self) -> "Outcome":
        """One request through SGLang's senders and receivers, as its schedulers call them."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        room = 1
        senders = []
        for rank in self.prefill:
            rank.fill(self.contents)
            senders.append(rank.endpoint(rank.manager, self.address, room))
            senders[-1].init(len(FROM.pages), FROM.row)
        receivers = []
        for rank in self.decode:
            _wait(lambda rank=rank: rank.manager.try_ensure_parallel_info(self.address), "no answer of prefill")
            receivers.append(rank.endpoint(rank.manager, self.address, room))
            receivers[-1].init(0)
            if receivers[-1].poll() != KVPoll.Failed:
                receivers[-1].send_metadata(
                    np.array(TO.pages, np.int32), TO.row, [np.array([TO.slot], np.int32)], decode_prefix_len=0
                )
        running = [receiver for receiver in receivers if receiver.poll() != KVPoll.Failed]
        asked = sorted({rank for receiver in running for rank in receiver.target_tp_ranks})
        if len(running) == len(receivers):
            for rank in asked:
                _wait(lambda rank=rank: senders[rank].poll() == KVPoll.WaitingForInput, f"prefill rank {rank} waits")
                senders[rank].send(np.array(FROM.pages, np.int32), [np.array([FROM.slot], np.int32)])
            ended = (KVPoll.Success, KVPoll.Failed)
            _wait(lambda: all(receiver.poll() in ended for receiver in receivers), "decode never learns of the end")
        names = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}
        ends = [names[receiver.poll()] for receiver in receivers]
        for number, receiver in enumerate(receivers):
            if ends[number] == "Failed":
                ends[number] += f": {receiver.kv_mgr.failure_records.get(room)}"
        return Outcome(ends, [rank for rank in range(len(self.prefill)) if rank not in asked])

    def wrong(self) -> list[str]:
        """Every buffer of a decode rank that is not as it must be, with what is wrong there."""
        lengths = [view.shape[1] for name, view in self.prefill[0].views().items() if name.startswith("metadata")]
        return self._compare(lambda rank: rank.expected(self.contents, lengths))

    def written(self) -> list[str]:
        """Every buffer of a decode rank that has been written to."""
        return self._compare(lambda rank: {n: np.full_like(v, POISON["decode"]) for n, v in rank.views().items()})

    def _compare(self, wanted: Callable[[Rank], dict[str, np.ndarray]]) -> list[str]:
        found = []
        for rank in self.decode:
            expected = wanted(rank)
            for name, view in rank.views().items():
                differs = view != expected[name]
                if differs.any():
                    items = np.flatnonzero(differs.reshape(len(view), -1).any(axis=1)).tolist()
                    found.append(f"decode rank {rank.rank}, {name}: {int(differs.sum())} bytes wrong, in items {items}")
        return found


@dataclass(frozen=True)
class Outcome:
    """Of a handover."""

    ends: list[str]
    """What the receiver of each decode rank says last, with the reason if it has failed."""
    unasked: list[int]
    """Prefill ranks that no decode rank has asked for anything: their scheduler waits for that, and so all of them."""

    @property
    def succeeded(self) -> bool:
        return set(self.ends) == {"Success"}


def _wait(until: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(POLL_SECONDS)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@dataclass
class _Group:
    """A process group over which nothing is said."""

    world_size: int
    rank_in_group: int = 0
    is_last_rank: bool = True
    cpu_group: None = None


def _publish(mode: str, backend: str, tp: int, rank: int, bootstrap_port: int) -> Any:
    """SGLang's configuration of the process, which a manager reads while it is made; of one rank after the other."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy")
    args.resolve_once()
    declare_resolution(
        args,
        "patches",
        tp_size=tp,
        page_size=PAGE,
        host=HOST,
        disaggregation_mode=mode,
        disaggregation_transfer_backend=backend,
        disaggregation_bootstrap_port=bootstrap_port,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
    )
    reset_context()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    alone, ranks = _Group(1), _Group(tp, rank)
    get_parallel().override_permanently(pp_group=alone, attn_cp_group=alone, attn_tp_group=ranks, tp_group=ranks)
    return args


def _classes(backend: str, mode: str) -> tuple[Any, Any]:
    """SGLang's manager, and its sender or receiver."""
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    endpoint = KVClassType.SENDER if mode == "prefill" else KVClassType.RECEIVER
    return tuple(get_kv_class(TransferBackend(backend), kind) for kind in (KVClassType.MANAGER, endpoint))


@contextlib.contextmanager
def _engine() -> Iterator[None]:
    """SGLang's own wrappers of the native engines, for one rank, with `NativeEngine` below them."""
    from sglang.srt.disaggregation.ascend import transfer_engine as ascend
    from sglang.srt.disaggregation.mooncake import conn as mooncake
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    module = ModuleType("mooncake.engine")
    module.TransferEngine = NativeEngine
    sys.modules["mooncake"], sys.modules["mooncake.engine"] = ModuleType("mooncake"), module
    ascend.TransferEngine, ascend.import_error = NativeEngine, None
    wrapper = MooncakeTransferEngine(HOST, gpu_id=0)
    before = mooncake.get_mooncake_transfer_engine
    mooncake.get_mooncake_transfer_engine = lambda: wrapper
    try:
        yield
    finally:
        mooncake.get_mooncake_transfer_engine = before


def _state_pool(shape: Shape, tp: int) -> Any:
    """SGLang's MambaPool; with its own NPU function on CPU tensors where the shape says so."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache import memory_pool

    layout = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=shape.value_heads * VALUE_DIM,
        n_groups=shape.key_heads,
        num_heads=shape.value_heads,
        head_dim=VALUE_DIM,
        state_size=KEY_DIM,
        conv_kernel=KERNEL,
        conv_shard_groups=shape.groups,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    # On a CPU with AMX SGLang would give the slots that platform's strides.
    platform = memory_pool._is_npu, memory_pool._is_cpu
    memory_pool._is_npu, memory_pool._is_cpu = shape.npu, False
    try:
        return memory_pool.MambaPool(
            size=SLOTS,
            spec_state_size=SLOTS,
            cache_params=Mamba2CacheParams(shape=layout, layers=list(LINEAR_LAYERS), dtype=dtype),
            mamba_layer_ids=list(LINEAR_LAYERS),
            device="cpu",
            speculative_num_draft_tokens=shape.draft_tokens or None,
        )
    finally:
        memory_pool._is_npu, memory_pool._is_cpu = platform


def _kv_pool(shape: Shape, tp: int, state: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=shape.kv_heads // tp,
        head_dim=HEAD_DIM,
        full_attention_layer_ids=[ATTENTION_LAYER],
        device="cpu",
        mamba_pool=state,
    )
